"""A real training process in a pod with simulated GPUs: ``python -m perseus_sim.training.pod_live script.py …``.

In the place of ``python script.py …``. The script computes for real, on the CPU; see ``perseus_sim.training.live``.
Which GPU is its own follows from LOCAL_RANK, as for any training script. A line now and then says what iterations take.
Standard library only: the image holds a training framework and little else.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from perseus_core.gpus import BACKWARD_RATIO
from perseus_core.units import us_from_s
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.shim_gpu import NoGpus, ShimGpu, granted
from perseus_sim.training.live import LiveGpu, run, tables_of


class IterationPrinter:
    """Prints the mean of the iterations that have ended since the last line."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._number = -1
        self._taken: list[tuple[float, float]] = []
        self._printed_s = time.monotonic()

    def ended(self, iteration: Mapping[str, Any]) -> None:
        """An iteration of ``live.LiveGpu`` has ended."""
        self._number += 1
        time_us = iteration["end_us"] - iteration["begin_us"]
        self._taken.append((time_us / 1e6, (iteration["end_energy_uj"] - iteration["energy_uj"]) / 1e6))
        if time.monotonic() < self._printed_s + self._every_s:
            return
        times_s, energies_j = zip(*self._taken, strict=True)
        clock_mhz = iteration["instructions"][-1][3] if iteration["instructions"] else 0
        print(
            f"{time.strftime('%H:%M:%S')} iteration {self._number}: "
            f"{fmean(times_s):.3f} s, {fmean(energies_j):.0f} J, the last at {clock_mhz} MHz",
            flush=True,
        )
        self._taken, self._printed_s = [], time.monotonic()


def gpu_of(environment: Mapping[str, str]) -> ShimGpu:
    """The GPU of this process: of those that the kubelet granted to its container, the one of its local rank.

    Raises:
        NoGpus: the container has no simulated GPU, or none for this rank.
    """
    folder, uuids = granted(environment)
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if local_rank >= len(uuids):
        raise NoGpus(f"LOCAL_RANK: is {local_rank}, and the container has {len(uuids)} GPUs")
    return ShimGpu(folder, uuids[local_rank])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perseus_sim.training.pod_live", description=__doc__)
    parser.add_argument("--step", type=float, default=0.4, help="seconds of an iteration at the highest clock (0.4)")
    parser.add_argument("--report", type=float, default=5.0, help="seconds between reports (5)")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="what trains, with its arguments")
    settings = parser.parse_args(arguments)
    if not settings.script:
        parser.error("script: what trains is missing")
    try:
        gpu = gpu_of(os.environ)
    except NoGpus as error:
        print(f"perseus_sim.training.pod_live: {error}", file=sys.stderr)
        return 2
    # The first process of a container ignores every signal that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    model = next(model for model in MODELS.values() if model.name == gpu.spec.model)
    tables = tables_of(model, gpu.spec.supported_clocks_mhz, us_from_s(settings.step) / (1 + BACKWARD_RATIO))
    try:
        run(LiveGpu(gpu, tables, IterationPrinter(settings.report).ended), settings.script)
    finally:
        gpu.rest()
    return 0


if __name__ == "__main__":
    sys.exit(main())
