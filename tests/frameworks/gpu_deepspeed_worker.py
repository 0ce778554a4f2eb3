"""The first rank of two that trains transformer layers on a real GPU with DeepSpeed's PipelineEngine.

``python gpu_deepspeed_worker.py RESULT.json deepspeed plain TIMING`` with PERSEUS_SOCKET. The other rank is not there:
gradients are whatever the memory held, and come at once. Changes no clock.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from itertools import repeat
from pathlib import Path
from typing import Any

STAGES = 2
os.environ |= {"LOCAL_SIZE": "1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(STAGES)}
logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from gpu_marks_worker import BATCH, LAYERS, LENGTH, MICROBATCHES, WIDTH, Layer, follow  # noqa: E402
from torch import nn  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import perseus_client.deepspeed as perseus  # noqa: E402


def main() -> None:
    timing = sys.argv[4]
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=STAGES)
    deepspeed.init_distributed()
    net = PipelineModule(
        [LayerSpec(Layer) for _ in range(LAYERS * STAGES)],
        num_stages=STAGES,
        loss_fn=nn.MSELoss(),
        partition_method="uniform",
    )
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)  # gradients are noise here
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    logging.disable(logging.NOTSET)
    attachment = perseus.attach(engine, timing=timing)
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    data: Any = repeat((x, x))
    follow(attachment, lambda: engine.train_batch(data), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
