"""A refined frontier is sent beside the one in force: stragglers are answered meanwhile, then all change at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.operator.conftest import LIMITS, Job, epochs_of, spec_of

from perseus_operator.api.conditions import ConditionType, Explanation, Reason
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.families.training.family import TrainingFamily
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.pace import Pace
from perseus_operator.nodes.actions import Push, Select
from perseus_operator.nodes.plans import StoredPlans
from perseus_operator.objects.values import JobRef

REFINED = "refined"


@pytest.fixture
def refined(job: Job) -> Job:
    """A job whose plan is in force, and the frontier that its calibration has made."""
    refine(job)
    return job


def refine(job: Job) -> None:
    job.state.solve.started("first", "basis")
    job.run()
    job.state.solve.basis = "basis"
    job.state.solve.ended()
    offer(job, REFINED)


def offer(job: Job, digest: str, basis: str = "basis") -> None:
    assert job.state.frontier is not None
    job.state.solve.started(digest, basis)
    job.state.solve_succeeded(replace(job.state.frontier, digest=digest), None)  # type: ignore[arg-type]
    job.state.solve.ended()


def store(job: Job, node: str) -> None:
    """One agent has the coming plans."""
    job.state.nodes[node].plans.stored_beside(StoredPlans(REFINED, REFINED, frozenset({0, 1})))


def slow(job: Job) -> None:
    for iteration in range(1, 12):
        job.train(iteration, (1.3 if iteration > 6 else 1.0, 1.0))


def actions(job: Job, kind: type) -> list[Any]:
    return [action for action in job.decide().actions if isinstance(action, kind)]


def test_the_plans_in_force_stay_applied_until_every_agent_has_the_coming_ones(refined: Job) -> None:
    made = refined.decide()
    assert made.applied
    assert {(push.node, push.plans, push.beside) for push in actions(refined, Push)} == {
        ("node-0", REFINED, True),
        ("node-1", REFINED, True),
    }
    store(refined, "node-0")
    assert [push.node for push in actions(refined, Push)] == ["node-1"]
    assert not refined.decide().adopt
    store(refined, "node-1")
    assert refined.decide().adopt
    refined.settle()
    assert refined.state.frontier is not None
    assert refined.state.frontier.digest == REFINED
    plans = [node.plans for node in refined.nodes]
    assert {(each.plan_id, bool(each.selected), each.beside) for each in plans} == {(REFINED, True, None)}


@pytest.mark.parametrize("stored", [(), ("node-0",), ("node-1",)])
def test_a_straggler_is_answered_on_the_plans_in_force_before_more_is_sent(
    refined: Job, stored: tuple[str, ...]
) -> None:
    before = refined.nodes[1].plans.plan_id
    for node in stored:
        store(refined, node)
    slow(refined)
    selects = {select.node: select for select in actions(refined, Select)}
    assert "node-1" in selects
    assert not {push.node for push in actions(refined, Push)} & selects.keys()
    assert refined.state.nodes["node-1"].plans.plan_id == before, "whose points these are"


def test_a_lease_that_was_lost_meanwhile_gets_the_plans_in_force_first(refined: Job) -> None:
    assert refined.state.frontier is not None
    in_force = refined.state.frontier.digest
    store(refined, "node-0")
    store(refined, "node-1")
    lost = refined.state.nodes["node-0"]
    lost.lease_lost()
    sent = []
    for _ in range(8):
        sent += [action.plans for action in refined.act().actions if isinstance(action, Push)]
    assert sent == [in_force, REFINED]
    assert all(node.plans.pushed is not None and node.plans.pushed.digest == REFINED for node in refined.nodes)


def test_an_agent_that_names_the_coming_plans_as_its_own_is_sent_those_in_force(refined: Job) -> None:
    """It was asked for a lease again, as for another pod, while it had both."""
    store(refined, "node-0")
    node = refined.state.nodes["node-0"]
    node.lease_acquired(node.pods, plan_id=REFINED, following=True, started_s=refined.now_s, ttl_s=30.0)
    assert refined.state.frontier is not None
    assert [(p.plans, p.beside) for p in actions(refined, Push) if p.node == "node-0"] == [
        (refined.state.frontier.digest, False)
    ]


def test_an_agent_that_does_not_answer_holds_up_no_frontier(refined: Job) -> None:
    store(refined, "node-1")
    refined.state.nodes["node-0"].command_failed(
        Explanation(Reason.AGENT_UNAVAILABLE, "no answer"), retry_at_s=refined.now_s + 10
    )
    assert refined.decide().adopt


def test_another_profile_does_not_wait(refined: Job) -> None:
    offer(refined, "other", basis="another basis")
    assert refined.state.frontier is not None
    assert (refined.state.frontier.digest, refined.state.solve.coming) == ("other", None)


def test_a_frontier_is_in_force_at_once_where_no_plan_is_followed(job: Job) -> None:
    job.solve()
    job.state.solve.basis = "basis"
    offer(job, REFINED)
    assert job.state.frontier is not None
    assert job.state.frontier.digest == REFINED


async def test_no_status_claims_of_a_new_frontier_that_its_plan_is_applied_before_it_is() -> None:
    """Who watches the status would take the iterations of the old plan for those of the new one."""
    written: list[dict[str, Any]] = []

    async def write_status(_: JobRef, status: dict[str, Any]) -> str:
        written.append(status)
        return str(len(written))

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    job = Job()
    services = SimpleNamespace(
        kube=SimpleNamespace(write_status=write_status, annotate=never, post_event=never),
        agents=SimpleNamespace(select=never, push=never, renew=never),
        metrics=Metrics(),
        epochs=epochs_of(1),
        limits=LIMITS,
        status_interval_s=0.0,
        figures_pace=Pace(1e6),
        looks_pace=Pace(1e6),
        monotonic_s=lambda: job.now_s,
        wall_s=lambda: job.wall_s,
    )
    runner = JobRunner(JobRef("ns", "job", "uid"), cast(Any, services))
    assert isinstance(runner.family, TrainingFamily)
    job.state = runner.family.training
    job.state.spec_accepted(spec_of())
    refine(job)
    for node in job.nodes:
        store(job, node.name)
    try:
        runner._reconcile()
        while not written:
            await asyncio.sleep(0)
        for _ in range(100):  # and whatever follows from it
            await asyncio.sleep(0)
    finally:
        await runner.stop()
        await runner._stop_tasks()
    assert job.state.frontier is not None
    assert job.state.frontier.digest == REFINED
    for status in written:
        applied = {c["type"]: c["status"] for c in status["conditions"]}[ConditionType.PLAN_APPLIED.value]
        assert (status["frontier"]["digest"], applied) != (REFINED, "True")
    assert written
