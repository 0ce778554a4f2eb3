"""The slowdown bound holds: what is measured beyond it takes the plan away, and brings it back carefully."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.job_hardware import job_hardware
from tests.unit.operator.conftest import frontier_of, spec_of

from perseus_core.evidence import Evidence
from perseus_core.grain import Grain
from perseus_core.marks import ClockControl, MarkSource
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.families.training.features.bound.cause import ExcessCause, why_slow
from perseus_operator.families.training.features.bound.guard import (
    CONFIRM,
    Bound,
    Guard,
    Hold,
    judge,
    next_coarser,
    scatter_of,
)
from perseus_operator.families.training.features.hardware.hardware import LatencyBasis
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.status.restore import restore_from_status
from perseus_operator.jobs import document
from perseus_operator.jobs.events import condition_events
from perseus_operator.nodes.actions import Release
from perseus_operator.nodes.iterations import KEPT, JobIteration, Measured

FASTEST_US = 1_000_000


def settled(make_job: Any, **changes: Any) -> Any:
    job = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "10%"}, **changes)
    job.state.baseline = Measured(FASTEST_US, 1000, 5)
    job.run()
    return job


def points(job: Any) -> set[int]:
    return {point for node in job.nodes for point in node.plans.selected.values()}


def said(job: Any) -> tuple[bool | None, Reason, str]:
    found = next(c for c in conditions_of(job.state, job.decide()) if c.type is ConditionType.BOUND_KEPT)
    return found.status, found.reason, found.message


def test_a_plan_that_breaks_the_bound_goes_to_the_fastest_then_to_default_clocks(make_job: Any) -> None:
    job = settled(make_job)
    assert points(job) == {2}
    assert said(job)[:2] == (True, Reason.BOUND_KEPT)
    assert said(job)[2].endswith("Up to 1.00% more is taken for noise."), "1.1 s may be shown as kept at 1.11 s"
    at = job.train_on(1, CONFIRM - 1, 1.06)  # 1.1 s planned, 1.166 s measured
    assert points(job) == {2}, "a few iterations say nothing"
    at = job.train_on(at, 1, 1.06)
    assert points(job) == {0}
    assert said(job)[:2] == (False, Reason.BOUND_EXCEEDED)
    assert "took 1.166 s; MaxSlowdown allows 1.1 s. The job runs at the fastest plan" in said(job)[2]
    at = job.train_on(at + 1, 10, 1.06)
    assert points(job) == {0}, "1.06 s is within the bound"
    job.train_on(at, CONFIRM + 1, 1.2)
    assert points(job) == set(), "not even the fastest plan keeps it"
    made = job.decide()
    assert made.waiting is not None
    assert made.waiting.reason is Reason.BOUND_EXCEEDED
    assert "default clocks" in said(job)[2]
    assert all(node.leased_pods for node in job.nodes), "still leased, for telemetry"


def test_without_the_guard_the_plan_would_have_stayed(make_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perseus_operator.families.training.features.bound.aim.judge", lambda guard, *_, **__: guard)
    job = settled(make_job)
    job.train_on(1, 3 * CONFIRM, 1.06)
    assert points(job) == {2}


def test_the_plan_is_tried_again_after_pauses_that_double_until_it_holds(make_job: Any) -> None:
    job, at, pauses = settled(make_job), 1, []
    for _ in range(4):
        at = job.train_on(at, CONFIRM, 1.06)
        assert points(job) == {0}
        assert job.decide().wake_at_s <= job.state.guard.until_s
        pauses.append(job.state.guard.until_s - job.now_s)
        job.now_s = job.state.guard.until_s - 0.1
        job.settle()
        assert points(job) == {0}
        job.now_s += 0.1
        job.settle()
        assert points(job) == {2}
        at += 1
    assert pauses == [60, 120, 240, 480]
    at = job.train_on(at, CONFIRM, 1.0)
    job.now_s += 480
    job.settle()
    assert job.state.guard.trips == 0, "it held for as long as it was away"


def test_a_job_that_is_slower_by_itself_gets_its_plan_back_with_a_bound_that_fits(make_job: Any) -> None:
    job = make_job(objective={"type": "MaxThroughput"})
    job.state.baseline = Measured(FASTEST_US, 1000, 5)
    job.run()
    at = job.train_on(1, CONFIRM, 1.05)
    assert job.state.guard.hold is Hold.DEFAULT_CLOCKS
    assert not any(node.plans.selected for node in job.nodes)
    at = job.train_on(at, CONFIRM + 2, 1.05)  # at default clocks as well
    job.now_s = job.state.guard.until_s
    job.settle()
    assert points(job) == {0}
    job.train_on(at, 3 * CONFIRM, 1.05)
    assert points(job) == {0}, "the bound counts from what default clocks took"
    assert "1.05 s" in said(job)[2]


def test_noise_checkpoints_and_stragglers_do_not_trip_it(make_job: Any) -> None:
    job = settled(make_job)
    at = job.train_on(1, 10, 1.009)
    for _ in range(4):
        at = job.train_on(at, 1, 1.0)
        at = job.train_on(at, CONFIRM - 1, 1.5)
    assert points(job) == {2}
    at = job.train_on(at, 2, 1.0)
    for iteration in range(at, at + 20):
        job.train(iteration, (1.0, 1.4))
        job.act()
    assert job.state.guard.hold is Hold.NOTHING, "a straggler is waited for, whatever the plan"


def test_iterations_beside_a_straggler_do_not_trip_it_when_that_recovers(make_job: Any) -> None:
    """They are beyond the bound, which allows for the straggler no more once it has recovered."""
    job = settled(make_job)
    at = job.train_on(1, 10, 1.0)
    for iteration in range(at, at + 30):  # so many that their times scatter no more
        job.train(iteration, (1.0, 1.4))
        job.act()
    assert points(job) != {2}
    for iteration in range(at + 30, at + 45):
        job.train(iteration, (1.0, 1.0))
        job.act()
        assert job.state.guard.hold is Hold.NOTHING
    assert points(job) == {2}
    job.train_on(at + 45, CONFIRM, 1.06)
    assert job.state.guard.hold is not Hold.NOTHING, "what comes after counts"


def test_a_stored_baseline_of_no_iterations_is_one_of_few(make_job: Any) -> None:
    job = settled(make_job)
    job.state.baseline = Measured(FASTEST_US, 1000, 0)
    job.train_on(1, CONFIRM, 1.06)
    assert points(job) == {0}


@pytest.mark.parametrize("objective", [{"type": "MinEnergy"}, {"type": "PowerCap", "powerCapWatts": 1_700}])
def test_objectives_without_a_bound_have_no_guard(make_job: Any, objective: dict[str, Any]) -> None:
    job = make_job(objective=objective)
    job.state.baseline = Measured(FASTEST_US, 1000, 5)
    job.run()
    before = points(job)
    job.train_on(1, 3 * CONFIRM, 1.5)
    assert points(job) == before
    assert said(job)[1] is Reason.NO_BOUND


def test_without_anything_measured_only_an_absolute_bound_is_known(make_job: Any) -> None:
    job = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "10%"})
    job.run()
    job.train_on(1, 3 * CONFIRM, 1.5)
    assert points(job) == {2}, "a prediction that nobody has confirmed is no bound"
    absolute = make_job(objective={"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1_300_000}})
    absolute.run()
    absolute.train_on(1, CONFIRM, 1.05)
    assert points(absolute) == {0}


def test_an_edited_objective_starts_with_a_new_guard(make_job: Any) -> None:
    job = settled(make_job)
    job.train_on(1, CONFIRM, 1.06)
    assert points(job) == {0}
    job.state.spec_accepted(make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "30%"}).spec)
    job.settle()
    assert points(job) == {6}
    job.state.spec_accepted(make_job(objective={"type": "MaxThroughput"}, mode="Recommend").spec)
    assert {type(a) for a in job.decide().actions} == {Release}


def test_it_comes_and_goes_as_events(make_job: Any) -> None:
    job = settled(make_job)
    kept = conditions_of(job.state, job.decide())
    stored = document.document(kept, status.figures(job.state, job.decide()), {}, generation=1, wall_s=0.0)
    job.train_on(1, CONFIRM, 1.06)
    broken = conditions_of(job.state, job.decide())
    (went,) = [e for e in condition_events(stored, broken) if e.reason is Reason.BOUND_EXCEEDED]
    assert went.kind == "Warning"
    stored = document.document(broken, status.figures(job.state, job.decide()), {}, generation=1, wall_s=0.0)
    (came,) = [e for e in condition_events(stored, kept) if e.reason is Reason.PLAN_RETRIED]
    assert came.kind == "Normal"
    assert Reason.BOUND_KEPT not in {e.reason for e in condition_events({}, kept)}


# ------------------------------------------------------------------------------------------------------- restarts


def restarted(job: Any, make_job: Any, *, after_s: float) -> Any:
    """Another operator, which has the status and nothing else; its monotonic clock is another one."""
    stored = document.document([], status.figures(job.state, job.decide()), {}, generation=1, wall_s=job.wall_s)
    heir = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "10%"})
    heir.now_s, heir.wall_s = 7.0, job.wall_s + after_s
    restore_from_status(heir.state, stored, now_s=heir.now_s, wall_s=heir.wall_s)
    return heir


def test_a_plan_that_broke_its_bound_is_not_tried_again_because_the_operator_restarts(make_job: Any) -> None:
    job = settled(make_job)
    job.train_on(1, CONFIRM, 1.06)
    assert points(job) == {0}
    heir = restarted(job, make_job, after_s=20)
    heir.run()
    assert points(heir) == {0}, "held on"
    assert said(heir)[:2] == (False, Reason.BOUND_EXCEEDED)
    assert said(heir)[2] == said(job)[2]
    heir.now_s += 39
    heir.settle()
    assert points(heir) == {0}
    heir.now_s += 2
    heir.settle()
    assert points(heir) == {2}, "tried again when the first operator would have"
    heir.train_on(heir.state.guard.since, CONFIRM, 1.06)
    assert heir.state.guard.trips == 2, "and the pause doubles"
    assert heir.state.guard.until_s - heir.now_s == 120


def test_default_clocks_and_their_reference_outlive_a_restart(make_job: Any) -> None:
    job = settled(make_job)
    at = job.train_on(1, CONFIRM, 1.3)
    job.train_on(at, CONFIRM + 1, 1.3)
    assert job.state.guard.hold is Hold.DEFAULT_CLOCKS
    heir = restarted(job, make_job, after_s=1)
    heir.run()
    assert points(heir) == set()
    assert heir.state.guard.hold is Hold.DEFAULT_CLOCKS


@pytest.mark.parametrize("after_s", [-86_400, 0, 30, 10**6])
def test_whatever_the_clocks_say_a_pause_is_never_longer_than_it_was(make_job: Any, after_s: float) -> None:
    job = settled(make_job)
    job.train_on(1, CONFIRM, 1.06)
    heir = restarted(job, make_job, after_s=after_s)
    assert heir.state.guard.until_s - heir.now_s <= job.state.guard.pause_s
    assert heir.state.guard.until_s >= heir.now_s - job.state.guard.pause_s


def test_what_was_held_for_another_objective_or_cannot_be_read_holds_nothing(make_job: Any) -> None:
    job = settled(make_job)
    job.train_on(1, CONFIRM, 1.06)
    heir = restarted(job, make_job, after_s=1)
    heir.state.spec_accepted(make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "30%"}).spec)
    heir.run()
    assert points(heir) == {6}
    for broken in ({}, {"hold": "Nothing"}, {"hold": 3, "until": "soon"}):
        other = make_job()
        restore_from_status(other.state, {"guard": broken}, now_s=0.0, wall_s=0.0)
        assert other.state.guard.hold is Hold.NOTHING


def test_nothing_is_stored_of_a_guard_that_never_tripped(make_job: Any) -> None:
    job = settled(make_job)
    job.train_on(1, 10, 1.0)
    assert status.figures(job.state, job.decide()).guard is None


def test_a_new_attempt_of_the_training_counts_its_iterations_from_its_own_start(make_job: Any) -> None:
    job = settled(make_job)
    job.train_on(1, CONFIRM, 1.06)
    assert job.state.guard.since > 0
    job.connect_ranks(pid=2)
    assert job.state.guard.since == 0
    assert job.state.guard.hold is Hold.FASTEST_PLAN


# ------------------------------------------------------------------------------------- the cause, and coarser plans


def mixed(job: Any, grains: str) -> None:
    """The job's frontier is rehearsed: i, s, t, n for a clock for each instruction, segment, stage, or none."""
    named = {"i": Grain.INSTRUCTION, "s": Grain.SEGMENT, "t": Grain.STAGE, "n": Grain.NONE}
    job.state.solve.frontier = replace(job.state.frontier, grains=tuple(named[letter] for letter in grains))


