"""The simulator against pipelines computed by hand: times, energy, slack, many plans at once, and its speed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perseus_solver.errors import InvalidProblem, InvalidSchedule
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

# Stage 1 is twice as slow as stage 0; the lower clock takes 1.5 times as long for 0.6 times the energy.
PROFILE = read_profile(
    "stage,instruction,frequency,time,energy\n"
    "0,forward,1000,1,10\n0,forward,500,1.5,6\n0,backward,1000,2,20\n0,backward,500,3,12\n"
    "1,forward,1000,2,20\n1,forward,500,3,12\n1,backward,1000,4,40\n1,backward,500,6,24\n"
)


@pytest.fixture
def problem() -> Problem:
    return build_problem(PROFILE, build_schedule("1f1b", stages=2, microbatches=2), blocking_power_w=3)


def test_times_energy_and_slack_of_a_pipeline_worked_by_hand(problem: Problem) -> None:
    simulator = Simulator(problem)
    choice = np.zeros(8, dtype=int)
    run = simulator.run(choice)
    # stage 0: F0 0-1, F1 1-2, B0 7-9, B1 13-15; stage 1: F0 1-3, B0 3-7, F1 7-9, B1 9-13
    assert run.start_s.tolist() == [0, 1, 7, 13, 1, 3, 7, 9]
    assert run.end_s.tolist() == [1, 2, 9, 15, 3, 7, 9, 13]
    assert run.iteration_time_s == 15
    assert run.energy_j == 180 + 3 * (2 * 15 - 18)
    assert simulator.slack_s(simulator.duration_s(choice)).tolist() == [0, 5, 4, 0, 0, 0, 0, 0]
    assert simulator.slack_s(simulator.duration_s(choice), 16).tolist() == [1, 6, 5, 1, 1, 1, 1, 1]
    assert simulator.slack_s(simulator.duration_s(choice), 14).min() == -1


def test_waiting_in_the_overhead_takes_blocking_power(problem: Problem) -> None:
    late = replace(problem, overhead_s=2.0)
    choice = np.zeros(8, dtype=int)
    before, after = Simulator(problem).run(choice), Simulator(late).run(choice)
    assert after.iteration_time_s == before.iteration_time_s + 2
    assert after.energy_j == before.energy_j + 3 * 2 * 2
    simulator = Simulator(late)
    assert simulator.slack_s(simulator.duration_s(choice), 17).min() == 0


def test_many_plans_at_once_are_each_plan_alone(problem: Problem) -> None:
    simulator = Simulator(replace(problem, edge_delay_s=np.full(problem.edge_from.size, 0.1)))
    choices = np.random.default_rng(1).integers(0, 2, (7, 8))
    many = simulator.run(choices)
    slack = simulator.slack_s(simulator.duration_s(choices))
    for k, choice in enumerate(choices):
        one = simulator.run(choice)
        assert (many.start_s[k] == one.start_s).all()
        assert (many.end_s[k] == one.end_s).all()
        assert many.iteration_time_s[k] == one.iteration_time_s
        assert many.energy_j[k] == pytest.approx(one.energy_j)
        assert (slack[k] == simulator.slack_s(simulator.duration_s(choice))).all()


def test_totals_of_many_plans_are_those_of_each(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perseus_solver.model.simulator._AT_ONCE", 3 * problem.instructions)
    simulator = Simulator(problem)
    choices = np.random.default_rng(2).integers(0, 2, (8, 8))
    time_s, energy_j = simulator.totals(choices)
    many = simulator.run(choices)
    assert (time_s == many.iteration_time_s).all()
    assert energy_j == pytest.approx(many.energy_j)


def test_plans_written_as_clocks_are_found_again(problem: Problem) -> None:
    simulator = Simulator(problem)
    choices = np.random.default_rng(3).integers(0, 2, (5, 8))
    clocks = np.array(
        [[problem.options[k].frequency_mhz[c] for k, c in zip(problem.option_of, row, strict=True)] for row in choices]
    )
    assert (simulator.choice_of(clocks.astype(np.uint16)) == choices).all()
    assert (simulator.choice_of(clocks[0]) == choices[0]).all()
    for foreign in (700, 1200, 100):
        with pytest.raises(InvalidProblem, match=f"forward of stage 0 was not measured at {foreign} MHz"):
            simulator.choice_of(np.full(8, foreign))


def test_a_cycle_is_refused_by_name(problem: Problem) -> None:
    knot = replace(
        problem,
        edge_from=np.append(problem.edge_from, 3).astype(np.int32),
        edge_to=np.append(problem.edge_to, 0).astype(np.int32),
        edge_delay_s=np.append(problem.edge_delay_s, 0.0),
    )
    with pytest.raises(InvalidSchedule, match=r"deadlocks: .*forward 0 on stage 0"):
        Simulator(knot)


def test_published_baseline_and_speed(sosp24: Path) -> None:
    """GPT-3 at the highest clocks takes 2.8365 s; a run at 8 × 96 takes 0.7 ms and a hundred 8 ms, with room here."""
    profile = read_profile(sosp24 / "stage_profile" / "gpt3-175b_a100-sxm.csv", stages=8)

    def simulator(microbatches: int) -> Simulator:
        schedule = build_schedule("1f1b", stages=8, microbatches=microbatches)
        return Simulator(build_problem(profile, schedule, blocking_power_w=83.64))

    assert simulator(12).run(np.zeros(192, dtype=int)).iteration_time_s == pytest.approx(2.8365, abs=5e-5)
    large = simulator(96)
    for plans, limit_s in ((np.zeros(1536, dtype=int), 0.04), (np.zeros((100, 1536), dtype=int), 0.8)):
        times = []
        for _ in range(10):
            begin = time.process_time()
            large.run(plans)
            times.append(time.process_time() - begin)
        assert min(times) < limit_s  # ten times what it takes
