"""Reports of ranks become iterations, whatever order, number or nonsense they come in."""

from __future__ import annotations

import random

import pytest
from tests.doubles.kept import kept

from perseus_core.iteration import IterationReport
from perseus_operator.nodes.iterations import History, Measured, summarise


def report(
    pipeline: int, stage: int, iteration: int, *, span_us: int = 10, energy_mj: int | None = 5, point: int | None = 0
) -> IterationReport:
    return IterationReport(pipeline, stage, 0, iteration, 2 * span_us, span_us, energy_mj, point)


def test_an_iteration_counts_once_all_ranks_have_reported() -> None:
    history = History(pipelines=2, ranks_per_pipeline=2)
    assert history.add(report(0, 0, 3, span_us=7)) is None
    assert history.add(report(0, 1, 3, span_us=9)) is None
    assert history.add(report(1, 0, 3)) is None
    assert history.measured({0: 0, 1: 0}) is None
    done = history.add(report(1, 1, 3, span_us=12))
    assert done is not None
    assert (done.iteration, done.spans_us, done.time_us, done.energy_mj) == (3, {0: 9, 1: 12}, 24, 20)
    assert history.measured({0: 0, 1: 0}) == Measured(time_us=24, energy_mj=20, iterations=1)
    assert history.measured({0: 0, 1: 1}) is None, "other plans, other figures"


def test_repeated_late_and_broken_reports_change_nothing() -> None:
    history = History(pipelines=1, ranks_per_pipeline=2)
    history.add(report(0, 0, 0))
    history.add(report(0, 0, 0))
    assert history.latest == -1
    history.add(report(0, 1, 0))
    assert history.latest == 0
    assert history.add(report(0, 1, 0)) is None
    assert history.add(report(0, 0, 1, span_us=0)) is None
    assert len(history.recent) == 1


def test_any_order_gives_the_same_figures() -> None:
    reports = [report(p, s, i, span_us=10 + i + p) for i in range(5) for p in range(3) for s in range(2)]
    figures = set()
    for seed in range(10):
        history = History(pipelines=3, ranks_per_pipeline=2)
        chunks = [reports[k : k + 6] for k in range(0, len(reports), 6)]
        for chunk in chunks:
            random.Random(seed).shuffle(chunk)
            for item in chunk:
                history.add(item)
        figures.add(history.measured({0: 0, 1: 0, 2: 0}))
    assert len(figures) == 1


def test_energy_is_unknown_if_any_rank_has_no_counter() -> None:
    history = History(pipelines=1, ranks_per_pipeline=2)
    history.add(report(0, 0, 1, energy_mj=None))
    history.add(report(0, 1, 1))
    measured = history.measured({0: 0})
    assert measured is not None
    assert measured.energy_mj is None


@pytest.mark.parametrize("unknown", range(6))
def test_energy_that_is_not_known_of_one_rank_is_not_known_of_the_job(unknown: int) -> None:
    """Unknown is not empty: a sum without it would be a saving that nobody has made."""
    history = History(pipelines=3, ranks_per_pipeline=2)
    ranks = [(pipeline, stage) for pipeline in range(3) for stage in range(2)]
    for number, (pipeline, stage) in enumerate(ranks):
        job = history.add(report(pipeline, stage, 1, energy_mj=None if number == unknown else 5))
    assert job is not None
    assert job.energy_mj is None
    assert job.first is not None
    assert job.first.energy is None


def run_at_default(history: History, only: IterationReport) -> None:
    iteration = history.add(only)
    assert iteration is not None
    assert iteration.unplanned
    history.ran_at_default(iteration)


def test_the_first_iteration_is_no_baseline() -> None:
    history = History(pipelines=1, ranks_per_pipeline=1)
    for iteration in range(3):
        run_at_default(history, report(0, 0, iteration, point=None))
    assert [i.iteration for i in history.unplanned] == [1, 2]
    assert summarise([]) is None


@pytest.mark.parametrize(("missing", "known"), [(0, True), (1, True), (2, False), (3, False)])
def test_one_reading_that_is_missed_does_not_take_the_energy_of_a_baseline(missing: int, known: bool) -> None:
    history = History(pipelines=1, ranks_per_pipeline=1)
    for iteration in range(4):
        run_at_default(history, report(0, 0, iteration, point=None, energy_mj=None if iteration <= missing else 1_000))
    baseline = summarise(history.unplanned)
    assert baseline is not None
    assert baseline.energy_mj == (1_000 if known else None)
    assert baseline.iterations == 3


def test_memory_stays_bounded_when_a_rank_never_reports() -> None:
    history = History(pipelines=2, ranks_per_pipeline=2)
    for iteration in range(10_000):
        history.add(report(0, 0, iteration))
        history.add(report(1, 0, iteration))
        history.add(report(1, 1, iteration))
    assert kept(history) < 2_000
