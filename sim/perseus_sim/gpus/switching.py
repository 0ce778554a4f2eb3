"""What a simulated driver takes for a change of a clock: draws of calls and latencies, and who holds its lock.

Both are log-normal around the published medians, with the published tails (``perseus_core.latency``). A part of the
spread belongs to the target clock and stays as it is for a GPU model; the rest differs from call to call. Rare outliers
come on top. Slow calls belong to slow changes: one random number moves both. Standard library only: trainers import
this.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from perseus_core.latency import SwitchLatency

_Z99: Final = 2.3263478740408408
_TIMES: Final = ("call_p99_s", "reader_period_s", "reader_call_s", "energy_period_s", "power_period_s")


@dataclass(frozen=True)
class DriverModel:
    """How the driver of a GPU model behaves.

    Attributes:
        latency: switch latency, duration of a call, and whether the GPUs of a node share the driver's lock.
        call_p99_s: 99th percentile of a call, seconds.
        target_share: share of the variance of a latency's logarithm that belongs to the target clock.
        outlier_probability, outlier_factor: so many changes take so many times longer.
        reader_period_s, reader_call_s: other programs hold the lock for a call so often; period 0: never.
        energy_period_s, power_period_s: how often the energy counter and the samples of power move, seconds.
    """

    latency: SwitchLatency
    call_p99_s: float
    target_share: float
    outlier_probability: float
    outlier_factor: float
    reader_period_s: float
    reader_call_s: float
    energy_period_s: float
    power_period_s: float

    def faster(self, factor: float) -> DriverModel:
        """Return the driver of a GPU on which everything takes ``factor`` times less time."""
        periods = {name: getattr(self, name) / factor for name in _TIMES}
        return replace(self, latency=self.latency.faster(factor), **periods)


class Switch(NamedTuple):
    """One change, in seconds from the begin of its call: the call's end, and the new clock in effect."""

    call_s: float
    latency_s: float


class Switches:
    """Draws the changes of one GPU."""

    def __init__(self, driver: DriverModel, seed: int) -> None:
        self._driver = driver
        self._normal: Callable[[float, float], float] = random.Random(seed).gauss
        self._uniform = random.Random(seed + 1).random
        sigma, share = driver.latency.sigma, driver.target_share
        self._target_sigma = sigma * math.sqrt(share)
        self._own_sigma = sigma * math.sqrt(1 - share)
        call_s = driver.latency.call_s
        self._call_sigma = math.log(driver.call_p99_s / call_s) / _Z99 if call_s > 0 else 0.0
        self._factors: dict[int, float] = {}

    def draw(self, mhz: int) -> Switch:
        """Draw the next change, to a clock in MHz (0: the default clocks)."""
        driver = self._driver
        z = self._normal(0.0, 1.0)
        latency_s = driver.latency.p50_s * self._of_target(mhz) * math.exp(self._own_sigma * z)
        if self._uniform() < driver.outlier_probability:
            latency_s *= driver.outlier_factor
        return Switch(min(driver.latency.call_s * math.exp(self._call_sigma * z), latency_s), latency_s)

    def _of_target(self, mhz: int) -> float:
        """How a target differs from the others: the same for every GPU of a model."""
        factor = self._factors.get(mhz)
        if factor is None:
            z = random.Random(f"{self._driver.latency.source} {mhz}").gauss(0.0, 1.0)
            factor = self._factors[mhz] = math.exp(self._target_sigma * z)
        return factor


class DriverLock:
    """The lock that calls of a node, or of one GPU, wait for in their order. Other programs read through it too."""

    def __init__(self, driver: DriverModel) -> None:
        self._free_s = 0.0
        self._period_s, self._reading_s = driver.reader_period_s, driver.reader_call_s
        self._reader_s = driver.reader_period_s or math.inf

    def acquire(self, now_s: float, hold_s: float) -> float:
        """Hold the lock from the earliest moment for so many seconds; returns that moment."""
        begin_s = max(now_s, self._free_s)
        while self._reader_s <= begin_s:
            begin_s = max(now_s, max(self._free_s, self._reader_s) + self._reading_s)
            self._free_s = max(self._free_s, self._reader_s) + self._reading_s
            self._reader_s += self._period_s
        self._free_s = begin_s + hold_s
        return begin_s
