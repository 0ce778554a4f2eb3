"""The simulated GPUs that one engine runs on: the clocks in effect on them, and what they draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perseus_core.units import mw_from_w, us_from_ns
from perseus_sim.gpus.clock_in_effect import ClockInEffect, Gpu
from perseus_sim.gpus.shared_gpu import Physics

_LEAST_US: Final = 1_000
"""Counters are moved no more often: watts over a shorter while are a rounding error."""


class GpuGroup:
    """All GPUs of an engine, in the machine's time.

    Args:
        gpus: at least one; nothing else runs on them.
        now_us: of the machine's monotonic clock, to which theirs are set: a counter may have stood still.
    """

    def __init__(self, gpus: Sequence[Gpu], now_us: int) -> None:
        self._gpus = list(gpus)
        self._clocks = [ClockInEffect(gpu) for gpu in gpus]
        before = [gpu.physics() for gpu in gpus]
        self._energies_uj = [float(physics.energy_uj) for physics in before]
        self._now_us = max(now_us, *(physics.now_us for physics in before))
        self._joules = 0.0
        for gpu, physics in zip(gpus, before, strict=True):
            gpu.advance(Physics(self._now_us, physics.energy_uj, gpu.spec.blocking_power_mw))

    def clocks_mhz(self, now_us: int) -> tuple[int, int]:
        """Return the slowest and the fastest clock in effect now."""
        clocks_mhz = []
        for gpu, clock in zip(self._gpus, self._clocks, strict=True):
            if clock.requested:
                clock.take_up(min(now_us, us_from_ns(gpu.requested_ns())))
            clock.settle(now_us)
            clocks_mhz.append(clock.mhz)
        return min(clocks_mhz), max(clocks_mhz)

    def drew(self, joules: float, now_us: int) -> None:
        """Book what all of them have drawn.

        Args:
            joules: since the engine began.
            now_us: the time.
        """
        passed_us = now_us - self._now_us
        if passed_us < _LEAST_US:
            return
        each_j = max(0.0, joules - self._joules) / len(self._gpus)
        power_mw = mw_from_w(each_j / passed_us * 1e6)
        for place, gpu in enumerate(self._gpus):
            self._energies_uj[place] += 1e6 * each_j
            gpu.advance(Physics(now_us, int(self._energies_uj[place]), power_mw))
        self._now_us, self._joules = now_us, joules
