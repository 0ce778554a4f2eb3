"""What is said: conditions keep their time, events are said once, a write holds only what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perseus_operator.api.conditions import Condition, ConditionType, Explanation, Reason, merge_conditions
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.status.events import baseline_event, plan_event
from perseus_operator.families.training.training import Training
from perseus_operator.jobs import document
from perseus_operator.jobs.events import condition_events
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.nodes.iterations import Measured
from perseus_operator.objects.formatting import percent, seconds
from perseus_operator.objects.values import JobRef


def said(job: Any) -> dict[str, Condition]:
    return {condition.type.value: condition for condition in conditions_of(job.state, job.decide())}


def test_ready_is_the_first_thing_that_is_missing(job: Any) -> None:
    assert said(job)["Ready"].reason is Reason.PROFILE_UNREADABLE
    job.state.inputs.profile_fault = Explanation(Reason.CONFIG_MAP_NOT_FOUND, "not there")
    assert said(job)["Ready"].reason is Reason.CONFIG_MAP_NOT_FOUND
    job.state.inputs.profile_fault = None
    job.solve()
    assert said(job)["Ready"].reason is Reason.NO_PODS
    job.run()
    assert said(job)["Ready"] == Condition(ConditionType.READY, True, Reason.READY, "The plan is in force.")
    job.state.job.spec_fault = Explanation(Reason.SPEC_INVALID, "spec.points: must be ...")
    ready = said(job)["Ready"]
    assert ready.reason is Reason.SPEC_INVALID
    assert "stays in force" in ready.message


def test_a_gpu_that_cannot_be_driven_is_named(job: Any) -> None:
    job.run()
    job.nodes[1].uncontrollable = {"GPU-1-0": "MIG is on"}
    condition = said(job)["AgentsReady"]
    assert (condition.status, condition.reason) == (False, Reason.GPU_NOT_CONTROLLABLE)
    assert "GPU-1-0 on node-1: MIG is on" in condition.message


def test_a_straggler_says_its_evidence(job: Any) -> None:
    job.run()
    for iteration in range(4):
        job.train(iteration, (1.0, 1.2))
    assert "timing alone" in said(job)["StragglerDetected"].message
    job.nodes[1].gpu_events["GPU-1-1", "THERMAL_SLOWDOWN"] = "hot"
    assert "GPU-1-1 on node-1: thermal slowdown" in said(job)["StragglerDetected"].message


def test_transition_time_moves_with_the_status_only() -> None:
    condition = Condition(ConditionType.READY, True, Reason.READY, "a")
    first = merge_conditions([], [condition], generation=1, now_rfc3339="t1")
    again = merge_conditions(
        first, [Condition(ConditionType.READY, True, Reason.READY, "b")], generation=2, now_rfc3339="t2"
    )
    assert again[0] == {**first[0], "message": "b", "observedGeneration": 2}
    turned = merge_conditions(
        again, [Condition(ConditionType.READY, False, Reason.NO_PODS, "c")], generation=2, now_rfc3339="t3"
    )
    assert turned[0]["lastTransitionTime"] == "t3"
    foreign = {"type": "Foreign", "status": "True"}
    assert merge_conditions([foreign], [condition], generation=1, now_rfc3339="t")[0] == foreign


def test_an_event_is_said_once(job: Any) -> None:
    made = job.run()
    now = conditions_of(job.state, made)
    stored = document.document(now, status.figures(job.state, made), {}, generation=1, wall_s=0.0)
    assert {event.reason for event in condition_events({}, now)} >= {Reason.PROFILE_READ, Reason.SOLVED, Reason.LEASED}
    assert condition_events(stored, now) == []


def test_stragglers_come_and_go_as_events(job: Any) -> None:
    none = [Condition(ConditionType.STRAGGLER_DETECTED, False, Reason.NO_STRAGGLER, "none")]
    some = [Condition(ConditionType.STRAGGLER_DETECTED, True, Reason.STRAGGLER_DETECTED, "1")]
    stored = {"conditions": merge_conditions([], none, generation=1, now_rfc3339="t")}
    assert condition_events({}, none) == []
    (came,) = condition_events(stored, some)
    assert (came.reason, came.kind) == (Reason.STRAGGLER_DETECTED, "Warning")
    stored = {"conditions": merge_conditions([], some, generation=1, now_rfc3339="t")}
    (went,) = condition_events(stored, none)
    assert (went.reason, went.kind) == (Reason.STRAGGLER_RECOVERED, "Normal")


def test_savings_are_measured_against_measured_or_not_said() -> None:
    state = Training(PerseusJob(JobRef("ns", "job", "uid")))
    assert status.savings(state, Measured(1, 1, 1)) is None
    state.restored(baseline=Measured(1_000_000, 2000, 3), guard=None)
    figures = status.savings(state, Measured(1_010_000, 1750, 9))
    assert figures is not None
    assert (figures.energy, figures.slowdown, figures.against) == ("12.50%", "1.00%", "Baseline")
    worse = status.savings(state, Measured(999_999, 2100, 9))
    assert worse is not None
    assert (worse.energy, worse.slowdown) == ("-5.00%", "0.00%")
    assert status.savings(state, None) is None
    assert status.savings(state, Measured(1, None, 1)) is None


def test_predicted_figures_count_the_waiting_of_the_early(job: Any) -> None:
    job.run()
    from perseus_operator.families.training.features.frontier.objective import predict

    frontier = job.state.frontier
    time_us, energy_mj = predict(frontier, {0: 0, 1: 0}, {1: 1.5}, tensor_parallel=2)
    assert time_us == 1_500_000
    waiting_mj = 2 * 80_000 * 0.5  # two stages of pipeline 0 wait half a second at 80 W
    assert energy_mj == 2 * (2 * frontier.energies_mj[0] + waiting_mj)


@pytest.mark.parametrize("ratio", [-20.0, -0.000001, 0.0, 0.03125, 99.0])
def test_percentages_fit_the_schema(ratio: float) -> None:
    import re

    assert re.fullmatch(r"-?[0-9]{1,3}(\.[0-9]{1,4})?%", percent(ratio))


def test_people_read_seconds_and_joules(job: Any) -> None:
    made = job.run()
    assert plan_event(job.state, made).message == "point 0 (1 s) on 2 pipelines, from iteration 1."
    said_of_baseline = baseline_event(Measured(1_687_043, 5_057_312, 3)).message
    assert said_of_baseline == "At default clocks an iteration takes 1.687 s and 5057 J (median of 3)."
    frontier = said(job)["FrontierReady"].message
    assert frontier.startswith(
        "11 points from T_min = 1 s to T* = 1.5 s, certified gap over all deadlines 0.001 % on average, 0.002 % at most"
    )
    texts = [condition.message for condition in said(job).values()]
    assert not [text for text in texts if "microseconds" in text or "millijoules" in text]


@pytest.mark.parametrize(
    ("time_us", "text"), [(1_687_043, "1.687 s"), (40_123, "0.04012 s"), (12_345_678_900, "12346 s"), (1e6, "1 s")]
)
def test_as_many_digits_as_mean_something(time_us: float, text: str) -> None:
    assert seconds(time_us) == text


def test_every_reason_is_used() -> None:
    import perseus_operator

    sources = [path.read_text() for path in Path(perseus_operator.__file__).parent.rglob("*.py")]
    unused = [reason.name for reason in Reason if not any(f"Reason.{reason.name}" in text for text in sources)]
    assert unused == []
