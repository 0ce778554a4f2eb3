"""Small linear programmes, solved by OR-Tools' GLOP. This is the only module that imports OR-Tools' linear solver.

OR-Tools is imported on the first call, so that a command that solves nothing starts fast.
"""

from __future__ import annotations

import math

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
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    variables = [solver.NumVar(a, b, "") for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    for row, least, most in zip(rows, row_low.tolist(), row_high.tolist(), strict=True):
        constraint = solver.Constraint(least, most)
        for j in np.flatnonzero(row).tolist():
            constraint.SetCoefficient(variables[j], float(row[j]))
    objective = solver.Objective()
    for j in np.flatnonzero(cost).tolist():
        objective.SetCoefficient(variables[j], float(cost[j]))
    objective.SetMinimization()
    status = solver.Solve()
    if status != pywraplp.Solver.OPTIMAL:
        raise ProgrammeFailed(
            f"a linear programme of {len(rows)} rows and {len(cost)} columns ended with status {status}"
        )
    x = np.array([variable.solution_value() for variable in variables])
    if not all(map(math.isfinite, x.tolist())):
        raise ProgrammeFailed("a linear programme ended with a number that is not finite")
    inside: Floats = np.clip(x, low, high)
    return inside
