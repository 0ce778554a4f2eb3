"""Which deadlines to plan for and which plans to keep, so that the worst deployed gap is least.

See `perseus_solver.model.deployed`: the last plan before a deadline is the one that runs, and its gap is largest just
before the next plan.
"""

from __future__ import annotations

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.model.deployed import step_gaps, waiting_s

_HALVINGS = 30
"""Halvings of the interval of worst gaps, to a billionth of it."""


def distance(time_s: Floats, energy_j: Floats, waiting_w: float) -> Floats:
    """Return how much a job would lose, in steps as shares of energy, on the way from the first time to each other.

    Args:
        time_s: float[times], increasing, seconds.
        energy_j: float[times], the bound, or plans, joules of the iteration.
        waiting_w: what all stages take while they wait, watts.

    Returns:
        float[times], from 0, not decreasing.
    """
    lost_j = -np.diff(energy_j - waiting_w * waiting_s(time_s, energy_j))
    share: Floats = np.append(0.0, np.cumsum(np.maximum(lost_j, 0.0) / energy_j[1:]))
    return share


def chosen(time_s: Floats, energy_j: Floats, bound_j: Floats, waiting_w: float, points: int) -> Index:
    """Return which plans to keep so that the worst deployed gap is least; the ends and least energy stay.

    A worst gap is possible if few enough steps lead from the first plan to the last, none with a larger gap. The fewest
    steps are those that always go to the plan, among all within reach, that reaches furthest. Bisection finds the
    smallest such gap; below that of all plans it does not look. What is left of the points lowers the mean.

    Args:
        time_s, energy_j: float[plans], plans that no other dominates, by increasing time.
        bound_j: float[plans], the bound at each time.
        waiting_w: what all stages take while they wait, watts.
        points: number of plans to keep, at most.

    Returns:
        int[plans kept], increasing.
    """
    last, least = len(time_s) - 1, int(energy_j.argmin())
    if points > last:
        return np.arange(last + 1)
    if points < 3:
        return np.array([0, last][:points], dtype=np.intp)
    waited_j = waiting_w * waiting_s(time_s, energy_j)
    spent_j = energy_j - waited_j
    # With all plans kept, each of the two parts has a worst step already, which no choice avoids.
    steps = step_gaps(time_s, energy_j, bound_j, waiting_w)
    least_worst = np.where(np.arange(last + 1) <= least, steps[:least].max(initial=0.0), steps[least:].max())

    def path(worst: float) -> list[int]:
        # Plan i may run until plan j begins if spent_j[i] ≤ allowed_j[j].
        allowed_j = np.minimum.accumulate((1.0 + np.maximum(worst, least_worst)) * bound_j - waited_j)
        reach = np.searchsorted(-allowed_j, -spent_j, side="right") - 1
        reach = np.clip(reach, np.minimum(np.arange(last + 1) + 1, last), last)
        steps = [0]
        while (at := steps[-1]) < last:
            end = min(int(reach[at]), least if at < least else last)
            steps.append(end if end in (least, last) else at + 1 + int(reach[at + 1 : end + 1].argmax()))
        return steps

    low, high = 0.0, float((spent_j[0] + waited_j[-1]) / bound_j.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if len(path(middle)) <= points else (middle, high)
    return _filled(path(high), time_s, spent_j, points)


def _filled(kept: list[int], time_s: Floats, spent_j: Floats, points: int) -> Index:
    """Return these plans and further ones, each the one that saves most over all deadlines; no step gets worse."""
    stay = np.zeros(len(time_s), dtype=np.bool_)
    stay[kept] = True
    place = np.arange(len(time_s))
    for _ in range(points - len(kept)):
        before = np.maximum.accumulate(np.where(stay, place, 0))
        after = np.minimum.accumulate(np.where(stay, place, place[-1])[::-1])[::-1]
        saved = np.where(stay, 0.0, (spent_j[before] - spent_j) * (time_s[after] - time_s))
        stay[saved.argmax()] = True
    return np.flatnonzero(stay)
