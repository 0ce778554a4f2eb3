"""One rank of a pipeline on a real GPU whose host never waits, and which times each instruction by events of its own.

``python gpu_control_worker.py RESULT.json STEPS SCHEDULE LAYERS`` with PERSEUS_SOCKET. It begins on a line from stdin.
The result: when each instruction of each step was launched, began and ended, microseconds of the host's clock. Changes
no clock.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_marks_worker import BATCH, LENGTH, WIDTH, Layer
from torch import nn

import perseus_client


def now_us() -> float:
    return time.monotonic_ns() / 1000


def anchor() -> tuple[Any, float]:
    """An event, and when the GPU passed it."""
    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    return event, now_us()


def main() -> None:
    sys.stdin.readline()
    steps, schedule, layers = int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
    torch.cuda.set_device(0)
    torch.set_default_dtype(torch.bfloat16)
    model = nn.Sequential(*[Layer() for _ in range(layers)]).cuda()
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", requires_grad=True)
    gradient = torch.randn_like(x)
    outputs: dict[int, Any] = {}

    def compute(kind: str, microbatch: int) -> None:
        if kind == "forward":
            outputs[microbatch] = model(x)
        else:
            outputs.pop(microbatch).backward(gradient)

    for kind, microbatch, _ in schedule:
        compute(kind, microbatch)
    session = perseus_client.connect(0, 0, schedule=schedule, timing="cuda")
    session.wait_connected(60)
    time.sleep(0.2)  # the first mark of the GPU's own is seen by then
    first, first_us = anchor()
    launched_us, events = [], []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        with session.step():
            for kind, microbatch, chunk in schedule:
                launched_us.append(now_us())
                pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                with session.instruction(kind, microbatch, chunk):
                    pair[0].record()
                    compute(kind, microbatch)
                    pair[1].record()
                events.append(pair)
    last, last_us = anchor()
    # Clocks of GPU and host drift apart: both ends are known in both.
    scale = (last_us - first_us) / (1000 * first.elapsed_time(last))
    spans_us = [[first_us + 1000 * scale * first.elapsed_time(event) for event in pair] for pair in events]
    result = Path(sys.argv[1])
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps({"launched_us": launched_us, "spans_us": spans_us}))
    partial.replace(result)
    session.close()


if __name__ == "__main__":
    main()
