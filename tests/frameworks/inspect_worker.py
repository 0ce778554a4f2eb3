"""What can be asked of the frameworks in one process, without an agent: exported orders, ranks, attaching in vain.

``python inspect_worker.py RESULT.json``. Ranks come from torch's fake process group, which lets one process be any
rank of a large world.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from said import listen  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import perseus_client.deepspeed as of_deepspeed  # noqa: E402
import perseus_client.megatron as of_megatron  # noqa: E402
import perseus_client.torch_pipelining as of_torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "torch_pipelining"))
import train  # noqa: E402

SINGLE = [("1F1B", 4, 8, 1), ("1F1B", 8, 16, 1), ("1F1B", 3, 7, 1), ("GPipe", 4, 6, 1)]
SEVERAL = [
    ("Interleaved1F1B", 2, 4, 2),
    ("Interleaved1F1B", 4, 8, 3),
    ("LoopedBFS", 4, 8, 2),
    ("InterleavedZeroBubble", 4, 8, 2),
    ("ZBVZeroBubble", 4, 8, 2),
    ("DualPipeV", 4, 10, 2),
]


def as_rank(rank: int, world: int) -> None:
    """Be a rank of a world."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def torch_orders() -> dict[str, str]:
    """By name, stages, microbatches and chunks."""
    orders = {}
    for name, stages, microbatches, chunks in SINGLE + SEVERAL:
        as_rank(0, stages)
        schedule, _ = train.build(
            name, microbatches=microbatches, group=dist.group.WORLD, device=torch.device("cpu"), chunks=chunks
        )
        orders[f"{name}-{stages}-{microbatches}-{chunks}"] = of_torch.schedule_csv(schedule)
    return orders


def other_orders() -> dict[str, dict[str, str]]:
    """Megatron's and DeepSpeed's, of the same shapes."""
    shapes = [shape for shape in SINGLE + SEVERAL if shape[0] in {"1F1B", "Interleaved1F1B"}]
    return {
        "megatron": {
            "-".join(map(str, shape)): of_megatron.schedule_csv(stages=shape[1], microbatches=shape[2], chunks=shape[3])
            for shape in shapes
        },
        "deepspeed": {
            "-".join(map(str, shape)): of_deepspeed.schedule_csv(stages=shape[1], microbatches=shape[2])
            for shape in shapes
            if shape[3] == 1
        },
    }


WORLDS = ((("dp", "pp", "tp"), (2, 2, 2)), (("pp", "dp", "cp", "tp"), (2, 2, 2, 2)))


def ranks() -> list[dict[str, Any]]:
    """Coordinates that the adapter finds, and those of the mesh."""
    ranks = [(names, sizes, rank) for names, sizes in WORLDS for rank in range(torch.Size(sizes).numel())]
    # A process for each: torch keeps what it once knew about a mesh.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.starmap(rank_of, ranks, chunksize=1)


def rank_of(names: tuple[str, ...], sizes: tuple[int, ...], rank: int) -> dict[str, Any]:
    """Of a stage whose embedding is split over the ranks that share it."""
    as_rank(rank, torch.Size(sizes).numel())
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    own = {name: mesh.get_local_rank(name) for name in names}
    split = mesh["cp", "tp"] if "cp" in names else mesh["tp"]
    module = train.Chunk(first=True, last=False, layers=1, recompute=False)
    whole = [Replicate()] * split.ndim
    module.embedding.weight = torch.nn.Parameter(DTensor.from_local(module.embedding.weight.data, split, whole))
    stage = PipelineStage(module, own["pp"], 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return {"found": list(of_torch._rank_id(SimpleNamespace(_stage=stage), None, None)), **own}


def in_vain() -> dict[str, Any]:
    """attach() where there is no agent."""
    as_rank(0, 2)
    schedule, _ = train.build("1F1B", microbatches=4, group=dist.group.WORLD, device=torch.device("cpu"))
    before = [dict(vars(owner)) for owner in (schedule, schedule._stage)]
    attachment = of_torch.attach(schedule)
    from megatron.core.pipeline_parallel import schedules

    forward_step = schedules.forward_step
    return {
        "active": [attachment.active, of_megatron.attach().active, of_deepspeed.attach(SimpleNamespace()).active],
        "untouched": [dict(vars(owner)) for owner in (schedule, schedule._stage)] == before
        and schedules.forward_step is forward_step,
    }


def refused() -> list[str]:
    """What is said where a framework cannot be followed, though an agent is expected."""
    lines = listen()
    as_rank(0, 2)
    schedule, _ = train.build("1F1B", microbatches=4, group=dist.group.WORLD, device=torch.device("cpu"))
    schedule.__class__ = type("Homemade", (type(schedule),), {})
    of_torch.attach(schedule, socket_path="/nowhere")
    of_deepspeed.attach(torch.nn.Linear(1, 1), socket_path="/nowhere")
    version, torch.__version__ = torch.__version__, "2.4.0"
    of_torch.attach(schedule, socket_path="/nowhere")
    torch.__version__ = version
    return lines


if __name__ == "__main__":
    result = {
        "ranks": ranks(),
        "orders": torch_orders(),
        "others": other_orders(),
        "in_vain": in_vain(),
        "refused": refused(),
    }
    Path(sys.argv[1]).write_text(json.dumps(result))
