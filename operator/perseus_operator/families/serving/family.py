"""One ServingPool: takes in what agents say of its engines, and hands out what is decided."""

from __future__ import annotations

import math
from collections.abc import Mapping

from perseus_operator.api.conditions import Condition, ConditionType, Explanation, Reason
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.api.serving.status import PoolFigures
from perseus_operator.budgets.draw import share_to_status
from perseus_operator.budgets.member import Member, held_limits_w
from perseus_operator.jobs.conditions import accepted, ready
from perseus_operator.jobs.decision import Decision
from perseus_operator.jobs.family import Family, Surroundings
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.report import JobReport
from perseus_operator.jobs.waiting import absence, first_node_fault, no_clocks
from perseus_operator.nodes.actions import Intent
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import Now


class ServingFamily(Family):
    """One pool."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._job = surroundings.job

    def spec_accepted(self, spec: PoolSpec) -> None:
        """See ``Family``."""
        self._job.spec_accepted(spec, spec)

    def pods_observed(self, chosen: Selection, agents: Mapping[str, str], *, finished_at_s: float | None) -> None:
        """See ``Family``. A pool has no end."""
        del finished_at_s
        self._job.pods_observed(chosen.pods, agents, excluded=chosen.excluded, failed=chosen.failed)

    def decide(self, _: Now) -> Decision:
        """See ``Family``."""
        spec = self._job.spec
        if spec is None:
            return Decision(intent=None)
        return Decision(intent=Intent(None, {}, drive=False, waiting=no_clocks(spec.mode)))

    def member(self, _: Now, *, settled: bool) -> Member:
        """What it draws is less than the power limits of its GPUs."""
        assert self._job.spec is not None
        seen = settled or all(node.leased_pods is not None for node in self._job.nodes.occupied)
        held_w = math.fsum(held_limits_w(self._job.nodes).values()) if seen else math.inf
        return Member(str(self._job.ref), self._job.spec.priority, drawn_w=held_w if seen else None, held_w=held_w)

    def report(self, _: Decision) -> JobReport:
        """See ``Family``."""
        job = self._job
        conditions = [accepted(job, _name_fault(job))]
        if job.spec is not None:
            fault = first_node_fault(job.nodes) if job.nodes.occupied else absence(job)
            fault = fault or Explanation(Reason.NO_SIGNAL, "No engine of the pool says what it does.")
            conditions.append(Condition(ConditionType.SIGNALS_READY, False, fault.reason, fault.message))
        needed = {ConditionType.ACCEPTED, ConditionType.SIGNALS_READY}
        conditions.append(ready(conditions, needed, "The pool is observed."))
        return JobReport(
            conditions=conditions, figures=PoolFigures(power_budget=share_to_status(job.share, job.draw, None))
        )


def _name_fault(job: Job) -> Explanation | None:
    if not job.name_taken:
        return None
    message = f"The PerseusJob {job.ref.name} has this name, and the pods that opted in with it: rename either."
    return Explanation(Reason.NAME_TAKEN, message)
