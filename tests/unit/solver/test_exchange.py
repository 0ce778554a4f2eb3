"""Exchanges on a chain: the optimum of a knapsack is found where small changes do not lead to it, and the path is
right.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest

from perseus_solver.frontier import solve_deadline
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.relaxation.curve import Engine
from perseus_solver.relaxation.tables import build_tables
from perseus_solver.schedules import build_schedule
from perseus_solver.search.exchange import exchanged, longest_path
from perseus_solver.search.rounding import Rounder


def problem_of(stages: int, microbatches: int, delay_s: float = 0.0) -> Problem:
    """Options whose times have nothing in common."""
    random = np.random.default_rng(7)
    rows = ["stage,instruction,frequency,time,energy"]
    for stage in range(stages):
        for kind, work in (("forward", 1.0), ("backward", 1.9)):
            for clock in range(1400, 900, -100):
                seconds = work * (1 + 0.3 * (stage == 0)) * (0.3 + 0.7 * 1400 / clock) * (1 + 0.03 * random.random())
                rows.append(f"{stage},{kind},{clock},{seconds},{seconds * (90 + 310 * (clock / 1400) ** 2.5)}")
    schedule = build_schedule("1f1b", stages=stages, microbatches=microbatches)
    return build_problem(read_profile("\n".join(rows) + "\n"), schedule, blocking_power_w=80.0, delay_s=delay_s)


def mixtures(problem: Problem, table: int, many: int) -> tuple[np.ndarray, np.ndarray]:
    """Time and effective energy of so many instructions of a table, for every way to choose their options."""
    options = problem.options[table]
    effective_j = options.energy_j - problem.blocking_power_w * options.time_s
    chosen = np.array(list(combinations_with_replacement(range(len(effective_j)), many)))
    return options.time_s[chosen].sum(axis=1), effective_j[chosen].sum(axis=1)


def chain() -> tuple[Engine, Rounder, np.ndarray, np.ndarray]:
    """One stage, nine microbatches; time and effective energy of every mixture of options."""
    problem = problem_of(1, 9)
    engine = Engine(problem)
    (forward_s, forward_j), (backward_s, backward_j) = (mixtures(problem, k, 9) for k in (0, 1))
    time_s, energy_j = np.add.outer(forward_s, backward_s).ravel(), np.add.outer(forward_j, backward_j).ravel()
    return engine, Rounder(engine.tables, engine.graph, engine.table_of), time_s, energy_j


def test_the_best_mixture_of_a_chain_is_proposed_and_all_proposals_fit() -> None:
    engine, rounder, time_s, energy_j = chain()
    fastest = np.zeros(engine.graph.n, dtype=np.intp)
    for deadline_s in np.linspace(time_s.min(), time_s.max(), 42)[1:-1].tolist():
        found = exchanged(rounder, fastest, deadline_s / engine.tables.tick_s)
        taken_s = engine.tables.time_s[engine.table_of[:, None], found].sum(axis=0)
        assert (taken_s <= deadline_s * (1 + 1e-12)).all()
        least_j = float(energy_j[time_s <= deadline_s * (1 + 1e-12)].min())
        assert rounder.energy_j(found).min() == pytest.approx(least_j, rel=1e-4)
        assert rounder.energy_j(found).min() >= least_j * (1 - 1e-12)


def test_every_undominated_mixture_of_a_chain_is_found_at_its_own_time() -> None:
    """A deadline that a mixture fills exactly."""
    engine, rounder, time_s, energy_j = chain()
    order = np.lexsort((energy_j, time_s))
    least_j = np.minimum.accumulate(energy_j[order])
    best = order[np.append(True, least_j[1:] < least_j[:-1])]
    assert len(best) > 100
    fastest = np.zeros(engine.graph.n, dtype=np.intp)
    for end_s, known_j in zip(time_s[best[1:-1]].tolist(), energy_j[best[1:-1]].tolist(), strict=True):
        found = exchanged(rounder, fastest, end_s / engine.tables.tick_s)
        assert rounder.energy_j(found).min() == pytest.approx(known_j, rel=1e-12)


@pytest.mark.parametrize("delay_s", [0.0, 0.4])
def test_the_longest_path_is_a_path_and_as_long_as_the_plan(delay_s: float) -> None:
    problem = problem_of(3, 5, delay_s)
    engine = Engine(problem)
    rounder = Rounder(engine.tables, engine.graph, engine.table_of)
    size = engine.tables.size[engine.table_of]
    random = np.random.default_rng(1)
    edges = set(zip(engine.graph.tail.tolist(), engine.graph.head.tolist(), strict=True))
    for _ in range(20):
        choice = (random.random(engine.graph.n) * size).astype(np.intp)
        duration_ticks = rounder.duration_ticks(choice[:, None])[:, 0]
        path, delays = longest_path(engine.graph, duration_ticks)
        assert set(zip(path[:-1].tolist(), path[1:].tolist(), strict=True)) <= edges
        assert duration_ticks[path].sum() + delays == rounder.makespan_ticks(choice[:, None])[0]


def test_proposals_change_only_the_longest_path_and_fit_the_deadline_on_it() -> None:
    problem = problem_of(3, 6)
    engine = Engine(problem)
    rounder = Rounder(engine.tables, engine.graph, engine.table_of)
    choice = np.full(engine.graph.n, 2, dtype=np.intp)
    path, _ = longest_path(engine.graph, rounder.duration_ticks(choice[:, None])[:, 0])
    deadline_ticks = float(rounder.makespan_ticks(choice[:, None])[0]) * 1.013
    found = exchanged(rounder, choice, deadline_ticks)
    assert found.shape[1] > 0
    away = np.setdiff1d(np.arange(engine.graph.n), path)
    assert (found[away] == choice[away, None]).all()
    exact = engine.tables.time_s[engine.table_of[:, None], found][path].sum(axis=0) / engine.tables.tick_s
    assert (exact <= deadline_ticks * (1 + 1e-12)).all()
    energy = rounder.energy_j(found)
    assert energy.min() < rounder.energy_j(choice[:, None])[0]


def test_nothing_is_proposed_where_other_paths_are_critical_too() -> None:
    """The fastest plan is far above what is best on its longest path, so other paths seem critical too."""
    problem = problem_of(3, 6)
    engine = Engine(problem)
    rounder = Rounder(engine.tables, engine.graph, engine.table_of)
    fastest = np.zeros(engine.graph.n, dtype=np.intp)
    deadline_ticks = float(rounder.makespan_ticks(fastest[:, None])[0]) * 1.05
    steps = [exchanged(rounder, fastest, deadline_ticks, within=within).shape[1] for within in (0.0, 1.0, 1e6)]
    assert steps[:2] == [0, 0]
    assert steps[2] > 0


def test_a_late_plan_meets_its_deadline_where_one_chain_determines_the_time() -> None:
    """All instructions are at their least energy, so nothing off the longest path need be faster. Without ``most_j`` no
    proposal takes more energy than the plan, and that cannot shorten it.
    """
    problem = problem_of(3, 6)
    engine = Engine(problem)
    rounder = Rounder(engine.tables, engine.graph, engine.table_of)
    cheapest_plan = engine.tables.size[engine.table_of] - 1
    deadline_ticks = float(np.floor(rounder.makespan_ticks(cheapest_plan[:, None])[0] * 0.985))
    known = solve_deadline(problem, deadline_ticks * engine.tables.tick_s)
    most_j = known.energy_j - problem.blocking_power_w * problem.stages * known.iteration_time_s
    offered, found = (
        exchanged(rounder, cheapest_plan, deadline_ticks),
        exchanged(rounder, cheapest_plan, deadline_ticks, most_j=most_j),
    )
    in_time = rounder.makespan_ticks(found) <= deadline_ticks + len(
        cheapest_plan
    )  # each duration is rounded up to a tick
    assert rounder.energy_j(found[:, in_time]).min() <= most_j * (1 + 1e-12)
    assert rounder.energy_j(found).min() < rounder.energy_j(offered).min()


@pytest.mark.parametrize(("microbatches", "others_mhz"), [(96, 870), (48, 900)])
def test_a_plan_of_two_clocks_is_matched_at_its_own_time(sosp24: Path, microbatches: int, others_mhz: int) -> None:
    """Near T* the numbers of two kinds of instructions decide, and the last bit of their sum. ``others_mhz`` is the
    clock of the last backward of each other stage, all of which are on the longest path, too.
    """
    measured = read_profile(sosp24 / "stage_profile" / "gpt3-175b_a100-sxm.csv", stages=8)
    schedule = build_schedule("1f1b", stages=8, microbatches=microbatches)
    problem = build_problem(measured, schedule, blocking_power_w=83.64)
    tables = build_tables(problem)
    cheapest = tables.row[np.arange(len(tables.size)), tables.size - 1][problem.option_of]
    *others, forward, backward = (np.flatnonzero(problem.option_of == k) for k in range(16))
    for k in range(1, 14, 2):
        cheapest[others[k][-1]] = np.flatnonzero(problem.options[k].frequency_mhz == others_mhz)[0]
    for faster in (28, 30, 31, 40):
        plan = cheapest.copy()
        plan[forward] = tables.row[14, 28]
        plan[forward[:faster]] = tables.row[14, 27]
        plan[backward] = tables.row[15, 27]
        known = Simulator(problem).run(plan)
        time_s = float(known.iteration_time_s)
        point = solve_deadline(problem, time_s)
        waiting_j = problem.blocking_power_w * 8 * (time_s - point.iteration_time_s)
        assert point.iteration_time_s <= time_s
        assert point.energy_j + waiting_j <= float(known.energy_j) * (1 + 1e-12)
