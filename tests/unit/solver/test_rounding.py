"""Sweeps: whatever their input, deadlines hold, slack is only used, and choices never become faster than they may."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.relaxation.curve import Engine
from perseus_solver.schedules import build_schedule
from perseus_solver.search.rounding import round_plans
from perseus_solver.search.sweeps import Curve, Mixtures, Plans, Ruin, Sweeps


@pytest.fixture(scope="module")
def engine() -> Engine:
    random = np.random.default_rng(3)
    rows = ["stage,instruction,frequency,time,energy"]
    for stage in range(3):
        for kind, work in (("forward", 1.0), ("backward", 2.0)):
            for clock in range(1400, 600, -100):
                seconds = work * 1400 / clock * (1 + 0.02 * random.random())
                rows.append(f"{stage},{kind},{clock},{seconds},{seconds * (100 + 300 * (clock / 1400) ** 2.5)}")
    problem: Problem = build_problem(
        read_profile("\n".join(rows) + "\n"),
        build_schedule("1f1b", stages=3, microbatches=5),
        blocking_power_w=80.0,
    )
    return Engine(problem)


@pytest.fixture(scope="module")
def sweeps(engine: Engine) -> Sweeps:
    return Sweeps(engine.tables, engine.graph, engine.table_of, engine.kind)


def some_plans(engine: Engine, count: int, seed: int) -> Plans:
    size = engine.tables.size[engine.table_of]
    return (np.random.default_rng(seed).random((count, engine.graph.n)) * size).astype(np.int16)


def finish_ticks(engine: Engine, duration_ticks: Floats) -> Floats:
    """When rows end, one row and one edge after the other."""
    graph = engine.graph
    done = np.zeros(graph.n)
    for row in range(graph.n):
        edges = np.flatnonzero(graph.head == row)
        ready = (done[graph.tail[edges]] + graph.delay_ticks[edges]).max(initial=0.0)
        done[row] = ready + duration_ticks[row]
    return done


def follow_slowly(engine: Engine, target_ticks: Floats) -> Index:
    """What `Sweeps.mixed` chooses where time is worth nothing: the slowest option that is in time, row by row."""
    graph, tables = engine.graph, engine.tables
    choice, done = np.zeros(graph.n, dtype=np.intp), np.zeros(graph.n)
    for row in range(graph.n):
        edges = np.flatnonzero(graph.head == row)
        ready = (done[graph.tail[edges]] + graph.delay_ticks[edges]).max(initial=0.0)
        ticks = tables.time_ticks[engine.table_of[row]]
        choice[row] = max(np.flatnonzero(ready + ticks <= target_ticks[row]), default=0)
        done[row] = ready + ticks[choice[row]]
    return choice


def test_totals_and_times_are_those_of_the_graph_one_row_after_the_other(engine: Engine, sweeps: Sweeps) -> None:
    """Not a multiple of the plans that are swept side by side."""
    plans = some_plans(engine, 13, seed=4)
    duration_ticks = engine.tables.time_ticks[engine.table_of, plans]
    finish = np.array([finish_ticks(engine, one) for one in duration_ticks])
    makespan_ticks, energy_j = sweeps.totals(plans)
    start_ticks, finish_ticks_of_all = sweeps.timetables(plans)
    assert np.array_equal(finish_ticks_of_all, finish)
    assert np.array_equal(start_ticks, finish - duration_ticks)
    assert np.array_equal(makespan_ticks, finish.max(axis=1))
    assert energy_j == pytest.approx(engine.tables.energy_j[engine.table_of, plans].sum(axis=1))


def test_free_slack_makes_plans_slower_and_leaves_no_usable_slack(engine: Engine, sweeps: Sweeps) -> None:
    before = some_plans(engine, 20, seed=5)
    deadline_ticks = np.floor(sweeps.totals(before)[0] * np.linspace(0.9, 1.3, 20))
    plans = sweeps.improved(before, deadline_ticks)
    own_ticks, energy_before_j = sweeps.totals(before)
    makespan_ticks, energy_j = sweeps.totals(plans)
    assert (plans >= before).all()
    assert (makespan_ticks <= np.maximum(deadline_ticks, own_ticks)).all()
    assert (energy_j <= energy_before_j).all()
    for row in range(engine.graph.n):
        slower = plans[-1:].copy()
        slower[0, row] += 1
        if slower[0, row] < engine.tables.size[engine.table_of[row]]:
            assert sweeps.totals(slower)[0][0] > deadline_ticks[-1]


@pytest.mark.parametrize("late", [False, True])
def test_a_timetable_is_followed_as_row_by_row(engine: Engine, sweeps: Sweeps, late: bool) -> None:
    """Two timetables of durations between options; time is worth nothing, and no slack is left to offer."""
    ticks = engine.tables.time_ticks[engine.table_of, np.concatenate([some_plans(engine, 1, seed=s) for s in (6, 7)])]
    fast, slow = ticks * np.array([[0.9], [1.1]])
    finish = np.array([finish_ticks(engine, one) for one in (fast, slow)])
    order = np.argsort(finish.max(axis=1))
    start = finish - np.array([fast, slow])
    nothing = np.zeros((2, sweeps.kinds))
    curve = Curve(start[order], finish[order], nothing, finish.max(axis=1)[order])
    deadline = np.array([curve.makespan_ticks.mean()])
    ahead = curve.makespan_ticks[1] - deadline[0] if late else deadline[0] - curve.makespan_ticks[0]
    target = (
        np.maximum(curve.finish_ticks[0], curve.finish_ticks[1] - ahead)
        if late
        else np.minimum(curve.finish_ticks[1], curve.finish_ticks[0] + ahead)
    )
    way = Mixtures(np.array([[0]]), np.array([[1]]), np.array([late], dtype=np.uint8), np.zeros(1, dtype=np.uint8))
    found = sweeps.mixed(curve, way, deadline, nothing[:1], tie=1.0, shares=np.array([0.0]))
    followed = follow_slowly(engine, target)[None].astype(np.int16)
    assert np.array_equal(found, sweeps.improved(followed, deadline))


def test_rounded_plans_meet_every_deadline_from_the_fastest_on(engine: Engine, sweeps: Sweeps) -> None:
    samples = engine.relaxation.trace(lambda _share: None)
    duration_ticks, makespan_ticks = engine.timetables(samples)
    finish = engine.graph.finish_ticks(duration_ticks)[:-1]
    through = np.stack([s.through[engine.graph.order] for s in samples]).astype(np.float64)
    start, finish = ((finish - duration_ticks).T.copy(), finish.T.copy())
    curve = Curve(start, finish, through, makespan_ticks)
    deadline_ticks = np.floor(np.linspace(engine.fastest_ticks, engine.slowest_ticks * 1.1, 15))
    worth = through[curve.around(deadline_ticks)[0]]
    for ways in ((False,), (True,), (False, True)):
        plans = round_plans(sweeps, curve, deadline_ticks, [(0, 0), (1, 1)], worth, ways=ways)
        made_ticks, energy_j = sweeps.totals(plans)
        assert (made_ticks <= deadline_ticks).all()
        assert energy_j[0] <= sweeps.totals(np.zeros_like(plans))[1][0]
        assert energy_j[-1] == pytest.approx(engine.tables.hull_energy_j[engine.table_of, -1].sum())


def test_a_ruined_part_is_the_whole_where_a_plan_is_too_slow_everywhere(engine: Engine, sweeps: Sweeps) -> None:
    """Of a plan that wastes, a trial of the whole finds a cheaper one; a deadline without slack is kept."""
    slow = sweeps.improved(np.zeros((3, engine.graph.n), dtype=np.int16), np.zeros(3))
    ticks, before_j = sweeps.totals(slow)
    deadline_ticks = np.floor(ticks * np.array([1.0, 1.1, 1.4]))
    through = np.full((3, sweeps.kinds), float(engine.tables.hull_price.max()) / 4)
    whole = Ruin(most_worth=1.2, least_noise=0.01, most_noise=0.3, least_part=1.0)
    shares = np.array([1.0, 0.5, 0.0])
    found = [
        sweeps.descended(slow, deadline_ticks, through, whole, shares, tries=5, rounds=4, seed=s) for s in (1, 1, 2)
    ]
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    made_ticks, energy_j = sweeps.totals(found[0])
    assert (made_ticks <= deadline_ticks).all()
    assert (energy_j <= before_j).all()
    assert (energy_j[1:] < before_j[1:]).all()
