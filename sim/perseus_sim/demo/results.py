"""What the demo has observed, as plain values: measurements with their intervals, and the plan in force.

Everything that the page, the pictures and the console say of a run is a function of these. Times and energies are in
the time of the profile (``time_scale``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from perseus_solver.kinds import Floats
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frontier, Point

_WRONG: Final = 0.05
"""How often an interval may miss the true median."""


@dataclass(frozen=True)
class Estimate:
    """A median, and by how much it may be wrong: with 95 % confidence it lies no further from the true one.

    Medians, because agents and simulated GPUs share a machine with whatever else it does: single iterations in which an
    agent got no processor in time say nothing of the plan.
    """

    median: float
    margin: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the median of values, and its margin by order statistics, whatever their distribution is."""
        ordered, n = sorted(values), len(values)
        beyond, tail, rank = 0.5**n, 0.5**n, 0
        while 2 * tail <= _WRONG and rank < n // 2:
            rank += 1  # so many values at either end are outside of the interval
            beyond *= (n - rank + 1) / rank
            tail += beyond
        middle = median(ordered)
        if not rank:
            return cls(middle, math.inf)
        return cls(middle, max(middle - ordered[rank - 1], ordered[n - rank] - middle))

    @property
    def relative_margin(self) -> float:
        """The margin as a share of the median."""
        return self.margin / self.median

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.median - self.margin

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.median + self.margin

    def against(self, reference: Estimate) -> Estimate:
        """Return by which share this is more than a reference that was measured by itself."""
        ratio = self.median / reference.median
        return Estimate(ratio - 1, ratio * math.hypot(self.relative_margin, reference.relative_margin))

    def within(self, limit: float, center: float = 0.0) -> bool:
        """Whether the whole interval is no further than a limit from a value."""
        return abs(self.median - center) + self.margin <= limit


@dataclass(frozen=True)
class Measurement:
    """Iterations of the job under the same clocks, from the counters of its GPUs."""

    numbers: tuple[int, ...]
    """Of the iterations."""
    time_s: Estimate
    of_pipeline: tuple[Estimate, ...]
    """Energy of all stages of each pipeline, joules."""
    energy_j: Estimate
    """Of the whole job."""

    @classmethod
    def of(cls, numbers: Sequence[int], times_s: Sequence[float], energies_j: Sequence[Sequence[float]]) -> Measurement:
        """Return the medians over iterations.

        Args:
            numbers: of the iterations.
            times_s: of each iteration.
            energies_j: of each iteration, by pipeline.
        """
        pipelines = tuple(Estimate.of(energies) for energies in zip(*energies_j, strict=True))
        total = Estimate.of([sum(energies) for energies in energies_j])
        return cls(tuple(numbers), Estimate.of(times_s), pipelines, total)


@dataclass(frozen=True)
class Prediction:
    """Time and energy of an iteration of the whole job, as the operator predicts them."""

    time_s: float
    energy_j: float
    saved: float
    """Share of the energy at the highest clocks that it saves."""


@dataclass(frozen=True)
class PlanRun:
    """A plan as it was predicted, and as it ran."""

    predicted: Prediction
    measured: Measurement


@dataclass(frozen=True)
class Executed:
    """One iteration of one pipeline as its GPUs ran it, from its begin.

    Attributes:
        iteration: its number.
        begin_s, end_s: float[n], of each instruction.
        power_w: float[n], its mean.
        time_s: until the next iteration began.
        energy_j: of all stages, until then.
    """

    iteration: int
    begin_s: Floats
    end_s: Floats
    power_w: Floats
    time_s: float
    energy_j: float


@dataclass(frozen=True)
class Results:
    """One run of the demo.

    Attributes:
        title: what was trained.
        gpu: what was simulated.
        speed: how many times faster than the profile everything simulated ran.
        problem: what was executed, as the profile has it.
        baseline: at default clocks.
        first: the first plan for measured hardware.
        calibrated: the first one with calibrated times.
        beside_straggler: while one GPU was throttled.
        in_force: the plan that stayed, when that GPU had recovered.
        frontier: the one that the plan in force is of, for one pipeline.
        point: its index on that.
        ran_default, ran_plan: an iteration of the first pipeline at default clocks, and under the plan in force.
    """

    title: str
    gpu: str
    speed: int
    problem: Problem
    baseline: Measurement
    first: PlanRun
    calibrated: PlanRun
    beside_straggler: Measurement
    in_force: PlanRun
    frontier: Frontier
    point: int
    ran_default: Executed
    ran_plan: Executed

    @property
    def plan(self) -> Point:
        """The plan in force."""
        return self.frontier[self.point]

    @property
    def saved(self) -> Estimate:
        """Share of the energy at default clocks that the plan in force saves."""
        more = self.in_force.measured.energy_j.against(self.baseline.energy_j)
        return Estimate(-more.median, more.margin)

    @property
    def slower(self) -> Estimate:
        """Share by which an iteration takes longer under the plan in force."""
        return self.in_force.measured.time_s.against(self.baseline.time_s)
