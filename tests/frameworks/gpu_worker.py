"""One process that computes on a real GPU: a pipeline of one rank, timed by CUDA events.

``python gpu_worker.py RESULT.json`` with PERSEUS_SOCKET. Changes no clock.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, schedules  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import perseus_client.torch_pipelining as perseus  # noqa: E402

WIDTH, MICROBATCHES, STEPS, SYNCHRONISED_STEPS = 2048, 8, 20, 5


def main() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    stages = [
        PipelineStage(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device), k, 2, device)
        for k in range(2)
    ]
    schedule = schedules.ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=nn.MSELoss())
    attachment = perseus.attach(schedule)
    assert attachment.session.wait_connected(30)
    x = torch.randn(MICROBATCHES * 512, WIDTH, device=device)

    synchronised = []
    original = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *args: (synchronised.append(1), original(*args))
    for _ in range(STEPS):
        schedule.step(x, target=x)
    torch.cuda.synchronize = original
    original()
    reached_us = []
    for _ in range(SYNCHRONISED_STEPS):  # what the GPU has done is known at the end of later steps
        schedule.step(x, target=x)
        original()
        reached_us.append(time.monotonic_ns() // 1000)
    Path(sys.argv[1]).write_text(
        json.dumps(
            {
                "synchronised": len(synchronised),
                "first_synchronised": STEPS,
                "reached_us": reached_us,
                "uuid": f"GPU-{torch.cuda.get_device_properties(device).uuid}",
            }
        )
    )
    attachment.detach()


if __name__ == "__main__":
    main()
