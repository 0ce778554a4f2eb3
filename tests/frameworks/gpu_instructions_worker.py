"""One process that computes on a real GPU in two instructions with a wait between them, until it is killed.

``python gpu_instructions_worker.py RESULT.json`` with PERSEUS_SOCKET; begins on a line from standard input. First it
says how long the instructions take when the host waits for each. Changes no clock.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

import perseus_client

WAIT_S = 0.2
SCHEDULE = [("forward", 0, 0), ("backward", 0, 0)]


def main() -> None:
    sys.stdin.readline()
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(x, x)

    def timed_s(products: int) -> float:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        compute(products)
        torch.cuda.synchronize()
        return time.perf_counter() - began_s

    timed_s(100)
    products = round(100 * 0.1 / timed_s(100))  # of a forward of about 100 ms
    durations_us = []
    for factor in (1, 2):
        durations_us.append(round(1e6 * median(timed_s(factor * products) for _ in range(5))))
        time.sleep(WAIT_S)
    said = {"durations_us": durations_us, "wait_us": round(1e6 * WAIT_S), "products": products}
    Path(sys.argv[1]).write_text(json.dumps(said))

    session = perseus_client.connect(0, 0, schedule=SCHEDULE, timing="cuda")
    assert session.wait_connected(60)
    while True:
        with session.step():
            for factor, instruction in enumerate(SCHEDULE, start=1):
                with session.instruction(*instruction):
                    compute(factor * products)
                torch.cuda.synchronize()
                time.sleep(WAIT_S)


if __name__ == "__main__":
    main()
