"""What was measured at one clock, how far that scatters with the load of the steps, and what is known in spite of it.

Sequences differ in length and experts in load, so a step takes longer or shorter by a factor that has nothing to do
with the clock. Two things hold for such steps all the same. The power at a clock hardly depends on load, so an energy
is the mean power times the usual time. And computing takes a + b / f at clock f, a for what memory decides. Where
single clocks cannot be distinguished, all of them together determine that line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression
from typing import Final

from perseus_solver.significance import LONGEST, sigma_of

SINGLE: Final = 0.05
"""Where the times of two clocks compare within this share, each is taken as measured: it is the bound that many jobs
give, and five iterations that scatter by 3 % do. Beyond it, neighbouring clocks cannot be distinguished."""
LINE: Final = 0.02
"""Share within which the line should give the slowdown of the lowest clock; those of higher ones it gives better."""
_SIDES: Final = 1.96
"""Standard deviations of an interval of 95 % confidence."""
_MEDIAN: Final = math.pi / 2
"""Variance of a median over that of a mean."""


@dataclass(frozen=True)
class Mean:
    """One kind of instruction of one stage at one clock: number in an iteration, mean time and energy of one."""

    count: int
    time_us: float
    energy_mj: float

    def scaled(self, factor: float) -> Mean:
        """Of an iteration whose load is larger by a factor."""
        return Mean(self.count, factor * self.time_us, factor * self.energy_mj)


@dataclass(frozen=True)
class StageReading:
    """One stage at one clock: an iteration's time and energy, and what its instructions took."""

    time_us: float
    energy_mj: float
    means: Mapping[tuple[str, int], Mean]
    """By kind and chunk."""
    quiet_us: int = 0
    """Time of waits within which the energy counter moved, of all iterations and GPUs together; and its energy."""
    quiet_mj: int = 0
    reached_mhz: int | None = None
    """SM clock that was really reached; above the power limit's plateau it is lower than the requested one. None: the
    agents do not read it."""

    @property
    def computing_us(self) -> float:
        """Time of the instructions of an iteration."""
        return sum(mean.count * mean.time_us for mean in self.means.values())

    @property
    def computing_mj(self) -> float:
        """Energy of the instructions of an iteration, as they were reported."""
        return sum(mean.count * mean.energy_mj for mean in self.means.values())

    def scaled(self, factor: float) -> StageReading:
        """Of an iteration whose load is larger by a factor: all times and energies grow alike."""
        means = {key: mean.scaled(factor) for key, mean in self.means.items()}
        return replace(self, time_us=factor * self.time_us, energy_mj=factor * self.energy_mj, means=means)

    def merged(self, other: StageReading, share: float) -> StageReading:
        """This reading and another at the same clock, which makes up a share of the iterations."""
        rest = 1 - share
        return StageReading(
            time_us=rest * self.time_us + share * other.time_us,
            energy_mj=rest * self.energy_mj + share * other.energy_mj,
            means={
                key: Mean(
                    mean.count,
                    rest * mean.time_us + share * other.means[key].time_us,
                    rest * mean.energy_mj + share * other.means[key].energy_mj,
                )
                for key, mean in self.means.items()
            },
            quiet_us=self.quiet_us + other.quiet_us,
            quiet_mj=self.quiet_mj + other.quiet_mj,
            reached_mhz=(
                round(rest * self.reached_mhz + share * other.reached_mhz)
                if self.reached_mhz and other.reached_mhz
                else None
            ),
        )


@dataclass(frozen=True)
class Reading:
    """What was measured at one clock."""

    clock_mhz: int
    iteration_time_us: float
    stages: tuple[StageReading, ...]
    scatter: tuple[float, ...] = ()
    """By how much the computing time of each iteration differs from that of the one before, as a logarithm over √2:
    slow drift hardly counts, and no mean has to be known."""
    iterations: int = 1

    @property
    def energy_mj(self) -> float:
        """Energy of an iteration of one GPU of every stage."""
        return sum(stage.energy_mj for stage in self.stages)

    def merged(self, other: Reading) -> Reading:
        """Both readings of this clock together."""
        total = self.iterations + other.iterations
        share = other.iterations / total
        return Reading(
            self.clock_mhz,
            (1 - share) * self.iteration_time_us + share * other.iteration_time_us,
            tuple(stage.merged(further, share) for stage, further in zip(self.stages, other.stages, strict=True)),
            self.scatter + other.scatter,
            total,
        )

    def on_line(self, iteration_factor: float, stage_factors: Sequence[float]) -> Reading:
        """The reading as it would have been with the usual load."""
        stages = tuple(stage.scaled(factor) for stage, factor in zip(self.stages, stage_factors, strict=True))
        return replace(self, iteration_time_us=iteration_factor * self.iteration_time_us, stages=stages)


