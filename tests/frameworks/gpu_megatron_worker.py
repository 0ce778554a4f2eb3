"""One rank of four that trains transformer layers on a real GPU with Megatron-Core's schedules, marked by the GPU.

``python gpu_megatron_worker.py RESULT.json VARIANT plain TIMING`` with PERSEUS_SOCKET; VARIANT is ``1f1b``,
``interleaved`` or ``overlapped`` (interleaved with ``overlap_p2p_comm``). The other ranks are not there: what this one
receives is whatever the memory held, and comes at once. Changes no clock.
"""

from __future__ import annotations

import sys
import warnings
from itertools import repeat
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_marks_worker import BATCH, CHUNKS, HEADS, LAYERS, LENGTH, MICROBATCHES, WIDTH, Layer, follow  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from torch import nn  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import perseus_client.megatron as perseus  # noqa: E402

STAGES, RANK = 4, 1


class Chunk(nn.Module):
    """A model chunk, as Megatron's schedules expect one: sequence first."""

    def __init__(self, config: Any, virtual: int | None) -> None:
        super().__init__()
        self.config, self.model_type, self.vp_stage = config, ModelType.encoder_or_decoder, virtual
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.received: Any = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self) -> Any:
        return self.layers(self.received.transpose(0, 1)).transpose(0, 1).contiguous()


def forward_step(_: Any, chunk: Chunk) -> Any:
    return chunk(), lambda output: (output.float().pow(2).mean(), {})  # a loss only the last stage has


def main() -> None:
    variant, timing = sys.argv[2], sys.argv[4]
    torch.cuda.set_device(0)
    torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=STAGES)
    chunks = 1 if variant == "1f1b" else CHUNKS
    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(1, STAGES, virtual, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=chunks * STAGES,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=virtual,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        overlap_p2p_comm=variant == "overlapped",
        batch_p2p_comm=variant != "overlapped",
    )
    config.microbatch_group_size_per_vp_stage = STAGES
    model = [Chunk(config, chunk if virtual else None).cuda() for chunk in range(chunks)]
    attachment = perseus.attach(timing=timing)

    def step() -> None:
        for chunk in model:
            chunk.zero_grad(set_to_none=True)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[repeat(None)] * chunks if virtual else repeat(None),
            model=model if virtual else model[0],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )

    follow(attachment, step, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
