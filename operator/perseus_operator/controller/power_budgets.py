"""PowerBudgets of the cluster: observes them, grants every selected job its share, and writes their status.

``planning.power_budget`` decides the shares; a job's planner decides what its share means. Nothing here waits except
for writes of status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from perseus_operator.api.budget import BudgetCondition, BudgetReason, BudgetSpec, parse_budget
from perseus_operator.api.conditions import merge_conditions
from perseus_operator.api.schema import dump
from perseus_operator.controller.versioned import Versioned
from perseus_operator.errors import InvalidSpec, KubeError, KubeNotFound
from perseus_operator.formatting import stamp
from perseus_operator.objects import JobRef, Json
from perseus_operator.planning import power_budget
from perseus_operator.planning.planner import Now
from perseus_operator.planning.power_allocation import Share
from perseus_operator.planning.power_budget import BudgetDecision, BudgetStatement, Member
from perseus_operator.planning.state import JobState
from perseus_operator.reporting.metrics import Metrics

logger = logging.getLogger(__name__)

_RETRY_S: Final = 5.0


class SharingJob(Protocol):
    """A job that may share a budget."""

    ref: JobRef
    state: JobState
    labels: Mapping[str, str]

    def grant(self, share: Share | None) -> None:
        """The job's share; None: no budget selects it."""
        ...


class BudgetStore(Protocol):
    """What is needed of the API server."""

    async def power_budgets(self) -> list[Json]:
        """All of them."""
        ...

    async def write_budget_status(self, name: str, uid: str, status: Json) -> str:
        """Store this whole status; the object's version after it."""
        ...


@dataclass
class _Budget:
    name: str
    uid: str
    generation: int = 0
    spec: BudgetSpec | None = None
    """The last accepted one."""
    fault: str = ""
    decision: BudgetDecision = field(default_factory=BudgetDecision)
    stored: Versioned[Json] = field(default_factory=lambda: Versioned({}))
    retry_at_s: float = 0.0


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

    async def restore(self) -> None:
        """List all budgets before any job is observed: their shares hold from the first reconciliation on.

        Raises:
            KubeError: no answer.
        """
        for body in await self._kube.power_budgets():
            self.observe(body)

    def observe(self, body: Mapping[str, Any]) -> None:
        """Take in a PowerBudget as it is now."""
        metadata = body["metadata"]
        name, uid = str(metadata["name"]), str(metadata["uid"])
        known = self._budgets.get(name)
        if known is None or known.uid != uid:
            known = self._budgets[name] = _Budget(name, uid)
            known.decision = power_budget.decision_from_status(body.get("status") or {})
        known.stored.observed(dict(body.get("status") or {}), str(metadata.get("resourceVersion", "")))
        known.generation = int(metadata.get("generation", 1))
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
            del self._budgets[known.name]
            self._metrics.forget_budget(known.name)
            for runner in self._runners():
                self.grant_share(runner)

    def grant_share(self, runner: SharingJob) -> None:
        """Grant a job its strictest share; a share that is not known yet is stricter than any other."""
        shares = [
            budget.decision.share(budget.name, str(runner.ref))
            for budget in self._budgets.values()
            if budget.spec is not None and power_budget.selects(budget.spec, runner.ref.namespace, runner.labels)
        ]
        runner.grant(min(shares, key=lambda share: -1.0 if share.watts is None else share.watts, default=None))

    async def tick(self, now: Now) -> None:
        """Decide the shares of every budget, grant them, and write what has changed. Call it about once a second."""
        runners = list(self._runners())
        if not self._budgets or (runners and all(runner.state.fenced is not None for runner in runners)):
            return  # a newer operator shares them; a job that is fenced alone keeps its share, see ``member_of``
        if self._settled_s is None:
            self._settled_s = now.monotonic_s + self._grace_s
        observed = {str(runner.ref) for runner in runners}
        settled = now.monotonic_s >= self._settled_s
        members: dict[str, Member | None] = {}
        for budget in self._budgets.values():
            spec = budget.spec
            if spec is None:
                continue
            selected = [r for r in runners if power_budget.selects(spec, r.ref.namespace, r.labels)]
            for runner in selected:
                if str(runner.ref) not in members:
                    members[str(runner.ref)] = power_budget.member_of(runner.state, now, settled=settled)
            found = [member for r in selected if (member := members[str(r.ref)]) is not None]
            if not settled:
                found += [Member(job, 0) for job in budget.decision.allocation.shares_w if job not in observed]
            budget.decision = power_budget.decide_shares(spec, found, budget.decision)
        for runner in runners:
            self.grant_share(runner)
        for budget in list(self._budgets.values()):
            # A restart changes nothing: the status of the earlier operator stands until every job has been observed.
            if not (budget.decision.unknown and not settled):
                await self._write(budget, now)

    async def _write(self, budget: _Budget, now: Now) -> None:
        """Update the metrics, and write the status if it has changed."""
        conditions = [_accepted(budget)]
        fields: Json = {}
        if budget.spec is not None:
            figures = power_budget.figures(budget.decision)
            within = power_budget.within_budget(budget.spec, budget.decision)
            self._metrics.set_budget(budget.name, budget.spec.watts, figures, kept=within.status)
            conditions.append(within)
            fields = dump(figures)
        written = budget.stored.value
        old = written.get("conditions", ())
        wanted = {
            "observedGeneration": budget.generation,
            "conditions": merge_conditions(
                old, conditions, generation=budget.generation, now_rfc3339=stamp(now.wall_s)
            ),
            **fields,
        }
        if wanted == written or now.monotonic_s < budget.retry_at_s:
            return
        budget.stored.write_started(wanted)
        try:
            version = await self._kube.write_budget_status(budget.name, budget.uid, wanted)
        except KubeNotFound:
            logger.info("PowerBudget %s: it was deleted", budget.name)
        except KubeError as error:
            budget.retry_at_s = now.monotonic_s + _RETRY_S
            logger.warning("PowerBudget %s: status not written: %s", budget.name, error)
        else:
            budget.stored.write_succeeded(version)


def _accepted(budget: _Budget) -> BudgetStatement:
    if not budget.fault:
        message = "The manifest is valid."
        return BudgetStatement(BudgetCondition.ACCEPTED, True, BudgetReason.ACCEPTED, message)
    note = " The spec accepted before stays in force." if budget.spec is not None else ""
    return BudgetStatement(BudgetCondition.ACCEPTED, False, BudgetReason.SPEC_INVALID, budget.fault + note)
