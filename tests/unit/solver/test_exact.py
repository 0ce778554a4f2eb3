"""Exact proofs: true on graphs of which every choice can be tried, and never worse than what was known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.laws.test_graph_laws import made_up_graph, totals

from perseus_solver.errors import Infeasible, InvalidProblem
from perseus_solver.exact import prove
from perseus_solver.frontier import Planner
from perseus_solver.kinds import SAME_TIME
from perseus_solver.model.point import Status
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

PROFILE = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{stage},{what},{clock},{work * (0.3 + 0.7 * 1400 / clock):.4f},{work * (40 + 260 * (clock / 1400) ** 2.2):.3f}\n"
    for stage in range(3)
    for what, work in (("forward", 0.05 + 0.01 * stage), ("backward", 0.1))
    for clock in (1400, 1200, 1000, 800)
)


def pipeline(microbatches: int = 3) -> Problem:
    schedule = build_schedule("1F1B", stages=3, microbatches=microbatches)
    return build_problem(read_profile(PROFILE), schedule, blocking_power_w=60.0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("scale", [1.0, 1 / 3])  # on a decimal grid, and on none
def test_the_optimum_of_a_small_graph_is_proven(seed: int, scale: float) -> None:
    nodes, edges, stage_of, waiting_w = made_up_graph(seed)
    nodes = {node: [(knob, t * scale, e) for knob, t, e in options] for node, options in nodes.items()}
    problem = Problem.from_graph(nodes, edges, stage_of=stage_of, blocking_power_w=waiting_w)
    time_s, energy_j = totals(nodes, edges, stage_of, waiting_w)
    deadline_s = float(np.random.default_rng(seed).uniform(time_s.min(), time_s.max()))
    best_j = energy_j[time_s <= deadline_s * (1 + SAME_TIME)].min()
    found = prove(problem, Planner(problem).plan(deadline_s), deadline_s, seconds=20)
    assert found.status is Status.OPTIMAL
    assert found.energy_j == pytest.approx(best_j)
    assert found.energy_lower_bound_j <= best_j * (1 + 1e-9)


def test_a_poor_plan_becomes_the_best_one() -> None:
    problem = pipeline()
    simulator = Simulator(problem)
    run = simulator.run(np.zeros(problem.instructions, dtype=int))
    planner = Planner(problem)
    good = planner.plan(float(run.iteration_time_s))
    highest = np.array([problem.options[k].frequency_mhz[0] for k in problem.option_of], dtype=np.uint16)
    poor = replace(good, frequencies_mhz=highest, energy_j=float(run.energy_j), energy_lower_bound_j=1.0)
    best = prove(problem, poor, good.iteration_time_s, seconds=20)
    assert best.status is Status.OPTIMAL
    assert best.energy_j <= good.energy_j * (1 + 1e-9)
    assert best.energy_lower_bound_j >= good.energy_lower_bound_j * (1 - 1e-9)
    again = simulator.run(simulator.choice_of(best.frequencies_mhz))
    assert (float(again.iteration_time_s), float(again.energy_j)) == (best.iteration_time_s, best.energy_j)


def test_what_cannot_be_proven_is_refused() -> None:
    problem = pipeline()
    point = Planner(problem).plan(2.0)
    with pytest.raises(Infeasible):
        prove(problem, point, 0.9 * point.iteration_time_s)
    with pytest.raises(InvalidProblem, match="seconds must be a positive finite number, not 0"):
        prove(problem, point, 2.0, seconds=0)
    with pytest.raises(InvalidProblem, match="2,400 instructions are too many for an exact proof; at most 2,000"):
        prove(pipeline(400), point, 2.0)
