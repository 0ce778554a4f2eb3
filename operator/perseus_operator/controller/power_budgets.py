"""PowerBudgets of the cluster: observes them, grants every selected job its share, and writes their status.

``planning.power_budget`` decides the shares; a job's planner decides what its share means. Nothing here waits except
for writes of status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from perseus_operator.api.budget import BudgetCondition, BudgetReason, BudgetSpec, parse_budget
from perseus_operator.api.schema import dump
from perseus_operator.controller.cluster_object import ClusterObject, vanished
from perseus_operator.controller.namespace_labels import NamespaceLabels, NamespaceStore
from perseus_operator.errors import InvalidSpec
from perseus_operator.objects import JobRef, Json
from perseus_operator.planning import power_budget
from perseus_operator.planning.aim import Now
from perseus_operator.planning.budget_watts import next_watts
from perseus_operator.planning.power_allocation import Share
from perseus_operator.planning.power_budget import BudgetDecision, BudgetStatement, Member
from perseus_operator.planning.state import JobState
from perseus_operator.reporting.metrics import Metrics
from perseus_proto import keys


class SharingJob(Protocol):
    """A job that may share a budget."""

    ref: JobRef
    state: JobState
    labels: Mapping[str, str]

    def grant(self, share: Share | None) -> None:
        """The job's share; None: no budget selects it."""
        ...


class BudgetStore(NamespaceStore, Protocol):
    """What is needed of the API server."""

    async def power_budgets(self) -> list[Json]:
        """All of them."""
        ...

    async def write_budget_status(self, name: str, uid: str, status: Json) -> str:
        """Store this whole status; the object's version after it."""
        ...


@dataclass
class _Budget(ClusterObject):
    spec: BudgetSpec | None = None
    """The last accepted one."""
    watts: float | None = None
    """What is shared now; None: nothing has been yet."""
    decision: BudgetDecision = field(default_factory=BudgetDecision)

    def shared(self, spec: BudgetSpec) -> BudgetSpec:
        """The spec with the watts that are shared now."""
        return spec if self.watts is None else replace(spec, watts=max(1, int(self.watts)))


