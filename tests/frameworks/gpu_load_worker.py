"""One process that loads a real GPU in a known way. Changes no clock.

``python gpu_load_worker.py RESULT.json MODE``, where MODE is
``forward``, ``backward``: a transformer layer's, again and again for some seconds;
``ramp``: nothing for a while, then tiny items of work, each timed by events;
``alternating``: two instructions of known kernels with PERSEUS_SOCKET, until it is killed. It begins on a line from
standard input; first it tells what each kernel draws alone, which the reader of the energy counter finds by its times.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_marks_worker import BATCH, LENGTH, WIDTH, Layer

import perseus_client

IDLE_S, LOAD_S, PART_S = 8.0, 6.0, 0.15
ITEMS = 4_000
SCHEDULE = [("forward", 0, 0), ("backward", 0, 0)]


def now_us() -> int:
    return time.monotonic_ns() // 1000


def run_for(seconds: float, work: Callable[[], Any]) -> tuple[int, int]:
    """Run it for so long; from when to when the GPU worked, in microseconds."""
    torch.cuda.synchronize()
    begin_us = now_us()
    while now_us() - begin_us < 1e6 * seconds:
        for _ in range(10):
            work()
        torch.cuda.synchronize()
    return begin_us, now_us()


def transformer(kind: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.bfloat16)
    layer = Layer().cuda()
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", requires_grad=True)
    output = layer(x)
    gradient = torch.randn_like(output)
    works = {"forward": lambda: layer(x), "backward": lambda: output.backward(gradient, retain_graph=True)}
    return {"span_us": run_for(LOAD_S, works[kind])}


def ramp() -> dict[str, Any]:
    """A tiny item computes and touches little memory, so its speed is that of the SM clock."""
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, x)
    torch.cuda.synchronize()
    time.sleep(IDLE_S)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ITEMS + 1)]
    begin_us = now_us()
    events[0].record()
    for event in events[1:]:
        for _ in range(20):
            torch.mm(x, x)
        event.record()
    torch.cuda.synchronize()
    at_us = [begin_us + 1000 * events[0].elapsed_time(event) for event in events]
    return {
        "begin_us": begin_us,
        "ends_us": at_us[1:],
        "items_us": [b - a for a, b in pairwise(at_us)],
    }


def alternating(result: Path) -> None:
    """A product of matrices, which draws much, and a copy, which draws less."""
    sys.stdin.readline()
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    kernels = {"forward": lambda: torch.mm(x, x, out=y), "backward": lambda: y.copy_(x)}
    counts, alone_us = {}, {}
    for name, kernel in kernels.items():
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(200):
            kernel()
        torch.cuda.synchronize()
        counts[name] = max(1, round(200 * PART_S / (time.perf_counter() - began_s)))
        alone_us[name] = run_for(LOAD_S, kernel)
    result.write_text(json.dumps({"alone_us": alone_us}))
    session = perseus_client.connect(0, 0, schedule=SCHEDULE, timing="cuda")
    session.wait_connected(60)
    while True:
        with session.step():
            for instruction in SCHEDULE:
                with session.instruction(*instruction):
                    for _ in range(counts[instruction[0]]):
                        kernels[instruction[0]]()
        torch.cuda.synchronize()


def main() -> None:
    result, mode = Path(sys.argv[1]), sys.argv[2]
    torch.cuda.set_device(0)
    if mode == "alternating":
        alternating(result)
    else:
        result.write_text(json.dumps(ramp() if mode == "ramp" else transformer(mode)))


if __name__ == "__main__":
    main()
