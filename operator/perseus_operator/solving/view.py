"""A solved frontier as planning reads it, integers without frequencies or arrays, and what is said of a calibration."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from perseus_core.grain import Grain
from perseus_operator.nodes.iterations import JobIteration


@dataclass(frozen=True)
class FrontierView:
    """The frontier of one pipeline, fastest point first; the same for every pipeline of the job."""

    digest: str
    times_us: tuple[int, ...]
    """Of a rehearsed frontier the times that are kept with confidence."""
    energies_mj: tuple[int, ...]
    stages: int
    blocking_power_mw: int
    mean_gap_ppm: int
    maximum_gap_ppm: int
    """Proven over all deadlines up to least energy, for each of which the last point before it runs."""
    solve_ms: int
    restored: bool
    """Restored from its PerseusFrontier, not solved for this operator."""
    allowance: float = 0.0
    """Nearly all iterations exceed these times by less than this share, if they are calibrated: a plan exactly at a
    bound would break it in half of the iterations."""
    clock_changes: tuple[int, ...] = ()
    """Clock changes of each point in one iteration of one pipeline, over all stages."""
    no_slowdown: float = 0.0
    """Share by which a plan may exceed T_min and count as no slower."""
    hardware: str = ""
    """What the plans were rehearsed under, as ``Hardware.to_json`` gives it; empty: they were not."""
    grains: tuple[Grain, ...] = ()
    """Of each point; empty: not rehearsed, so one clock for each instruction."""
    medians_us: tuple[int, ...] = ()
    """Expected iteration time of each point; empty: not rehearsed, so ``times_us``."""
    highest_mj: int | None = None
    """Energy of an iteration of one pipeline with every instruction at its highest clock."""
    instruction_us: int | None = None
    """Median duration of an instruction under the fastest plan."""
    ceilings_mw: tuple[tuple[int, int], ...] = ()
    """(MHz, mW), lowest clock first: what one pipeline draws at most with all GPUs at this clock."""

    @property
    def expected_us(self) -> tuple[int, ...]:
        """Expected iteration time of each point, to compare measured ones with."""
        return self.medians_us or self.times_us

    @property
    def scatter(self) -> float:
        """What the fastest plan keeps over what it is expected to take, a ratio; 1.0: not rehearsed."""
        return self.times_us[0] / self.expected_us[0]

    def grain(self, point: int) -> Grain:
        """How finely a point sets clocks."""
        return self.grains[min(point, len(self.grains) - 1)] if self.grains else Grain.INSTRUCTION

    @property
    def t_min_us(self) -> int:
        """T_min: the fastest iteration."""
        return self.times_us[0]

    @property
    def no_slower_us(self) -> int:
        """The longest time that counts as no slower than T_min."""
        return round(self.t_min_us * (1 + self.no_slowdown))

    @property
    def t_star_us(self) -> int:
        """T*: a slower plan saves nothing, even while the pipeline waits for others."""
        return self.times_us[-1]

    @property
    def least_energy_us(self) -> int:
        """The iteration time of least energy. It lies before T*: beyond it a plan saves less than its waiting costs."""
        return self.times_us[min(range(len(self.times_us)), key=self.energies_mj.__getitem__)]

    def lookup(self, time_us: float, finest: Grain = Grain.INSTRUCTION) -> int:
        """The slowest point not slower than ``time_us`` and not finer than ``finest``; without one the fastest."""
        last = bisect_right(self.times_us, time_us) - 1
        return next((point for point in range(last, 0, -1) if self.grain(point) >= finest), 0)


class PlannedTimes(Protocol):
    """What the plans in force say about single instructions."""

    def paces(self, iteration: JobIteration) -> Mapping[int, Sequence[float]]:
        """Measured divided by planned time of each stage, by pipeline (dp), where every instruction was measured."""
        ...

    def slowdown(self, stage_slowdowns: Mapping[int, float]) -> float:
        """Slowdown of an iteration whose stages have these slowdowns."""
        ...


@dataclass(frozen=True)
class CalibrationQuality:
    """Whether a calibrated model explains the run, and how well. Errors and allowance are ratios, not per cents."""

    digest: str
    explains: bool
    reason: str
    heldout_error: float | None
    """Mean error over iterations that were not used for fitting."""
    uncalibrated_error: float
    """Mean error of the model without calibration."""
    iterations: int
    allowance: float
    """Nearly all iterations stay within this share above what is planned."""
