"""What the client costs a training step: two ranks of real PyTorch, each with an agent's end that is woken for every
instruction (the worst case).

``python overhead_worker.py RESULT.json`` with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and PERSEUS_SOCKET. Steps
with and without hooks alternate. Two figures: the CPU time that the training thread spends inside the client's calls
(the clock's own cost counted in; what the thread loses when others take its CPU is not), and the median difference of
neighbouring steps, which counts everything and drowns in noise unless the machine is idle. Started by
``tests.bench.frameworks``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import perseus_client.torch_pipelining as perseus

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "torch_pipelining"))
import train

MICROBATCHES = 8
BATCH = 4
"""Sequences in a microbatch: makes an instruction some 20 ms long, short for a stage on a GPU."""
PAIRS = 24
WARM_UP = 4
CALLS = ("step_begin", "step_end", "instruction_begin", "instruction_end")


class Stopwatch:
    """CPU time inside the client's calls."""

    def __init__(self, kind: type) -> None:
        """``kind``: of the session; its instances have no attributes of their own."""
        self.spent_ns = 0
        for name in CALLS:
            setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            started_ns = time.thread_time_ns()
            original(*arguments)
            self.spent_ns += time.thread_time_ns() - started_ns

        return call


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train.WIDTH, train.LENGTH = 256, 128
    shape = {"microbatches": MICROBATCHES, "group": dist.group.WORLD, "device": torch.device("cpu")}
    plain, modules = train.build("1F1B", **shape)
    hooked, others = train.build("1F1B", **shape)
    attachment = perseus.attach(hooked)
    assert attachment.session.wait_connected(30)
    watch = Stopwatch(type(attachment.session))
    tokens = torch.randint(train.VOCABULARY, (BATCH * MICROBATCHES, train.LENGTH))

    def step(schedule: Any, own: list[Any]) -> float:
        dist.barrier()
        started_s = time.perf_counter()
        train.train_step(schedule, own, tokens)
        return time.perf_counter() - started_s

    inside, differences, steps_s = [], [], []
    for pair in range(PAIRS + WARM_UP):
        watch.spent_ns = 0
        if pair % 2:  # neither always goes first
            without_s = step(plain, modules)
            with_s = step(hooked, others)
        else:
            with_s = step(hooked, others)
            without_s = step(plain, modules)
        if pair >= WARM_UP:
            inside.append(watch.spent_ns / 1e9 / with_s)
            differences.append(with_s / without_s - 1)
            steps_s.append(without_s)
    result = {
        "inside_percent": 100 * median(inside),
        "difference_percent": 100 * median(differences),
        "step_ms": 1000 * median(steps_s),
        "instructions": 2 * MICROBATCHES,
    }
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
