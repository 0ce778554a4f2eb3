"""Equal work items on a real GPU, timed by its own events: the process behind ``perseus_bench.cuda``.

Needs PyTorch and nothing else of this project, so that any Python may run it. Commands come on stdin, a line each
(``start N``, ``start -``, ``finish``), answers go to stdout as JSON; the number of completed items goes to a file that
is mapped by both sides. At most ``DEPTH`` items wait in the launch queue: the GPU never idles, and progress is known.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import sys
import time
from collections import deque
from itertools import pairwise
from typing import Any

DEPTH = 3
ITEM_MS = 0.5
SIZE = 4096


class Items:
    """The GPU and its queue."""

    def __init__(self, torch: Any) -> None:
        self.cuda = torch.cuda
        self.left = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.float16)
        self.right = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.float16)
        self.product = torch.empty_like(self.left)
        self.multiply = torch.mm
        self.repeat = 1
        for _ in range(20):  # the first ones load libraries
            self.launch()
        times = []
        for _ in range(20):
            begin = self.mark()
            self.launch()
            end = self.mark()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        self.repeat = max(1, round(ITEM_MS / sorted(times)[len(times) // 2]))

    def launch(self) -> None:
        """One work item."""
        for _ in range(self.repeat):
            self.multiply(self.left, self.right, out=self.product)

    def mark(self) -> Any:
        """An event of now."""
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def anchor(self) -> tuple[Any, float]:
        """An event, and the host's time at which the GPU passed it, µs."""
        self.cuda.synchronize()
        event = self.mark()
        event.synchronize()
        return event, time.monotonic_ns() / 1000


def run(items: Items, limit: int | None, progress: mmap.mmap) -> dict[str, Any]:
    """Compute until ``finish`` comes or the limit is reached, and return the times of the items."""
    progress[:8] = struct.pack("q", 0)
    first, first_us = items.anchor()
    marks, waiting, launched = [first], deque([first]), 0
    asked = False
    while (launched < limit) if limit is not None else not asked:
        items.launch()
        launched += 1
        marks.append(items.mark())
        waiting.append(marks[-1])
        if len(waiting) > DEPTH:
            waiting.popleft().synchronize()
            progress[:8] = struct.pack("q", launched - DEPTH)
        if limit is None and select.select([sys.stdin], [], [], 0)[0]:
            asked = True
            if sys.stdin.readline().strip() != "finish":
                sys.exit(0)  # the parent has gone
    last, last_us = items.anchor()
    progress[:8] = struct.pack("q", launched)
    if limit is not None and sys.stdin.readline().strip() != "finish":
        sys.exit(0)
    # Events and the host's clock drift apart by some 20 µs a second: both ends are known in both.
    durations_us = [1000 * before.elapsed_time(after) for before, after in pairwise(marks)]
    elapsed_us = sum(durations_us) + 1000 * marks[-1].elapsed_time(last)
    scale = (last_us - first_us) / elapsed_us if elapsed_us else 1.0
    return {"begin_us": first_us, "durations_us": [round(each * scale, 3) for each in durations_us]}


def main(progress_file: str) -> None:
    """Serve commands until stdin ends."""
    import torch

    with open(progress_file, "r+b") as file:
        progress = mmap.mmap(file.fileno(), 8)
    items = Items(torch)
    name = f"{items.repeat} × {SIZE}³ matrix products, half precision, PyTorch {torch.__version__}"
    _answer({"name": name, "gpu": torch.cuda.get_device_name(), "pid": os.getpid()})
    while (line := sys.stdin.readline().split())[:1] == ["start"]:
        _answer(run(items, None if line[1] == "-" else int(line[1]), progress))


def _answer(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201  # read by the parent


if __name__ == "__main__":
    main(sys.argv[1])
