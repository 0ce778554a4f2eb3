"""Keeps a PowerBudget's energy by pacing: what was used, the watts at which the rest lasts, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from perseus_core.units import j_from_kwh, kwh_from_j
from perseus_operator.api.budget import (
    BudgetCondition,
    BudgetFigures,
    BudgetReason,
    BudgetSpec,
    EnergyFigures,
    EnergySpec,
)
from perseus_operator.budgets.budget import BudgetDecision, BudgetStatement
from perseus_operator.budgets.energy import EnergyLedger, assumed_w
from perseus_operator.budgets.member import Member
from perseus_operator.budgets.watts import DECISION_S, level_w, wanted_watts, watts_until
from perseus_operator.objects.formatting import counted, stamp
from perseus_operator.objects.values import Now

_SCARCE: Final = 0.95
"""Expected use of this share of the budget is said before it binds: what jobs want is known to some per cent."""


@dataclass(frozen=True)
class _Outlook:
    """What is to be expected until the period's end. Watts are of all jobs together."""

    budget_j: float
    used_j: float
    forecast_j: float
    level_w: float
    cap_w: float
    """By spec.watts or the timetable."""
    wanted_w: float
    least_w: float

    @property
    def reason(self) -> BudgetReason:
        """What is said of it."""
        if self.used_j >= self.budget_j:
            return BudgetReason.ENERGY_USED_UP
        if self.level_w < min(self.least_w, self.cap_w):
            return BudgetReason.ENERGY_TOO_SMALL
        if self.level_w < min(self.wanted_w, self.cap_w):
            return BudgetReason.ENERGY_PACED
        return BudgetReason.ENERGY_SCARCE if self.forecast_j > _SCARCE * self.budget_j else BudgetReason.ENERGY_ENOUGH


class EnergyPacing:
    """The pacing of one budget: the ledger is kept each second, and what follows from it is decided each minute."""

    def __init__(self, stored: BudgetFigures | None = None) -> None:
        """Go on from what an operator before this one has stored; None: it has stored nothing."""
        self.level_w = math.inf
        """The watts at which the energy lasts; infinite: it is no limit."""
        self.figures: EnergyFigures | None = None
        self.statement: BudgetStatement | None = None
        self._ledger = EnergyLedger(stored)
        self._spec: BudgetSpec | None = None
        self._decided_s = -math.inf

    def advance(
        self, spec: BudgetSpec, energy: EnergySpec, members: Iterable[Member], decision: BudgetDecision, now: Now
    ) -> None:
        """Count what was used, and decide again if it is time.

        Args:
            spec: of the budget, with the watts of its manifest.
            energy: of it.
            members: selected jobs that draw power.
            decision: about the watts that were shared until now.
            now: the time.
        """
        drawing, shares_w = list(members), decision.allocation.shares_w
        begun = self._ledger.advance(spec, energy, drawing, shares_w, now)
        if begun or spec != self._spec or now.monotonic_s >= self._decided_s + DECISION_S:
            self._spec, self._decided_s = spec, now.monotonic_s
            self._decide(spec, energy, [(member, assumed_w(member, shares_w)) for member in drawing], now)

    def _decide(self, spec: BudgetSpec, energy: EnergySpec, drawing: Sequence[tuple[Member, float]], now: Now) -> None:
        wanted_w = math.fsum(member.claim.wanted_w if member.claim else watts for member, watts in drawing)
        least_w = math.fsum(member.claim.least_w if member.claim else watts for member, watts in drawing)
        uncounted = sum(member.claim is None and watts == 0.0 for member, watts in drawing)
        period, used_j = self._ledger.period, self._ledger.used.total_j
        assert period is not None
        budget_j = j_from_kwh(energy.kilowatt_hours)
        self.level_w = level_w(spec, max(0.0, budget_j - used_j), now.wall_s, period.end_s)
        caps = watts_until(spec, now.wall_s, period.end_s)
        outlook = _Outlook(
            budget_j=budget_j,
            used_j=used_j,
            forecast_j=used_j + math.fsum(min(watts, wanted_w) * seconds for watts, seconds in caps),
            level_w=self.level_w,
            cap_w=wanted_watts(spec, now.wall_s),
            wanted_w=wanted_w,
            least_w=least_w,
        )
        self.figures = self._ledger.figures(energy, now, forecast_j=outlook.forecast_j, pace_w=self.level_w)
        message = _message(outlook, stamp(period.end_s)) + _unmeasured(self._ledger.unmeasured, uncounted)
        broken = outlook.reason in (BudgetReason.ENERGY_USED_UP, BudgetReason.ENERGY_TOO_SMALL)
        self.statement = BudgetStatement(BudgetCondition.ENERGY_KEPT, not broken, outlook.reason, message)


def _message(outlook: _Outlook, end: str) -> str:
    budget = f"{kwh_from_j(outlook.budget_j):,.0f} kWh"
    used = f"{kwh_from_j(outlook.used_j):,.1f} of {budget} are used"
    expected = f"{kwh_from_j(outlook.forecast_j):,.1f} kWh are expected by {end} as the jobs' objectives ask"
    match outlook.reason:
        case BudgetReason.ENERGY_USED_UP:
            return f"{used}, and it has to last until {end}: every job runs its plan of least power."
        case BudgetReason.ENERGY_TOO_SMALL:
            return (
                f"{used}: {outlook.level_w:,.0f} W could be drawn until {end}, less than the {outlook.least_w:,.0f} W"
                " that the jobs draw at least: every job runs its plan of least power."
            )
        case BudgetReason.ENERGY_PACED:
            return f"{used}; {expected}: no more than {outlook.level_w:,.0f} W are shared, so that it lasts."
        case BudgetReason.ENERGY_SCARCE:
            return f"{used}; {expected}: fewer watts will be shared if the jobs draw more."
        case _:
            return f"{used}; {expected}."


def _unmeasured(jobs: list[str], uncounted: int) -> str:
    said = ""
    if jobs:
        said = f" {counted(len(jobs), 'job')} not measured, first {jobs[0]}: counted at the watts that are granted."
    if uncounted:
        said += f" {counted(uncounted, 'job')} not counted: it is not known yet what their GPUs can draw."
    return said