class PowerBudgets:
    """All PowerBudgets of the cluster."""

    def __init__(
        self, kube: BudgetStore, runners: Callable[[], Iterable[SharingJob]], metrics: Metrics, *, grace_s: float
    ) -> None:
        """``grace_s``: how long after a start the shares of jobs that have not been observed yet stay reserved."""
        self._kube = kube
        self._metrics = metrics
        self._runners = runners
        self._grace_s = grace_s
        self._settled_s: float | None = None
        """When every job must have been observed (monotonic)."""
        self._budgets: dict[str, _Budget] = {}
        self._namespaces = NamespaceLabels(kube)
        self._ticked_s: float | None = None

    async def restore(self) -> None:
        """List all budgets: before any job is observed, so that their shares hold from the first reconciliation on, and
        now and then, for those of which the watch has missed something.

        Raises:
            KubeError: no answer.
        """
        known = list(self._budgets.values())
        listed = await self._kube.power_budgets()
        for body in listed:
            self.observe(body)
        for budget in vanished(known, listed):
            self._forget(budget)

    def observe(self, body: Mapping[str, Any]) -> None:
        """Take in a PowerBudget as it is now."""
        metadata = body["metadata"]
        name, uid = str(metadata["name"]), str(metadata["uid"])
        known = self._budgets.get(name)
        if known is None or known.uid != uid:
            known = self._budgets[name] = _Budget(keys.BUDGET_KIND, name, uid)
            status = body.get("status") or {}
            known.decision = power_budget.decision_from_status(status)
            known.watts = status.get("watts")
        known.observed(body)
        try:
            known.spec, known.fault = parse_budget(body.get("spec")), ""
        except InvalidSpec as error:
            known.fault = str(error)
        for runner in self._runners():
            self.grant_share(runner)

    def deleted(self, body: Mapping[str, Any]) -> None:
        """Take in that a PowerBudget does not exist any more."""
        known = self._budgets.get(str(body["metadata"]["name"]))
        if known is not None and known.uid == body["metadata"]["uid"]:
            self._forget(known)

    def grant_share(self, runner: SharingJob) -> None:
        """Grant a job its strictest share; a share that is not known yet is stricter than any other."""
        shares = [
            budget.decision.share(budget.name, str(runner.ref), budget.spec.fallback.hold_seconds)
            for budget in self._budgets.values()
            if budget.spec is not None and self._selects(budget.spec, runner) is not False
        ]
        runner.grant(min(shares, key=lambda share: -1.0 if share.watts is None else share.watts, default=None))

    async def tick(self, now: Now) -> None:
        """Decide the shares of every budget, grant them, and write what has changed. Call it about once a second."""
        runners = list(self._runners())
        if not self._budgets or (runners and all(runner.state.fenced is not None for runner in runners)):
            return  # a newer operator shares them; a job that is fenced alone keeps its share, see ``member_of``
        if self._settled_s is None:
            self._settled_s = now.monotonic_s + self._grace_s
        elapsed_s = 0.0 if self._ticked_s is None else now.monotonic_s - self._ticked_s
        self._ticked_s = now.monotonic_s
        if any(budget.spec and budget.spec.selector.namespace_selector for budget in self._budgets.values()):
            await self._namespaces.refresh({runner.ref.namespace for runner in runners}, now.monotonic_s)
        observed = {str(runner.ref) for runner in runners}
        settled = now.monotonic_s >= self._settled_s
        members: dict[str, Member | None] = {}
        for budget in self._budgets.values():
            spec = budget.spec
            if spec is None:
                continue
            selected = [r for r in runners if self._selects(spec, r)]
            for runner in selected:
                if str(runner.ref) not in members:
                    members[str(runner.ref)] = power_budget.member_of(runner.state, now, settled=settled)
            found = [member for r in selected if (member := members[str(r.ref)]) is not None]
            if not settled:
                found += [Member(job, 0) for job in budget.decision.allocation.shares_w if job not in observed]
            budget.watts = next_watts(spec, budget.watts, now.wall_s, elapsed_s)
            budget.decision = power_budget.decide_shares(budget.shared(spec), found, budget.decision)
        for runner in runners:
            self.grant_share(runner)
        for budget in list(self._budgets.values()):
            # A restart changes nothing: the status of the earlier operator stands until every job has been observed.
            if not (budget.decision.unknown and not settled):
                await self._write(budget, now)

    def _selects(self, spec: BudgetSpec, runner: SharingJob) -> bool | None:
        namespace = runner.ref.namespace
        return power_budget.selects(spec, namespace, runner.labels, self._namespaces.of(namespace))

    async def _write(self, budget: _Budget, now: Now) -> None:
        """Update the metrics, and write the status if it has changed."""
        conditions = [_accepted(budget)]
        fields: Json = {}
        if budget.spec is not None:
            shared = budget.shared(budget.spec)
            figures = power_budget.figures(shared, budget.decision)
            within = power_budget.within_budget(shared, budget.decision)
            self._metrics.set_budget(budget.name, shared.watts, figures, kept=within.status)
            conditions.append(within)
            fields = dump(figures)
        await budget.write(conditions, fields, now, self._kube.write_budget_status)
        if budget.gone:
            self._forget(budget)

    def _forget(self, budget: _Budget) -> None:
        """It does not exist any more."""
        if self._budgets.get(budget.name) is not budget:
            return
        del self._budgets[budget.name]
        self._metrics.forget_budget(budget.name)
        for runner in self._runners():
            self.grant_share(runner)


def _accepted(budget: _Budget) -> BudgetStatement:
    if not budget.fault:
        message = "The manifest is valid."
        return BudgetStatement(BudgetCondition.ACCEPTED, True, BudgetReason.ACCEPTED, message)
    note = " The spec accepted before stays in force." if budget.spec is not None else ""
    return BudgetStatement(BudgetCondition.ACCEPTED, False, BudgetReason.SPEC_INVALID, budget.fault + note)
