"""Virtual time of one simulated GPU: it is spent on instructions, at the clocks in force, and on waiting.

An instruction takes as long as the profile measured at the clock in force, which may change while it runs. Sleeps keep
virtual time behind wall time × speed, so that the run can be watched and the agent acts while instructions run.
Standard library only, as sixteen trainers start at once.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from perseus_sim.gpus.clock_in_effect import ClockInEffect, Gpu
from perseus_sim.gpus.shared_gpu import Physics

_LEAST_US: Final = 1e-3
"""Work that is not worth a turn: after a day, microseconds as floats differ by 1e-5 at least."""
_AGENT_NEIGHBOUR_TIMEOUT_S: Final = 0.1
"""Longest that virtual time stands still for the agent: many times what it needs on a busy machine, and soon over."""
_AGENT_POLL_S: Final = 0.0003
_TIMEOUTS_TO_GIVE_UP: Final = 5
"""Unanswered rings in a row after which the rank no longer waits, until the GPU is written again."""

_SLICE_S: Final = 0.02
"""A request is seen at least so soon: two within an instruction are then seen both."""

_NOTHING_RUNS: Final = (math.inf, 1.0, 1.0)  # virtual time, share that is left then, length of the whole

SPIKE: Final = 0.1
"""In the noisiest of the public traces (Wide-ResNet on A40) 1.5 % of the instructions take more than 2 % longer than
usual, and 0.03 % more than 10 %."""


@dataclass(frozen=True)
class Table:
    """Time and power of one kind of instruction against the clock, ascending, in a clock's steps."""

    clocks_mhz: list[int]
    times_us: list[float]
    powers_mw: list[float]

    def at(self, clock_mhz: int) -> tuple[float, float]:
        """Time (µs) and power (mW); between measured clocks interpolated, beyond them in proportion to the period."""
        clocks = self.clocks_mhz
        if not clock_mhz or clocks == [0]:  # constant time
            return self.times_us[-1], self.powers_mw[-1]
        place = bisect_left(clocks, clock_mhz)
        if place == len(clocks):
            return self.times_us[-1], self.powers_mw[-1]
        if clocks[place] == clock_mhz:
            return self.times_us[place], self.powers_mw[place]
        if place == 0:
            return self.times_us[0] * clocks[0] / clock_mhz, self.powers_mw[0]
        share = (clock_mhz - clocks[place - 1]) / (clocks[place] - clocks[place - 1])
        return (
            self.times_us[place - 1] + share * (self.times_us[place] - self.times_us[place - 1]),
            self.powers_mw[place - 1] + share * (self.powers_mw[place] - self.powers_mw[place - 1]),
        )


