"""A PerseusJob whose workload's pods carry the label of another one says whose they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from perseus_core import keys
from perseus_operator.api.conditions import Condition, ConditionType, Reason
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.controller.taken_pods import observe_taken_pods
from perseus_operator.jobs.conditions import agents_ready, ready
from perseus_operator.jobs.pace import Pace
from perseus_operator.objects.values import JobRef, Owner, Pod

JOB_NAME = "batch.kubernetes.io/job-name"
SPEC: dict[str, Any] = {
    "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
    "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
}


class Namespace:
    """Two PerseusJobs, of which the second is observed by its runner."""

    def __init__(self, workload: dict[str, Any]) -> None:
        services = SimpleNamespace(monotonic_s=lambda: 0.0, wall_s=lambda: 0.0, looks_pace=Pace(100.0))
        self.runner = JobRunner(JobRef("ns", "second", "u-second"), cast(Any, services))
        self.jobs = KnownJobs(10)
        for name in ("first", "second"):
            metadata = {"namespace": "ns", "name": name, "uid": f"u-{name}", "generation": 1}
            body = {"metadata": metadata, "spec": SPEC | {"workload": workload}}
            self.jobs.observe(body)
        self.runner.observe(body)
        self.pods_of: dict[tuple[str, str], dict[str, Pod]] = {}

    def run(self, name: str, job: str, workload: str = "train", namespace: str = "ns", **changes: Any) -> None:
        labels = {keys.LABEL_JOB: job, JOB_NAME: workload}
        owner = Owner("batch/v1", "Job", workload, "w")
        pod = Pod(f"u-{name}", namespace, name, "node", job, labels, owner=owner, **changes)
        self.pods_of.setdefault((namespace, job), {})[pod.uid] = pod

    async def said(self) -> tuple[Reason, str]:
        await observe_taken_pods([self.runner], self.jobs, self.pods_of)
        condition = agents_ready(self.runner.job)
        assert condition.status is False
        return condition.reason, condition.message


@pytest.mark.parametrize(
    "workload", [{"reference": {"kind": "Job", "name": "train"}}, {"selector": {"matchLabels": {JOB_NAME: "train"}}}]
)
async def test_a_job_says_to_which_one_the_pods_of_its_workload_belong(workload: dict[str, Any]) -> None:
    there = Namespace(workload)
    assert (await there.said())[0] is Reason.NO_PODS
    there.run("a", "first")
    there.run("b", "first")
    there.run("c", "first", workload="other")
    reason, message = await there.said()
    assert reason is Reason.PODS_TAKEN
    assert message == "2 pods of its workload carry the label perseus.energy/job: first, and so belong to first."
    there.pods_of.clear()
    assert (await there.said())[0] is Reason.NO_PODS


async def test_no_pod_is_taken_that_runs_no_more_or_is_of_nobody_or_elsewhere() -> None:
    there = Namespace({"reference": {"kind": "Job", "name": "train"}})
    there.run("a", "first", failure="Evicted")
    there.run("b", "first", succeeded=True)
    there.run("c", "nobody")
    there.run("d", "first", namespace="elsewhere")
    assert (await there.said())[0] is Reason.NO_PODS


async def test_a_job_that_gets_pods_of_its_own_waits_for_none_of_others() -> None:
    there = Namespace({"reference": {"kind": "Job", "name": "train"}})
    there.run("a", "first")
    await there.said()
    there.run("b", "second")
    there.runner.observe_pods(there.pods_of["ns", "second"].values(), {})
    assert there.runner.job.taken_pods is None


@pytest.mark.parametrize("reason", [Reason.NO_PODS, Reason.PODS_TAKEN])
def test_a_job_without_pods_is_not_ready_for_that_reason_and_not_for_a_profile_to_come(reason: Reason) -> None:
    def reason_of(agents: Reason, profile: Reason) -> Reason:
        reasons = {
            ConditionType.PROFILE_READY: profile,
            ConditionType.FRONTIER_READY: Reason.WAITING_FOR_PROFILE,
            ConditionType.AGENTS_READY: agents,
        }
        conditions = [Condition(kind, False, reason, "") for kind, reason in reasons.items()]
        return ready(conditions, set(reasons), "").reason

    assert reason_of(reason, Reason.PROFILING) is reason
    assert reason_of(reason, Reason.PROFILE_INVALID) is Reason.PROFILE_INVALID
    assert reason_of(Reason.NO_AGENT, Reason.PROFILING) is Reason.PROFILING
