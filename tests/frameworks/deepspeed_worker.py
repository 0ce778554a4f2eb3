"""A rank that trains with DeepSpeed's PipelineEngine: without the client, then with it.

``python deepspeed_worker.py FOLDER plain|recompute`` under ``perseus_sim.training.live``. See ``conftest.Harness``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from said import listen  # noqa: E402
from torch import nn  # noqa: E402

import perseus_client.deepspeed as perseus  # noqa: E402

WIDTH = 32
MICROBATCHES = 5
COMPARED_STEPS = 3
UNHOOKED_STEPS = 6


class Layer(nn.Module):
    """A stage holds two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.linear(x))


def make_engine(name: str) -> Any:
    torch.manual_seed(0)
    net = PipelineModule(
        [LayerSpec(Layer) for _ in range(2 * dist.get_world_size())],
        num_stages=dist.get_world_size(),
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
        activation_checkpoint_interval=1 if name == "recompute" else 0,
    )
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
    return engine


def batches() -> Iterator[Any]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def train(engine: Any, data: Iterator[Any]) -> list[Any]:
    """Losses, then the parameters at the end."""
    losses = [engine.train_batch(data).detach().clone() for _ in range(COMPARED_STEPS)]
    return losses + [p.detach().clone() for p in engine.module.parameters()]


def unhooked(engine: Any, data: Iterator[Any]) -> list[str]:
    """Attached, but somebody has put the map of instructions back: what the client says."""
    lines = listen()
    attachment = perseus.attach(engine)
    engine._INSTRUCTION_MAP = type(engine)._INSTRUCTION_MAP
    for _ in range(UNHOOKED_STEPS):
        engine.train_batch(data)
        attachment.session.wait_connected(30)  # the first step says hello
    attachment.detach()
    return lines


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile C++ first; gloo does as well
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    followed = 0
    for name in sys.argv[2:]:
        reference = train(make_engine(name), batches())
        engine = make_engine(name)
        attachment = perseus.attach(engine)
        result: dict[str, Any] = {"attached": attachment.active, "idempotent": perseus.attach(engine) is attachment}
        if rank == 0:
            text = perseus.schedule_csv(stages=dist.get_world_size(), microbatches=MICROBATCHES)
            (folder / f"{name}.csv").write_text(text)
        data = batches()
        seen = train(engine, data)
        result["bit_identical"] = all(torch.equal(a, b) for a, b in zip(reference, seen, strict=True))
        attachment.session.wait_connected(30)
        ready = folder / f"{name}.{rank}.ready"
        partial = ready.with_suffix(".partial")
        partial.write_text(json.dumps({"first_iteration": followed}))
        os.replace(partial, ready)
        followed += COMPARED_STEPS
        while True:
            done = torch.tensor([int((folder / f"{name}.done").exists())])
            dist.broadcast(done, 0)
            if done.item():
                break
            engine.train_batch(data)
            followed += 1
        engine.eval_batch(batches())
        attachment.detach()
        result["left_behind"] = [
            key for key in ("_INSTRUCTION_MAP", "_exec_schedule", "_perseus_attachment") if key in vars(engine)
        ]
        engine.train_batch(data)
        result["said"] = unhooked(engine, data)
        followed += UNHOOKED_STEPS
        (folder / f"{name}.{rank}.result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