class Engine:
    """Virtual time of one GPU: spends it on work and on waiting, and books the energy."""

    def __init__(self, gpu: Gpu, *, speed: float | None, noise: float, seed: int, spikes: float = 0.0) -> None:
        """``speed``: virtual over wall seconds, None for as fast as possible; ``noise``: relative, of durations;
        ``spikes``: share of instructions that take up to `SPIKE` longer.
        """
        self._gpu = gpu
        self._speed = speed
        self._noise = noise
        self._spikes = spikes
        self._random = random.Random(seed)
        physics = gpu.physics()
        self._now_us = float(physics.now_us)
        self._energy_uj = float(physics.energy_uj)
        self._anchor = (self._now_us, time.monotonic_ns())
        self._clock = ClockInEffect(gpu)
        self._unanswered = 0
        self._running = _NOTHING_RUNS

    @property
    def now_us(self) -> float:
        return self._now_us

    @property
    def energy_uj(self) -> int:
        return int(self._energy_uj)

    @property
    def clock_mhz(self) -> int:
        """The clock in force."""
        return self._clock.mhz

    def pace_from(self, now_us: float, wall_ns: int) -> None:
        """From here on, virtual time ``now_us`` belongs to the wall time."""
        self._anchor = (now_us, wall_ns)

    def wait_until(self, time_us: float) -> None:
        """Block: the GPU spins in a receive at blocking power."""
        self._notice(self._now_us)
        if time_us > self._now_us:
            self._spend(time_us, self._gpu.spec.blocking_power_mw)
            self._sleep()

    def block(self) -> None:
        """A receive begins, of unknown length."""
        self._spend(self._now_us, self._gpu.spec.blocking_power_mw)

    def work(self, table: Table, slowdown: float = 1.0) -> None:
        """Run one instruction at the clocks in force, which may change while it runs."""
        factor = slowdown * math.exp(self._random.gauss(0.0, self._noise)) if self._noise else slowdown
        if self._spikes and self._random.random() < self._spikes:
            factor *= 1 + SPIKE * self._random.random()
        left, left_us = 1.0, math.inf
        while left_us > _LEAST_US:
            self._notice(self._now_us)
            self._clock.settle(self._now_us)
            time_us, power_mw = table.at(self._clock.mhz)
            time_us *= factor
            finish_us = self._now_us + left * time_us
            changes_us = self._clock.changes_us
            until_us = finish_us if changes_us is None else min(finish_us, changes_us)
            self._running = self._now_us, left, time_us
            self._spend(self._now_us, power_mw)  # a reader of the GPU sees what it draws now
            until_us = self._sleep_through(until_us)
            left -= (until_us - self._now_us) / time_us
            left_us = left * time_us
            self._spend(until_us, power_mw)
        self._running = _NOTHING_RUNS

    def progress(self, now_us: float) -> tuple[float, float]:
        """How much of the running instruction is done at a moment, 0 to 1, and how long the whole takes at the clock in
        force, µs; 0 where none runs. For another thread."""
        since_us, left, time_us = self._running
        return min(1.0, 1 - left + max(0.0, now_us - since_us) / time_us), time_us

    def await_agent(self) -> None:
        """The agent was woken because the next instruction wants another clock: let it write."""
        deadline_s = time.monotonic() + _AGENT_NEIGHBOUR_TIMEOUT_S
        while not self._clock.requested:
            if self._unanswered >= _TIMEOUTS_TO_GIVE_UP:
                return
            if time.monotonic() > deadline_s:
                self._unanswered += 1
                return
            time.sleep(_AGENT_POLL_S)
        self._notice(self._now_us)

    def _notice(self, latest_us: float) -> bool:
        """Take up a request that came until this moment; whether there is one."""
        if not self._clock.requested:
            return False
        self._unanswered = 0
        self._clock.take_up(self._requested_us(latest_us))
        return True

    def _requested_us(self, latest_us: float) -> float:
        """When the last request came, in virtual time. While that stands still for the agent, it comes at once."""
        if self._speed is None:
            return latest_us
        virtual_us, wall_ns = self._anchor
        return min(latest_us, virtual_us + (self._gpu.requested_ns() - wall_ns) / 1000 * self._speed)

    def _spend(self, until_us: float, power_mw: float) -> None:
        """Let time pass at a power: here alone do time and energy grow."""
        self._energy_uj += power_mw * (until_us - self._now_us) / 1000
        self._now_us = until_us
        self._gpu.advance(Physics(int(until_us), int(self._energy_uj), int(power_mw)))

    def _sleep_through(self, until_us: float) -> float:
        """Sleep while an instruction runs, a slice of it at most; earlier if a request came meanwhile, and then the
        virtual time of that. Without pauses: all of it."""
        if self._speed is None:
            return until_us
        until_us = min(until_us, self._now_us + _SLICE_S * 1e6 * self._speed)
        self._sleep(until_us)
        if self._notice(until_us):
            return max(self._now_us, min(until_us, self._clock.changes_us or until_us))
        return until_us

    def _sleep(self, until_us: float | None = None) -> None:
        if self._speed is None:
            return
        virtual_us, wall_ns = self._anchor
        target_ns = wall_ns + ((self._now_us if until_us is None else until_us) - virtual_us) * 1000 / self._speed
        ahead_s = (target_ns - time.monotonic_ns()) / 1e9
        if ahead_s > 0:
            time.sleep(ahead_s)
