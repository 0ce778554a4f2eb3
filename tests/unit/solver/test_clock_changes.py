"""Clock changes: counted as a GPU sees them, and traded for energy within bounds."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_solver.errors import InvalidProblem
from perseus_solver.frontier import solve_deadline, solve_frontier
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier
from perseus_solver.schedules import build_schedule
from perseus_solver.switching import clock_changes, reduce_clock_changes, reduce_clock_changes_of_point

pytestmark = pytest.mark.usefixtures("short_search")


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
def test_the_change_to_the_next_iteration_counts(clocks: list[list[int]], changes: int) -> None:
    plan = np.array(clocks, dtype=np.uint16).reshape(1, -1)
    assert clock_changes(plan, np.array([0, 3, 6], dtype=np.int32)).tolist() == [changes]


def replay(problem: Problem, frequencies_mhz: np.ndarray) -> tuple[float, float, int]:
    """Time, energy and changes of a plan, instruction by instruction."""
    offset = problem.stage_offset.tolist()
    stage = np.repeat(np.arange(problem.stages), np.diff(offset))
    before: dict[int, list[tuple[int, float]]] = {i: [] for i in range(problem.instructions)}
    edges = zip(problem.edge_from.tolist(), problem.edge_to.tolist(), problem.edge_delay_s.tolist(), strict=True)
    for a, b, delay in edges:
        before[b].append((a, delay))
    end: dict[int, float] = {}
    busy, energy, changes = 0.0, 0.0, 0
    waiting = list(before)
    while waiting:
        i = next(i for i in waiting if all(a in end for a, _ in before[i]))
        waiting.remove(i)
        options = problem.options[problem.option_of[i]]
        at = options.frequency_mhz.tolist().index(int(frequencies_mhz[i]))
        first = i == offset[stage[i]]
        changed = frequencies_mhz[i] != frequencies_mhz[offset[stage[i] + 1] - 1 if first else i - 1]
        start = max([end[a] + delay for a, delay in before[i]], default=0.0)
        end[i] = start + options.time_s[at]
        busy += options.time_s[at]
        energy += options.energy_j[at]
        changes += int(changed)
    time_s = max(end.values()) + problem.overhead_s
    return time_s, energy + problem.blocking_power_w * (problem.stages * time_s - busy), changes


@pytest.mark.parametrize("loss", [0.002, 0.01])
def test_every_figure_of_a_reduced_plan_is_exact(problem: Problem, frontier: Frontier, loss: float) -> None:
    reduced = reduce_clock_changes(problem, frontier, loss=loss)
    for point in reduced:
        time_s, energy_j, changes = replay(problem, point.frequencies_mhz)
        assert time_s == pytest.approx(point.iteration_time_s, rel=1e-12)
        assert energy_j == pytest.approx(point.energy_j, rel=1e-12)
        assert changes == point.clock_changes
        assert point.gap >= 0
    assert (np.diff(reduced.time_s) > 0).all()
    assert (np.diff(reduced.effective_energy_j) < 0).all()


@pytest.mark.parametrize("loss", [0.0, 0.002, 0.02])
def test_each_reduced_plan_replaces_one_that_is_no_faster_and_has_no_fewer_changes(
    problem: Problem, frontier: Frontier, loss: float
) -> None:
    effective_j = frontier.effective_energy_j + loss * frontier.energy_j
    reduced = reduce_clock_changes(problem, frontier, loss=loss)
    for point, own_j in zip(reduced, reduced.effective_energy_j.tolist(), strict=True):
        in_time = point.iteration_time_s <= frontier.time_s * (1 + 1e-9)
        within = own_j <= effective_j * (1 + 1e-9)
        assert (in_time & within & (point.clock_changes <= frontier.clock_changes)).any()


def test_a_small_loss_saves_most_changes(problem: Problem, frontier: Frontier) -> None:
    reduced = reduce_clock_changes(problem, frontier, loss=0.01)
    assert reduced.clock_changes.mean() < 0.6 * frontier.clock_changes.mean()


def test_one_deadline_costs_no_more_than_permitted(problem: Problem, frontier: Frontier) -> None:
    deadline_s = 1.1 * frontier.t_min_s
    point = solve_deadline(problem, deadline_s)
    reduced = reduce_clock_changes_of_point(problem, frontier, point, deadline_s, loss=0.003)
    assert reduced.iteration_time_s <= deadline_s
    assert reduced.clock_changes < point.clock_changes
    assert reduced.energy_j <= point.energy_j * 1.003 + 1e-9


def test_constant_instructions_stay_without_clock() -> None:
    rows = ["stage,instruction,frequency,time,energy", "0,constant,0,0.2,20"]
    for stage in range(2):
        for kind, work in (("forward", 1.0), ("backward", 1.9)):
            rows += [
                f"{stage},{kind},{clock},{work * 1400 / clock},{work * (95 + 205 * (clock / 1400) ** 2.2)}"
                for clock in range(1400, 700, -100)
            ]
    profile = read_profile("\n".join(rows) + "\n")
    schedule = build_schedule("1f1b", stages=2, microbatches=4, constants=profile.constant_stages)
    loading = build_problem(profile, schedule, blocking_power_w=80.0)
    reduced = reduce_clock_changes(loading, solve_frontier(loading, 10), loss=0.05)
    constant = np.array([int(o.frequency_mhz[0]) == 0 for o in loading.options])[loading.option_of]
    assert constant.any()
    assert ((reduced.frequencies_mhz == 0) == constant).all()


def test_more_loss_never_means_more_changes(problem: Problem, frontier: Frontier) -> None:
    totals = [
        float(np.median(reduce_clock_changes(problem, frontier, loss=loss).clock_changes))
        for loss in (0.0, 0.002, 0.01, 0.05)
    ]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("loss", [-0.1, np.nan, np.inf])
def test_a_loss_is_finite_and_not_negative(problem: Problem, frontier: Frontier, loss: float) -> None:
    with pytest.raises(InvalidProblem, match="loss must be a finite number"):
        reduce_clock_changes(problem, frontier, loss=loss)
