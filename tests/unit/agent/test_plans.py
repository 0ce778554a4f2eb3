"""Which point is in force in which iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.recording_node import plan_set_of

from perseus_agent.clocks.plans import MAX_PENDING, JobPlans, wake_map
from perseus_agent.errors import InvalidRequest, UnknownPlan
from perseus_core.latency import SwitchLatency
from perseus_proto.planset import PlanSet, decode_plan_set


def plan_set(*clocks: int) -> PlanSet:
    return decode_plan_set(plan_set_of([[[clock, 600] for clock in clocks], [[clock, clock] for clock in clocks]]))


FIRST = plan_set(1200, 1005, 900)


@pytest.fixture
def plans() -> JobPlans:
    plans = JobPlans()
    plans.push(FIRST)
    return plans


def in_force(plans: JobPlans, *iterations: int, dp: int = 0) -> list[int | None]:
    found = [plans.follow(dp, 0, iteration) for iteration in iterations]
    return [None if plan is None else plan.point for plan in found]


def test_nothing_is_in_force_until_something_is_selected(plans: JobPlans) -> None:
    assert in_force(plans, 0, 10) == [None, None]


def test_a_selection_begins_at_its_iteration(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 1}, 5, {0: 2})
    assert in_force(plans, 4, 5, 99) == [None, 1, 1]
    assert in_force(plans, 5, dp=1) == [None]


def test_a_selection_that_comes_too_late_begins_at_the_next_boundary_of_all_ranks(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 1}, 5, {0: 7, 1: 8})
    assert in_force(plans, 7, 8, 9) == [None, None, 1]


def test_a_later_selection_replaces_those_it_precedes_and_keeps_those_before_it(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 0}, 0, {})
    plans.select(FIRST.plan_id, {0: 1}, 20, {0: 3})
    plans.select(FIRST.plan_id, {0: 2}, 10, {0: 3})
    assert in_force(plans, 4, 9, 10, 20) == [0, 0, 2, 2]


def test_pipelines_not_named_keep_their_point(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 0, 1: 1}, 0, {})
    plans.select(FIRST.plan_id, {1: 2}, 5, {})
    assert in_force(plans, 6) == [0]
    assert in_force(plans, 6, dp=1) == [2]


def test_a_new_plan_set_is_followed_only_once_selected_and_the_old_one_stays_until_then(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 1}, 0, {})
    second = plan_set(705, 600)
    plans.push(second)
    followed = plans.follow(0, 0, 3)
    assert followed is not None
    assert followed.plan_id == FIRST.plan_id
    plans.select(second.plan_id, {0: 1}, 5, {0: 3})
    before, after = plans.follow(0, 0, 4), plans.follow(0, 0, 5)
    assert before is not None
    assert after is not None
    assert (before.plan_id, after.plan_id) == (FIRST.plan_id, second.plan_id)
    assert after.clocks_mhz == (600, 600)


def test_a_plan_set_that_is_followed_can_be_selected_from_after_another_was_stored(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 1}, 0, {})
    second = plan_set(705, 600)
    plans.push(second)
    for iteration in range(3, 9):
        plans.select(FIRST.plan_id, {0: iteration % 3}, iteration + 1, {0: iteration})
        assert in_force(plans, iteration + 1) == [iteration % 3]
    plans.select(second.plan_id, {0: 0}, 10, {0: 9})
    plans.select(second.plan_id, {0: 1}, 12, {0: 11})
    with pytest.raises(UnknownPlan):
        plans.select(FIRST.plan_id, {0: 1}, 13, {0: 12})


@pytest.mark.parametrize(
    ("plan_id", "points", "from_iteration", "error", "rule"),
    [
        ("f" * 64, {0: 0}, 0, UnknownPlan, "is not stored here"),
        (FIRST.plan_id, {0: 3}, 0, InvalidRequest, "selections.point: 3 is beyond the 3 points"),
        (FIRST.plan_id, {0: 0, 1: 3}, 0, InvalidRequest, "selections.point"),
        (FIRST.plan_id, {}, 0, InvalidRequest, "selections: must not be empty"),
        (FIRST.plan_id, {0: 0}, 2**63, InvalidRequest, "from_iteration: must be at most"),
    ],
)
def test_a_bad_selection_is_refused_whole(
    plans: JobPlans, plan_id: str, points: dict[int, int], from_iteration: int, error: type[Exception], rule: str
) -> None:
    with pytest.raises(error, match=rule):
        plans.select(plan_id, points, from_iteration, {})
    assert plans.selections == {}


def test_pending_selections_are_bounded(plans: JobPlans) -> None:
    for number in range(MAX_PENDING):
        plans.select(FIRST.plan_id, {0: 0}, 100 + number, {0: 3})
    with pytest.raises(InvalidRequest, match="pending"):
        plans.select(FIRST.plan_id, {0: 0}, 1000, {0: 3})


def test_years_of_selections_take_no_memory(plans: JobPlans) -> None:
    for iteration in range(0, 10_000, 3):
        plans.select(FIRST.plan_id, {0: iteration % 3}, iteration + 2, {0: iteration})
    assert len(plans._snapshot.timelines[0]) <= 4


def test_new_processes_begin_with_what_was_in_force(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 2}, 5000, {0: 4990})
    plans.rebase(0, 6000)
    assert in_force(plans, 0, 1) == [2, 2]


def test_new_processes_do_not_wait_for_a_boundary_of_the_old_count(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 2}, 0, {0: 5000})
    plans.rebase(0, 5000)
    assert in_force(plans, 0, 1) == [2, 2]


def test_a_first_process_does_not_bring_a_selection_forward(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 2}, 5, {})
    plans.rebase(0, None)
    assert in_force(plans, 4, 5) == [None, 2]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=40))
def test_the_wake_map_marks_exactly_the_changes(clocks: list[int]) -> None:
    wake = wake_map(clocks)
    clock, changes = clocks[-1], []
    for place, wanted in enumerate(clocks):
        if wanted != clock:
            changes.append(place)
        clock = wanted
    assert [place for place, byte in enumerate(wake) if byte] == changes


def test_no_plan_can_be_selected_for_some_iterations(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 1, 1: 1}, 0, {})
    plans.select(FIRST.plan_id, {0: None}, 5, {0: 2})
    assert in_force(plans, 4, 5, 9) == [1, None, None]
    plans.select(FIRST.plan_id, {0: 1}, 8, {0: 6})
    assert in_force(plans, 6, 7, 8) == [None, None, 1]
    assert in_force(plans, 5, dp=1) == [1]
    assert plans.selections[0].point == 1


def latency(p50_s: float) -> SwitchLatency:
    return SwitchLatency.of_seconds(p50_s, 2 * p50_s, 0.0, False, "sent with the plan")


def changes_followed(plans: JobPlans, *iterations: int) -> list[dict[int, SwitchLatency]]:
    found = [plans.follow(0, 0, iteration) for iteration in iterations]
    return [dict(plan.changes) for plan in found if plan is not None]


def test_a_plan_knows_the_latencies_that_were_sent_with_it(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 1}, 0, {})
    assert changes_followed(plans, 0) == [{}], "an older operator sends none"
    second = replace(plan_set(705, 600), changes={705: latency(0.02)})
    plans.push(second)
    plans.select(second.plan_id, {0: 0}, 5, {0: 3})
    assert changes_followed(plans, 4, 5) == [{}, second.changes]


def test_the_same_plans_with_other_latencies_replace_those_that_are_followed_and_those_to_come(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 1}, 0, {})
    plans.select(FIRST.plan_id, {0: 2}, 10, {0: 3})
    before = plans.follow(0, 0, 4)
    known = {600: latency(0.03), 1005: latency(0.01)}
    plans.push(replace(FIRST, changes=known))
    assert changes_followed(plans, 4, 10) == [known, known]
    assert in_force(plans, 4, 10) == [1, 2], "no selection is lost"
    after = plans.follow(0, 0, 4)
    assert before is not None
    assert after is not None
    assert replace(after, changes={}) == before
    plans.select(FIRST.plan_id, {0: 0}, 12, {0: 11})
    assert changes_followed(plans, 12) == [known]
    plans.push(FIRST)
    assert changes_followed(plans, 10, 12) == [{}, {}]


def test_the_same_plans_with_the_same_latencies_are_no_other_plan(plans: JobPlans) -> None:
    """A rank that follows it begins its timetable anew with another one."""
    plans.push(replace(FIRST, changes={600: latency(0.03)}))
    plans.select(FIRST.plan_id, {0: 1}, 0, {})
    followed = plans.follow(0, 0, 4)
    plans.push(replace(FIRST, changes={600: latency(0.03)}))
    assert plans.follow(0, 0, 4) is followed


def test_latencies_of_one_plan_set_are_not_those_of_another(plans: JobPlans) -> None:
    plans.select(FIRST.plan_id, {0: 1}, 0, {})
    plans.push(replace(plan_set(705, 600), changes={705: latency(0.02)}))
    assert changes_followed(plans, 4) == [{}]
