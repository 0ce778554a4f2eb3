"""When a job is profiled, and what its nodes are told meanwhile: the planner's decisions, with agents that obey."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perseus_core.iteration import IterationReport
from perseus_operator.api.conditions import Condition, ConditionType, Explanation, Reason
from perseus_operator.families.training.decide import Decision
from perseus_operator.families.training.features.profile.decision import BeginSweep, SaveSweep, StoreProfile
from perseus_operator.families.training.features.profile.reading import Mean, Reading, StageReading
from perseus_operator.families.training.features.profile.sweep import DIGEST_PREFIX, Sweep
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.nodes.actions import Push, Release, Select
from perseus_operator.nodes.workloads import Selection

ONLINE: dict[str, Any] = {"profileRef": {"name": "p"}, "online": {"maxClocks": 4, "iterationsPerClock": 2}}
CLOCKS = tuple(range(600, 1001, 100))
MISSING = Explanation(Reason.PROFILE_NOT_FOUND, "PerseusProfile p does not exist.")


def profiled(make_job: Any, **changes: Any) -> Any:
    """A job whose profile does not exist, with all its processes there."""
    job = make_job(**{"profile": ONLINE, **changes})
    job.state.inputs.profile_fault, job.state.inputs.read_at_s = MISSING, job.now_s
    job.start_pods()
    job.connect_ranks()
    for node in job.nodes:
        node.clocks_mhz = {rank.gpu_uuid: CLOCKS for rank in node.ranks.values()}
    return job


def obey(job: Any) -> Decision:
    """One thought, agents and profiler doing as they are told."""
    made: Decision = job.act()
    own = job.state.profiling
    for action in made.actions:
        if isinstance(action, BeginSweep):
            own.sweep, own.readings_stored = action.sweep, 0
        elif isinstance(action, SaveSweep):
            own.readings_stored = own.sweep.measured
        elif isinstance(action, StoreProfile):
            own.profile_stored = True
    return made


def settle(job: Any) -> Decision:
    for _ in range(8):
        made = obey(job)
    return made


def measure(job: Any, energy_mj: float) -> None:
    """The clock being measured is."""
    sweep: Sweep = job.state.profiling.sweep
    clock = sweep.clocks_mhz[sweep.point]
    stage = StageReading(1e9 / clock, energy_mj, {("forward", 0): Mean(1, 1e8 / clock, energy_mj / 2)})
    job.state.profiling.sweep = sweep.add(Reading(clock, 1e9 / clock, (stage, stage)))


def said(job: Any, made: Decision, kind: ConditionType = ConditionType.PROFILE_READY) -> Condition:
    return next(c for c in conditions_of(job.state, made) if c.type is kind)


def test_a_sweep_from_the_first_clock_to_the_profile(make_job: Any) -> None:
    job = profiled(make_job)
    made = settle(job)
    sweep = job.state.profiling.sweep
    assert sweep.clocks_mhz == (1000, 800, 600), "at most four at equal steps: five clocks in steps of two"
    assert all(node.plans.pushed and node.plans.pushed.serve({0, 1}, sweep.digest) for node in job.nodes)
    for point in range(3):
        assert all(node.plans.selected == {p: point} for p, node in enumerate(job.nodes))
        assert f"clock {point + 1} of at most 3: 0 of 2 iterations" in said(job, made).message
        assert said(job, made).reason is said(job, made, ConditionType.PLAN_APPLIED).reason is Reason.PROFILING
        assert status.planned_slowdown(job.state, made) == pytest.approx(1000 / sweep.clocks_mhz[point])
        assert not made.applied
        measure(job, 1000 - point)
        made = settle(job)
    assert job.state.profiling.readings_stored == 2, "after every clock but the last, which is kept with the profile"
    assert job.state.profiling.profile_stored
    assert all(node.plans.selected == {p: 0} for p, node in enumerate(job.nodes)), "the highest clock at first"
    assert not [action for action in obey(job).actions if isinstance(action, StoreProfile)], "kept once"
    job.state.inputs.profile_fault = None
    job.solve()
    job.state.profiling.sweep = None
    made = settle(job)
    assert made.applied
    assert all(node.plans.pushed.digest == job.state.frontier.digest for node in job.nodes)


def test_nothing_is_measured_where_there_is_a_profile_or_nobody_asked(make_job: Any) -> None:
    job = profiled(make_job)
    job.state.inputs.profile_fault = None
    job.solve()
    assert settle(job).applied
    assert job.state.profiling.sweep is None
    bare = profiled(make_job, profile={"profileRef": {"name": "p"}})
    assert settle(bare).profiling is None
    assert said(bare, bare.decide()).reason is Reason.PROFILE_NOT_FOUND
    damaged = profiled(make_job)
    damaged.state.inputs.profile_fault = Explanation(Reason.PROFILE_INVALID, "row 3")
    assert settle(damaged).profiling is None, "it is somebody's: nothing is written into it"


def test_recommend_changes_no_clock_and_says_what_it_needs(make_job: Any) -> None:
    job = profiled(make_job, mode="Recommend")
    made = settle(job)
    assert said(job, made).reason is Reason.PROFILING_NEEDS_ENFORCE
    assert "needs spec.mode Enforce" in said(job, made).message
    assert not any(node.plans.pushed or node.plans.selected for node in job.nodes)
    enforced = profiled(make_job)
    settle(enforced)
    measure(enforced, 1000)
    settle(enforced)
    enforced.state.spec_accepted(make_job(profile=ONLINE, mode="Recommend").spec)
    assert any(isinstance(action, Release) for action in enforced.decide().actions)
    settle(enforced)
    enforced.state.spec_accepted(make_job(profile=ONLINE).spec)
    settle(enforced)
    assert enforced.state.profiling.sweep.point == 1, "it goes on where it was"
    assert all(node.plans.selected == {p: 1} for p, node in enumerate(enforced.nodes))


def test_the_baseline_comes_first(make_job: Any) -> None:
    job = profiled(make_job, baselineIterations=2)
    made = settle(job)
    assert not any(node.plans.selected for node in job.nodes)
    assert "default clocks" in said(job, made).message
    assert "It takes at most 9 iterations at 3 clocks, slower by at most" in said(job, made).message, "before it begins"
    for iteration in range(4):
        for p, node in enumerate(job.nodes):
            for stage in range(2):
                job.state.iteration_reported(node, IterationReport(p, stage, 0, iteration, 10, 10, 1000, None))
    job.state.baseline_measured()
    settle(job)
    assert all(node.plans.selected for node in job.nodes)


def test_a_lost_lease_and_new_pods_go_on_where_it_was(make_job: Any) -> None:
    job = profiled(make_job)
    settle(job)
    measure(job, 1000)
    settle(job)
    job.nodes[0].lease_lost()
    made = obey(job)
    made = settle(job)
    assert all(node.plans.selected == {p: 1} for p, node in enumerate(job.nodes))
    job.state.pods_observed(Selection(()), {n.name: n.address for n in job.nodes}, wall_s=0.0)
    assert "No pod of the job is running" in said(job, job.decide()).message
    job.start_pods()
    job.connect_ranks(pid=2)
    made = settle(job)
    assert job.state.profiling.sweep.point == 1
    assert [a for a in made.actions if isinstance(a, Select | Push)] == []
    assert all(node.plans.selected == {p: 1} for p, node in enumerate(job.nodes))


def test_other_gpus_or_another_number_of_clocks_start_a_new_sweep(make_job: Any) -> None:
    job = profiled(make_job)
    settle(job)
    measure(job, 1000)
    for node in job.nodes:
        node.clocks_mhz = dict.fromkeys(node.clocks_mhz, (500, 900))
    settle(job)
    assert job.state.profiling.sweep.clocks_mhz == (900, 500)
    assert job.state.profiling.sweep.readings == ()
    measure(job, 1000)
    longer = {**ONLINE, "online": {**ONLINE["online"], "maxDurationSeconds": 10}}
    job.state.spec_accepted(make_job(profile=longer).spec)
    settle(job)
    assert len(job.state.profiling.sweep.readings) == 1, "other bounds do not undo what has been measured"
    assert job.state.profiling.sweep.recipe.most_us == 10_000_000


def test_what_cannot_be_measured_is_said_and_leaves_default_clocks(make_job: Any) -> None:
    locked = profiled(make_job)
    locked.nodes[0].uncontrollable = {"GPU-0-0": "MIG"}
    made = settle(locked)
    assert said(locked, made).reason is Reason.PROFILING_FAILED
    assert "GPU-0-0 on node-0" in said(locked, made).message
    mixed = profiled(make_job)
    mixed.nodes[0].clocks_mhz = dict.fromkeys(mixed.nodes[0].clocks_mhz, (1, 2))
    assert "0 clocks in common" in said(mixed, settle(mixed)).message
    late = profiled(make_job)
    settle(late)
    late.state.profiling.sweep = replace(late.state.profiling.sweep, spent_us=10**12)
    made = settle(late)
    assert "raise spec.profile.online.maxDurationSeconds" in said(late, made).message
    assert not any(node.plans.selected for node in late.nodes)
    stuck = profiled(make_job)
    settle(stuck)
    stuck.state.profiling.rejection = "dp 0, stage 1 does not follow its schedule"
    assert "was rejected: dp 0, stage 1 does not follow" in said(stuck, stuck.decide()).message


def test_stragglers_and_the_objective_s_bound_wait_until_it_is_over(make_job: Any) -> None:
    """Points of a sweep are not those of the frontier, though there is one: the profile is measured anew."""
    job = make_job(profile=ONLINE)
    job.run()
    for node in job.nodes:
        node.clocks_mhz = {rank.gpu_uuid: CLOCKS for rank in node.ranks.values()}
    job.state.profiling.stale_profile = "csv"
    settle(job)
    measure(job, 1000)
    settle(job)
    assert job.state.sweeping
    for iteration in range(12):
        for p, node in enumerate(job.nodes):
            for stage in range(2):
                span_us = 3_000_000 if p else 1_000_000
                told = job.state.iteration_reported(
                    node, IterationReport(p, stage, 0, iteration, 3_000_000, span_us, 1000, 1)
                )
    assert told is not None
    assert not job.state.is_typical(told), "nothing is learnt from it either"
    assert job.state.stragglers.detector.slowdowns == {}
    made = job.decide()
    assert made.slowdowns == {}
    assert made.guard == job.state.guard


STEPS: dict[str, Any] = {"schedule": "Steps", "stages": 1, "dataParallel": 2}


@pytest.mark.parametrize(
    ("objective", "best_mhz"),
    [
        ({"type": "MaxSlowdown", "maxSlowdown": "30%"}, 1000),
        ({"type": "MinEnergy"}, 800),
        ({"type": "MaxThroughput"}, 1200),
        ({"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1_050_000}}, 1000),
        ({"type": "PowerCap", "powerCapWatts": 1_300}, 1000),
    ],
)
def test_where_a_plan_is_one_clock_those_around_the_best_are_measured(
    make_job: Any, objective: dict[str, Any], best_mhz: int
) -> None:
    """Of 300 to 1,200 MHz every 50, every fourth is measured first; energy is least at 800."""
    supported = tuple(range(300, 1201, 50))
    online = {**ONLINE, "online": {**ONLINE["online"], "maxClocks": 5}}
    job = profiled(make_job, profile=online, pipeline=STEPS, objective=objective)
    for node in job.nodes:
        node.clocks_mhz = dict.fromkeys(node.clocks_mhz, supported)
    settle(job)
    while not job.state.profiling.profile_stored:
        sweep = job.state.profiling.sweep
        clock = sweep.clocks_mhz[sweep.point]
        energy_mj = 500_000.0 + abs(clock - 800) * 500
        stage = StageReading(1e9 / clock, energy_mj, {("step", 0): Mean(1, 1e9 / clock, energy_mj)})
        job.state.profiling.sweep = sweep.add(Reading(clock, 1e9 / clock, (stage,)))
        made = settle(job)
        if not job.state.profiling.profile_stored:
            assert "will be measured" in said(job, made).message or "Measuring" in said(job, made).message
    clocks = job.state.profiling.sweep.clocks_mhz
    assert clocks[:4] == (1200, 1000, 800, 600)
    around = range(best_mhz + 150, best_mhz - 200, -50)
    assert clocks[4:] == tuple(clock for clock in around if clock < 1200 and clock != best_mhz)


def test_where_steps_vary_clocks_are_measured_again_instead_of_those_around_the_best(make_job: Any) -> None:
    job = profiled(make_job, pipeline=STEPS)
    settle(job)
    messages = []
    while not job.state.profiling.profile_stored:
        sweep = job.state.profiling.sweep
        clock = sweep.clocks_mhz[sweep.point]
        stage = StageReading(1e9 / clock, 1e6, {("step", 0): Mean(1, 1e9 / clock, 1e6)})
        job.state.profiling.sweep = sweep.add(Reading(clock, 1e9 / clock, (stage,), (0.2,), iterations=2))
        messages.append(said(job, settle(job)).message)
        assert job.state.profiling.readings_stored >= sweep.measured, "what a restarted operator goes on with"
    sweep = job.state.profiling.sweep
    assert sweep.clocks_mhz == (1000, 800, 600)
    assert {reading.iterations for reading in sweep.readings} == {64}
    assert "Measuring 600 MHz, clock 3 of 3, in round 2 because steps vary by" in messages[2]
    assert [node.plans.selected for node in job.nodes] == [{0: 0}, {1: 0}]


def test_a_pipeline_mixes_clocks_and_needs_none_between_them(make_job: Any) -> None:
    job = profiled(make_job)
    settle(job)
    for energy in (1000, 990, 980):
        measure(job, energy)
    settle(job)
    assert job.state.profiling.profile_stored
    assert not job.state.profiling.sweep.chosen_mhz


def test_a_profile_that_no_longer_fits_is_measured_again(make_job: Any) -> None:
    job = make_job(profile=ONLINE)
    job.run()
    for node in job.nodes:
        node.clocks_mhz = {rank.gpu_uuid: CLOCKS for rank in node.ranks.values()}
    assert settle(job).applied
    job.state.profiling.stale_profile, job.state.profiling.stale_reason = (
        "csv",
        "Stage 1 takes 13% more time than profiled. ",
    )
    made = settle(job)
    assert job.state.profiling.sweep.replaces == "csv"
    assert said(job, made).message.startswith("Stage 1 takes 13% more time than profiled. Measuring 1000 MHz")
    assert all(node.plans.pushed.digest.startswith(DIGEST_PREFIX) for node in job.nodes)
    # Too little could be measured: then the old profile must do.
    job.state.profiling.fault = Explanation(Reason.PROFILING_FAILED, "no")
    assert settle(job).applied


def test_writes_that_fail_are_tried_again_later(make_job: Any) -> None:
    job = profiled(make_job)
    settle(job)
    measure(job, 1000)
    job.state.profiling.retry_at_s = job.now_s + 5
    made = job.decide()
    assert not [action for action in made.actions if isinstance(action, SaveSweep)]
    assert made.wake_at_s <= job.now_s + 5
    job.now_s += 5
    assert [action for action in job.decide().actions if isinstance(action, SaveSweep)]
    job.state.profiling.writing = True
    assert not [action for action in job.decide().actions if isinstance(action, SaveSweep)]
