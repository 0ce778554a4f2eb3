"""How much energy the jobs of a PowerBudget have used in the period that goes on.

Energy is measured where GPUs' own counters say it: each report of an iteration or of an engine's second has the energy
of some GPUs over some time. GPU time that no report covers yet counts at the watts that its job was granted, and a
report that covers it later takes that back. So time in which nobody measured (GPUs without a counter, a lost report, an
operator that was away) is never taken for time without energy, and both parts are shown apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from perseus_core.units import j_from_wh, wh_from_j
from perseus_operator.api.budget import BudgetFigures, BudgetSpec, EnergyFigures, EnergySpec, EnergyUse
from perseus_operator.budgets.member import Member
from perseus_operator.budgets.periods import Period, period_at
from perseus_operator.budgets.reading import Reading
from perseus_operator.objects.formatting import stamp
from perseus_operator.objects.values import Now

_UNMEASURED_S: Final = 600.0
"""Iterations last seconds, some minutes: a job that has reported nothing for so long is not being measured."""


@dataclass(frozen=True)
class Use:
    """Energy that was used in one period.

    Attributes:
        begin_s: of the period, in seconds since 1970.
        measured_j: by the GPUs' counters.
        assumed_j: where nobody measured.
    """

    begin_s: float
    measured_j: float = 0.0
    assumed_j: float = 0.0

    @property
    def total_j(self) -> float:
        """All of it."""
        return self.measured_j + self.assumed_j


@dataclass(frozen=True)
class _Open:
    """GPU time of one job that no report covers yet.

    Attributes:
        reading: of the job, up to which its reports are counted; None: it says none.
        gpus: that it held last.
        gpu_s: not covered.
        energy_j: that is assumed for it.
    """

    reading: Reading | None
    gpus: int = 0
    gpu_s: float = 0.0
    energy_j: float = 0.0


class EnergyLedger:
    """What the jobs of one budget have used. It is changed by ``advance`` alone."""

    def __init__(self, stored: BudgetFigures | None = None) -> None:
        """Go on from what an operator before this one has stored; None: it has stored nothing."""
        self.period: Period | None = None
        self._use = Use(-math.inf)
        self._previous: Use | None = None
        self._open: dict[str, _Open] = {}
        self._at_s: float | None = None
        """Up to when energy is counted (monotonic); None: nothing has been since the start."""
        self._absence = stored if stored is not None and stored.energy is not None else None
        """What the operator before this one had granted; None: nothing, or its absence is counted."""
        if stored is not None and stored.energy is not None:
            energy = stored.energy
            self._use = _use_of(energy.used)
            self._previous = None if energy.previous is None else _use_of(energy.previous)
            self.period = Period(self._use.begin_s, _seconds(energy.end))

    @property
    def used(self) -> Use:
        """In the period that goes on."""
        return replace(self._use, assumed_j=self._use.assumed_j + math.fsum(o.energy_j for o in self._open.values()))

    @property
    def unmeasured(self) -> list[str]:
        """Jobs of which nothing has been measured for ten minutes."""
        return sorted(job for job, open_ in self._open.items() if open_.gpu_s >= _UNMEASURED_S * max(1, open_.gpus))

    def advance(
        self, spec: BudgetSpec, energy: EnergySpec, members: Iterable[Member], shares_w: Mapping[str, float], now: Now
    ) -> bool:
        """Count what the jobs have used since the last time.

        Args:
            spec: of the budget.
            energy: of it.
            members: that draw power now.
            shares_w: what they were granted until now, by job.
            now: the time.

        Returns:
            Whether another period has begun.
        """
        begun = self._begin(period_at(energy, now.wall_s))
        if self._absence is not None:
            self._count_absence(self._absence, spec, now)
            self._absence = None
        elapsed_s = 0.0 if self._at_s is None else max(0.0, now.monotonic_s - self._at_s)
        self._at_s = now.monotonic_s
        before, self._open = self._open, {}
        for member in members:
            open_ = before.pop(member.job, None) or _Open(member.reading)
            self._open[member.job] = self._count(member, open_, assumed_w(member, shares_w), elapsed_s)
        # Of those that have gone nothing will be reported any more.
        self._assume(math.fsum(open_.energy_j for open_ in before.values()))
        return begun

    def figures(self, energy: EnergySpec, now: Now, *, forecast_j: float, pace_w: float) -> EnergyFigures:
        """The figures of the status. Energy is rounded up, so that a restart loses nothing.

        Args:
            energy: of the budget.
            now: the time.
            forecast_j: what would be used by the end of the period.
            pace_w: what may be drawn; infinite: it is no limit.
        """
        assert self.period is not None
        return EnergyFigures(
            as_of=stamp(now.wall_s),
            end=stamp(self.period.end_s),
            budget_watt_hours=1000 * energy.kilowatt_hours,
            used=_written(self.used),
            forecast_watt_hours=math.ceil(wh_from_j(forecast_j)),
            pace_watts=int(pace_w) if math.isfinite(pace_w) else None,
            unmeasured_jobs=len(self.unmeasured),
            previous=None if self._previous is None else _written(self._previous),
        )

    def _begin(self, period: Period) -> bool:
        """What was used in a period counts again if the clock has jumped beyond its end and is back."""
        before, self.period = self.period, period
        if before == period:
            return False
        used, self._use = self.used, Use(period.begin_s)
        if before is None or period.begin_s >= before.end_s or _differs(before, period):
            self._previous = None if before is None else used
        elif self._previous is not None and self._previous.begin_s == period.begin_s:
            measured_j, assumed_j = self._previous.measured_j + used.measured_j, self._previous.assumed_j
            self._use = Use(period.begin_s, measured_j, assumed_j + used.assumed_j)
            self._previous = None
        else:  # an earlier one, or the same in another time zone
            self._use = replace(used, begin_s=period.begin_s)
        self._open = {job: replace(open_, gpu_s=0.0, energy_j=0.0) for job, open_ in self._open.items()}
        return True

    def _count_absence(self, granted: BudgetFigures, spec: BudgetSpec, now: Now) -> None:
        """Nobody has measured since an operator before this one: as much as it had granted, at first; once GPUs have
        gone back to their default clocks, as much as the jobs want.
        """
        assert granted.energy is not None
        away_s = max(0.0, now.wall_s - _seconds(granted.energy.as_of))
        counts_s = min(away_s, now.wall_s - self._use.begin_s)
        held_s = max(0.0, min(counts_s, spec.fallback.hold_seconds - (away_s - counts_s)))
        held_w = granted.granted_watts + granted.unsteered_watts
        free_w = max(granted.granted_watts, granted.wanted_watts) + granted.unsteered_watts
        self._assume(held_w * held_s + free_w * (counts_s - held_s))

    def _count(self, member: Member, open_: _Open, watts: float, elapsed_s: float) -> _Open:
        open_ = replace(
            open_,
            gpus=member.gpus,
            gpu_s=open_.gpu_s + member.gpus * elapsed_s,
            energy_j=open_.energy_j + watts * elapsed_s,
        )
        if not member.gpus:  # whatever comes later, it is not of these
            self._assume(watts * elapsed_s)
            open_ = replace(open_, energy_j=open_.energy_j - watts * elapsed_s)
        if member.reading is None:
            return open_
        fresh = member.reading.since(open_.reading)
        open_ = replace(open_, reading=member.reading)
        if fresh.gpu_s <= 0.0 or open_.gpu_s <= 0.0:
            return open_
        # What is reported of time before this period, or of more GPUs than there are, does not count.
        counted = min(1.0, open_.gpu_s / fresh.gpu_s)
        self._use = replace(self._use, measured_j=self._use.measured_j + counted * fresh.energy_j)
        left = 1.0 - counted * fresh.gpu_s / open_.gpu_s
        return replace(open_, gpu_s=left * open_.gpu_s, energy_j=left * open_.energy_j)

    def _assume(self, energy_j: float) -> None:
        self._use = replace(self._use, assumed_j=self._use.assumed_j + energy_j)


def assumed_w(member: Member, shares_w: Mapping[str, float]) -> float:
    """What a job draws where it is not measured: at clocks that are not set what it drew, else its share.

    Args:
        member: the job.
        shares_w: granted, by job.
    """
    if member.drawn_w is not None:
        return min(member.drawn_w, member.held_w)
    granted_w = max(shares_w.get(member.job, 0.0), member.follows_w or 0.0)
    watts = granted_w or member.held_w  # before its first share: what its GPUs can draw, as far as they are known
    return min(watts, member.held_w) if math.isfinite(watts) else 0.0


def _differs(before: Period, period: Period) -> bool:
    """Whether one is a day and one a month."""
    shorter_s, longer_s = sorted((before.end_s - before.begin_s, period.end_s - period.begin_s))
    return longer_s > 2 * shorter_s


def _written(use: Use) -> EnergyUse:
    return EnergyUse(
        begin=stamp(use.begin_s),
        measured_watt_hours=math.ceil(wh_from_j(use.measured_j)),
        assumed_watt_hours=math.ceil(wh_from_j(use.assumed_j)),
    )


def _use_of(written: EnergyUse) -> Use:
    measured_j, assumed_j = j_from_wh(written.measured_watt_hours), j_from_wh(written.assumed_watt_hours)
    return Use(_seconds(written.begin), measured_j, assumed_j)


def _seconds(written: str) -> float:
    return datetime.fromisoformat(written).timestamp()