def test_coarser_plans_are_tried_before_the_fastest_and_default_clocks(make_job: Any) -> None:
    job = settled(make_job)
    mixed(job, "itiissitiii")  # 1.0 s, 1.05 s, ...; the objective allows 1.1 s
    job.settle()
    assert points(job) == {2}
    at = job.train_on(1, CONFIRM, 1.06)
    assert (job.state.guard.hold, points(job)) == (Hold.STAGES, {1}), "no plan of segments ends in time"
    assert "one clock for each stage; the plan is tried again" in said(job)[2]
    at = job.train_on(at + 1, CONFIRM + 1, 1.12)
    assert (job.state.guard.hold, points(job)) == (Hold.FASTEST_PLAN, {0})
    job.train_on(at + 1, CONFIRM + 1, 1.2)
    assert (job.state.guard.hold, points(job)) == (Hold.DEFAULT_CLOCKS, set())
    assert job.state.guard.trips == 1, "one withdrawal in several steps"


def test_each_step_is_coarser_than_the_one_before(make_job: Any) -> None:
    job = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "30%"})
    job.state.baseline = Measured(FASTEST_US, 1000, 5)
    job.run()
    mixed(job, "istististis")
    job.settle()
    assert points(job) == {6}
    at = job.train_on(1, CONFIRM, 1.1)
    assert (job.state.guard.hold, points(job)) == (Hold.STAGES, {5}), "a plan of one clock for each stage ran the best"
    job = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "30%"})
    job.state.baseline = Measured(FASTEST_US, 1000, 5)
    job.run()
    mixed(job, "ittissiitii")
    job.settle()
    at = job.train_on(1, CONFIRM, 1.1)
    assert (job.state.guard.hold, points(job)) == (Hold.SEGMENTS, {5})
    job.train_on(at + 1, CONFIRM + 1, 1.1)
    assert (job.state.guard.hold, points(job)) == (Hold.STAGES, {2})


