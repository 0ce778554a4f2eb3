"""What holds for profiles of every family: a frontier, feasible deadlines kept, no plan dearer than a known one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.made_up_profiles import FAMILIES, made_up_problem

from perseus_solver.certify import check_frontier
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.frontier import Planner
from perseus_solver.kinds import SAME_TIME, latest_s
from perseus_solver.model.deployed import DeployedGap
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Simulator

pytestmark = pytest.mark.usefixtures("short_search")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [3, 11])
def test_every_family_is_planned_and_every_feasible_deadline_met(family: str, seed: int) -> None:
    problem = made_up_problem(family, seed, stages=2 + seed % 3, microbatches=6, schedule="1f1b")
    planner = Planner(problem)
    frontier = planner.frontier(40)
    check_frontier(problem, frontier, planner.proofs)
    assert DeployedGap.of(frontier).worst >= frontier.gap[: frontier.least_energy + 1].max() - 1e-12
    fastest_s = float(Simulator(problem).run(all_maximum(problem)).iteration_time_s)
    for deadline_s in (
        frontier.t_min_s,
        frontier.t_min_s * (1 - 0.4 * SAME_TIME),
        fastest_s,
        float(frontier.time_s[len(frontier) // 2]),
        2 * frontier.t_star_s,
    ):
        point = planner.plan(deadline_s)
        assert point.iteration_time_s <= latest_s(deadline_s)
        in_time = frontier.time_s <= latest_s(deadline_s)
        if in_time.any():
            assert point.energy_j <= frontier.energy_j[in_time].min() * (1 + 1e-12)
        assert point.energy_lower_bound_j <= point.energy_j


def test_times_that_are_equal_but_for_rounding_are_the_same_time() -> None:
    """0.1 + 0.2 is not 0.3, and every good plan of a rounded profile is late by that."""
    problem: Problem = made_up_problem("rounded", 3, stages=4, microbatches=8, schedule="1f1b")
    planner = Planner(problem)
    t_min_s = planner.t_min_s
    for deadline_s in (np.nextafter(t_min_s, 0.0), t_min_s, np.nextafter(t_min_s, 1e9)):
        exact, later = (planner.plan(float(d)) for d in (deadline_s, t_min_s * (1 + 3e-10)))
        assert exact.energy_j == pytest.approx(later.energy_j, rel=1e-6)


def test_the_same_deadline_asked_twice_has_the_same_answer() -> None:
    planner = Planner(made_up_problem("noisy", 3, stages=3, microbatches=4, schedule="1f1b"))
    deadline_s = 1.1 * planner.t_min_s
    one, other = planner.plan(deadline_s), planner.plan(deadline_s)
    assert (one.energy_j, one.energy_lower_bound_j) == (other.energy_j, other.energy_lower_bound_j)
    assert np.array_equal(one.frequencies_mhz, other.frequencies_mhz)