@dataclass(frozen=True)
class Certainty:
    """How well the readings of a sweep are known.

    Attributes:
        scatter: standard deviation of the logarithm of one iteration's computing time; 0: not known, for want of
            iterations in a row.
        single: share within which the times of two clocks compare after one round, with 95 % confidence.
        line: share within which the line through all clocks gives the slowdown of the lowest, with 95 % confidence.
        fewest: iterations at the clock that has the fewest.
    """

    scatter: float
    single: float
    line: float
    fewest: int

    @classmethod
    def of(cls, readings: Sequence[Reading], round_iterations: int) -> Certainty:
        """That of some readings, at least one.

        Args:
            readings: of all rounds together.
            round_iterations: measured at each clock in a round.
        """
        residuals = [residual for reading in readings for residual in reading.scatter]
        scatter = sigma_of(residuals) if residuals else 0.0
        fewest = min(reading.iterations for reading in readings)
        deviation = scatter * math.sqrt(_MEDIAN / fewest)
        periods = [1 / reading.clock_mhz for reading in readings]
        mean = fmean(periods)
        lever = math.sqrt(sum((period - mean) ** 2 for period in periods))
        reach = (max(periods) - min(periods)) / lever if lever else math.inf
        single = _SIDES * scatter * math.sqrt(2 * _MEDIAN / round_iterations)
        return cls(scatter, single, _SIDES * deviation * reach if deviation else 0.0, fewest)

    @property
    def varies(self) -> bool:
        """Whether clocks cannot be compared one by one."""
        return self.single > SINGLE

    @property
    def enough(self) -> bool:
        """Whether more iterations are not worth their time."""
        return not self.varies or self.line <= LINE or self.fewest >= LONGEST

    def __str__(self) -> str:
        if not self.varies:
            return ""
        precision = f"the slowdown of the lowest is known to ±{self.line:.1%}, those of higher ones better"
        return f"Steps vary by {self.scatter:.0%} with their data, so times are a line through all clocks: {precision}."


def levelled(readings: Sequence[Reading]) -> tuple[Reading, ...]:
    """The readings with the usual load: each stage's times on the line t = a + b / f through all of its readings.

    Every power stays as it was measured. Without an effect of the clock (b < 0) the times are all alike; without one of
    memory (a < 0) they are in proportion to the period.

    Args:
        readings: at two clocks or more.
    """
    whole = _factors([reading.clock_mhz for reading in readings], [reading.iteration_time_us for reading in readings])
    stages = [
        _factors(
            [reading.stages[stage].reached_mhz or reading.clock_mhz for reading in readings],
            [reading.stages[stage].computing_us for reading in readings],
        )
        for stage in range(len(readings[0].stages))
    ]
    return tuple(
        reading.on_line(whole[place], [factors[place] for factors in stages]) for place, reading in enumerate(readings)
    )


def _factors(clocks_mhz: Sequence[int], times_us: Sequence[float]) -> list[float]:
    """What each time is to be multiplied by."""
    periods = [1 / clock for clock in clocks_mhz]
    if len(set(periods)) == 1:
        line = [fmean(times_us)] * len(times_us)
    else:
        b, a = linear_regression(periods, times_us)
        if b < 0:
            a, b = fmean(times_us), 0.0
        elif a < 0:
            a, b = 0.0, sum(p * t for p, t in zip(periods, times_us, strict=True)) / sum(p * p for p in periods)
        line = [a + b * period for period in periods]
    return [fitted / time_us for fitted, time_us in zip(line, times_us, strict=True)]
