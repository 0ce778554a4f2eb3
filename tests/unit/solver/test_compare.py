"""The other methods do what their descriptions say, and this solver is never worse at the same time."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from perseus_solver.comparison import baselines, lowtime_peer
from perseus_solver.comparison.table import as_json, as_table, compare, single_clocks
from perseus_solver.errors import InvalidProblem
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

pytestmark = pytest.mark.usefixtures("short_search")


def pipeline(schedule: str = "1f1b", heaviest: int = 2) -> Problem:
    rows = "".join(
        f"{s},{what},{f},{work * weight * (0.3 + 980 / f):.6f},{work * weight * (40 + f * f / 9000):.6f}\n"
        for s, weight in enumerate(1.5 if s == heaviest else 1.0 for s in range(3))
        for what, work in (("forward", 0.05), ("backward", 0.1), ("input_gradient", 0.05), ("weight_gradient", 0.05))
        for f in range(1400, 700, -100)
    )
    profile = read_profile("stage,instruction,frequency,time,energy\n" + rows)
    return build_problem(profile, build_schedule(schedule, stages=3, microbatches=5), blocking_power_w=60)


def test_the_solver_is_never_worse_at_the_same_time() -> None:
    rows = compare(pipeline())
    assert [row.name for row in rows] == ["all-maximum", "best single frequency", "EnvPipe's heuristic", "lowtime"]
    for row in rows[:3]:
        assert row.iteration_time_s is not None
        assert row.energy_j is not None
        assert row.ours is not None
        assert row.ours.iteration_time_s <= row.iteration_time_s
        assert row.ours.energy_j <= row.energy_j
    assert "--lowtime" in rows[3].note or "not installed" in rows[3].note


def test_best_single_clock_takes_least_energy_within_the_deadline() -> None:
    problem = pipeline()
    simulator = Simulator(problem)
    base = simulator.run(baselines.all_maximum(problem))
    plan = baselines.best_single_clock(simulator, float(base.iteration_time_s) * 1.2)
    chosen = simulator.run(plan)
    times, energies = single_clocks(simulator)
    fits = times <= base.iteration_time_s * 1.2
    assert 1 < fits.sum() < fits.size
    assert chosen.energy_j == energies[fits].min()
    with pytest.raises(InvalidProblem, match=r"no single clock common to all instructions meets 0\.001 s"):
        baselines.best_single_clock(simulator, 0.001)


def test_envpipe_saves_without_slowdown_where_the_last_stage_is_heaviest() -> None:
    problem = pipeline(heaviest=2)
    simulator = Simulator(problem)
    base, plan = simulator.run(baselines.all_maximum(problem)), baselines.envpipe(simulator)
    run = simulator.run(plan)
    assert run.iteration_time_s == pytest.approx(base.iteration_time_s)
    assert run.energy_j < base.energy_j
    schedule = problem.schedule
    assert (plan[schedule.stage == 2] == 0).all()  # the envelope stays at the highest clock


def test_envpipe_ends_where_another_stage_is_heaviest() -> None:
    """It still runs the light last stage at full speed, and raises the path through stage 0 to the highest clocks."""
    problem = pipeline(heaviest=0)
    simulator = Simulator(problem)
    base, plan = simulator.run(baselines.all_maximum(problem)), baselines.envpipe(simulator)
    assert simulator.run(plan).iteration_time_s == pytest.approx(base.iteration_time_s)
    assert (plan[problem.schedule.stage == 2] == 0).all()


def test_methods_that_do_not_apply_say_so() -> None:
    rows = compare(pipeline("ZBH1"))
    assert rows[2].iteration_time_s is None
    assert rows[2].note == "EnvPipe is defined for plain forwards and backwards, not for ZBH1"
    assert "EnvPipe is defined" in as_table(rows)
    assert json.loads(as_json(rows))[2] == {
        "name": "EnvPipe's heuristic",
        "note": rows[2].note,
        "iteration_time_s": None,
        "energy_j": None,
        "ours": None,
    }


def test_table_has_a_line_for_each_method() -> None:
    lines = as_table(compare(pipeline())).splitlines()
    assert len(lines) == 2 + 4
    assert lines[2].startswith("all-maximum")
    assert "+0.00" in lines[2]
    assert "-0.00" not in "".join(lines)


def test_envpipe_reproduces_the_published_savings(sosp24: Path) -> None:
    """Its column of the paper's Table 6, to a quarter of a percentage point."""
    powers = {"gpt3-175b_a100-sxm": 83.64, "bloom-176b_a40": 70.38}
    with (sosp24 / "reference" / "table6.csv").open() as file:
        table = [row for row in csv.DictReader(file) if row["microbatches"] in {"12", "24"}]
    assert len(table) == 4
    for row in table:
        profile = read_profile(sosp24 / "stage_profile" / f"{row['profile']}.csv", stages=8)
        schedule = build_schedule("1f1b", stages=8, microbatches=int(row["microbatches"]))
        simulator = Simulator(build_problem(profile, schedule, blocking_power_w=powers[row["profile"]]))
        base = simulator.run(baselines.all_maximum(simulator.problem))
        run = simulator.run(baselines.envpipe(simulator))
        saving = 100 * (1 - run.energy_j / base.energy_j)
        assert saving == pytest.approx(float(row["envpipe_intrinsic_saving_percent"]), abs=0.25)


@pytest.mark.skipif(not lowtime_peer.installed(), reason="lowtime is not installed (extra 'bench')")
def test_lowtime_plans_are_choices_from_slow_to_fast() -> None:
    problem = pipeline()
    plans = np.array(list(lowtime_peer.lowtime_plans(problem, unit_time_s=0.002)))
    assert plans.shape[1] == problem.instructions
    times = Simulator(problem).run(plans).iteration_time_s
    assert times[0] > times[-1]


@pytest.mark.skipif(not lowtime_peer.installed(), reason="lowtime is not installed (extra 'bench')")
def test_lowtime_refuses_what_it_does_not_support() -> None:
    problem = pipeline()
    delayed = build_problem(
        read_profile(
            "stage,instruction,frequency,time,energy\n0,forward,1,1,1\n0,backward,1,1,1\n1,forward,1,1,1\n1,backward,1,1,1\n"
        ),
        build_schedule("1f1b", stages=2, microbatches=2),
        blocking_power_w=0,
        delay_s=0.1,
    )
    with pytest.raises(lowtime_peer.PeerFailed, match="supports no delays"):
        next(lowtime_peer.lowtime_plans(delayed, unit_time_s=0.01))
    with pytest.raises(lowtime_peer.PeerFailed, match="lowtime cannot fit forward of stage 0"):
        next(lowtime_peer.lowtime_plans(problem, unit_time_s=10.0))
