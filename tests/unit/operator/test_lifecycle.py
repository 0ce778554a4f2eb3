"""The end of a job: when it is deleted, what its conditions say, and what is left of what was measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.conftest import Job

from perseus_operator.api.conditions import Condition, ConditionType, Reason
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.status.restore import restore_from_status
from perseus_operator.jobs import document
from perseus_operator.jobs.events import condition_events
from perseus_operator.jobs.lifecycle import next_deletion
from perseus_operator.nodes.iterations import Measured
from perseus_operator.nodes.workloads import Selection
from perseus_operator.plugin.doctor import examine
from perseus_operator.plugin.listing import listing


def said(job: Any) -> dict[str, Condition]:
    return {condition.type.value: condition for condition in conditions_of(job.state, job.decide())}


def deletion(job: Any) -> tuple[bool, float]:
    """Whether the job is to be deleted now, and when to look again."""
    return next_deletion(job.state.job.end, job.spec, now_s=job.now_s, wall_s=job.wall_s)


def restore(job: Any, stored: dict[str, Any]) -> None:
    restore_from_status(job.state, stored, now_s=0.0, wall_s=0.0)
    job.state.job.end.restored(stored)


def finish(job: Any) -> None:
    addresses = {node.name: node.address for node in job.nodes}
    job.state.pods_observed(Selection((), finished=True), addresses, wall_s=job.wall_s)
    job.settle()


def stored_by(job: Any) -> dict[str, Any]:
    made = job.decide()
    figures, conditions = status.figures(job.state, made), conditions_of(job.state, made)
    return document.document(conditions, figures, {}, generation=1, wall_s=job.wall_s)


def measured(make_job: Any, **changes: Any) -> Any:
    job = make_job(objective={"type": "MinEnergy"}, **changes)
    job.state.baseline = Measured(1_000_000, 8000, 5)
    job.run()
    job.state.plan_measured(Measured(1_100_000, 6000, 5))
    return job


@given(st.integers(0, 10**6), st.floats(0, 10**6), st.floats(0, 100))
def test_a_job_is_deleted_when_its_time_is_over_and_not_before(ttl_s: int, past_s: float, rest_s: float) -> None:
    job = Job(ttlSecondsAfterFinished=ttl_s)
    job.state.pods_observed(Selection((), finished=True), {}, wall_s=job.wall_s)
    job.state.job.end.deletion_asked(job.now_s + rest_s)
    now_s, wall_s = job.now_s + past_s, job.wall_s + past_s
    due, wake_s = next_deletion(job.state.job.end, job.spec, now_s=now_s, wall_s=wall_s)
    if not due:
        assert wake_s > now_s
        later_s = wake_s - now_s + 1e-3
        assert next_deletion(job.state.job.end, job.spec, now_s=now_s + later_s, wall_s=wall_s + later_s)[0]
    else:
        assert past_s >= ttl_s - 1e-3
        assert past_s >= rest_s - 1e-3


def test_without_a_time_to_live_nothing_is_deleted(make_job: Any) -> None:
    job = make_job()
    finish(job)
    job.now_s, job.wall_s = job.now_s + 1e9, job.wall_s + 1e9
    assert deletion(job) == (False, math.inf)
    running = make_job(ttlSecondsAfterFinished=0)
    running.run()
    assert deletion(running) == (False, math.inf)


def test_a_deletion_that_did_not_come_through_is_asked_for_again(make_job: Any) -> None:
    job = make_job(ttlSecondsAfterFinished=10)
    finish(job)
    assert deletion(job) == (False, job.now_s + 10)
    job.now_s, job.wall_s = job.now_s + 10, job.wall_s + 10
    assert deletion(job)[0]
    job.state.job.end.deletion_asked(job.now_s + 30)
    assert deletion(job) == (False, job.now_s + 30)
    job.now_s, job.wall_s = job.now_s + 30, job.wall_s + 30
    assert deletion(job)[0]


def test_conditions_tell_a_job_that_runs_from_one_that_waits_and_one_that_has_finished(make_job: Any) -> None:
    job = measured(make_job, ttlSecondsAfterFinished=60)
    found = said(job)
    assert (found["Active"].status, found["Active"].message) == (True, "2 pods on 2 nodes.")
    assert (found["Suspended"].status, found["Finished"].status, found["Ready"].status) == (False, False, True)
    waiting = make_job()
    waiting.solve()
    found = said(waiting)
    assert (found["Active"].status, found["Active"].reason) == (False, Reason.NO_PODS)
    assert (found["Finished"].status, found["Ready"].status) == (False, False)
    finish(job)
    found = said(job)
    assert (found["Active"].status, found["Active"].reason) == (False, Reason.FINISHED)
    assert (found["Ready"].status, found["Ready"].reason) == (True, Reason.FINISHED)
    assert found["Finished"].message.endswith("The PerseusJob will be deleted 60 s after that.")
    assert found["PlanApplied"].reason is Reason.FINISHED
    events = {event.reason for event in condition_events({}, conditions_of(job.state, job.decide()))}
    assert Reason.FINISHED in events
    suspended = make_job(suspend=True)
    found = said(suspended)
    assert (found["Suspended"].status, found["Active"].reason) == (True, Reason.SUSPENDED)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_finished_job_keeps_what_it_saved(make_job: Any, restarted: bool) -> None:
    job = measured(make_job)
    finish(job)
    stored = stored_by(job)
    if restarted:
        before, job = job, make_job(objective={"type": "MinEnergy"})
        restore(job, stored)
        assert job.state.job.end.finished_at_s == pytest.approx(before.state.job.end.finished_at_s, abs=1)
        assert "frontier" not in stored_by(job), "it is not read again yet"
        stored = stored_by(job)
    assert stored["savings"]["energy"] == "25.00%"
    metadata = {"namespace": "ns", "name": "job", "generation": 1}
    shown = {"metadata": metadata, "spec": {}, "status": stored}
    assert examine(shown)["verdict"] == "It has finished. It saved 25.00% of the energy of an iteration."
    overview = listing([shown])
    assert overview["jobs"][0]["state"] == "Finished"
    assert overview["savedWatts"] == 0, "it draws nothing any more"


@pytest.mark.parametrize("when", [{}, {"lastTransitionTime": "yesterday"}, {"lastTransitionTime": ""}])
def test_an_end_at_no_time_is_no_end(make_job: Any, when: dict[str, str]) -> None:
    job = make_job()
    ended = {"type": "Finished", "status": "True", **when}
    restore(job, {"conditions": [ended]})
    assert job.state.job.end.finished_at_s is None


def test_another_run_reports_nothing_of_the_one_before(make_job: Any) -> None:
    job = measured(make_job)
    finish(job)
    job.start_pods()
    finish(job)
    assert "savings" not in stored_by(job)


def test_every_condition_type_is_reported(make_job: Any) -> None:
    job = make_job()
    of_pools = {"SignalsReady", "ClocksApplied", "ObjectiveKept"}
    assert set(said(job)) == {kind.value for kind in ConditionType} - of_pools


def test_what_a_plan_saves_is_said_by_an_operator_that_has_just_started(make_job: Any) -> None:
    before = measured(make_job)
    for iteration in range(1, 8):
        before.train(iteration, (1.0, 1.0))
        before.settle()
    stored = stored_by(before)
    assert stored["savings"]["against"] == "Baseline"
    after = make_job(objective={"type": "MinEnergy"})
    restore(after, stored)
    after.run()
    again = stored_by(after)
    assert again["plan"]["point"] == stored["plan"]["point"]
    assert again["savings"] == stored["savings"], "the plan runs on; iterations are measured anew meanwhile"
    for other in ({"plan": {**stored["plan"], "point": 0}}, {"frontier": {**stored["frontier"], "digest": "0" * 64}}):
        elsewhere = make_job(objective={"type": "MinEnergy"})
        restore(elsewhere, {**stored, **other})
        elsewhere.run()
        assert "savings" not in stored_by(elsewhere), "it was measured under another plan"
