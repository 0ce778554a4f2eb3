"""What a PowerBudget comes to: which jobs share it, what each gets, and what is said about that. Pure.

Called by ``budgets`` about once a second. Level-triggered: asked twice without a change in between, it says the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perseus_operator.api.budget import (
    MAX_JOBS,
    BudgetCondition,
    BudgetFigures,
    BudgetReason,
    BudgetSpec,
    JobShare,
)
from perseus_operator.api.job import Mode
from perseus_operator.formatting import percent
from perseus_operator.planning.objective import FrontierView, Target
from perseus_operator.planning.planner import Now, current_target
from perseus_operator.planning.power_allocation import (
    Allocation,
    Claim,
    Share,
    allocate,
    claim,
    power_w,
    replicas_of,
    steady,
)
from perseus_operator.planning.state import JobState


@dataclass(frozen=True)
class Member:
    """A selected job that draws power. ``claim`` and ``drawn_w`` None: nobody knows how much yet."""

    job: str
    priority: int
    claim: Claim | None = None
    drawn_w: float | None = None
    """Of a job whose clocks are not set."""
    frontier: FrontierView | None = None


@dataclass(frozen=True)
class BudgetDecision:
    """What was decided, and about what: with the same about, shares are steady."""

    about: tuple[Any, ...] = ()
    allocation: Allocation = field(default_factory=Allocation)
    members: tuple[Member, ...] = ()
    reserved_w: float = 0.0

    @property
    def unknown(self) -> list[str]:
        """Jobs of which nobody knows how much they draw."""
        return [m.job for m in self.members if m.claim is None and m.drawn_w is None]

    def share(self, budget: str, job: str) -> Share:
        """What a selected job may have; unknown until it has been counted."""
        watts = self.allocation.shares_w.get(job)
        return Share(budget, watts, self.allocation.feasible)


@dataclass(frozen=True)
class BudgetStatement:
    """A condition of a PowerBudget."""

    type: BudgetCondition
    status: bool | None
    reason: BudgetReason
    message: str


def selects(spec: BudgetSpec, namespace: str, labels: Mapping[str, str]) -> bool:
    """Whether a PerseusJob shares the budget."""
    chosen = spec.selector
    if chosen.namespaces is not None and namespace not in chosen.namespaces:
        return False
    return all(labels.get(key) == value for key, value in (chosen.match_labels or {}).items())


def member_of(state: JobState, now: Now) -> Member | None:
    """What a job would do with watts; None: it draws none, since no pod of it runs."""
    spec, job = state.spec, str(state.ref)
    if spec is None or not any(node.pods for node in state.nodes.values()):
        return None
    if spec.mode is Mode.RECOMMEND or spec.suspend:
        return Member(job, spec.priority, drawn_w=_default_w(state))
    asked = current_target(state, spec, now)
    if state.frontier is None or asked is None:
        return Member(job, spec.priority)
    if not isinstance(asked, Target):  # what was in force stays, whatever that was
        return Member(job, spec.priority, drawn_w=_default_w(state))
    copies = replicas_of(spec)
    wanted = state.frontier.lookup(asked.time_us)
    gpus = copies * spec.pipeline.stages
    found = claim(job, state.frontier, copies=copies, gpus=gpus, priority=spec.priority, wanted=wanted)
    return Member(job, spec.priority, found, frontier=state.frontier)


def _default_w(state: JobState) -> float | None:
    """Mean power at default clocks: measured; else that of the fastest plan, which is less; else not known."""
    measured = state.baseline
    if measured is not None and measured.energy_mj is not None and measured.time_us > 0:
        return 1000 * measured.energy_mj / measured.time_us
    if state.frontier is None or state.spec is None:
        return None
    return power_w(state.frontier, 0, replicas_of(state.spec))


def decide_shares(spec: BudgetSpec, members: Iterable[Member], before: BudgetDecision) -> BudgetDecision:
    """Share the budget. A job whose frontier is not known, after a restart for instance, keeps what it had."""
    known = tuple(sorted(members, key=lambda member: member.job))
    claims = [member.claim for member in known if member.claim is not None]
    kept_w = {
        member.job: before.allocation.shares_w[member.job]
        for member in known
        if member.claim is None and member.drawn_w is None and member.job in before.allocation.shares_w
    }
    reserved_w = math.fsum(member.drawn_w for member in known if member.drawn_w is not None)
    left_w = spec.watts - reserved_w - math.fsum(kept_w.values())
    fresh = allocate(left_w, claims)
    about = (spec.watts, *sorted((claim.job, claim.priority, claim.about) for claim in claims))
    if about == before.about and before.allocation.feasible:
        fresh = steady(before.allocation.shares_w, fresh, claims, left_w)
    shares_w = {**fresh.shares_w, **kept_w}
    return BudgetDecision(about, Allocation(shares_w, fresh.feasible, fresh.price), known, reserved_w)


def within_budget(spec: BudgetSpec, decision: BudgetDecision) -> BudgetStatement:
    """Whether the budget is kept."""
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
            f"{message}{unsteered}: every job runs its most frugal plan.",
        )
    if unknown:
        message = f"{len(unknown)} of {len(members)} jobs have no frontier yet, first {unknown[0]}."
        return BudgetStatement(BudgetCondition.KEPT, None, BudgetReason.POWER_UNKNOWN, message)
    total_w = allocation.total_w + decision.reserved_w
    worth = f"one more kilowatt is worth {1000 * allocation.price:.3g} GPUs" if allocation.price else "all have enough"
    message = f"{len(members)} jobs are granted {total_w:.0f} of {spec.watts} W; {worth}."
    return BudgetStatement(BudgetCondition.KEPT, True, BudgetReason.SHARED, message)


def figures(decision: BudgetDecision) -> BudgetFigures:
    """The figures of the status. Watts are rounded down, so that shares never add up to more than there is."""
    claims = [member.claim for member in decision.members if member.claim is not None]
    shares_w = decision.allocation.shares_w
    shown = [_share(member, shares_w[member.job]) for member in decision.members if member.job in shares_w]
    return BudgetFigures(
        jobs=len(decision.members),
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
        speed = max((s for w, s in member.claim.curve if w <= watts + 1e-6), default=member.claim.curve[0][1])
        slowdown, wanted = percent(1 / speed - 1), int(member.claim.wanted_w)
    return JobShare(
        name=name,
        namespace=namespace,
        priority=member.priority,
        watts=int(watts),
        wanted_watts=wanted,
        slowdown=slowdown,
    )


def decision_from_status(written: Mapping[str, Any]) -> BudgetDecision:
    """The shares that an operator before this one granted, as its status has them."""
    shares_w = {}
    for share in written.get("shares") or ():
        if isinstance(share, Mapping):
            shares_w[f"{share.get('namespace')}/{share.get('name')}"] = float(share.get("watts") or 0)
    return BudgetDecision(allocation=Allocation(shares_w))
