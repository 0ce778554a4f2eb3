"""What a PowerBudget means: which jobs share it, how many watts each gets, and the budget's condition and figures.

Level-triggered: asked twice without a change in between, it decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from perseus_operator.api.budget import (
    MAX_JOBS,
    BudgetCondition,
    BudgetFigures,
    BudgetReason,
    BudgetSpec,
    JobShare,
)
from perseus_operator.api.stored import parse_stored, stored_items
from perseus_operator.budgets.allocation import ROUNDING_W, Allocation, Share, allocate, steady
from perseus_operator.budgets.member import Member
from perseus_operator.objects.formatting import percent


@dataclass(frozen=True)
class BudgetDecision:
    """How a budget is shared. While the subject stays the same, so do good enough shares."""

    subject: tuple[Any, ...] = ()
    """Claims that were decided about."""
    allocation: Allocation = field(default_factory=Allocation)
    members: tuple[Member, ...] = ()
    reserved_w: float = 0.0
    """Set aside for jobs whose clocks are not set."""
    decided_w: float = 0.0
    """Watts that there were for the claims when the shares were decided; less than now: more has come since."""

    @property
    def unknown(self) -> list[str]:
        """Jobs of which it is not known how much they draw."""
        return [m.job for m in self.members if m.claim is None and m.drawn_w is None]

    def share(self, budget: str, job: str, held_w: float, hold_s: int, budget_w: float) -> Share:
        """The share of a selected job; its watts are unknown until the job has been counted."""
        return Share(budget, self.allocation.shares_w.get(job), self.allocation.feasible, held_w, hold_s, budget_w)


@dataclass(frozen=True)
class BudgetStatement:
    """A condition of a PowerBudget."""

    type: BudgetCondition
    status: bool | None
    reason: BudgetReason
    message: str


def selects(
    spec: BudgetSpec, namespace: str, labels: Mapping[str, str], namespace_labels: Mapping[str, str] | None
) -> bool | None:
    """Whether a budget selects a PerseusJob; None: that depends on the labels of its namespace, which are not known.

    Args:
        spec: of the budget.
        namespace: of the PerseusJob.
        labels: of the PerseusJob.
        namespace_labels: of its namespace; None: not known.
    """
    chosen = spec.selector
    if chosen.namespaces is not None and namespace not in chosen.namespaces:
        return False
    if any(labels.get(key) != value for key, value in (chosen.match_labels or {}).items()):
        return False
    if chosen.namespace_selector is None:
        return True
    return None if namespace_labels is None else chosen.namespace_selector.selects(namespace_labels)


def _granted(member: Member, spec: BudgetSpec) -> Member:
    """The member with the priority that a budget grants it."""
    priority = spec.priority(member.job.partition("/")[0], member.priority)
    claim = None if member.claim is None else replace(member.claim, priority=priority)
    return replace(member, priority=priority, claim=claim)


def decide_shares(spec: BudgetSpec, members: Iterable[Member], before: BudgetDecision) -> BudgetDecision:
    """Decide the shares of a budget. A job whose frontier is not known yet, as after a restart, keeps its share; while
    it is not known what one draws that has none, no less is set aside for such jobs than before.

    Args:
        spec: of the budget, with the watts that it shares now.
        members: selected jobs that draw power.
        before: the previous decision.
    """
    granted = tuple(sorted((_granted(member, spec) for member in members), key=lambda member: member.job))
    claims = [member.claim for member in granted if member.claim is not None]
    kept_w = {
        member.job: min(before.allocation.shares_w[member.job], member.held_w)
        for member in granted
        if member.claim is None and member.drawn_w is None and member.job in before.allocation.shares_w
    }
    reserved_w = math.fsum(member.drawn_w for member in granted if member.drawn_w is not None)
    if any(m.claim is None and m.drawn_w is None and m.job not in kept_w for m in granted):
        reserved_w = max(reserved_w, before.reserved_w)  # of what was set aside, some may be what that job draws
    left_w = spec.watts - reserved_w - math.fsum(kept_w.values())
    fresh = allocate(left_w, claims)
    subject, decided_w = tuple(sorted((claim.job, claim.priority, claim.subject) for claim in claims)), left_w
    if subject == before.subject and before.allocation.feasible:
        raised = left_w > before.decided_w + ROUNDING_W
        held = steady(before.allocation.shares_w, fresh, claims, left_w, raised=raised)
        decided_w = left_w if held is fresh else max(left_w, before.decided_w)
        fresh = held
    shares_w = {**fresh.shares_w, **kept_w}
    allocation = Allocation(shares_w, fresh.feasible, fresh.price)
    return BudgetDecision(subject, allocation, granted, reserved_w, decided_w)


def lower_first(decision: BudgetDecision, before: BudgetDecision) -> BudgetDecision:
    """Raise no share before those jobs follow that are to draw less: the replica that serves one may have died.

    What is not raised now is decided again, as if its watts had come later.

    Args:
        decision: just made.
        before: in force.
    """
    shares_w, old_w = decision.allocation.shares_w, before.allocation.shares_w
    late = any(
        member.follows_w is not None and member.follows_w > shares_w.get(member.job, math.inf)
        for member in decision.members
    )
    if not late:
        return decision
    kept_w = {job: min(watts, old_w.get(job, watts)) for job, watts in shares_w.items()}
    return replace(decision, allocation=replace(decision.allocation, shares_w=kept_w), decided_w=0.0)


def within_budget(spec: BudgetSpec, decision: BudgetDecision) -> BudgetStatement:
    """The condition that says whether the jobs keep within the budget."""
    members, allocation = decision.members, decision.allocation
    unknown = decision.unknown
    if not members:
        return BudgetStatement(BudgetCondition.KEPT, True, BudgetReason.NO_JOBS, "No running job shares this budget.")
    least_w = math.fsum(m.claim.least_w for m in members if m.claim is not None) + decision.reserved_w
    if not allocation.feasible:
        message = f"{spec.watts} W are less than the {math.ceil(least_w)} W that {len(members)} jobs draw at least"
        unsteered = f", {decision.reserved_w:.0f} W of it at clocks that are not set" if decision.reserved_w else ""
        return BudgetStatement(
            BudgetCondition.KEPT,
            False,
            BudgetReason.TOO_SMALL,
            f"{message}{unsteered}: every job runs its plan of least power.",
        )
    if unknown:
        counts = f"{len(unknown)} of {len(members)} jobs"
        message = f"It is not known what {counts} draw, first {unknown[0]}: no frontier yet, or suspended."
        return BudgetStatement(BudgetCondition.KEPT, None, BudgetReason.POWER_UNKNOWN, message)
    total_w = allocation.total_w + decision.reserved_w
    worth = f"one more kilowatt is worth {1000 * allocation.price:.3g} GPUs" if allocation.price else "all have enough"
    message = f"{len(members)} jobs are granted {total_w:.0f} of {spec.watts} W; {worth}."
    return BudgetStatement(BudgetCondition.KEPT, True, BudgetReason.SHARED, message)


def figures(spec: BudgetSpec, decision: BudgetDecision) -> BudgetFigures:
    """The figures of the status. Watts are rounded down, so that shares never add up to more than the budget."""
    claims = [member.claim for member in decision.members if member.claim is not None]
    shares_w = decision.allocation.shares_w
    shown = [_share(member, shares_w[member.job]) for member in decision.members if member.job in shares_w]
    return BudgetFigures(
        jobs=len(decision.members),
        watts=spec.watts,
        granted_watts=int(decision.allocation.total_w),
        wanted_watts=int(math.fsum(claim.wanted_w for claim in claims)),
        least_watts=math.ceil(math.fsum(claim.least_w for claim in claims)),
        unsteered_watts=int(decision.reserved_w),
        milli_gpus_per_kilowatt=min(round(1e6 * decision.allocation.price), 10**12),
        shares=tuple(shown[:MAX_JOBS]),
    )


def _share(member: Member, watts: float) -> JobShare:
    namespace, _, name = member.job.partition("/")
    slowdown, wanted = None, None
    if member.claim is not None:
        slowdown, wanted = percent(1 / member.claim.speed(watts) - 1), int(member.claim.wanted_w)
    return JobShare(
        name=name,
        namespace=namespace,
        priority=member.priority,
        watts=int(watts),
        wanted_watts=wanted,
        slowdown=slowdown,
    )


def decision_from_status(written: Mapping[str, Any]) -> BudgetDecision:
    """The shares that another replica, or an operator before this one, has granted, and what it has set aside, by the
    status.
    """
    shares_w = {}
    for share in stored_items(written.get("shares")):
        if (stored := parse_stored(JobShare, share)) is not None:
            shares_w[f"{stored.namespace}/{stored.name}"] = float(stored.watts)
    conditions = stored_items(written.get("conditions"))
    too_small = any(each.get("reason") == BudgetReason.TOO_SMALL for each in conditions)
    figures = parse_stored(BudgetFigures, written)
    reserved_w = 0.0 if figures is None else float(figures.unsteered_watts)
    return BudgetDecision(allocation=Allocation(shares_w, not too_small), reserved_w=reserved_w)
