"""What a plan saves, measured again and again while the job runs: a few iterations without the plan between those with
it.

The baseline that is measured before the first plan grows old: training drifts, with its data, its learning rate's
schedule and the room's temperature. So from time to time all pipelines run some iterations at default clocks, and
these are compared with the iterations under the plan before and after them: whatever drifts slowly cancels. The pairs
scatter, which says how sure their mean is.

    idle ── BeginComparison ──► without the plan ── ResumePlan ──► under the plan again ── EndComparison ──► idle
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

from perseus_core.units import ratio_from_share
from perseus_operator.api.status import ComparisonStatus, Figures, PairStatus
from perseus_operator.api.stored import parse_stored
from perseus_operator.nodes.iterations import Measured, measured_of
from perseus_operator.objects.formatting import exact_percent

KEPT: Final = 20
"""Pairs that count: the latest. More would tell of a training that is long past."""
_T95: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""Student's t for 95 %, two-sided, by degrees of freedom from 1."""


@dataclass(frozen=True)
class Pair:
    """One comparison. Both shares are of the iterations without the plan."""

    saved: float
    """Share of the energy; negative: the plan takes more."""
    slowdown: float
    """Share by which iterations take longer; negative: they are faster."""


@dataclass(frozen=True)
class Interval:
    """A mean and where it lies with 95 % confidence; one pair alone has no interval."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class BeginComparison:
    """Interrupt the plan for some iterations."""

    before: Measured


@dataclass(frozen=True)
class ResumePlan:
    """Go back to the plan."""

    without: Measured


@dataclass(frozen=True)
class EndComparison:
    """The comparison is complete, or None: nothing comes of it."""

    after: Measured | None


ComparisonAction = BeginComparison | ResumePlan | EndComparison


@dataclass
class Comparisons:
    """The pairs, and the comparison under way. Changed only by its methods, one for each event."""

    pairs: tuple[Pair, ...] = ()
    reference: Measured | None = None
    """The latest iterations without the plan; None: none were compared yet."""
    before: Measured | None = None
    """Under the plan, before the comparison under way; None: none is."""
    without: Measured | None = None
    """Without the plan, in the comparison under way."""
    from_iteration: int = 0
    """Where the present part of it began."""
    last: int = 0
    """Iteration at which the latest one ended; 0: there was none."""

    @property
    def running(self) -> bool:
        """Whether one is under way."""
        return self.before is not None

    @property
    def interrupting(self) -> bool:
        """Whether the plan is interrupted for one."""
        return self.running and self.without is None

    def decided(self, action: ComparisonAction, *, iteration: int) -> None:
        """The planner has decided the next step.

        Args:
            action: that step.
            iteration: the furthest that any rank has begun.
        """
        self.from_iteration = iteration
        match action:
            case BeginComparison(before):
                self.before, self.without = before, None
            case ResumePlan(without):
                self.without = without
            case EndComparison(after):
                pair = after and self.before and self.without and _pair(self.before, self.without, after)
                if pair:
                    self.pairs, self.reference = (*self.pairs, pair)[-KEPT:], self.without
                self.before, self.without, self.last = None, None, iteration

    def restarted(self) -> None:
        """The training starts again, and counts its iterations anew."""
        self.before, self.without, self.last = None, None, 0

    def discarded(self) -> None:
        """Another objective: what was saved before says nothing of it."""
        self.pairs, self.before, self.without = (), None, None


def interval(values: Sequence[float]) -> Interval:
    """The mean of one or more values and its interval of 95 % confidence, by Student's t."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    half = _T95[min(len(values) - 1, len(_T95)) - 1] * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def _pair(before: Measured, without: Measured, after: Measured) -> Pair | None:
    """None: the energy of one part is not known."""
    if not before.energy_mj or not without.energy_mj or not after.energy_mj:
        return None
    energy_mj, time_us = fmean((before.energy_mj, after.energy_mj)), fmean((before.time_us, after.time_us))
    return Pair(1 - energy_mj / without.energy_mj, time_us / without.time_us - 1)


def comparisons_to_status(comparisons: Comparisons) -> ComparisonStatus | None:
    """For the status; None: none was complete yet."""
    without = comparisons.reference
    if without is None:
        return None
    pairs = tuple(
        PairStatus(
            number=number,
            saved=exact_percent(pair.saved),
            slowdown=exact_percent(pair.slowdown),
        )
        for number, pair in enumerate(comparisons.pairs)
    )
    figures = Figures(
        iteration_time_microseconds=without.time_us,
        energy_millijoules=without.energy_mj,
        iterations=without.iterations,
    )
    return ComparisonStatus(last_iteration=comparisons.last, without=figures, pairs=pairs)


def comparisons_from_status(written: object) -> Comparisons:
    """As an earlier operator has stored them; none, if it has not."""
    stored = parse_stored(ComparisonStatus, written)
    if stored is None:
        return Comparisons()
    pairs = (Pair(ratio_from_share(each.saved), ratio_from_share(each.slowdown)) for each in stored.pairs or ())
    return Comparisons(tuple(pairs)[-KEPT:], measured_of(stored.without), last=stored.last_iteration)