@given(
    st.lists(st.sampled_from(tuple(Grain)), min_size=1, max_size=12),
    st.integers(900_000, 1_700_000),
    st.sampled_from([Hold.NOTHING, Hold.SEGMENTS, Hold.STAGES, Hold.FASTEST_PLAN]),
)
def test_a_coarser_hold_changes_the_plan_to_a_coarser_one_that_ends_in_time(
    grains: list[Grain], target_us: int, hold: Hold
) -> None:
    view = replace(frontier_of(spec_of(), len(grains)), grains=tuple(grains))
    coarser = next_coarser(view, lambda grain: view.lookup(target_us + 0.5, grain), hold)
    before = view.lookup(target_us + 0.5, hold.finest)
    if coarser is None:
        return
    after = view.lookup(target_us + 0.5, coarser.finest)
    assert coarser > hold
    assert view.grain(after) > view.grain(before)
    assert view.times_us[after] <= max(target_us + 0.5, view.t_min_us)


def test_a_frontier_that_was_not_rehearsed_has_no_coarser_plans() -> None:
    view = frontier_of(spec_of())
    assert next_coarser(view, lambda grain: view.lookup(1_200_000, grain), Hold.NOTHING) is None


GOOD = Evidence(MarkSource.GPU, ClockControl.TIMETABLE, 0, below_us=0, above_us=5_000, computing_us=1_000_000)
LATE = replace(GOOD, below_us=60_000)
HELD = replace(GOOD, marks=MarkSource.HOST, control=ClockControl.HELD, lead_us=40_000)


