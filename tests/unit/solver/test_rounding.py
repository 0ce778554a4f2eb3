"""Sweeps of the rounding: whatever their input, deadlines hold, slack is only used, and choices never become faster."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.relaxation.curve import Engine
from perseus_solver.schedules import build_schedule
from perseus_solver.search.rounding import Curve, Rounder, round_plans


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
def rounder(engine: Engine) -> Rounder:
    return Rounder(engine.tables, engine.graph, engine.table_of)


def test_reclaim_meets_the_deadline_and_only_slows_down(engine: Engine, rounder: Rounder) -> None:
    random = np.random.default_rng(4)
    size = engine.tables.size[engine.table_of][:, None]
    for back in (False, True):
        choice = (random.random((engine.graph.n, 20)) * size).astype(np.intp)
        deadline_ticks = np.floor(rounder.makespan_ticks(choice) * (1.0 + 0.3 * random.random(20)))
        price = random.random(choice.shape) * float(engine.tables.hull_price.max())
        before = choice.copy()
        worth = rounder.worth(price)
        makespan_ticks = rounder.reclaim(choice, deadline_ticks, worth, rounder.free(20), backward=back)
        assert (choice >= before).all()
        assert (makespan_ticks <= deadline_ticks).all()
        assert np.array_equal(makespan_ticks, rounder.makespan_ticks(choice))
        assert (choice > before).any()


def test_reclaim_of_free_slack_leaves_no_usable_slack(engine: Engine, rounder: Rounder) -> None:
    choice = np.zeros((engine.graph.n, 1), dtype=np.intp)
    deadline_ticks = rounder.makespan_ticks(choice) * 1.2
    rounder.reclaim(choice, deadline_ticks, rounder.worth(np.zeros(choice.shape)))
    for row in range(engine.graph.n):
        slower = choice.copy()
        slower[row] += 1
        if slower[row, 0] < engine.tables.size[engine.table_of[row]]:
            assert rounder.makespan_ticks(slower)[0] > deadline_ticks[0]


def test_a_followed_timetable_is_never_exceeded(engine: Engine, rounder: Rounder) -> None:
    random = np.random.default_rng(5)
    size = engine.tables.size[engine.table_of][:, None]
    duration_ticks = rounder.duration_ticks((random.random((engine.graph.n, 10)) * size).astype(np.intp)) * 1.01
    finish_ticks = engine.graph.finish_ticks(duration_ticks)[:-1]
    end = finish_ticks.max(axis=0)
    free = rounder.worth(np.zeros(duration_ticks.shape))
    assert (rounder.makespan_ticks(rounder.follow(finish_ticks, free)) <= end).all()
    reach_ticks = engine.graph.reach_ticks(duration_ticks)[:-1]
    assert (rounder.makespan_ticks(rounder.follow(reach_ticks, free, backward=True)) <= end).all()


def test_rounded_plans_meet_every_deadline_from_the_fastest_on(engine: Engine, rounder: Rounder) -> None:
    samples = sorted(engine.sample([0, 10**6, 10**7, engine.steepest()]), key=lambda sample: -sample.price)
    duration_ticks, makespan = engine.timetables(samples)
    finish_ticks = engine.graph.finish_ticks(duration_ticks)[:-1]
    through = np.stack([s.through for s in samples], axis=1)[engine.graph.order].astype(np.float64)
    curve = Curve(finish_ticks - duration_ticks, finish_ticks, through, makespan)
    deadline_ticks = np.floor(np.linspace(engine.fastest_ticks, engine.slowest_ticks * 1.1, 15))
    worth = through[:, curve.around(deadline_ticks)[0]]
    choice = round_plans(rounder, curve, deadline_ticks, [(0, 0), (1, 1)], worth)
    assert (rounder.makespan_ticks(choice) <= deadline_ticks).all()
    energy = rounder.energy_j(choice)
    assert energy[0] <= rounder.energy_j(np.zeros_like(choice))[0]
    assert energy[-1] == pytest.approx(engine.tables.hull_energy_j[engine.table_of, -1].sum())
