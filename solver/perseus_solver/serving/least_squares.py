"""Least squares of few parameters that are at least 0, exact: the best of all sets of parameters that are more than 0.

Six parameters have 63 such sets; each is one small system of equations, and many fits are solved at once. There is no
iteration that could fail to end, and a column that says nothing gets 0.
"""

from __future__ import annotations

import numpy as np

from perseus_solver.kinds import Floats

_RIDGE = 1e-10
"""Of the scaled columns' squared length: columns that say the same share their parameter, and no system is singular."""
_NOTHING = 1e-200
"""Of the longest column's squared length: one that is shorter is 0, but for rounding."""


def non_negative(gram: Floats, moment: Floats) -> Floats:
    """Minimise βᵀ·gram·β − 2·βᵀ·moment over β ≥ 0, for many problems at once.

    Args:
        gram: float[problems, parameters, parameters], XᵀX.
        moment: float[problems, parameters], Xᵀy.

    Returns:
        float[problems, parameters].
    """
    count = gram.shape[-1]
    squares = np.diagonal(gram, axis1=1, axis2=2)
    length = np.where(squares > _NOTHING * np.max(squares, axis=1, keepdims=True), np.sqrt(squares), np.inf)
    scaled = gram / (length[:, :, None] * length[:, None, :])
    aim = moment / length
    # Where the best of all parameters are not negative, no set of fewer is better.
    best = np.linalg.solve(scaled + _RIDGE * np.eye(count), aim[:, :, None])[:, :, 0]
    left = np.flatnonzero((best < 0.0).any(axis=1))
    best[left] = _best_support(scaled[left], aim[left])
    return best / length


def _best_support(scaled: Floats, aim: Floats) -> Floats:
    """Try all sets of parameters that are more than 0."""
    count = aim.shape[-1]
    best, least = np.zeros_like(aim), np.zeros(len(aim))
    for support in range(1, (1 << count) - 1):
        used = np.array([bool(support >> place & 1) for place in range(count)])
        system = np.where(used[:, None] & used[None, :], scaled, 0.0) + np.diag(np.where(used, _RIDGE, 1.0))
        solution = np.linalg.solve(system, np.where(used, aim, 0.0)[:, :, None])[:, :, 0]
        value = np.einsum("pi,pij,pj->p", solution, scaled, solution) - 2.0 * np.einsum("pi,pi->p", solution, aim)
        better = (solution >= 0.0).all(axis=1) & (value < least)
        best[better], least[better] = solution[better], value[better]
    return best
