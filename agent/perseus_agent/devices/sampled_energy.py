"""An energy counter made of the driver's samples of power.

The hardware counter ticks every 100 ms. On an H100 reading it takes 3 to 17 ms, in which the firmware answers no other
call: a clock that is due then comes late. The driver stores samples of power for seconds, 20 ms apart, each the mean
since the one before; reading them all takes 0.4 ms (docs/clocks-take-time.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from perseus_agent.devices.base import EnergyReading

Sample = tuple[int, int]
"""Wall-clock time (µs) and power (mW)."""

MAX_STEP_US: Final = 50_000
"""Samples further apart are less exact than the counter."""
MAX_GAP_US: Final = 200_000
"""Energy between samples further apart is not estimated."""
CLOCK_STEP_US: Final = 5_000
"""The wall clock is corrected by far less between two readings, unless it is set."""
STALE_US: Final = 1_000_000
"""A newest sample older than this was not taken now, or not by this clock."""


def usable(samples: Sequence[Sample], now_us: int) -> bool:
    """Whether a GPU's samples are dense and of today: ``now_us`` on the wall clock."""
    if len(samples) < 2 or not -CLOCK_STEP_US <= now_us - samples[-1][0] <= STALE_US:
        return False
    return 0 < median(after - before for (before, _), (after, _) in pairwise(samples)) <= MAX_STEP_US


class SampledEnergy:
    """The counter of one GPU. It restarts at zero where samples were missed or the wall clock was set."""

    def __init__(self) -> None:
        self.restarts = 0
        self._last_us: int | None = None
        self._offset_us: int | None = None
        self._energy_nj: int | None = None

    def take(self, samples: Sequence[Sample], offset_us: int) -> list[EnergyReading]:
        """The counter at each sample that is new.

        Args:
            samples: all that the driver has stored, oldest first.
            offset_us: monotonic less wall-clock time, now.
        """
        clock_set = self._offset_us is not None and abs(offset_us - self._offset_us) > CLOCK_STEP_US
        self._offset_us = offset_us
        if not samples:
            return []
        last_us = self._last_us
        self._last_us, _ = samples[-1]
        if clock_set or (last_us is not None and self._last_us < last_us):
            self._energy_nj = None  # the wall clock was set, before these samples or between them
            return []
        readings = []
        # Energy before the first call was reported by an earlier process of the agent.
        for time_us, power_mw in samples[-1:] if last_us is None else samples[_seen(samples, last_us) :]:
            if self._energy_nj is None or last_us is None or not 0 < time_us - last_us <= MAX_GAP_US:
                self._energy_nj = 0
                self.restarts += 1
            else:
                self._energy_nj += power_mw * (time_us - last_us)
            last_us = time_us
            readings.append(EnergyReading(time_us + offset_us, self._energy_nj // 1_000_000))
        return readings


def _seen(samples: Sequence[Sample], until_us: int) -> int:
    """How many of the samples are not new. Counted from the end: behind a wall clock that was set back come earlier
    times."""
    seen = len(samples)
    while seen and samples[seen - 1][0] > until_us:
        seen -= 1
    return seen