@pytest.mark.parametrize(
    ("evidence", "cause", "says"),
    [
        (LATE, ExcessCause.SLOW_CLOCK_CHANGES, "clock changes take 60 ms"),
        (
            replace(LATE, marks=MarkSource.EVENTS, lead_us=75_000),
            ExcessCause.EARLY_MARKS,
            "marks lead the GPU by 75 ms",
        ),
        (replace(LATE, limited_mhz=1335), ExcessCause.SLOW_CLOCK_CHANGES, "6 % of the computing time"),
        (replace(GOOD, limited_mhz=1335), ExcessCause.POWER_LIMIT, "the power limit holds clocks at 1,335 MHz"),
        (replace(HELD, limited_mhz=1335), ExcessCause.POWER_LIMIT, "the power limit holds clocks at 1,335 MHz"),
        (HELD, ExcessCause.GPU_TIMES_UNKNOWN, "GPU times are not known"),
        (None, ExcessCause.GPU_TIMES_UNKNOWN, "GPU times are not known"),
        (GOOD, ExcessCause.UNKNOWN, "something else slows the iterations"),
    ],
)
def test_the_cause_is_in_the_evidence_of_the_iterations(
    make_job: Any, evidence: Evidence | None, cause: ExcessCause, says: str
) -> None:
    job = settled(make_job)
    job.state.hardware.adopted(job_hardware("H100", 60_000, 100_000, basis=LatencyBasis.MEASURED))
    job.state.solve.frontier = replace(job.state.frontier, hardware="{}")
    for iteration in range(1, 1 + CONFIRM):
        job.train(iteration, (1.06, 1.06), evidence=evidence)
        job.act()
    finding = job.state.guard.finding
    assert finding is not None
    assert finding.cause is cause
    assert says in finding.evidence
    assert f"Cause: {finding.evidence}." in said(job)[2]
    stored = status.figures(job.state, job.decide()).guard
    assert stored is not None
    assert (stored.cause, stored.evidence) == (cause.value, finding.evidence)
    heir = restarted(job, make_job, after_s=1)
    assert heir.state.guard.finding == finding


