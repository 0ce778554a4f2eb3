"""What the planner wants in every situation of a job's life."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operator.conftest import LIMITS

from perseus_core.iteration import IterationReport
from perseus_core.rank import RankId
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.pipeline import ScheduleName
from perseus_operator.families.training.features.frontier.inputs import ReadInputs, Solve, inputs_digest
from perseus_operator.families.training.features.stragglers.annotation import parse_annotation
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.nodes.actions import Acquire, AwaitRenewal, Push, Release, Renew, Select
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import Pod


def test_nothing_accepted_means_nothing_done(job: Any) -> None:
    job.state.job.spec = None
    job.state.job.spec_fault = Explanation(Reason.SPEC_INVALID, "spec: is required")
    made = job.decide()
    assert made.actions == ()
    assert made.waiting == job.state.job.spec_fault


def test_a_profile_is_read_then_solved_then_looked_at_again(job: Any) -> None:
    assert job.decide().actions == (ReadInputs(),)
    job.state.inputs.read_at_s, job.state.inputs.profile_digest = job.now_s, "csv"
    digest = inputs_digest(job.spec, "csv")
    assert job.decide().actions == (Solve(digest),)
    job.state.solve.solving = digest
    assert job.decide().actions == (), "one solve at a time"
    job.state.solve.solving = None
    job.state.solve.fault = digest, Explanation(Reason.SOLVE_FAILED, "no")
    assert job.decide().actions == (), "the same inputs fail the same way"
    job.state.inputs.profile_digest = "edited"
    assert job.decide().actions == (Solve(inputs_digest(job.spec, "edited")),)
    job.now_s += 60
    assert ReadInputs() in job.decide().actions


def test_a_missing_profile_is_looked_for_sooner(job: Any) -> None:
    job.state.inputs.read_at_s = job.now_s
    job.state.inputs.profile_fault = Explanation(Reason.CONFIG_MAP_NOT_FOUND, "gone")
    made = job.decide()
    assert made.actions == ()
    assert made.wake_at_s == pytest.approx(job.now_s + 5)


def test_every_input_of_the_solver_is_in_the_digest(make_job: Any) -> None:
    base = make_job().spec
    pipeline = base.pipeline
    others = [
        replace(base, pipeline=replace(pipeline, stages=3)),
        replace(base, pipeline=replace(pipeline, microbatches=5)),
        replace(base, pipeline=replace(pipeline, schedule=ScheduleName.GPIPE)),
        replace(base, pipeline=replace(pipeline, chunks=2)),
        replace(base, profile=replace(base.profile, blocking_power_milliwatts=1)),
        replace(base, points=7),
    ]
    digests = {inputs_digest(spec, "csv") for spec in [base, *others]} | {inputs_digest(base, "other")}
    assert len(digests) == len(others) + 2
    unrelated = replace(base, pipeline=replace(pipeline, data_parallel=9), baseline_iterations=5)
    assert inputs_digest(unrelated, "csv") == inputs_digest(base, "csv")


def test_lease_push_select_in_this_order_and_then_nothing(job: Any) -> None:
    job.solve()
    job.start_pods()
    assert set(job.act().actions) == {Acquire("node-0"), Acquire("node-1")}
    assert job.act().waiting.reason is Reason.WAITING_FOR_RANKS
    job.connect_ranks()
    plans = job.state.frontier.digest
    assert set(job.act().actions) == {Push(f"node-{n}", frozenset({0, 1}), plans) for n in (0, 1)}
    job.state.nodes["node-1"].iteration_reported(IterationReport(1, 0, 0, 40, 10, 10, None, None))
    assert set(job.act().actions) == {Select("node-0", ((0, 0),), 42), Select("node-1", ((1, 0),), 42)}
    made = job.act()
    assert made.actions == ()
    assert made.applied
    assert job.decide() == made, "asked twice, the same answer"


def test_a_renewal_holds_up_no_plan_and_nothing_else_changes_its_lease(job: Any) -> None:
    job.run()
    node = job.state.nodes["node-0"]
    node.renewal_started()
    job.now_s += LIMITS.lease_ttl_s / 2
    assert job.decide().actions == (Renew("node-1"),), "not twice at once"
    job.act()
    node.plans.selection_outdated()
    assert [type(action) for action in job.decide().actions] == [Select]
    node.pods_observed(node.pods | {Pod("another", "ns", "another", "node-0", "job", {})})
    made = job.decide()
    assert made.actions == (AwaitRenewal("node-0"),)
    assert made.wake_at_s > job.now_s + 1.0, "until then there is nothing to decide"
    node.renewal_ended()
    assert job.decide().actions == (Acquire("node-0"),)


def test_a_selection_does_not_wait_for_a_renewal_until_the_lease_is_short(job: Any) -> None:
    job.run()
    job.now_s += LIMITS.lease_ttl_s / 2
    for node in job.nodes:
        node.plans.selection_outdated()
    assert {type(action) for action in job.decide().actions} == {Select}
    job.act()
    assert {type(action) for action in job.decide().actions} == {Renew}
    job.now_s += LIMITS.lease_ttl_s / 4
    for node in job.nodes:
        node.plans.selection_outdated()
    assert {type(action) for action in job.decide().actions} == {Renew}


def test_the_furthest_iteration_is_of_the_processes_that_are_there(job: Any) -> None:
    job.run()
    first, second = job.nodes
    first.iteration_reported(IterationReport(0, 0, 0, 8, 10, 10, None, None))
    second.iteration_reported(IterationReport(1, 1, 0, 6, 10, 10, None, None))
    assert job.state.nodes.furthest_iteration == 9
    job.state.rank_left(first, first.ranks[0, 0, 0])
    assert job.state.nodes.furthest_iteration == 7
    job.connect_ranks(pid=2)
    assert job.state.nodes.furthest_iteration == 0, "new processes count from their own start"


def test_a_busy_node_is_left_alone_and_holds_up_nobody(job: Any) -> None:
    job.solve()
    job.start_pods()
    job.state.nodes["node-0"].busy = True
    assert job.decide().actions == (Acquire("node-1"),)


def test_nothing_is_selected_before_every_node_holds_the_plans(job: Any) -> None:
    job.solve()
    job.start_pods()
    job.connect_ranks()
    job.act()
    plans = job.state.frontier.digest
    node = job.state.nodes["node-0"]
    node.busy = True
    made = job.act()
    assert made.actions == (Push("node-1", frozenset({0, 1}), plans),)
    assert job.act().actions == ()
    node.busy = False
    assert job.act().actions == (Push("node-0", frozenset({0, 1}), plans),)
    assert {type(action) for action in job.act().actions} == {Select}


def test_leases_are_renewed_at_a_third_and_acquired_again_when_expired(job: Any) -> None:
    job.run()
    job.now_s += 9.9
    assert job.decide().actions == ()
    job.now_s += 0.2
    assert set(job.decide().actions) == {Renew("node-0"), Renew("node-1")}
    job.now_s += 20
    assert set(job.decide().actions) == {Acquire("node-0"), Acquire("node-1")}


def test_leases_that_end_at_different_times_are_renewed_in_a_few_groups(make_job: Any) -> None:
    """So the planner looks at a job of thousands of nodes a few times, not once for each of them."""
    job = make_job(pipeline={"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": 20})
    job.run()
    for n, node in enumerate(job.nodes):
        node.lease_renewed(started_s=job.now_s + n / 2, ttl_s=30.0)
    rounds = []
    for _ in range(1000):
        job.now_s += 0.1
        rounds += [len(renewed)] if (renewed := job.act().actions) else []
        assert all(node.expires_at_s > job.now_s + 30 / 2 for node in job.nodes), "never late"
    assert sum(rounds[-5:]) >= 20, f"five times in a third of the lease: {rounds}"


def test_an_agent_that_failed_is_asked_again_only_when_its_pause_is_over(job: Any) -> None:
    job.start_pods()
    job.state.inputs.read_at_s = job.now_s
    for node in job.nodes:
        node.retry_at_s = job.now_s + 2
    made = job.decide()
    assert made.actions == ()
    assert made.wake_at_s == pytest.approx(job.now_s + 2)


def test_changed_pods_mean_a_new_list_and_no_pods_mean_release(job: Any) -> None:
    job.run()
    pod = next(iter(job.state.nodes["node-0"].pods))
    job.state.pods_observed(
        Selection((pod, replace(pod, uid="pod-x", name="t-x"))),
        {"node-0": "10.0.0.0:1", "node-1": "10.0.0.1:1"},
        wall_s=0.0,
    )
    assert set(job.decide().actions) == {Acquire("node-0"), Release("node-1")}
    job.settle()
    assert sorted(job.state.nodes) == ["node-0"]


@pytest.mark.parametrize(
    ("objective", "point"),
    [
        ({"type": "MaxThroughput"}, 0),
        ({"type": "MinEnergy"}, 8),
        ({"type": "MaxSlowdown", "maxSlowdown": "12%"}, 2),
        ({"type": "MaxSlowdown", "maxSlowdown": "90%"}, 8),
        ({"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1_249_999}}, 4),
        ({"type": "PowerCap", "powerCapWatts": 2 * 902}, 2),
    ],
)
def test_objectives_choose_their_point(make_job: Any, objective: dict[str, Any], point: int) -> None:
    job = make_job(objective=objective)
    assert job.run().wanted == {0: point, 1: point}


def test_a_deadline_by_date_follows_what_is_left(make_job: Any) -> None:
    job = make_job(objective={"type": "Deadline", "deadline": {"finishBy": "2030-03-17T17:46:40Z", "iterations": 1000}})
    job.wall_s = 1_900_000_000.0  # the very second of finishBy, less what follows
    job.wall_s -= 1_200
    assert job.run().wanted == {0: 3, 1: 3}, "1.2 s each; on the grid of 1 % just below"
    job.wall_s += 200
    assert job.decide().wanted == {0: 0, 1: 0}
    job.wall_s += 100
    made = job.decide()
    assert made.wanted == {0: 0, 1: 0}, "too late: as fast as possible"
    assert "take at least 1000 s, T_min = 1 s each" in made.note


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (
            {"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 999_999}},
            "T_min = 1 s (1000000 microseconds)",
        ),
        ({"type": "PowerCap", "powerCapWatts": 10}, "powerCapWatts: 10 is less than the 1227 W"),
    ],
)
def test_an_infeasible_objective_changes_nothing(make_job: Any, objective: dict[str, Any], said: str) -> None:
    job = make_job()
    job.run()
    job.state.spec_accepted(make_job(objective=objective).spec)
    made = job.decide()
    assert made.actions == ()
    assert made.waiting is not None
    assert made.waiting.reason is Reason.OBJECTIVE_INFEASIBLE
    assert said in made.waiting.message


def test_recommend_selects_nothing_and_gives_back_what_was_selected(make_job: Any) -> None:
    job = make_job(objective={"type": "MinEnergy"})
    job.run()
    job.state.spec_accepted(make_job(objective={"type": "MinEnergy"}, mode="Recommend").spec)
    assert set(job.act().actions) == {Release("node-0"), Release("node-1")}
    assert set(job.act().actions) == {Acquire("node-0"), Acquire("node-1")}
    made = job.act()
    assert made.actions == ()
    assert made.advised_point == 8


@pytest.mark.parametrize(
    ("annotation", "wanted"),
    [
        ("1:0:1.1", {0: 2, 1: 0}),
        ("1:0:1.12,0:0:1.06", {0: 1, 1: 0}),
        ("1:0:9", {0: 10, 1: 0}),
        ("GPU-0-1:0:1.2", {0: 0, 1: 4}),
        ("1:0:1", {0: 0, 1: 0}),
        ("7:0:1.5", {0: 0, 1: 0}),
    ],
)
def test_declared_stragglers(job: Any, annotation: str, wanted: dict[int, int]) -> None:
    job.run()
    job.state.stragglers.declarations_observed(parse_annotation(annotation), now_s=job.now_s)
    assert job.settle().wanted == wanted


def test_a_pipeline_that_the_job_does_not_have_is_no_straggler_and_the_annotation_is_invalid(job: Any) -> None:
    job.run()
    job.state.stragglers.declarations_observed(parse_annotation("9:0:1.2,1:0:1.12"), now_s=job.now_s)
    made = job.settle()
    accepted, *_ = conditions_of(job.state, made)
    assert (accepted.status, accepted.reason) == (False, Reason.ANNOTATION_INVALID)
    assert "the job has data-parallel ranks 0 to 1, not 9; that entry does not count." in accepted.message
    assert set(made.slowdowns) == {1}, "the other one counts"
    job.state.stragglers.declarations_observed(parse_annotation("1:0:1.12"), now_s=job.now_s)
    assert conditions_of(job.state, job.settle())[0].status is True


def test_a_declared_straggler_waits_for_its_delay(job: Any) -> None:
    job.run()
    job.state.stragglers.declarations_observed(parse_annotation("1:5:1.2"), now_s=job.now_s)
    made = job.decide()
    assert made.slowdowns == {}
    assert made.wake_at_s == pytest.approx(job.now_s + 5)
    job.now_s += 5
    assert job.decide().slowdowns == {1: 1.2}


def test_within_an_objective_that_is_slower_a_small_straggler_changes_the_straggler_only(make_job: Any) -> None:
    job = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "30%"})
    job.run()
    job.state.stragglers.declarations_observed(parse_annotation("1:0:1.1"), now_s=job.now_s)
    # Everybody may take 1.3 s; the slow one needs a plan of 1.3 / 1.1 = 1.18 s for that.
    assert job.settle().wanted == {0: 6, 1: 3}


def test_detected_only_where_asked_for(make_job: Any) -> None:
    for mode, seen in (("Automatic", True), ("External", False), ("Ignore", False)):
        job = make_job(straggler={"mode": mode})
        job.run()
        for iteration in range(4):
            job.train(iteration, (1.0, 1.2) if iteration >= 2 else (1.0, 1.0))
        assert bool(job.decide().slowdowns) is seen, mode


@pytest.mark.parametrize(("kind", "seen"), [("THERMAL_SLOWDOWN", True), ("POWER_CAP", False), ("DRIFT", False)])
def test_a_gpu_that_says_it_is_slowed_is_believed_after_one_iteration(job: Any, kind: str, seen: bool) -> None:
    job.run()
    job.train(0)
    job.nodes[1].gpu_events["GPU-1-1", kind] = "active"
    job.train(1, (1.0, 1.2))
    assert bool(job.decide().slowdowns) is seen
    selects = [action for action in job.decide().actions if isinstance(action, Select)]
    assert {action.from_iteration for action in selects} == ({3} if seen else set()), "exactly one more iteration"


def test_the_baseline_comes_first_unless_a_plan_is_in_force_already(make_job: Any) -> None:
    job = make_job(baselineIterations=2)
    made = job.run()
    assert made.waiting is not None
    assert made.waiting.reason is Reason.MEASURING_BASELINE
    for iteration in range(3):
        job.train(iteration)
    job.state.baseline_measured()
    assert job.settle().applied

    restarted = make_job(baselineIterations=2)
    restarted.solve()
    restarted.start_pods()
    restarted.connect_ranks()
    for node in restarted.nodes:
        node.plans.driven = True  # by an operator before this one
    assert restarted.settle().applied


@pytest.mark.parametrize("told_again", [False, True])
def test_whatever_a_gpu_may_follow_is_given_back_when_clocks_may_not_be_set(make_job: Any, told_again: bool) -> None:
    """Though it would have to be said again: new processes have joined, an answer did not come, the operator is new."""
    job = make_job(objective={"type": "MinEnergy"})
    job.run()
    if told_again:
        job.connect_ranks(pid=2)
        assert not any(node.plans.selected for node in job.nodes)
    job.state.spec_accepted(make_job(mode="Recommend").spec)
    released = {action.node for action in job.decide().actions if isinstance(action, Release)}
    assert released == {node.name for node in job.nodes}
    job.settle()
    assert not any(node.plans.driven for node in job.nodes)
    assert not [action for action in job.decide().actions if isinstance(action, Release)], "once"


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        ({"stage": 7}, Reason.RANKS_MISMATCH),
        ({"dp": 2}, Reason.RANKS_MISMATCH),
        ({"tp": 1}, Reason.RANKS_MISMATCH),
    ],
)
def test_ranks_that_do_not_fit_are_never_driven(job: Any, rank: dict[str, int], reason: Reason) -> None:
    job.solve()
    job.start_pods()
    job.connect_ranks()
    node = job.state.nodes["node-0"]
    odd = replace(node.ranks.pop(RankId(0, 0, 0)), **rank)
    node.ranks[odd.id] = odd
    made = job.settle()
    assert made.waiting.reason is reason
    assert not any(node.plans.selected for node in job.nodes)
    assert all(node.plans.pushed is None or max(node.plans.pushed.stages) < 2 for node in job.nodes)


def test_a_rank_taken_twice_is_a_mismatch(job: Any) -> None:
    job.solve()
    job.start_pods()
    job.connect_ranks()
    first = job.state.nodes["node-0"].ranks[RankId(0, 0, 0)]
    job.state.nodes["node-1"].ranks[RankId(0, 0, 0)] = replace(first, pod_uid="pod-1")
    assert job.settle().waiting.reason is Reason.RANKS_MISMATCH


def test_new_processes_get_their_selection_again(job: Any) -> None:
    job.run()
    for iteration in range(20):
        job.train(iteration)
    job.connect_ranks(pid=2)
    assert {type(a) for a in job.decide().actions} == {Select}
    assert {a.from_iteration for a in job.decide().actions} == {1}
    assert job.settle().applied
    assert job.state.history is not None
    assert job.state.history.latest == -1, "they count from zero again"


def test_a_new_frontier_replaces_the_old_plans_together(make_job: Any) -> None:
    job = make_job()
    job.run()
    job.state.spec_accepted(make_job(points=50).spec)
    made = job.decide()
    assert [type(a) for a in made.actions] == [Solve]
    assert made.applied, "the old plan stays in force while the new frontier is solved"
    job.solve()
    made = job.act()
    assert {type(a) for a in made.actions} == {Push}
    assert not made.applied, "the same point, but of the plans before"
    assert {type(a) for a in job.act().actions} == {Select}
    assert job.act().applied


def test_an_unreachable_node_does_not_keep_others_from_a_straggler(job: Any) -> None:
    job.run()
    job.state.nodes["node-1"].fault = Explanation(Reason.AGENT_UNAVAILABLE, "dark")
    job.state.nodes["node-1"].busy = True
    job.state.stragglers.declarations_observed(parse_annotation("1:0:1.2"), now_s=job.now_s)
    assert job.decide().actions == (Select("node-0", ((0, 4),), 1),)
