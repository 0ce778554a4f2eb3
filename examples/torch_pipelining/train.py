"""Train a small transformer with torch.distributed.pipelining, on CPUs or GPUs. Perseus is the line marked below.

torchrun --nproc-per-node 4 train.py --schedule 1F1B --microbatches 8 --steps 50

Without a Perseus agent (the environment variable PERSEUS_SOCKET, see training-job.yaml) the line does nothing.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils.checkpoint import checkpoint

import perseus_client.torch_pipelining as perseus

VOCABULARY, WIDTH, LENGTH = 64, 32, 16
V_SHAPED = {"ZBVZeroBubble", "DualPipeV"}
"""Schedules in which a rank holds a stage of the way down the model and one of the way back."""


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class Chunk(nn.Module):
    """What one pipeline stage computes: the first embeds tokens, the last predicts them."""

    def __init__(self, *, first: bool, last: bool, layers: int, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY) if last else None
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Predict the next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(
    name: str,
    *,
    microbatches: int,
    group: dist.ProcessGroup,
    device: torch.device,
    chunks: int = 2,
    layers: int = 1,
    recompute: bool = False,
) -> tuple[Any, list[Chunk]]:
    """A schedule of this name, and this rank's part of the model."""
    kind: Any = get_schedule_class(name)
    rank, ranks = group.rank(), group.size()
    single = issubclass(kind, PipelineScheduleSingle)
    chunks = 1 if single else chunks
    total = chunks * ranks
    places = [rank, total - 1 - rank] if name in V_SHAPED else [rank + chunk * ranks for chunk in range(chunks)]
    modules, stages = [], []
    for place in places:
        torch.manual_seed(place)
        module = Chunk(first=place == 0, last=place == total - 1, layers=layers, recompute=recompute).to(device)
        modules.append(module)
        stages.append(PipelineStage(module, place, total, device, group=group))
    return kind(stages[0] if single else stages, n_microbatches=microbatches, loss_fn=loss_of), modules


def train_step(schedule: Any, modules: list[Chunk], tokens: Tensor, replicas: dist.ProcessGroup | None = None) -> float:
    """One iteration without the optimizer: gradients are in the modules, averaged over pipelines; returns the loss
    where the last stage is."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    losses: list[Tensor] = []
    arguments = (tokens,) if any(stage.is_first for stage in stages) else ()
    last = {"target": tokens, "losses": losses} if any(stage.is_last for stage in stages) else {}
    for module in modules:
        module.zero_grad(set_to_none=True)
    schedule.step(*arguments, **last, return_outputs=False)
    if replicas is not None and replicas.size() > 1:
        for module in modules:
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad, group=replicas)
                parameter.grad.div_(replicas.size())
    return float(torch.stack(losses).detach().mean()) if losses else float("nan")


def main() -> None:
    """One process of the job, as torchrun starts it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1F1B", help="a schedule of torch.distributed.pipelining")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="virtual stages on each rank, where the schedule has any")
    parser.add_argument("--layers", type=int, default=1, help="transformer layers in each virtual stage")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--data-parallel", type=int, default=1, help="pipelines")
    parser.add_argument("--recompute", action="store_true", help="activation recomputation")
    parser.add_argument("--export-schedule", type=Path, help="write the schedule of all stages to this file, as CSV")
    options = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(kind, (options.data_parallel, world // options.data_parallel), mesh_dim_names=("dp", "pp"))
    schedule, modules = build(
        options.schedule,
        microbatches=options.microbatches,
        group=mesh.get_group("pp"),
        device=device,
        chunks=options.chunks,
        layers=options.layers,
        recompute=options.recompute,
    )
    perseus.attach(schedule)  # <- Perseus. Everything else is plain PyTorch.
    if options.export_schedule and dist.get_rank() == 0:
        options.export_schedule.write_text(perseus.schedule_csv(schedule))

    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=3e-3)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    start = torch.randint(VOCABULARY, (2 * options.microbatches, 1), generator=generator)
    tokens = ((start + 3 * torch.arange(LENGTH)) % VOCABULARY).to(device)  # something that the model can learn
    for step in range(options.steps):
        loss = train_step(schedule, modules, tokens, mesh.get_group("dp"))
        optimizer.step()
        if step % 10 == 0 and not math.isnan(loss) and mesh.get_local_rank("dp") == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
