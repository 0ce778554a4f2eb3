"""Energy between two moments, from a counter that moves only every 20 to 100 ms, or from samples of power as dense.

``EnergyMeter`` stores the edges of the counter (the moments at which it was seen to move) and interpolates between
them, so that an iteration's energy is not quantised to whole ticks; sums over adjoining spans are exact. Between two
edges the energy is known without interpolation: ``quiet`` finds those within a wait. ``InstructionEnergies`` averages
the energy of each instruction over many iterations, since one instruction is shorter than a tick.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import add, sub
from typing import Final

from perseus_agent.devices.base import EnergyReading

MAX_EDGES: Final = 16_384
"""Edges stored at least: five minutes at a tick of 20 ms, longer than any iteration."""
SETTLE_US: Final = 50_000
"""After a computation its power may go on in the counter for so long: sensors average over 25 ms and more."""
STALE_US: Final = 2_000_000
"""A counter silent for so long has stopped; no counter published ticks slower than every 200 ms."""


class EnergyMeter:
    """The counter of one GPU."""

    def __init__(self) -> None:
        self._times_us = array("q")
        self._energies_mj = array("q")
        self._befores_us = array("q")
        """When the counter was read last before it was seen to move: it moved in between."""
        self._offset_mj = 0
        self._first_mj: int | None = None
        self._seen: EnergyReading | None = None
        self.answers = False
        """Whether the counter did when it was read last."""

    @property
    def total_mj(self) -> int | None:
        """The counter as a quantity that never decreases while the agent runs, also over a driver reload."""
        return None if self._seen is None else self._seen.energy_mj + self._offset_mj

    @property
    def used_mj(self) -> int:
        """Energy since the counter was first read; 0 before. It never falls, and a first reading adds nothing to it, so
        the sum over several GPUs is a counter however late one of them is read."""
        total_mj = self.total_mj
        return 0 if total_mj is None or self._first_mj is None else total_mj - self._first_mj

    def read(self, readings: Sequence[EnergyReading] | None) -> None:
        """The counter was read; None: it did not answer."""
        self.answers = readings is not None
        for reading in readings or ():
            self.add(reading)

    def add(self, reading: EnergyReading) -> None:
        """Add a reading of the counter."""
        seen = self._seen
        if self._first_mj is None:
            self._first_mj = reading.energy_mj
        if seen is not None and reading.time_us <= seen.time_us:
            return
        if seen is not None and reading.energy_mj < seen.energy_mj:
            # The driver was reloaded, or samples were missed. The energy in between is lost, never estimated.
            self._offset_mj += seen.energy_mj
            self._forget(len(self._times_us))
        if seen is None or reading.energy_mj != seen.energy_mj or not self._times_us:
            self._befores_us.append(seen.time_us if seen and self._times_us else reading.time_us - STALE_US)
            self._times_us.append(reading.time_us)
            self._energies_mj.append(reading.energy_mj + self._offset_mj)
            if len(self._times_us) > 2 * MAX_EDGES:
                self._forget(MAX_EDGES)
        self._seen = reading

    def covers(self, time_us: int) -> bool:
        """Whether ``at`` can be answered for good: an edge lies behind the moment, or the counter has stopped."""
        if not self._times_us or self._seen is None:
            return False
        return self._times_us[-1] >= time_us or self._seen.time_us >= time_us + STALE_US

    def at(self, times_us: Sequence[int]) -> list[float] | None:
        """The counter at ascending moments, mJ; None if one of them lies outside of what is known."""
        if not times_us or not self._times_us or times_us[0] < self._times_us[0] or not self.covers(times_us[-1]):
            return None
        known_us, known_mj = self._times_us, self._energies_mj
        answers = []
        after = bisect_right(known_us, times_us[0])
        for time_us in times_us:
            while after < len(known_us) and known_us[after] <= time_us:
                after += 1
            if after == len(known_us):
                answers.append(float(known_mj[-1]))
                continue
            span_us = known_us[after] - known_us[after - 1]
            rise_mj = known_mj[after] - known_mj[after - 1]
            answers.append(known_mj[after - 1] + rise_mj * (time_us - known_us[after - 1]) / span_us)
        return answers

    def quiet(self, waits_us: Sequence[tuple[int, int]], begin_us: int, end_us: int) -> tuple[float, int]:
        """Time (µs) and energy (mJ) of waits within a longer span, as far as they lie between two edges, the first of
        which has no part in what came before the wait. 0 and 0: no wait has two."""
        times_us, befores_us = self._times_us, self._befores_us
        start, stop = bisect_left(times_us, begin_us), bisect_right(times_us, end_us) - 1
        if stop <= start:
            return 0.0, 0
        # An edge is known as well as the counter is read. Waits that just hold two edges hold two that seem close: then
        # the mean step is used. Unless every reading finds another value: then edges lie right before readings.
        mean_us = (times_us[stop] - times_us[start]) / (stop - start)
        steps_known = 2 * sum(befores_us[at] > times_us[at - 1] for at in range(start + 1, stop + 1)) > stop - start
        span_us, energy_mj = 0.0, 0
        for wait_begin_us, wait_end_us in waits_us:
            first = bisect_left(befores_us, wait_begin_us + SETTLE_US)
            last = bisect_right(times_us, wait_end_us) - 1
            if last > first:
                span_us += mean_us * (last - first) if steps_known else times_us[last] - times_us[first]
                energy_mj += self._energies_mj[last] - self._energies_mj[first]
        return span_us, energy_mj

    def _forget(self, edges: int) -> None:
        """The oldest."""
        for stored in (self._times_us, self._energies_mj, self._befores_us):
            del stored[:edges]


class InstructionEnergies:
    """Mean energy of each instruction over the iterations run under one plan and point."""

    def __init__(self) -> None:
        self._key: object = None
        self._sums_mj: list[float] = []
        self.iterations = 0

    def add(self, key: object, energies_mj: Sequence[float]) -> None:
        """One more iteration under ``key``; another key, or another number of instructions, restarts the means."""
        if key != self._key or len(energies_mj) != len(self._sums_mj):
            self._key, self._sums_mj, self.iterations = key, [0.0] * len(energies_mj), 0
        self._sums_mj = list(map(add, self._sums_mj, energies_mj))
        self.iterations += 1

    def means_mj(self, key: object) -> tuple[int, ...]:
        """Rounded such that each sum from the first on is off by less than one. Empty: no
        iteration was run under ``key`` last."""
        if key != self._key or not self.iterations:
            return ()
        ends_mj = list(map(round, accumulate(total_mj / self.iterations for total_mj in self._sums_mj)))
        return tuple(map(sub, ends_mj, [0, *ends_mj[:-1]]))
