"""A job without a plan: one clock for all its GPUs, held by the leases on its nodes.

Training processes need not be connected, so nothing is known of iterations: no slowdown is promised, and no savings are
measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from perseus_operator.api.conditions import Condition, ConditionType, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.status import ClockStatus, StatusFigures
from perseus_operator.budgets.draw import share_to_status
from perseus_operator.budgets.member import Member, held_limits_w
from perseus_operator.families.fixed_clock.clock import clock_intent
from perseus_operator.jobs.conditions import agents_ready, all_conditions
from perseus_operator.jobs.decision import Decision
from perseus_operator.jobs.family import Family, Surroundings
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.report import JobReport, smoothing_to_status
from perseus_operator.nodes.lease_clock import LeaseClock
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.formatting import counted
from perseus_operator.objects.values import Now, Pod


class FixedClockFamily(Family):
    """One job with a fixed clock."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._job = surroundings.job

    @property
    def _spec(self) -> JobSpec:
        assert isinstance(self._job.spec, JobSpec)
        return self._job.spec

    def spec_accepted(self, spec: JobSpec) -> None:
        """See ``Family``."""
        self._job.spec_accepted(spec, spec)

    def pods_observed(self, chosen: Selection, agents: Mapping[str, str], *, wall_s: float) -> None:
        """See ``Family``."""
        self._job.pods_observed(chosen, agents, wall_s=wall_s)

    def decide(self, _: Now) -> Decision:
        """See ``Family``."""
        intent = clock_intent(self._job, self._spec)
        return Decision(intent=intent, applied=intent.waiting is None)

    def member(self, _: Now, *, settled: bool) -> Member:
        """What it draws at its clock is not known, but it is less than the power limits of its GPUs."""
        occupied = self._job.nodes.occupied
        seen = all(settled if node.clock is None else _says_all(node.clock, node.pods) for node in occupied)
        seen = seen and (settled or bool(occupied))
        held_w = math.fsum(held_limits_w(self._job.nodes).values()) if seen else math.inf
        drawn_w = held_w if seen else None
        return Member(str(self._job.ref), self._spec.priority, drawn_w=drawn_w, held_w=held_w)

    def report(self, decision: Decision) -> JobReport:
        """See ``Family``."""
        job, spec = self._job, self._spec
        mhz = spec.objective.clock_megahertz or 0
        locked, gpus = job.nodes.locked_at(mhz)
        summary = "All GPUs run at the clock that was asked for." if spec.mode.sets_clocks else "No clock is to be set."
        return JobReport(
            conditions=all_conditions(job, [agents_ready(job), _clock_applied(job, decision, mhz)], None, summary),
            figures=StatusFigures(
                clock=ClockStatus(megahertz=mhz, gpus=gpus, locked=locked),
                power_budget=share_to_status(job.share, job.draw, None),
                power_profiles=job.nodes.power_profiles or None,
                power_smoothing=smoothing_to_status(job.nodes.power_smoothing),
            ),
        )


def _says_all(clock: LeaseClock, pods: frozenset[Pod]) -> bool:
    """Whether the agent says which GPUs every pod has: when a lease is new, it has yet to ask the kubelet."""
    return {gpu.pod_uid for gpu in clock.gpus} >= {pod.uid for pod in pods}


def _clock_applied(job: Job, decision: Decision, mhz: int) -> Condition:
    kind, waiting = ConditionType.PLAN_APPLIED, decision.intent.waiting if decision.intent else None
    if waiting is not None:
        return Condition(kind, False, waiting.reason, waiting.message)
    locked, _ = job.nodes.locked_at(mhz)
    message = f"{counted(locked, 'GPU')} locked at {mhz} MHz. Iterations are not measured: no slowdown is promised."
    return Condition(kind, True, Reason.CLOCK_IN_FORCE, message)
