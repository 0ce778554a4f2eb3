"""PowerBudgets of the cluster: observes them, grants every selected job its share, and writes their status.

``budget`` decides the shares; a job's family decides what its share means. Of several replicas of the operator one
decides and writes; the others grant their jobs what is written, and write into the jobs' status what those draw.
Nothing here waits except for writes of status.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

from perseus_core import keys
from perseus_operator.api.budget import BudgetCondition, BudgetFigures, BudgetReason, BudgetSpec
from perseus_operator.api.power_status import DrawStatus, MeterStatus
from perseus_operator.api.schema import dump
from perseus_operator.api.stored import parse_stored, stored_items
from perseus_operator.budgets import budget as power_budget
from perseus_operator.budgets.allocation import Share
from perseus_operator.budgets.budget import BudgetDecision, BudgetStatement
from perseus_operator.budgets.draw import draw_to_status, member_from_status, meter_to_status
from perseus_operator.budgets.member import Member
from perseus_operator.budgets.pacing import EnergyPacing
from perseus_operator.budgets.watts import next_watts
from perseus_operator.clients.kube.cluster_object import ClusterObject, ClusterObjects
from perseus_operator.clients.kube.namespace_labels import NamespaceLabels, NamespaceStore
from perseus_operator.errors import KubeError
from perseus_operator.objects.values import JobRef, Json, Now, Owner

logger = logging.getLogger(__name__)

_SAME_EVENT_S: Final = 600.0
"""An event is not repeated within this time."""
_METER_S: Final = 15.0
"""How often what was measured of a job is written for the replica that shares its budget."""
_EVENTS: Final = {
    BudgetReason.ENERGY_SCARCE: "Warning",
    BudgetReason.ENERGY_PACED: "Normal",
    BudgetReason.ENERGY_TOO_SMALL: "Warning",
    BudgetReason.ENERGY_USED_UP: "Warning",
}
"""Reasons that are events as well, and of which kind."""


class SharingJob(Protocol):
    """A job of this replica that may share a budget."""

    ref: JobRef
    labels: Mapping[str, str]
    taken_over_s: float
    """When an operator before this one has served it until (monotonic); -inf: none has."""

    def member(self, now: Now, *, settled: bool) -> Member | None:
        """What the job draws, and what a watt is worth to it; None: it draws no power, since no pod of it runs."""
        ...

    def grant(self, share: Share | None) -> None:
        """The job's share; None: no budget selects it."""
        ...

    def publish_draw(self, draw: DrawStatus | None) -> None:
        """What the status says of its draw; None: nothing."""
        ...


class BudgetMetrics(Protocol):
    """Where figures of budgets are shown."""

    def set_budget(
        self, budget: str, watts: int, figures: BudgetFigures, *, kept: bool | None, energy_kept: bool | None
    ) -> None:
        """Show these; None: whether the watts, or the energy, are kept is not known."""
        ...

    def forget_budget(self, budget: str) -> None:
        """Show nothing of it any more."""
        ...


@dataclass(frozen=True)
class OtherJob:
    """A job that another replica serves, as it was observed last."""

    namespace: str
    name: str
    labels: Mapping[str, str]
    priority: int
    status: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class BudgetStore(NamespaceStore, Protocol):
    """What is needed of the API server."""

    async def power_budgets(self) -> list[Json]:
        """All of them."""
        ...

    async def write_budget_status(self, name: str, uid: str, status: Json) -> str:
        """Store this whole status; the object's version after it."""
        ...

    async def post_cluster_event(self, about: Owner, *, kind: str, reason: str, message: str) -> None:
        """Post an event on a cluster-wide object; ``kind`` is Normal or Warning."""
        ...


@dataclass
class _Budget(ClusterObject[BudgetSpec]):
    watts: float | None = None
    """What is shared now; None: nothing has been yet."""
    decision: BudgetDecision = field(default_factory=BudgetDecision)
    pacing: EnergyPacing = field(default_factory=EnergyPacing)
    said: BudgetReason | None = None
    """What was said last of its energy."""
    posted: dict[BudgetReason, float] = field(default_factory=dict)
    """Events posted lately, and when (monotonic)."""

    def shared(self, spec: BudgetSpec) -> BudgetSpec:
        """The spec with the watts that are shared now."""
        return spec if self.watts is None else replace(spec, watts=max(1, int(self.watts)))


