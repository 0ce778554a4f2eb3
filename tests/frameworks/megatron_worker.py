"""A rank that trains with the real schedules and communication of Megatron-Core: without the client, then with it.

``python megatron_worker.py FOLDER plain|recompute|interleaved|overlapped …`` under ``perseus_sim.training.live``.
Megatron asks for CUDA in a few places; those answers alone are stood in for (``without_cuda``). See
``conftest.Harness``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from said import listen
from torch import nn
from torch.utils.checkpoint import checkpoint

import perseus_client.megatron as perseus

MICROBATCHES = 4
WIDTH, LENGTH, BATCH = 32, 8, 2
COMPARED_STEPS = 2


def on_cpu(original: Any) -> Any:
    def make(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return original(*args, **options)

    return make


def without_cuda() -> None:
    """What Megatron asks CUDA for, answered by the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    for name in ("zeros", "tensor", "empty", "ones"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


warnings.filterwarnings("ignore")
without_cuda()
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


class Chunk(nn.Module):
    """A model chunk, as Megatron's schedules expect one."""

    def __init__(self, config: Any, place: int, *, recompute: bool, virtual: int | None) -> None:
        super().__init__()
        torch.manual_seed(place)
        self.config, self.model_type, self.vp_stage = config, ModelType.encoder_or_decoder, virtual
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.first, self.recompute = place == 0, recompute
        self.received: Any = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: Any) -> Any:
        x = x if self.first else self.received
        return checkpoint(self.layers, x, use_reentrant=False) if self.recompute else self.layers(x)


class Variant:
    """Model, data and configuration of one way to train."""

    def __init__(self, name: str) -> None:
        self.chunks = 2 if name in {"interleaved", "overlapped"} else 1
        stages, stage = dist.get_world_size(), dist.get_rank()
        virtual = self.chunks if self.chunks > 1 else None
        parallel_state.initialize_model_parallel(1, stages, virtual)
        self.config = TransformerConfig(
            num_layers=self.chunks * stages,
            hidden_size=WIDTH,
            num_attention_heads=4,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=name == "overlapped",
            batch_p2p_comm=name != "overlapped",
        )
        if getattr(self.config, "microbatch_group_size_per_vp_stage", 1) is None:
            self.config.microbatch_group_size_per_vp_stage = stages
        self.model = [
            Chunk(
                self.config,
                chunk * stages + stage,
                recompute=name == "recompute",
                virtual=chunk if virtual else None,
            )
            for chunk in range(self.chunks)
        ]

    def run(self, *, forward_only: bool = False, microbatches: int = MICROBATCHES, iteration: Any = None) -> list[Any]:
        """One iteration: losses, then gradients. ``iteration``: asked of Megatron before."""
        for chunk in self.model:
            chunk.zero_grad(set_to_none=True)
        several = self.chunks > 1
        losses = (iteration or get_forward_backward_func())(
            forward_step_func=forward_step,
            data_iterator=[batches() for _ in self.model] if several else batches(),
            model=self.model if several else self.model[0],
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        gradients = [p.grad.clone() for chunk in self.model for p in chunk.parameters() if p.grad is not None]
        return [loss["loss"] for loss in losses] + gradients


def batches() -> Iterator[Any]:
    generator = torch.Generator().manual_seed(7)
    while True:
        yield torch.randn(LENGTH, BATCH, WIDTH, generator=generator)


def forward_step(data: Iterator[Any], chunk: Chunk) -> Any:
    x = next(data)
    return chunk(x), lambda output: (output.float().pow(2).mean(), {"loss": output.detach().pow(2).mean()})


def attached_late(variant: Variant) -> list[str]:
    """Attached when training has asked for its iteration already: what the client says."""
    lines, asked = listen(), get_forward_backward_func()
    attachment = perseus.attach()
    for _ in range(3):
        variant.run(iteration=asked)
    attachment.detach()
    return lines


def train_until(file: Path, variant: Variant) -> int:
    steps = 0
    while True:
        done = torch.tensor([int(file.exists())])
        dist.broadcast(done, 0)
        if done.item():
            return steps
        variant.run()
        steps += 1


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    followed = 0
    for name in sys.argv[2:]:
        variant = Variant(name)
        before = {key: value for key, value in vars(schedules).items() if callable(value)}
        reference = [variant.run() for _ in range(COMPARED_STEPS)][-1]
        attachment = perseus.attach()
        result: dict[str, Any] = {"attached": attachment.active, "idempotent": perseus.attach() is attachment}
        if rank == 0:
            text = perseus.schedule_csv(stages=dist.get_world_size(), microbatches=MICROBATCHES, chunks=variant.chunks)
            (folder / f"{name}.csv").write_text(text)
        variant.run(microbatches=2 * MICROBATCHES)  # a ramp-up of the batch: the next is another schedule
        seen = [variant.run() for _ in range(COMPARED_STEPS)][-1]
        result["bit_identical"] = all(torch.equal(a, b) for a, b in zip(reference, seen, strict=True))
        attachment.session.wait_connected(30)
        ready = folder / f"{name}.{rank}.ready"
        partial = ready.with_suffix(".partial")
        partial.write_text(json.dumps({"first_iteration": followed + 1}))
        os.replace(partial, ready)
        followed += 1 + COMPARED_STEPS + train_until(folder / f"{name}.done", variant)
        with torch.no_grad():
            variant.run(forward_only=True)
        attachment.detach()
        result["restored"] = all(getattr(schedules, key) is value for key, value in before.items())
        variant.run()
        result["said"] = attached_late(variant)
        (folder / f"{name}.{rank}.result").write_text(json.dumps(result))
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
