"""Steps whose time depends on their data: load raises no alarm and withdraws no plan, and hides neither for ever."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest
from tests.doubles.steps_job import Load, StepsJob

from perseus_operator.api.conditions import ConditionType
from perseus_operator.families.training.features.bound.guard import Hold
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_solver.stragglers import PaceNoise

FIVE_PERCENT = {"objective": {"type": "MaxSlowdown", "maxSlowdown": "5%"}, "baselineIterations": 3}
LOADS = {
    "all ranks alike": Load(common=0.3),
    "each rank by itself": Load(own=0.3),
    "both": Load(common=0.3, own=0.3),
    "a tenth": Load(common=0.1, own=0.1),
}
SLOW_FROM = 100


def trained(ranks: int, load: Load, steps: int, *, slowdown: float = 1.0, seed: int = 2) -> StepsJob:
    """A job after some steps; rank 1 is slow from `SLOW_FROM` on."""
    job = StepsJob(
        ranks,
        load,
        slow=lambda step, rank: slowdown if rank == 1 and step >= SLOW_FROM else 1.0,
        seed=seed,
        **FIVE_PERCENT,
    )
    job.run()
    job.step(steps)
    return job


@pytest.mark.parametrize("ranks", [2, 8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_load_raises_no_alarm_and_withdraws_no_plan(load: Load, ranks: int) -> None:
    for seed in range(3):
        job = trained(ranks, load, 200, seed=seed)
        assert not [step.stragglers for step in job.steps if step.stragglers]
        assert {step.hold for step in job.steps} == {Hold.NOTHING}
        assert all(point for point in job.steps[-1].points), "a plan runs that saves energy"


def test_a_detector_that_takes_load_for_slowness_would_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaceNoise, "sigmas", lambda self, stages: [0.0] * stages)
    job = trained(8, LOADS["each rank by itself"], 100)
    alarms = sum(bool(after.stragglers.keys() - before.stragglers.keys()) for before, after in pairwise(job.steps))
    assert alarms > 20


def test_load_that_all_ranks_share_delays_no_alarm() -> None:
    job = trained(8, LOADS["all ranks alike"], SLOW_FROM + 20, slowdown=1.1)
    first = next(number for number, step in enumerate(job.steps) if step.stragglers)
    assert first <= SLOW_FROM + 1
    assert job.steps[-1].stragglers == {1: pytest.approx(1.1, rel=0.02)}


@pytest.mark.parametrize(("slowdown", "within"), [(1.5, 64), (2.5, 16)])
def test_a_slow_rank_is_found_in_spite_of_load_the_sooner_the_slower_it_is(slowdown: float, within: int) -> None:
    for seed in range(3):
        job = trained(8, LOADS["each rank by itself"], SLOW_FROM + 120, slowdown=slowdown, seed=seed)
        found = [number for number, step in enumerate(job.steps) if step.stragglers]
        assert SLOW_FROM <= found[0] < SLOW_FROM + within
        assert {rank for step in job.steps for rank in step.stragglers} == {1}, "and no other"
        assert job.steps[-1].stragglers[1] == pytest.approx(slowdown, rel=0.3)


def test_what_load_hides_is_said() -> None:
    job = trained(8, LOADS["each rank by itself"], 100)
    said = {found.type: found.message for found in conditions_of(job.state, job.decide())}
    assert "cannot be distinguished from load" in said[ConditionType.STRAGGLER_DETECTED]
    assert "cannot be distinguished from load" in said[ConditionType.BOUND_KEPT]
    steady = trained(8, Load(), 100)
    assert not [found for found in conditions_of(steady.state, steady.decide()) if "load" in found.message]


@pytest.mark.parametrize(
    ("load", "slower"), [(LOADS["all ranks alike"], 1.8), (LOADS["a tenth"], 1.3)], ids=["0.3", "0.1"]
)
def test_a_plan_that_is_much_slower_than_it_may_be_is_withdrawn_in_spite_of_load(load: Load, slower: float) -> None:
    for seed in range(3):
        job = trained(4, load, 100, seed=seed)
        job.step(60, plan_is_slower=slower)
        assert max(step.hold for step in job.steps[:100]) is Hold.NOTHING
        assert job.steps[-1].hold is not Hold.NOTHING


def test_one_odd_iteration_makes_no_long_baseline() -> None:
    job = StepsJob(4, Load(), slow=lambda step, rank: 1.2 if step == 2 else 1.0, **FIVE_PERCENT)
    job.run()
    job.step(12)
    assert job.state.baseline is not None
    assert job.state.baseline.iterations <= 9


def test_where_iterations_vary_the_baseline_is_the_median_of_more_of_them() -> None:
    steady, varying = trained(4, Load(), 100), trained(4, LOADS["all ranks alike"], 100)
    assert steady.state.baseline is not None
    assert varying.state.baseline is not None
    assert steady.state.baseline.iterations == 3
    assert varying.state.baseline.iterations > 30
    unplanned = [step.time_s for step in varying.steps if step.points[0] is None]
    assert varying.state.baseline.time_us == pytest.approx(1e6 * median(unplanned[1:]), rel=0.1)
