"""A rank that trains with the real schedules and communication of Megatron-Core: without the client, then with it.

``python megatron_worker.py FOLDER plain|recompute|interleaved|overlapped|tensor|context|expert|alone …`` under
``perseus_sim.training.live``.
Megatron asks for CUDA in a few places; those answers alone are stood in for (``without_cuda``). See
``conftest.Harness``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from inspect import signature
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
SPLIT = {"tensor": 2, "context": 2, "expert": 2, "alone": 2}
"""Ranks that share a stage: its tensors, the sequence, the experts of two pipelines, or nothing but gradients."""
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
    "add_bias_linear": False,
}


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


def experts_without_cuda() -> None:
    """What Megatron's experts ask CUDA and Transformer Engine for, answered by the CPU."""

    class Stream:
        """Of work that is done when its call returns."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: Stream()

    exchange = dist.all_to_all_single

    def all_to_all_single(received: Any, sent: Any, *sizes: Any, **options: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):  # counts that a GPU would have copied to its host
            if isinstance(options.get(name), torch.Tensor):
                options[name] = options[name].tolist()
        return exchange(received, sent, *sizes, **options)

    torch.cuda.Stream = torch.cuda.Event = lambda *_, **__: Stream()
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda *_: None
    dist.all_to_all_single = all_to_all_single
    moe_utils.te_general_gemm = None  # looked up though Transformer Engine is not there


warnings.filterwarnings("ignore")
without_cuda()
import megatron.core  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402


class Chunk(nn.Module):
    """A model chunk, as Megatron's schedules expect one."""

    def __init__(self, config: Any, place: int, *, name: str, virtual: int | None) -> None:
        super().__init__()
        torch.manual_seed(place)
        self.config, self.model_type, self.vp_stage = config, ModelType.encoder_or_decoder, virtual
        recompute = name == "recompute"
        if name == "tensor":
            self.layers: nn.Module = Split(config)
        elif name == "expert":
            self.layers = Experts(config)
        elif name == "context":
            self.layers = Attention()
        else:
            self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.first, self.recompute = place == 0, recompute
        self.received: Any = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: Any) -> Any:
        x = x if self.first else self.received
        return checkpoint(self.layers, x, use_reentrant=False) if self.recompute else self.layers(x)


class Split(nn.Module):
    """Two of Megatron's layers whose tensor-parallel ranks hold a part of each, and reduce at the end."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        options = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False, "skip_bias_add": False}
        self.first = ColumnParallelLinear(WIDTH, 2 * WIDTH, gather_output=False, **options)
        self.second = RowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True, **options)

    def forward(self, x: Any) -> Any:
        return self.second(torch.nn.functional.gelu(self.first(x)[0]))[0]


class Attention(nn.Module):
    """Attention over a sequence of which each context-parallel rank of Megatron's holds a part.

    Megatron's own refuses context parallelism without Transformer Engine, which needs CUDA. This one gathers keys and
    values by a function of Megatron's, as ``cp_comm_type`` "all_gather" does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        group = parallel_state.get_context_parallel_group()
        every = [gather_from_sequence_parallel_region(of(x), group=group) for of in (self.key, self.value)]
        query, key, value = (part.transpose(0, 1) for part in (self.query(x), *every))
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(0, 1).contiguous()


class Experts(nn.Module):
    """Megatron's layer of experts, of which each expert-parallel rank holds half: tokens go there and back."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
        # A function that builds the layer since 0.19; a description of it before.
        self.layer = spec(config) if callable(spec) else MoELayer(config, spec.submodules)

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


class Variant:
    """Model, data and configuration of one way to train."""

    def __init__(self, name: str) -> None:
        self.chunks = 2 if name in {"interleaved", "overlapped"} else 1
        virtual = self.chunks if self.chunks > 1 else None
        split = SPLIT.get(name, 1)
        self.stages = stages = dist.get_world_size() // split
        tensor, context, expert = (split if name == kind else 1 for kind in ("tensor", "context", "expert"))
        parallel_state.initialize_model_parallel(
            tensor, stages, virtual, context_parallel_size=context, expert_model_parallel_size=expert
        )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.config = TransformerConfig(
            num_layers=self.chunks * stages,
            hidden_size=WIDTH,
            num_attention_heads=4,
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            use_cpu_initialization=True,
            **(EXPERTS if name == "expert" else {}),
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
                name=name,
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


def part_of_this_rank(batch: dict[str, Any]) -> Any:
    """The context-parallel rank's part of a batch; newer versions ask for more."""
    if "is_hybrid_cp" not in signature(get_batch_on_this_cp_rank).parameters:
        return get_batch_on_this_cp_rank(batch)
    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank({**batch, "cu_seqlens": None}, is_hybrid_cp=False, cp_group=group)


def batches() -> Iterator[Any]:
    generator = torch.Generator().manual_seed(7)
    while True:
        whole = {"x": torch.randn(BATCH, LENGTH, WIDTH, generator=generator)}
        yield part_of_this_rank(whole)["x"].transpose(0, 1).contiguous()


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
    if "expert" in sys.argv[2:]:
        experts_without_cuda()
    for name in sys.argv[2:]:
        variant = Variant(name)
        before = {key: value for key, value in vars(schedules).items() if callable(value)}
        reference = [variant.run() for _ in range(COMPARED_STEPS)][-1]
        attachment = perseus.attach()
        result: dict[str, Any] = {
            "version": megatron.core.__version__,
            "attached": attachment.active,
            "idempotent": perseus.attach() is attachment,
        }
        if rank == 0:
            text = perseus.schedule_csv(stages=variant.stages, microbatches=MICROBATCHES, chunks=variant.chunks)
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