class PowerBudgets(ClusterObjects[_Budget]):
    """All PowerBudgets of the cluster."""

    def __init__(
        self,
        kube: BudgetStore,
        runners: Callable[[], Iterable[SharingJob]],
        metrics: BudgetMetrics,
        *,
        grace_s: float,
        others: Callable[[], Iterable[OtherJob]] = tuple,
    ) -> None:
        """Know no budget yet.

        Args:
            kube: where status is written.
            runners: the jobs of this replica.
            metrics: of this replica.
            grace_s: how long after a start the shares of jobs that have not been observed yet stay reserved, and how
                long after it was taken over it is not known which ranks of a job run.
            others: the jobs of other replicas.
        """
        super().__init__(partial(_Budget, keys.BUDGET_KIND), BudgetSpec)
        self._kube = kube
        self._metrics = metrics
        self._runners = runners
        self._others = others
        self._grace_s = grace_s
        self._leads = False
        """Whether this replica decides the shares."""
        self._settled_s = math.inf
        """When every job must have been observed (monotonic), if this replica leads."""
        self._read: dict[str, tuple[Mapping[str, Any], Member | None]] = {}
        """What was read of other replicas' jobs, and from which status: most stay as they are for long."""
        self._held_w: dict[str, float] = {}
        """What the GPUs of this replica's jobs can draw, by namespace/name."""
        self._namespaces = NamespaceLabels(kube)
        self._ticked_s: float | None = None
        self._meters: dict[str, tuple[float, MeterStatus]] = {}
        """What was written last of this replica's jobs for the one that shares budgets, and when (monotonic)."""

    async def _list(self) -> list[Json]:
        return await self._kube.power_budgets()

    async def _send(self, name: str, uid: str, status: Json) -> str:
        return await self._kube.write_budget_status(name, uid, status)

    def _observed(self, budget: _Budget, status: Mapping[str, Any], *, new: bool) -> None:
        if new or not self._leads:  # as another replica, or an operator before this one, has decided
            budget.decision = power_budget.decision_from_status(status)
            budget.watts = status.get("watts")
            budget.pacing = EnergyPacing(parse_stored(BudgetFigures, status))
            budget.said = _said(status)
        for runner in self._runners():
            self.grant_share(runner)

    def _forgotten(self, budget: _Budget) -> None:
        self._metrics.forget_budget(budget.name)
        for runner in self._runners():
            self.grant_share(runner)

    def grant_share(self, runner: SharingJob) -> None:
        """Grant a job its strictest share; a share that is not known yet is stricter than any other."""
        job = str(runner.ref)
        held_w = self._held_w.get(job, math.inf)
        shares = [
            budget.decision.share(
                budget.name, job, held_w, budget.spec.fallback.hold_seconds, budget.shared(budget.spec).watts
            )
            for budget in self._objects.values()
            if budget.spec is not None and self._selects(budget.spec, runner.ref.namespace, runner.labels) is not False
        ]
        runner.grant(min(shares, key=lambda share: -1.0 if share.watts is None else share.watts, default=None))

    async def tick(self, now: Now, *, leads: bool = True) -> None:
        """Decide the shares of every budget, grant them, and write what has changed. Call it about once a second.

        Args:
            now: the time.
            leads: whether this replica decides; else it publishes what its jobs draw, and grants what another decides.
        """
        if leads and not self._leads:
            self._settled_s = now.monotonic_s + self._grace_s
        if self._leads and not leads:
            for budget in self._objects.values():
                self._metrics.forget_budget(budget.name)
        self._leads = leads
        elapsed_s = 0.0 if self._ticked_s is None else now.monotonic_s - self._ticked_s
        self._ticked_s = now.monotonic_s
        runners = list(self._runners())
        others = list(self._others()) if leads and self._objects else []
        if any(budget.spec and budget.spec.selector.namespace_selector for budget in self._objects.values()):
            namespaces = {runner.ref.namespace for runner in runners} | {other.namespace for other in others}
            await self._namespaces.refresh(namespaces, now.monotonic_s)
        ours = self._own_members(runners, now)
        theirs = self._other_members(others)
        if leads:
            for budget in self._objects.values():
                if budget.spec is not None:
                    members = self._members(budget, budget.spec, ours, theirs, now)
                    _decide(budget, budget.spec, members, elapsed_s, now)
        for runner in runners:
            self.grant_share(runner)
        if leads:
            settled = now.monotonic_s >= self._settled_s
            for budget in list(self._objects.values()):
                # A restart changes nothing: the status of before stands until every job has been observed.
                if not (budget.decision.unknown and not settled):
                    await self._write(budget, now)

    def _own_members(self, runners: Iterable[SharingJob], now: Now) -> list[tuple[SharingJob, Member | None]]:
        """This replica's jobs that share a budget, and what they draw: their status says it where another one leads."""
        members = []
        for runner in runners:
            if not self._is_selected(runner.ref.namespace, runner.labels):
                runner.publish_draw(None)
                continue
            settled = now.monotonic_s >= runner.taken_over_s + self._grace_s
            member = runner.member(now, settled=settled)
            members.append((runner, member))
            runner.publish_draw(None if self._leads or member is None else self._draw(member, now))
        self._held_w = {str(runner.ref): member.held_w for runner, member in members if member is not None}
        self._meters = {job: meter for job, meter in self._meters.items() if job in self._held_w}
        return members

    def _draw(self, member: Member, now: Now) -> DrawStatus:
        """What the status says of a job; of its energy now and then, which would change with every iteration."""
        draw = draw_to_status(member)
        if not any(budget.spec and budget.spec.energy for budget in self._objects.values()):
            return draw
        if member.job not in self._meters or now.monotonic_s >= self._meters[member.job][0] + _METER_S:
            self._meters[member.job] = now.monotonic_s, meter_to_status(member)
        return replace(draw, meter=self._meters[member.job][1])

    def _other_members(self, others: Iterable[OtherJob]) -> list[tuple[OtherJob, Member | None]]:
        """Other replicas' jobs that share a budget, and what their status says that they draw."""
        before, self._read = self._read, {}
        members = []
        for other in others:
            if not self._is_selected(other.namespace, other.labels):
                continue
            job = str(other)
            stored = before.get(job)
            if stored is None or stored[0] is not other.status:
                stored = other.status, member_from_status(job, other.priority, other.status)
            self._read[job] = stored
            members.append((other, stored[1]))
        return members

    def _members(
        self,
        budget: _Budget,
        spec: BudgetSpec,
        ours: Iterable[tuple[SharingJob, Member | None]],
        others: Iterable[tuple[OtherJob, Member | None]],
        now: Now,
    ) -> list[Member]:
        """The jobs that a budget selects and that draw power."""
        selected = [(str(r.ref), member) for r, member in ours if self._selects(spec, r.ref.namespace, r.labels)]
        selected += [(str(o), member) for o, member in others if self._selects(spec, o.namespace, o.labels)]
        members = [member for _, member in selected if member is not None]
        if now.monotonic_s < self._settled_s:
            observed = {job for job, _ in selected}
            members += [Member(job, 0) for job in budget.decision.allocation.shares_w if job not in observed]
        return members

    def _is_selected(self, namespace: str, labels: Mapping[str, str]) -> bool:
        specs = (budget.spec for budget in self._objects.values() if budget.spec is not None)
        return any(self._selects(spec, namespace, labels) for spec in specs)

    def _selects(self, spec: BudgetSpec, namespace: str, labels: Mapping[str, str]) -> bool | None:
        return power_budget.selects(spec, namespace, labels, self._namespaces.of(namespace))

    async def _write(self, budget: _Budget, now: Now) -> None:
        """Update the metrics, and write the status if it has changed."""
        conditions = [_accepted(budget)]
        fields: Json = {}
        if budget.spec is not None:
            shared = budget.shared(budget.spec)
            figures = replace(power_budget.figures(shared, budget.decision), energy=budget.pacing.figures)
            within = power_budget.within_budget(shared, budget.decision)
            energy = budget.pacing.statement
            energy_kept = None if energy is None else energy.status
            self._metrics.set_budget(budget.name, shared.watts, figures, kept=within.status, energy_kept=energy_kept)
            conditions += [within] if energy is None else [within, energy]
            fields = dump(figures)
        await self._write_status(budget, conditions, fields, now)
        await self._announce(budget, now)

    async def _announce(self, budget: _Budget, now: Now) -> None:
        """Post an event where something else is said of a budget's energy than before."""
        statement = budget.pacing.statement
        reason = None if statement is None else statement.reason
        before, budget.said = budget.said, reason
        if statement is None or reason == before or reason not in _EVENTS:
            return
        if now.monotonic_s < budget.posted.get(reason, -math.inf) + _SAME_EVENT_S:
            return
        budget.posted[reason] = now.monotonic_s
        about = Owner(f"{keys.API_GROUP}/{keys.API_VERSION}", keys.BUDGET_KIND, budget.name, budget.uid)
        try:
            await self._kube.post_cluster_event(about, kind=_EVENTS[reason], reason=reason, message=statement.message)
        except KubeError as error:
            logger.warning("PowerBudget %s: event not posted: %s", budget.name, error)


