"""A family that the operator does not have, as a program: the operator with it. ``test_third_family`` runs it.

It serves jobs with the objective ``PowerCap``, which the API has already. One of its own needs a member more in
``ObjectiveType``, which the manifests of PerseusJob and EnergyClass are made from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from perseus_core.leases import RestingClock
from perseus_operator.__main__ import main
from perseus_operator.api.conditions import Condition, ConditionType, Explanation, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.objective import ObjectiveType
from perseus_operator.api.status import ClockStatus, StatusFigures
from perseus_operator.budgets.allocation import Claim
from perseus_operator.budgets.draw import share_to_status
from perseus_operator.budgets.member import Member, held_limits_w
from perseus_operator.families.registry import FAMILIES, Kind
from perseus_operator.jobs.conditions import agents_ready, all_conditions
from perseus_operator.jobs.decision import Decision
from perseus_operator.jobs.family import Family, Surroundings
from perseus_operator.jobs.report import JobReport
from perseus_operator.nodes.actions import Intent
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import Now

WATTS: Final = {900: 200.0, 1200: 280.0, 1410: 400.0}
"""What a GPU draws at each clock (MHz)."""


class WattClockFamily(Family):
    """One clock for all GPUs of a job: the highest at which they draw no more than its cap and its share allow."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._job = surroundings.job

    def spec_accepted(self, spec: JobSpec) -> None:
        self._job.spec_accepted(spec, spec)

    def pods_observed(self, chosen: Selection, agents: Mapping[str, str], *, wall_s: float) -> None:
        self._job.pods_observed(chosen, agents, wall_s=wall_s)

    def _curve(self, share_w: float = math.inf) -> dict[int, float]:
        """What all GPUs draw at each clock that may be had; until they are known, at the lowest."""
        gpus, spec = len(held_limits_w(self._job.nodes)), self._job.spec
        limit_w = min(share_w, spec.objective.power_cap_watts or 0) if spec and gpus else 0
        lowest = min(WATTS)
        return {mhz: gpus * watts for mhz, watts in WATTS.items() if mhz == lowest or gpus * watts <= limit_w}

    def decide(self, _: Now) -> Decision:
        share, nodes = self._job.share, self._job.nodes.occupied
        mhz = max(self._curve(math.inf if share is None else share.watts or 0))
        applied = bool(nodes) and all(node.at_clock(mhz) for node in nodes)
        waiting = None if applied else Explanation(Reason.APPLYING, f"The GPUs are to run at {mhz} MHz.")
        return Decision(intent=Intent(None, {}, True, waiting, resting=RestingClock(mhz)), applied=applied)

    def member(self, _: Now, *, settled: bool) -> Member:
        limits_w, job = held_limits_w(self._job.nodes), str(self._job.ref)
        if not limits_w:
            return Member(job, 0)
        curve = tuple((watts, mhz / max(WATTS)) for mhz, watts in self._curve().items())
        return Member(job, 0, Claim(job, 0, len(limits_w), curve), held_w=math.fsum(limits_w.values()))

    def report(self, decision: Decision) -> JobReport:
        job, intent = self._job, decision.intent
        assert intent is not None
        mhz = intent.resting.mhz
        locked, gpus = job.nodes.locked_at(mhz)
        said = intent.waiting or Explanation(Reason.CLOCK_IN_FORCE, f"The GPUs run at {mhz} MHz.")
        in_force = Condition(ConditionType.PLAN_APPLIED, decision.applied, said.reason, said.message)
        return JobReport(
            conditions=all_conditions(job, [agents_ready(job), in_force], None, said.message),
            figures=StatusFigures(
                clock=ClockStatus(megahertz=mhz, gpus=gpus, locked=locked),
                power_budget=share_to_status(job.share, job.draw, None),
            ),
        )


if __name__ == "__main__":
    main([Kind(lambda spec: spec.objective.type is ObjectiveType.POWER_CAP, WattClockFamily), *FAMILIES])
