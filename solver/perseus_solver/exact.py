"""Close the gap of one plan, or bound it more tightly, with an exact solver: CP-SAT of OR-Tools.

The relaxation's bound is below the best plan of measured clocks, because those are not continuous. CP-SAT searches the
measured clocks themselves. Of graphs with up to some hundred instructions it often proves the optimum; otherwise its
bound is at least as high as the one it was given.

A bound must hold in spite of integers. So durations, delays and energies are rounded down and the deadline up: every
plan that keeps the deadline also does so here, for no more energy than it takes. A plan that CP-SAT finds is simulated
exactly before it counts.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import numpy as np

from perseus_solver.errors import Infeasible, InvalidProblem
from perseus_solver.kinds import Index, Ints, Options, latest_s
from perseus_solver.model.point import Point, status_of
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Choice, Simulator
from perseus_solver.switching import clock_changes

MAX_INSTRUCTIONS = 2_000
"""Of larger graphs CP-SAT improves neither plan nor bound in minutes."""
DEFAULT_SECONDS = 60.0
_TIME_UNITS, _ENERGY_UNITS = 2.0**40, 2.0**40
"""Units in the deadline, where times are on no decimal grid, and in the energy of the plan. Rounding loses at most one
of each for every instruction: less than a billionth of the energy, which is what counts as optimal.
"""
_MOST_DIGITS = 9
_EXACT = 1e-12
"""Relative error of float64 in a few operations."""


def prove(problem: Problem, point: Point, deadline_s: float, *, seconds: float = DEFAULT_SECONDS) -> Point:
    """Look for the optimum at a deadline, from a plan that is known.

    Args:
        problem: the problem.
        point: a plan of it that ends by the deadline, with its bound; see `perseus_solver.frontier.Planner.plan`.
        deadline_s: longest iteration time allowed, seconds, overhead included.
        seconds: the longest time to search, on all cores that this process may use.

    Returns:
        The best plan known, this one or a cheaper one, with the highest bound proven for the deadline. Its status is
        ``optimal`` if no cheaper plan exists.

    Raises:
        Infeasible: the plan ends after the deadline.
        InvalidProblem: the problem is too large for an exact solver, or ``seconds`` is not positive.
    """
    if problem.instructions > MAX_INSTRUCTIONS:
        raise InvalidProblem(
            f"{problem.instructions:,} instructions are too many for an exact proof; at most {MAX_INSTRUCTIONS:,}"
        )
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidProblem(f"seconds must be a positive finite number, not {seconds}")
    if point.iteration_time_s > latest_s(deadline_s):
        raise Infeasible(deadline_s, point.iteration_time_s)
    simulator = Simulator(problem)
    model = _Model(problem, simulator, point, deadline_s)
    picked, bound_j = model.solve(seconds)
    best = point
    if picked is not None:
        best = _cheaper(problem, simulator, point, model.rows(picked, problem.option_of), deadline_s)
    proven_j = min(max(bound_j, point.energy_lower_bound_j), best.energy_j)
    return replace(best, energy_lower_bound_j=proven_j, status=status_of(best.energy_j / proven_j - 1.0))


def _cheaper(problem: Problem, simulator: Simulator, point: Point, choice: Choice, deadline_s: float) -> Point:
    """Return a plan if it is in time and takes less energy than the point, otherwise the point."""
    run = simulator.run(choice)
    time_s, energy_j = float(run.iteration_time_s), float(run.energy_j)
    if time_s > latest_s(deadline_s) or energy_j >= point.energy_j:
        return point
    frequencies = problem.frequencies_of(choice)
    return replace(
        point,
        iteration_time_s=time_s,
        energy_j=energy_j,
        frequencies_mhz=frequencies,
        clock_changes=int(clock_changes(frequencies[None], problem.stage_offset)[0]),
    )


def _undominated(options: Options, waiting_w: float) -> Index:
    """Return the options that no other beats in both time and effective energy; exactly, so that proofs hold."""
    effective_j = options.energy_j - waiting_w * options.time_s
    order = np.lexsort((effective_j, options.time_s))
    least = np.minimum.accumulate(effective_j[order])
    kept: Index = order[np.append(True, effective_j[order][1:] < least[:-1])]
    return kept


class _Model:
    """The problem at one deadline, in integers."""

    def __init__(self, problem: Problem, simulator: Simulator, point: Point, deadline_s: float) -> None:
        from ortools.sat.python import cp_model

        self._model = model = cp_model.CpModel()
        waiting_w = problem.blocking_power_w * problem.stages
        within_s = latest_s(deadline_s) - problem.overhead_s
        tick_s = _grid_s(problem) or within_s / _TIME_UNITS
        price, self._unit_j = _price(waiting_w * tick_s, point.energy_j / _ENERGY_UNITS)
        self._fixed_j = waiting_w * problem.overhead_s
        self._rows = [_undominated(options, problem.blocking_power_w) for options in problem.options]

        most = _down(within_s, tick_s)
        end = [model.new_int_var(0, most, "") for _ in range(problem.instructions)]
        makespan = model.new_int_var(0, most, "")
        self._picked: list[list[cp_model.IntVar]] = []
        hints = simulator.choice_of(point.frequencies_mhz).tolist()
        cost: list[cp_model.LinearExpr] = []
        length: list[cp_model.LinearExpr] = []
        for k, hint, ends in zip(problem.option_of.tolist(), hints, end, strict=True):
            rows, options = self._rows[k], problem.options[k]
            picked = [model.new_bool_var("") for _ in rows]
            model.add_exactly_one(picked)
            energy_j = options.energy_j[rows] - problem.blocking_power_w * options.time_s[rows]
            units = np.floor(energy_j / self._unit_j).astype(np.int64).tolist()
            ticks = [_down(seconds, tick_s) for seconds in options.time_s[rows].tolist()]
            cost.append(cp_model.LinearExpr.weighted_sum(picked, units))
            length.append(cp_model.LinearExpr.weighted_sum(picked, ticks))
            model.add(ends >= length[-1])
            model.add(makespan >= ends)
            for row, variable in zip(rows.tolist(), picked, strict=True):
                model.add_hint(variable, row == hint)
            self._picked.append(picked)
        edges = zip(problem.edge_from.tolist(), problem.edge_to.tolist(), problem.edge_delay_s.tolist(), strict=True)
        for before, after, delay_s in edges:
            model.add(end[after] >= end[before] + _down(delay_s, tick_s) + length[after])
        total = cp_model.LinearExpr.sum(cost) + price * makespan
        # What is known helps the search. Rounding may take a unit, or a tick, from each instruction.
        proven = math.floor((point.energy_lower_bound_j - self._fixed_j) / self._unit_j)
        model.add(total >= proven - (price + 1) * (problem.instructions + 1))
        model.minimize(total)

    def solve(self, seconds: float) -> tuple[Index | None, float]:
        """Return the best choice found, None if there is none, and the bound in joules."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = len(os.sched_getaffinity(0))
        solver.parameters.random_seed = 0
        status = solver.solve(self._model)
        bound_j = math.floor(solver.best_objective_bound) * self._unit_j + self._fixed_j
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound_j
        return np.array([[solver.value(one) for one in picked].index(1) for picked in self._picked]), bound_j

    def rows(self, positions: Index, option_of: Ints) -> Index:
        """Return positions in the options for positions among those that are not dominated."""
        return np.array([self._rows[k][at] for k, at in zip(option_of.tolist(), positions.tolist(), strict=True)])


def _grid_s(problem: Problem) -> float | None:
    """Return the coarsest power of ten of which all durations and delays are multiples, in seconds; None: none is.

    Profiles are decimal numbers of a few digits. On their own grid nothing is rounded.
    """
    seconds = np.concatenate([problem.edge_delay_s, *(options.time_s for options in problem.options)])
    for digits in range(_MOST_DIGITS + 1):
        scaled = seconds * 10.0**digits
        if (np.abs(scaled - np.rint(scaled)) <= _EXACT * np.maximum(scaled, 1.0)).all():
            return float(10.0**-digits)
    return None


def _price(waiting_j: float, unit_j: float) -> tuple[int, float]:
    """Return what a tick of waiting takes as a whole number of units, and a unit, slightly below the one given."""
    price = math.ceil(waiting_j / unit_j)
    return (price, waiting_j / price) if price else (0, unit_j)


def _down(seconds: float, tick_s: float) -> int:
    """Return whole ticks, rounded down; what is a whole number up to rounding of floats is that number."""
    return math.floor(seconds / tick_s * (1 + _EXACT))