def _decide(budget: _Budget, spec: BudgetSpec, members: Sequence[Member], elapsed_s: float, now: Now) -> None:
    if spec.energy is None:
        budget.pacing = EnergyPacing()
    else:
        budget.pacing.advance(spec, spec.energy, members, budget.decision, now)
    budget.watts = next_watts(spec, budget.watts, now.wall_s, elapsed_s, budget.pacing.level_w)
    decision = power_budget.decide_shares(budget.shared(spec), members, budget.decision)
    budget.decision = power_budget.lower_first(decision, budget.decision)


def _said(status: Mapping[str, Any]) -> BudgetReason | None:
    """What an operator before this one has said of a budget's energy."""
    for condition in stored_items(status.get("conditions")):
        if condition.get("type") == BudgetCondition.ENERGY_KEPT and condition.get("reason") in list(BudgetReason):
            return BudgetReason(condition["reason"])
    return None


def _accepted(budget: _Budget) -> BudgetStatement:
    if budget.refusal:
        return BudgetStatement(BudgetCondition.ACCEPTED, False, BudgetReason.SPEC_INVALID, budget.refusal)
    message = "The manifest is valid."
    if budget.spec is not None and budget.spec.selector.match_labels:
        message += (
            " spec.selector.matchLabels is no limit to tenants, who choose the labels of their PerseusJobs."
            " namespaces and namespaceSelector are."
        )
    return BudgetStatement(BudgetCondition.ACCEPTED, True, BudgetReason.ACCEPTED, message)