def test_an_assumed_latency_is_not_said_to_be_measured() -> None:
    slow = [iteration_with(LATE)]
    assumed = why_slow(slow, job_hardware("H100", 30_000, 100_000))
    assert "are assumed to take 30 ms" in assumed.evidence
    assert why_slow(slow, None).cause is ExcessCause.UNKNOWN


def test_one_hot_iteration_is_no_power_limit() -> None:
    slow = [iteration_with(replace(GOOD, limited_mhz=mhz)) for mhz in (None, None, None, 1200, 1200)]
    assert why_slow(slow, None).cause is not ExcessCause.POWER_LIMIT


def iteration_with(evidence: Evidence | None) -> JobIteration:
    return JobIteration(1, {0: 1}, 1, None, {0: 0}, mixed=False, evidence=evidence)


@pytest.mark.parametrize(
    ("slower", "iterations", "withdrawn"),
    [(1.05, 20_000, False), (1.2, 100, True), (1.5, 30, True)],
    ids=["a plan that uses up its 5 %", "a plan that takes 20 %", "a plan that takes 50 %"],
)
def test_iterations_that_scatter_with_their_data_hide_no_plan_and_withdraw_none(
    slower: float, iterations: int, withdrawn: bool
) -> None:
    """As where sequences differ in length: a standard deviation of 10 %, in which a slowdown of 5 % is lost."""
    scatter, random = 0.1, Random(7)
    kept = 1 + 1.645 * scatter  # by 95 % of the iterations
    bound = Bound(FASTEST_US * kept * 1.05, typical=1 / kept)
    recent: deque[JobIteration] = deque(maxlen=KEPT)
    guard = Guard()
    for number in range(iterations):
        time_us = round(FASTEST_US * slower * max(0.1, random.gauss(1.0, scatter)))
        recent.append(JobIteration(number, {0: time_us}, time_us, None, {0: 1}, mixed=False))
        measured = scatter_of(recent)
        guard = judge(
            guard, recent, bound=bound, scatter=measured, confirm=CONFIRM, furthest=number, now_s=0.0, wall_s=0.0
        )
        if guard.trips:
            break
    assert bool(guard.trips) is withdrawn
