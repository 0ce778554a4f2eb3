"""Moves by minimum cuts: the cheapest of all splits is found, plans end in time and take no more energy, and a move
changes what no single instruction can change alone.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_solver.kinds import Index
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.relaxation.curve import Engine
from perseus_solver.schedules import build_schedule
from perseus_solver.search.cuts import Cuts
from perseus_solver.search.rounding import Rounder

FORWARD_S, BACKWARD_S = [1, 2, 3], [2, 3, 4, 5]


def problem_of(stages: int, microbatches: int, random: np.random.Generator, *, convex: bool) -> Problem:
    """Options a second apart; effective energies fall, and where convex, by less each time."""
    rows = ["stage,instruction,frequency,time,energy"]
    for stage in range(stages):
        for kind, times in (("forward", FORWARD_S), ("backward", BACKWARD_S)):
            falls = random.uniform(0.1, 10.0, len(times))
            energies = 100.0 - np.cumsum(np.sort(falls)[::-1] if convex else falls)
            for k, (seconds, energy) in enumerate(zip(times, energies.tolist(), strict=True)):
                rows.append(f"{stage},{kind},{1400 - 100 * k},{seconds},{energy}")
    schedule = build_schedule("1f1b", stages=stages, microbatches=microbatches)
    return build_problem(read_profile("\n".join(rows) + "\n"), schedule, blocking_power_w=0.0)


def rounder_of(problem: Problem) -> Rounder:
    engine = Engine(problem)
    return Rounder(engine.tables, engine.graph, engine.table_of)


def any_plan(rounder: Rounder, random: np.random.Generator) -> Index:
    return (random.random(rounder.graph.n) * rounder.tables.size[rounder.table_of]).astype(np.intp)


def cheapest_split(rounder: Rounder, choice: Index, span: float, deadline_ticks: float) -> float:
    """Effective energy after the best of all splits of begins and ends, one after the other; infinite without any."""
    graph, tables, of, n = rounder.graph, rounder.tables, rounder.table_of, rounder.graph.n
    duration_ticks = rounder.duration_ticks(choice[:, None])[:, 0]
    end = graph.finish_ticks(duration_ticks[:, None])[:-1, 0]
    begin = end - duration_ticks
    bits = (np.arange(1 << 2 * n)[:, None] >> np.arange(2 * n)) & 1
    new_begin, new_end = begin + span * bits[:, :n], end + span * bits[:, n:]
    fits = (new_begin >= 0).all(axis=1) & (new_end <= deadline_ticks).all(axis=1)
    fits &= (new_end[:, graph.tail] + graph.delay_ticks <= new_begin[:, graph.head]).all(axis=1)
    window = (new_end - new_begin)[fits]
    if not len(window):
        return float("inf")
    total = np.zeros(len(window))
    for row in range(n):
        size = int(tables.size[of[row]])
        best = tables.time_ticks[of[row], :size].searchsorted(window[:, row], side="right") - 1
        total += np.where(best < 0, np.inf, tables.energy_j[of[row], np.maximum(best, 0)])
    return float(total.min())


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, -1.0]), st.sampled_from([-1.0, 0.0, 1.0]))
@settings(max_examples=60, deadline=None)
def test_the_cheapest_of_all_splits_is_found(seed: int, sign: float, spare_s: float) -> None:
    """Where every second saved costs more than the one before. The plan may be a second late before the move."""
    random = np.random.default_rng(seed)
    rounder = rounder_of(problem_of(2, 2, random, convex=True))
    choice, second = any_plan(rounder, random), 1.0 / rounder.tables.tick_s
    assert second == round(second), "then options lie exactly one span apart"
    if spare_s < 0:
        sign = -1.0  # later never ends earlier
    cuts = Cuts(rounder)
    deadline_ticks = float(rounder.makespan_ticks(choice[:, None])[0]) + spare_s * second
    least_j = cheapest_split(rounder, choice, sign * second, deadline_ticks)
    found = cuts._moved(cuts._timetable(choice), sign * second, deadline_ticks)
    if found is None:
        assert least_j == np.inf or least_j == pytest.approx(float(rounder.energy_j(choice[:, None])[0]), abs=1e-6)
    else:
        assert rounder.makespan_ticks(found[:, None])[0] <= deadline_ticks
        assert float(rounder.energy_j(found[:, None])[0]) == pytest.approx(least_j, abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_an_improved_plan_is_in_time_and_takes_no_more_energy(seed: int, convex: bool) -> None:
    random = np.random.default_rng(seed)
    rounder = rounder_of(problem_of(3, 4, random, convex=convex))
    choice = any_plan(rounder, random)
    deadline_ticks = float(rounder.makespan_ticks(choice[:, None])[0]) * random.uniform(1.0, 1.2)
    found = Cuts(rounder).improved(choice, deadline_ticks)
    assert rounder.makespan_ticks(found[:, None])[0] <= deadline_ticks
    assert rounder.energy_j(found[:, None])[0] <= rounder.energy_j(choice[:, None])[0]


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_plan_that_is_slightly_late_is_shortened(seed: int, convex: bool) -> None:
    random = np.random.default_rng(seed)
    rounder = rounder_of(problem_of(3, 4, random, convex=convex))
    cheapest_plan = rounder.tables.size[rounder.table_of] - 1
    cuts = Cuts(rounder)
    longest = float(rounder.makespan_ticks(cheapest_plan[:, None])[0])
    shortest = float(rounder.makespan_ticks(np.zeros_like(cheapest_plan)[:, None])[0])
    deadline_ticks = max(shortest, longest - cuts.reach(cheapest_plan) * random.uniform(0.0, 0.6))
    found = cuts.shortened(cheapest_plan, deadline_ticks)
    if found is not None:
        assert rounder.makespan_ticks(found[:, None])[0] <= deadline_ticks
    else:
        assert not convex or deadline_ticks < longest - cuts.reach(cheapest_plan) / 2, "near ones are in reach"
    assert cuts.shortened(cheapest_plan, shortest * 0.99) is None
    assert (cuts.shortened(cheapest_plan, longest) == cheapest_plan).all()


def test_one_shared_instruction_is_shortened_so_that_many_get_time() -> None:
    """Of three stages, the last microbatch's backwards follow one another, and everything else runs beside them. A
    second there costs little and gives two stages a second at once. No single instruction can do that, because each is
    already at the best that its slack allows.
    """
    random = np.random.default_rng(3)
    rounder = rounder_of(problem_of(3, 6, random, convex=True))
    cuts = Cuts(rounder)
    better = 0
    for _ in range(20):
        choice = any_plan(rounder, random)
        deadline_ticks = float(rounder.makespan_ticks(choice[:, None])[0])
        stuck, stuck_j = cuts._relaxed(choice[:, None], deadline_ticks)
        again, _ = cuts._relaxed(stuck[:, None], deadline_ticks)
        assert (again == stuck).all(), "slack is distributed already"
        better += bool(rounder.energy_j(cuts.improved(stuck, deadline_ticks)[:, None])[0] < stuck_j - 1e-9)
    assert better >= 15
