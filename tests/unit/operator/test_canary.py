"""Mode Canary: the plan on one pipeline, what it is compared with, and what follows."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from perseus_core.units import ratio_from_share
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.budgets.allocation import Share
from perseus_operator.errors import InvalidSpec
from perseus_operator.families.training.features.canary.decision import ATTEMPTS, ITERATIONS, PAUSE
from perseus_operator.families.training.features.canary.state import Canary, Phase, canary_from_status
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.jobs import document
from perseus_operator.nodes.actions import Release

SLOW = {"type": "MaxSlowdown", "maxSlowdown": "23%"}
"""The slowest plan within it is 20 % slower."""
DEFAULT_MJ = 100_000


class Run:
    """Two pipelines, the second of which always draws a tenth more; the plan changes energy and time of the first."""

    def __init__(self, make_job: Any, *, saved: float = 0.2, slower: float = 1.0, noise: float = 0.0) -> None:
        self.job = make_job(mode="Canary", objective=SLOW, baselineIterations=3, comparison={"everyIterations": 0})
        self.saved, self.slower, self.noise = saved, slower, noise
        self.drawn = random.Random(5)
        self.iteration = 1
        self.points: list[dict[int, int | None]] = []
        self.job.solve()
        self.job.start_pods()
        self.job.connect_ranks()
        self.job.settle()

    def train(self, count: int = 1, slowdowns: tuple[float, float] = (1.0, 1.0)) -> None:
        for _ in range(count):
            points = {p: node.plans.selected.get(p) for p, node in enumerate(self.job.nodes)}
            self.points.append(points)
            planned = points[0] is not None
            own_mj = DEFAULT_MJ * (1 - self.saved if planned else 1) * self.drawn.gauss(1, self.noise)
            factors = (slowdowns[0] * (self.slower if planned else 1), slowdowns[1])
            self.job.train(self.iteration, factors, energy_mj=(round(own_mj), round(1.1 * DEFAULT_MJ)))
            self.iteration += 1
            self.job.state.baseline_measured()
            for _ in range(4):
                self.job.act()

    def reason(self) -> tuple[bool | None, Reason]:
        made = conditions_of(self.job.state, self.job.decide())
        return next((c.status, c.reason) for c in made if c.type is ConditionType.PLAN_APPLIED)


def test_a_plan_that_saves_goes_from_one_pipeline_to_all(make_job: Any) -> None:
    run = Run(make_job, noise=0.01)
    run.train(3)
    assert {point for points in run.points for point in points.values()} == {None}, "the baseline comes first"
    assert run.reason() == (False, Reason.CANARY)
    run.train(ITERATIONS + 2)
    tested = [points for points in run.points[3:] if points[0] is not None and points[1] is None]
    assert len(tested) >= ITERATIONS
    assert run.reason() == (True, Reason.PLAN_IN_FORCE)
    assert {point for node in run.job.nodes for point in node.plans.selected.values()} == {run.job.decide().wanted[0]}
    shown = status.figures(run.job.state, run.job.decide()).canary
    assert shown is not None
    assert shown.phase == "Passed"
    assert shown.saved is not None
    assert ratio_from_share(shown.saved) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    ("conduct", "why"),
    [
        ({"saved": -0.01}, "The canary saved -1.00%, which may be nothing but scatter"),
        ({"saved": 0.005, "noise": 0.02}, "which may be nothing but scatter"),
    ],
    ids=["takes more", "lost in noise"],
)
def test_one_that_does_not_goes_back_and_says_why(make_job: Any, conduct: dict[str, float], why: str) -> None:
    run = Run(make_job, **conduct)
    run.train(3 + ITERATIONS + 2)
    assert_it_has_failed(run, why)


@pytest.mark.parametrize(
    ("slower", "why"),
    [(1.02, "% slower, "), (1.3, "With the plan pipeline 0 became a straggler, 30.00% slower.")],
    ids=["slower than planned", "much slower"],
)
def test_one_that_is_too_slow_each_time_is_given_up(make_job: Any, slower: float, why: str) -> None:
    run = Run(make_job, slower=slower)
    run.train(PAUSE)
    assert run.reason() == (False, Reason.CANARY)
    made = run.job.decide()
    assert made.waiting is not None
    assert why in made.waiting.message
    assert f"All run at default clocks; attempt 2 of {ATTEMPTS} begins at iteration " in made.waiting.message
    run.train(PAUSE * 2**ATTEMPTS)
    assert_it_has_failed(run, why)
    planned = [points[0] is not None for points in run.points]
    assert sum(not before and after for before, after in pairwise(planned)) == ATTEMPTS


@pytest.mark.parametrize("disturbed", [1.02, 1.3], ids=["a little", "much"])
def test_one_that_was_disturbed_once_passes(make_job: Any, disturbed: float) -> None:
    run = Run(make_job, noise=0.01)
    run.train(4)
    assert run.points[-1][0] is not None
    run.train(ITERATIONS + 1, (disturbed, 1.0))
    assert run.job.state.canary.phase is Phase.TESTING
    assert run.job.state.canary.slow_attempts == 1
    run.train(2 * PAUSE)
    assert run.reason() == (True, Reason.PLAN_IN_FORCE)
    assert run.job.state.canary.phase is Phase.PASSED


def test_another_attempt_of_the_workload_does_not_wait_for_an_iteration_of_the_one_before(make_job: Any) -> None:
    run = Run(make_job)
    run.iteration = 10_000
    run.train(4)
    run.train(ITERATIONS + 1, (1.3, 1.0))
    assert run.job.state.canary.resume_at > 10_000
    run.iteration = 1
    run.job.connect_ranks(pid=2)
    run.train(ITERATIONS + 5)
    assert run.job.state.canary.phase is Phase.PASSED


def assert_it_has_failed(run: Run, why: str) -> None:
    made = run.job.decide()
    assert run.reason() == (False, Reason.CANARY_FAILED)
    assert made.waiting is not None
    assert why in made.waiting.message
    run.job.settle()
    assert not any(node.plans.driven for node in run.job.nodes)
    run.train(5)
    assert set(run.points[-1].values()) == {None}, "it is not tried again"


def test_gpus_that_were_given_back_are_released(make_job: Any) -> None:
    run = Run(make_job)
    run.train(5)
    run.job.state.canary_judged(Canary(Phase.FAILED, why="Too slow."))
    assert [type(action) for action in run.job.act().actions] == [Release, Release]


def test_an_edit_of_the_objective_tries_again(make_job: Any) -> None:
    run = Run(make_job)
    run.job.state.canary_judged(Canary(Phase.FAILED, why="Too slow."))
    raw = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": 2},
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
        "objective": {"type": "MinEnergy"},
        "mode": "Canary",
    }
    run.job.state.spec_accepted(parse_spec(JobSpec, raw))
    assert run.job.state.canary == Canary()


def test_it_waits_while_a_pipeline_is_a_straggler(make_job: Any) -> None:
    run = Run(make_job)
    run.train(5)
    run.job.state.stragglers.detector.slowdowns = {1: 1.4}
    run.job.settle()
    made = run.job.decide()
    assert made.waiting is not None
    assert "waits until no pipeline is a straggler" in made.waiting.message
    assert {point for node in run.job.nodes for point in node.plans.selected.values()} == {None}


def test_a_budget_that_limits_the_job_does_not_wait_for_a_canary(make_job: Any) -> None:
    """At default clocks the other pipelines would draw more than the share."""
    run = Run(make_job)
    run.train(3)
    run.job.state.job.share_granted(Share("hall", 1_300.0))
    run.job.settle()
    assert run.reason() == (True, Reason.LIMITED_BY_BUDGET)


def test_a_job_of_one_pipeline_is_compared_with_its_baseline(make_job: Any) -> None:
    pipeline = {"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": 1}
    job = make_job(mode="Canary", objective=SLOW, baselineIterations=3, pipeline=pipeline)
    job.solve()
    job.start_pods()
    job.connect_ranks()
    job.settle()
    for iteration in range(1, 4 + ITERATIONS + 2):
        planned = job.nodes[0].plans.selected.get(0) is not None
        job.train(iteration, (1.0,), energy_mj=90_000 if planned else DEFAULT_MJ)
        job.state.baseline_measured()
        for _ in range(4):
            job.act()
    assert job.state.canary.phase is Phase.PASSED
    assert job.state.canary.saved == pytest.approx(0.1)


def test_a_restarted_operator_does_not_try_again_what_was_judged(make_job: Any) -> None:
    run = Run(make_job)
    run.train(3 + ITERATIONS + 2)
    shown = document.document([], status.figures(run.job.state, run.job.decide()), {}, generation=1, wall_s=0.0)
    assert canary_from_status(shown["canary"]).phase is Phase.PASSED
    assert canary_from_status(None) == canary_from_status({"phase": "Later"}) == Canary()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"baselineIterations": 0}, "baselineIterations must be above 0 with mode Canary"),
        ({"objective": {"type": "FixedClock", "clockMegahertz": 900}}, "mode must not be Canary with objective.type"),
    ],
    ids=["no baseline", "no plan"],
)
def test_where_there_is_nothing_to_compare_it_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        parse_spec(JobSpec, {"mode": "Canary", **raw})
