"""Small linear programmes, solved by OR-Tools' GLOP. This is the only module that imports OR-Tools' linear solver.

OR-Tools is imported on the first call, so that a command that solves nothing starts fast.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from perseus_solver.kinds import Floats

SCALE = 1e3
"""Factor on times and relative errors that brings them near 1: delays are about a thousandth of a second."""


class ProgrammeFailed(RuntimeError):
    """No optimum was reached. This is a bug, never bad input: callers only build feasible, bounded programmes."""


def minimise(*, cost: Floats, rows: Floats, row_low: Floats, row_high: Floats, low: Floats, high: Floats) -> Floats:
    """Return the x that minimises ``cost · x`` with ``row_low ≤ rows · x ≤ row_high`` and ``low ≤ x ≤ high``.

    Coefficients should be near 1: the simplex works to absolute tolerances of about 1e-6.

    Args:
        cost: float[columns].
        rows: float[rows, columns].
        row_low, row_high: float[rows], may be infinite.
        low, high: float[columns], may be infinite.

    Returns:
        float[columns].

    Raises:
        ProgrammeFailed: no optimal solution was found.
    """
    programme = Programme(cost, low, high)
    for row, least, most in zip(rows, row_low.tolist(), row_high.tolist(), strict=True):
        programme.add(row, least, most)
    return programme.solve()


class Programme:
    """A linear programme that grows row by row, and starts each time from the solution before."""

    def __init__(self, cost: Floats, low: Floats, high: Floats) -> None:
        """Begin with ``cost · x`` to be minimised and ``low ≤ x ≤ high``, float[columns] each."""
        from ortools.linear_solver import pywraplp

        self._optimal = pywraplp.Solver.OPTIMAL
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._low, self._high = low, high
        self._variables = [self._solver.NumVar(a, b, "") for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        self._rows: list[Any] = []
        objective = self._solver.Objective()
        for j in np.flatnonzero(cost).tolist():
            objective.SetCoefficient(self._variables[j], float(cost[j]))
        objective.SetMinimization()

    def add(self, row: Floats, least: float, most: float) -> None:
        """Add ``least ≤ row · x ≤ most``; ``row`` is float[columns]."""
        constraint = self._solver.Constraint(least, most)
        for j in np.flatnonzero(row).tolist():
            constraint.SetCoefficient(self._variables[j], float(row[j]))
        self._rows.append(constraint)

    def limit(self, row: int, most: float) -> None:
        """Change the upper limit of a row, numbered from 0 in the order in which they were added."""
        self._rows[row].SetUb(most)

    def solve(self) -> Floats:
        """Return the best x.

        Raises:
            ProgrammeFailed: no optimal solution was found.
        """
        status = self._solver.Solve()
        if status != self._optimal:
            raise ProgrammeFailed(
                f"a linear programme of {len(self._rows)} rows and {len(self._variables)} columns "
                f"ended with status {status}"
            )
        x = np.array([variable.solution_value() for variable in self._variables])
        if not all(map(math.isfinite, x.tolist())):
            raise ProgrammeFailed("a linear programme ended with a number that is not finite")
        inside: Floats = np.clip(x, self._low, self._high)
        return inside
