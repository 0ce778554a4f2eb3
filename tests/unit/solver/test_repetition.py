"""Where a schedule repeats: the range of every stage is found, and a few well chosen prices suffice."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.relaxation.composed import MOST_PRICES, Composed
from perseus_solver.relaxation.curve import BOUNDARY_BLOCKS, Engine
from perseus_solver.relaxation.periods import find_repetitions
from perseus_solver.relaxation.samples import by_price
from perseus_solver.relaxation.whole import Whole
from perseus_solver.schedules import build_schedule


def repeating(schedule: str, stages: int, microbatches: int) -> Problem:
    rows = ["stage,instruction,frequency,time,energy"]
    for stage in range(stages):
        for kind, work in (("forward", 1.0), ("backward", 2.1)):
            for clock in range(1400, 800, -60):
                seconds = work * (1 + 0.1 * (stage % 3)) * (0.3 + 0.7 * 1400 / clock)
                rows.append(f"{stage},{kind},{clock},{seconds},{seconds * (90 + 310 * (clock / 1400) ** 2.5)}")
    profile = read_profile("\n".join(rows) + "\n")
    return build_problem(
        profile, build_schedule(schedule, stages=stages, microbatches=microbatches), blocking_power_w=80.0
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_repeated_instructions_have_the_options_and_edges_of_their_kind(schedule: str) -> None:
    problem = repeating(schedule, 4, 60)
    offset = problem.stage_offset
    stage = np.repeat(np.arange(4), np.diff(offset))
    place = np.arange(problem.instructions) - offset[stage]
    for repetition in find_repetitions(problem, Engine(problem).graph, 8):
        inside = (repetition.begin[stage] <= place) & (place < repetition.end[stage])
        block, node = repetition.locate(problem)
        assert (problem.option_of == repetition.option_of[node])[inside].all()
        edge_class = repetition.classify(problem, block, node)
        for ends, pattern in ((problem.edge_from, repetition.tail), (problem.edge_to, repetition.head)):
            for i in np.flatnonzero(
                inside & (block >= repetition.low[stage] + 1) & (block < repetition.high[stage] - 1)
            ).tolist():
                assert sorted(edge_class[ends == i].tolist()) == np.flatnonzero(pattern == node[i]).tolist()


def test_stages_repeat_beyond_what_all_do_together() -> None:
    """Only filling and draining the pipeline, a triangle each, and the blocks at either end are solved one by one."""
    stages = 12
    engine = Engine(repeating("1f1b", stages, 120))
    assert engine.steady is not None
    # One block more at either end, because the stages leave it one after the other.
    triangles, kept = stages * (stages - 1), 2 * (BOUNDARY_BLOCKS + 1) * 2 * stages
    assert engine.steady.rows <= triangles + kept


def test_rows_of_one_kind_carry_the_same_flow() -> None:
    engine = Engine(repeating("1f1b", 4, 80), short=0)
    relaxation = engine.relaxation
    assert isinstance(relaxation, Composed)
    assert engine.kind.max() < engine.graph.n / 2
    one = np.unique(engine.kind, return_index=True)[1]
    for sample in relaxation.at_prices([relaxation.steepest() // 40, relaxation.steepest() // 10]):
        through = sample.through[engine.graph.order]
        assert np.array_equal(through[one][engine.kind], through)


def test_a_graph_that_is_short_for_its_parts_is_solved_whole() -> None:
    assert isinstance(Engine(repeating("1f1b", 4, 40)).relaxation, Whole)
    assert isinstance(Engine(repeating("1f1b", 4, 400)).relaxation, Composed)


def test_few_prices_are_put_where_the_bound_bends() -> None:
    engine = Engine(repeating("1f1b", 4, 80), short=0)
    relaxation = engine.relaxation
    assert isinstance(relaxation, Composed)
    relaxation.most_prices = MOST_PRICES - 1
    prices = relaxation.forecast(7)
    assert len(set(prices)) == 7
    at_s = np.linspace(engine.fastest_ticks, engine.slowest_ticks, 60) * engine.tables.tick_s
    waiting_j = engine.problem.blocking_power_w * engine.problem.stages * at_s

    def envelope(chosen: list[int]) -> np.ndarray:
        samples = by_price(relaxation.at_prices(chosen))
        proofs = [*samples, *relaxation.mixed(samples)]
        return np.max([proof.bound.at(at_s) for proof in proofs], axis=0) + waiting_j

    assert (envelope(relaxation.forecast(40)) / envelope(prices) - 1).max() < 0.01
