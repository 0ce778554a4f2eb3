"""Pipelines that are faster than the slowest run slower, by what they would only wait, and by no more."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.steps_job import Load, StepsJob
from tests.unit.operator.conftest import frontier_of, spec_of

from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.families.training.decide import common_point
from perseus_operator.families.training.features.bound.guard import Hold
from perseus_operator.families.training.features.frontier.objective import PipelineSpread, select_points
from perseus_operator.families.training.features.stragglers.spread import Spread
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of

THROUGHPUT = {"objective": {"type": "MaxThroughput"}}


def after(factors: dict[int, float], iterations: int, *, noise: float = 0.0, seed: int = 1) -> Spread:
    spread, chance = Spread(), random.Random(seed)
    for _ in range(iterations):
        ratios = {dp: factor * math.exp(chance.gauss(0, noise)) for dp, factor in factors.items()}
        spread.observe(ratios, sigma=noise, confirm=2)
    return spread


def test_factors_are_those_of_the_pipelines_beside_the_median_one() -> None:
    found = after({0: 1.0, 1: 1.04, 2: 0.97}, 20, noise=0.002)
    assert found.factors == {dp: pytest.approx(factor, rel=0.008) for dp, factor in {0: 1.0, 1: 1.04, 2: 0.97}.items()}
    assert 1.0 < found.margin < 1.01


def test_equal_pipelines_and_few_iterations_and_unknown_noise_say_nothing() -> None:
    assert after({0: 1.0, 1: 1.001, 2: 0.999}, 40, noise=0.001).factors == {}
    assert after({0: 1.0, 1: 1.04}, 8).factors == {}
    unknown = Spread()
    for _ in range(40):
        unknown.observe({0: 1.0, 1: 1.04}, sigma=math.inf, confirm=2)
    assert (unknown.factors, unknown.margin) == ({}, 1.0)
    assert after({0: 1.0}, 40).factors == {}, "one pipeline waits for nobody"


def test_a_pipeline_that_becomes_slower_counts_at_once_and_one_that_becomes_faster_later() -> None:
    spread = after({0: 1.0, 1: 1.0, 2: 1.04}, 30, noise=0.001)
    for _ in range(2):
        spread.observe({0: 1.03, 1: 1.0, 2: 1.04}, sigma=0.001, confirm=2)
    assert spread.factors[0] == pytest.approx(1.03, rel=0.008)
    for _ in range(6):
        spread.observe({0: 1.0, 1: 1.0, 2: 1.04}, sigma=0.001, confirm=2)
    assert spread.factors[0] == pytest.approx(1.03, rel=0.008), "so that clocks do not come and go"
    for _ in range(20):
        spread.observe({0: 1.0, 1: 1.0, 2: 1.04}, sigma=0.001, confirm=2)
    assert spread.factors[0] == pytest.approx(1.0, rel=0.008)


@pytest.mark.parametrize("slowdown", [1.2, 2.0])
def test_after_a_straggler_all_run_as_before_it(slowdown: float) -> None:
    job = StepsJob(
        4,
        Load(own=0.001),
        slow=lambda step, rank: slowdown if rank == 1 and 60 <= step < 90 else 1.02 if rank == 2 else 1.0,
        **THROUGHPUT,
    )
    job.run()
    job.step(60)
    before = job.steps[-1].points
    job.step(30)
    assert job.steps[-1].points != before
    job.step(6)
    assert job.steps[-1].points == before


@given(
    factors=st.lists(st.floats(0.8, 1.3), min_size=1, max_size=8),
    stragglers=st.dictionaries(st.integers(0, 7), st.floats(1.05, 2.0), max_size=2),
    target_us=st.integers(1_000_000, 1_500_000),
    margin=st.floats(1.0, 1.1),
)
def test_no_pipeline_is_planned_beyond_the_slowest(
    factors: list[float], stragglers: dict[int, float], target_us: int, margin: float
) -> None:
    view, pipelines = frontier_of(spec_of()), len(factors)
    slow = {p: slowdown for p, slowdown in stragglers.items() if p < pipelines}
    own = dict(enumerate(factors))
    points = select_points(view, target_us, pipelines, slow, spread=PipelineSpread(own, margin))
    healthy = [factor for p, factor in own.items() if p not in slow]
    last_us = max([target_us * max(healthy, default=1.0), *(s * target_us for s in slow.values())])
    for p, point in points.items():
        assert slow.get(p, own[p]) * view.times_us[point] <= max(last_us, slow.get(p, own[p]) * view.t_min_us) * 1.001
    alike = select_points(view, target_us, pipelines, {}, spread=PipelineSpread(dict.fromkeys(own, 1.07)))
    assert alike == select_points(view, target_us, pipelines, {}), "all alike is nothing to use"


@given(
    st.dictionaries(st.integers(0, 3), st.floats(1.05, 2.0), max_size=4),
    st.lists(st.floats(0.9, 1.1), min_size=4, max_size=4),
    st.integers(1_000_000, 1_500_000),
    st.floats(1.0, 1.1),
)
def test_within_a_share_no_pipeline_is_planned_faster_than_it_allows(
    slow: dict[int, float], factors: list[float], target_us: int, margin: float
) -> None:
    view, spread = frontier_of(spec_of()), PipelineSpread(dict(enumerate(factors)), margin)
    points = select_points(view, target_us, 4, slow, spread=spread, least_us=target_us)
    assert min(points.values()) >= view.lookup(target_us + 0.5)


@given(st.lists(st.floats(0.9, 1.1), min_size=2, max_size=8), st.integers(1_000_000, 1_500_000))
def test_a_deadline_is_kept_by_the_slow_pipelines_too(factors: list[float], target_us: int) -> None:
    view = frontier_of(spec_of())
    spread = PipelineSpread(dict(enumerate(factors)), relative=False)
    for p, point in select_points(view, target_us, len(factors), {}, spread=spread).items():
        assert point == 0 or factors[p] * view.times_us[point] <= target_us + 2


def spread_gpus(ranks: int, seed: int, deviation: float = 0.015) -> list[float]:
    """GPUs that differ as published: by 8 % from the slowest to the fastest usual one (arXiv 2208.11035)."""
    chance = random.Random(seed)
    return [math.exp(chance.gauss(0.0, deviation)) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise", [0.002, 0.02, 0.1])
def test_gpus_that_differ_save_what_they_would_wait_and_cost_no_time(ranks: int, noise: float) -> None:
    for seed in range(2):
        gpus = spread_gpus(ranks, seed)
        job = StepsJob(ranks, Load(own=noise), slow=lambda step, rank, gpus=gpus: gpus[rank], seed=seed, **THROUGHPUT)
        alike = StepsJob(
            ranks,
            Load(own=noise),
            slow=lambda step, rank, gpus=gpus: gpus[rank],
            seed=seed,
            straggler={"mode": "Ignore"},
            **THROUGHPUT,
        )
        for one in (job, alike):
            one.run()
            one.step(100)
        took, would_have = (sum(step.time_s for step in one.steps[-50:]) for one in (job, alike))
        spent, would_spend = (sum(step.energy_j for step in one.steps[-50:]) for one in (job, alike))
        assert took <= would_have * 1.003
        assert spent <= would_spend * (0.99 if noise < 0.01 else 1.001)
        assert {step.hold for step in job.steps} == {Hold.NOTHING}


def test_a_rank_that_becomes_slower_than_it_was_is_followed_before_the_plan_is_withdrawn() -> None:
    gpus = [1.0, 1.0, 1.04, 1.0]
    job = StepsJob(
        4,
        Load(own=0.001),
        slow=lambda step, rank: gpus[rank] * (1.03 if rank == 0 and step >= 80 else 1.0),
        **THROUGHPUT,
    )
    job.run()
    job.step(80)
    before = job.steps[-1].points
    assert before[0] is not None
    assert before[2] is not None
    assert before[0] > before[2]
    job.step(40)
    assert (job.steps[-1].points[0] or 0) < before[0]
    assert {step.hold for step in job.steps} == {Hold.NOTHING}


@pytest.mark.parametrize("mode", ["External", "Ignore"])
def test_what_is_measured_counts_only_where_stragglers_are_detected(mode: str) -> None:
    job = StepsJob(
        4, Load(), slow=lambda step, rank: 1.04 if rank == 1 else 1.0, straggler={"mode": mode}, **THROUGHPUT
    )
    job.run()
    job.step(60)
    assert job.state.stragglers.detector.spread.factors
    assert len(set(job.steps[-1].points)) == 1


def test_the_status_says_who_runs_slower_and_what_the_job_will_take() -> None:
    job = StepsJob(4, Load(own=0.001), slow=lambda step, rank: 1.04 if rank == 1 else 1.0, **THROUGHPUT)
    job.run()
    job.step(60)
    decision = job.decide()
    said = {found.type: found.message for found in conditions_of(job.state, decision)}
    assert "3 pipelines of 4, up to 4" in said[ConditionType.PLAN_APPLIED]
    assert job.state.frontier is not None
    point = common_point(decision.wanted, decision.slowdowns)
    assert point == decision.wanted[1], "the slowest pipeline's is the objective's"
    predicted = status.figures(job.state, decision).predicted
    assert predicted is not None
    assert predicted.iteration_time_microseconds == pytest.approx(
        1.04 * job.state.frontier.expected_us[point], rel=0.01
    )


def test_steps_that_hold_the_wait_for_others_say_nothing_and_the_status_says_so() -> None:
    job = StepsJob(
        4, Load(), slow=lambda step, rank: 1.3 if rank == 1 and step > 30 else 1.0, own_time=False, **THROUGHPUT
    )
    job.run()
    job.step(80)
    assert not any(step.stragglers for step in job.steps)
    assert job.state.stragglers.detector.spread.factors == {}
    (found,) = [one for one in conditions_of(job.state, job.decide()) if one.type is ConditionType.STRAGGLER_DETECTED]
    assert (found.status, found.reason) == (None, Reason.WAITS_NOT_MARKED)
    assert "pass the model to perseus_client.steps" in found.message
    for alike in ({"straggler": {"mode": "External"}}, {"ranks": 1}):
        other = StepsJob(**{"ranks": 4, "load": Load(), "own_time": False, **THROUGHPUT, **alike})
        other.run()
        other.step(5)
        (found,) = [
            one for one in conditions_of(other.state, other.decide()) if one.type is ConditionType.STRAGGLER_DETECTED
        ]
        assert found.reason is Reason.NO_STRAGGLER, "nothing is to be detected"
