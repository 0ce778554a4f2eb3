"""Clock changes: counted as a GPU sees them, and traded for energy within bounds."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_solver.errors import InvalidProblem
from perseus_solver.frontier import solve_frontier
from perseus_solver.problem import Problem, build_problem
from perseus_solver.profile import read_profile
from perseus_solver.result import Frontier
from perseus_solver.schedules import build_schedule
from perseus_solver.simulate import Simulator
from perseus_solver.switches import Switching, calm, clock_changes


@pytest.fixture(scope="module")
def problem() -> Problem:
    rows = ["stage,instruction,frequency,time,energy"]
    for stage in range(3):
        for kind, work in (("forward", 1.0), ("backward", 1.9)):
            for clock in range(1400, 700, -20):
                seconds = (1 + 0.1 * stage) * work * (0.3 + 0.7 * 1400 / clock)
                rows.append(f"{stage},{kind},{clock},{seconds},{seconds * (95 + 305 * (clock / 1400) ** 2.2)}")
    profile = read_profile("\n".join(rows) + "\n")
    return build_problem(profile, build_schedule("1f1b", stages=3, microbatches=8), blocking_power_w=80.0)


@pytest.fixture(scope="module")
def frontier(problem: Problem) -> Frontier:
    return solve_frontier(problem, 30)


@pytest.mark.parametrize(
    ("clocks", "changes"),
    [
        ([[900, 900, 900], [900, 900, 900]], 0),
        ([[900, 900, 800], [900, 900, 900]], 2),  # there, and back for the next iteration
        ([[900, 0, 900], [800, 0, 0]], 0),  # a constant instruction leaves the clock alone
        ([[900, 800, 700], [900, 800, 900]], 5),
    ],
)
def test_changes_count_round_the_iteration(clocks: list[list[int]], changes: int) -> None:
    plan = np.array(clocks, dtype=np.uint16).reshape(1, -1)
    assert clock_changes(plan, np.array([0, 3, 6], dtype=np.int32)).tolist() == [changes]


def test_calm_plans_change_less_cost_little_and_are_never_later(problem: Problem, frontier: Frontier) -> None:
    calmed = calm(problem, frontier, loss=0.01)
    assert calmed.clock_changes.sum() / len(calmed) < 0.8 * frontier.clock_changes.sum() / len(frontier)
    assert (calmed.gap >= -1e-12).all()
    assert calmed.t_min_s <= frontier.t_min_s
    for point in calmed:
        original = frontier[
            min(int(np.searchsorted(frontier.time_s, point.iteration_time_s - 1e-12)), len(frontier) - 1)
        ]
        assert point.energy_j <= original.energy_j * 1.0101
    simulator = Simulator(problem)
    time_s, energy_j = simulator.totals(simulator.choice_of(calmed.frequencies_mhz))
    assert np.allclose(time_s, calmed.time_s, rtol=1e-12)
    assert np.allclose(energy_j, calmed.energy_j, rtol=1e-12)


def test_no_loss_and_no_cost_change_nothing_that_costs(problem: Problem, frontier: Frontier) -> None:
    calmed = calm(problem, frontier, loss=0.0)
    assert (calmed.energy_j <= np.interp(calmed.time_s, frontier.time_s, frontier.energy_j) * (1 + 1e-9)).all()


def test_more_loss_never_means_more_changes(problem: Problem, frontier: Frontier) -> None:
    totals = [float(np.median(calm(problem, frontier, loss=loss).clock_changes)) for loss in (0.0, 0.002, 0.01, 0.05)]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("switching", "loss", "name"),
    [
        (Switching(), -0.1, "loss"),
        (Switching(cost_j=-1.0), 0.1, "cost_j"),
        (Switching(latency_s=np.nan), 0.1, "latency_s"),
    ],
)
def test_costs_are_finite_and_not_negative(
    problem: Problem, frontier: Frontier, switching: Switching, loss: float, name: str
) -> None:
    with pytest.raises(InvalidProblem, match=f"{name} must be a finite number"):
        calm(problem, frontier, switching, loss=loss)
