"""What a plan saves, measured while the job runs: when it is interrupted, what is compared, and how sure that is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
from tests.offenders import about_each

from perseus_core.iteration import IterationReport
from perseus_core.leases import RestingClock
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.budgets.allocation import Share
from perseus_operator.errors import InvalidSpec
from perseus_operator.families.training.features.comparison.state import (
    KEPT,
    BeginComparison,
    Comparisons,
    EndComparison,
    Pair,
    ResumePlan,
    comparisons_from_status,
    interval,
)
from perseus_operator.families.training.status import status
from perseus_operator.families.training.training import Training
from perseus_operator.jobs import document
from perseus_operator.nodes.iterations import Measured

EVERY, ITERATIONS = 40, 3
SETTINGS = {"everyIterations": EVERY, "iterations": ITERATIONS}
SLOW = {"type": "MaxSlowdown", "maxSlowdown": "20%"}


class Run:
    """A job whose iterations take the energy that ``energy_mj`` says of their number and whether a plan is followed."""

    def __init__(self, make_job: Any, energy_mj: Callable[[int, bool], float], **changes: Any) -> None:
        self.job = make_job(**{"comparison": SETTINGS, "objective": SLOW, **changes})
        self.job.run()
        self.energy_mj = energy_mj
        self.iteration = 1
        self.planned: list[bool] = []
        """Of each iteration, whether a plan was followed."""

    def train(self, count: int = 1) -> None:
        for _ in range(count):
            planned = any(point is not None for node in self.job.nodes for point in node.plans.selected.values())
            self.planned.append(planned)
            self.job.train(self.iteration, energy_mj=round(self.energy_mj(self.iteration, planned)))
            self.iteration += 1
            for _ in range(4):
                self.job.act()
                self.job.state.baseline_measured()

    def train_until(self, done: Callable[[], bool]) -> None:
        for _ in range(10 * EVERY):
            if done():
                return
            self.train()
        raise AssertionError("it never was")

    @property
    def pairs(self) -> tuple[Pair, ...]:
        state: Training = self.job.state
        return state.comparisons.pairs


def steady(_: int, planned: bool) -> float:
    return 80_000 if planned else 100_000


def test_the_plan_is_interrupted_seldom_and_for_a_bounded_share(make_job: Any) -> None:
    run = Run(make_job, steady)
    run.train(20 * EVERY)
    assert len(run.pairs) >= 15
    assert run.planned.count(False) <= len(run.planned) * (ITERATIONS + 2) / EVERY
    assert [pair.saved for pair in run.pairs] == pytest.approx([0.2] * len(run.pairs))
    slower = run.job.state.frontier.times_us[run.job.decide().wanted[0]] / 1_000_000 - 1
    assert [pair.slowdown for pair in run.pairs] == pytest.approx([slower] * len(run.pairs))
    assert run.job.decide().applied
    assert run.job.decide().waiting is None


def test_what_drifts_cancels(make_job: Any) -> None:
    """Energy grows by a fifth over the run, as with longer sequences; the first baseline would say that nothing is
    saved."""
    run = Run(make_job, lambda number, planned: steady(number, planned) * (1 + number / (5 * 10 * EVERY)))
    run.train(10 * EVERY)
    assert fmean(pair.saved for pair in run.pairs) == pytest.approx(0.2, abs=0.002)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    held, drawn = 0, random.Random(7)
    for _ in range(1000):
        found = interval([drawn.gauss(0.1, 0.02) for _ in range(6)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.1 <= found.high
    assert 0.93 <= held / 1000 <= 0.97
    assert interval([0.1]).low is None


def within(t: float, freedom: int) -> float:
    """Probability that Student's t lies within ±t: its density, integrated by Simpson's rule."""
    n = freedom
    scale = math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi)
    steps = 2_000
    width = t / steps
    density = [scale * (1 + (k * width) ** 2 / n) ** (-(n + 1) / 2) for k in range(steps + 1)]
    return 2 * width / 3 * (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]))


@about_each(range(2, KEPT + 1))
def test_the_interval_is_that_of_student_with_one_degree_of_freedom_less_than_values(values: int) -> None:
    sample = [0.1 + 0.01 * number**2 for number in range(values)]
    found = interval(sample)
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.mean == pytest.approx(found.mean - found.low)
    t = (found.high - found.mean) * math.sqrt(values) / stdev(sample)
    assert within(t, values - 1) == pytest.approx(0.95, abs=1e-4)


def test_more_values_than_are_kept_are_never_surer_than_they_are() -> None:
    """As of a canary, which may compare more iterations than comparisons keep pairs."""
    for values in (KEPT + 1, 30, 60, 1_000):
        sample = [float(number % 7) for number in range(values)]
        found = interval(sample)
        assert found.high is not None
        t = (found.high - found.mean) * math.sqrt(values) / stdev(sample)
        assert 0.95 <= within(t, values - 1) <= 0.965


def test_status_says_what_it_was_measured_against_and_how_sure_it_is(make_job: Any) -> None:
    drawn = random.Random(3)
    run = Run(make_job, lambda number, planned: steady(number, planned) * drawn.gauss(1, 0.01))
    run.train_until(lambda: len(run.pairs) == 1)
    shown = status.figures(run.job.state, run.job.decide()).savings
    assert shown is not None
    assert (shown.against, shown.energy_low) == ("Comparisons", None)
    run.train_until(lambda: len(run.pairs) == 5)
    shown = status.figures(run.job.state, run.job.decide()).savings
    assert shown is not None
    assert shown.energy_low is not None
    assert shown.energy_high is not None
    low, mean, high = (float(text.rstrip("%")) for text in (shown.energy_low, shown.energy, shown.energy_high))
    assert low < mean < high
    assert low <= 20 <= high


def test_what_was_compared_survives_a_restart(make_job: Any) -> None:
    run = Run(make_job, steady)
    run.train_until(lambda: len(run.pairs) == 2)
    made = run.job.decide()
    stored = document.document([], status.figures(run.job.state, made), {}, generation=1, wall_s=0.0)
    back = comparisons_from_status(stored["comparison"])
    assert (back.pairs, back.reference, back.last) == (
        tuple(Pair(round(p.saved, 6), round(p.slowdown, 6)) for p in run.pairs),
        run.job.state.comparisons.reference,
        run.job.state.comparisons.last,
    )
    assert comparisons_from_status(None) == Comparisons()


def test_measured_figures_stay_while_the_plan_is_interrupted(make_job: Any) -> None:
    run = Run(make_job, steady)
    run.train(10)
    while True:
        made = run.job.decide()
        shown = status.figures(run.job.state, made)
        assert made.applied
        assert shown.measured is not None
        assert shown.measured.energy_millijoules in (4 * 80_000, None)
        if run.pairs:
            return
        run.train()


@pytest.mark.parametrize(
    "changes",
    [
        {"comparison": {"everyIterations": 0}},
        {"mode": "Recommend"},
    ],
    ids=["switched off", "no clocks are set"],
)
def test_where_it_is_not_wanted_nothing_is_interrupted(make_job: Any, changes: dict[str, Any]) -> None:
    run = Run(make_job, steady, **changes)
    run.train(3 * EVERY)
    assert not run.pairs
    assert len(set(run.planned)) == 1


def test_a_budget_is_never_exceeded_to_measure_what_is_saved(make_job: Any) -> None:
    run = Run(make_job, steady)
    run.job.state.job.share_granted(Share("hall", 10_000.0))
    run.train(3 * EVERY)
    assert all(run.planned)
    assert {node.resting for node in run.job.nodes} != {RestingClock()}


def test_a_straggler_ends_a_comparison_at_once(make_job: Any) -> None:
    run = Run(make_job, steady)
    run.train_until(lambda: run.job.state.comparisons.interrupting)
    run.job.state.stragglers.detector.slowdowns = {1: 1.3}
    run.job.settle()
    assert not run.job.state.comparisons.running
    assert all(point is not None for node in run.job.nodes for point in node.plans.selected.values())
    assert not run.pairs


def test_an_agent_that_goes_on_with_the_plan_is_not_waited_for(make_job: Any) -> None:
    """As one of an earlier version does, that knows no selection without a plan."""
    run = Run(make_job, steady)
    run.train_until(lambda: run.job.state.comparisons.interrupting)
    for node in run.job.nodes:
        node.plans.selection_accepted({0: None, 1: None}, plan_id=node.plans.plan_id, from_iteration=run.iteration)
    began = run.iteration
    while run.job.state.comparisons.running:
        for p, node in enumerate(run.job.nodes):
            for stage in range(2):
                run.job.state.iteration_reported(node, IterationReport(p, stage, 0, run.iteration, 10, 10, 80_000, 3))
        run.iteration += 1
        run.job.act()
        assert run.iteration - began < 8 * (ITERATIONS + 1)
    assert not run.pairs
    assert run.job.state.comparisons.last >= began


def test_another_objective_begins_anew_and_so_do_new_processes(make_job: Any) -> None:
    run = Run(make_job, steady)
    run.train_until(lambda: len(run.pairs) == 2)
    run.job.connect_ranks(pid=2)
    run.train_until(lambda: len(run.pairs) == 3)
    raw = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": 2},
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
        "objective": {"type": "MinEnergy"},
    }
    run.job.state.spec_accepted(parse_spec(JobSpec, raw))
    assert run.pairs == ()


def reshaped(make_job: Any, **changes: Any) -> Run:
    """A job with a baseline and a plan whose number of pipelines is edited to three and back while it trains."""
    run = Run(make_job, steady, baselineIterations=3, **changes)
    run.train_until(lambda: run.job.state.baseline is not None and run.planned[-1])
    stated = run.job.state.job.stated_spec
    for pipelines in (3, 2):
        run.job.state.spec_accepted(replace(stated, pipeline=replace(stated.pipeline, data_parallel=pipelines)))
        run.job.settle()
    assert run.job.state.baseline is None, "of another shape"
    return run


@pytest.mark.parametrize("every", [EVERY, 0, 100_000])
def test_the_baseline_of_another_shape_is_measured_again_at_once(make_job: Any, every: int) -> None:
    run = reshaped(make_job, comparison={**SETTINGS, "everyIterations": every})
    first = len(run.planned)
    run.train(6 * (ITERATIONS + 1))
    assert run.job.state.baseline is not None
    assert run.job.state.baseline.energy_mj == 4 * 100_000
    assert ITERATIONS <= run.planned[first:].count(False) <= ITERATIONS + 2
    assert run.planned[-1], "and the plan is in force again"
    shown = status.figures(run.job.state, run.job.decide()).savings
    assert shown is not None
    assert shown.energy == "20.00%"
    assert shown.against == ("Comparisons" if every else "Baseline")


def test_a_job_without_energy_counters_gets_its_baseline_again_too(make_job: Any) -> None:
    run = reshaped(make_job)
    for number in range(6 * (ITERATIONS + 1)):
        run.job.train(run.iteration + number, energy_mj=None)
        run.job.act()
        run.job.state.baseline_measured()
        run.job.act()
    assert run.job.state.baseline is not None
    assert run.job.state.baseline.energy_mj is None


def test_no_budget_is_exceeded_to_measure_the_baseline_again(make_job: Any) -> None:
    run = reshaped(make_job)
    run.job.state.job.share_granted(Share("hall", 10_000.0))
    first = len(run.planned)
    run.train(EVERY)
    assert run.job.state.baseline is None
    assert all(run.planned[first:])


def test_what_was_compared_in_another_shape_says_nothing_of_this_one(make_job: Any) -> None:
    run = Run(make_job, steady)
    run.train_until(lambda: len(run.pairs) == 2)
    stated = run.job.state.job.stated_spec
    run.job.state.spec_accepted(replace(stated, pipeline=replace(stated.pipeline, data_parallel=3)))
    assert run.pairs == ()
    assert run.job.state.without_plan is None


def test_only_the_latest_pairs_count() -> None:
    comparisons = Comparisons()
    for number in range(KEPT + 5):
        comparisons.decided(BeginComparison(Measured(100, 90, 5)), iteration=number)
        comparisons.decided(ResumePlan(Measured(100, 100 + number, 3)), iteration=number)
        comparisons.decided(EndComparison(Measured(100, 90, 3)), iteration=number)
    assert len(comparisons.pairs) == KEPT
    assert comparisons.pairs[0] == Pair(pytest.approx(1 - 90 / 105), 0.0)


def test_a_share_of_interruptions_that_costs_more_than_a_tenth_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"spec.comparison: everyIterations must be 0, or at least ten times"):
        parse_spec(JobSpec, {"comparison": {"everyIterations": 39, "iterations": 3}})
