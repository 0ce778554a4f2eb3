"""Local search on plans: ruin a part of the iteration by price, and recreate it as the price falls.

A trial makes the instructions of a random part of the iteration as fast as they would be if time were worth slightly
more than it is, with some noise. Then the slack of the whole plan is offered at a falling share of that worth, first to
the instructions that save most with it, and in the end for nothing. (Ruin and recreate: Schrimpf et al., 2000; a noisy
greedy choice: GRASP, Feo and Resende, 1995.) Where the schedule repeats, instructions of one kind share their noise, so
trials of long schedules are periodic. Many trials of many plans are swept side by side.
"""

from __future__ import annotations

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.search.rounding import Rounder

_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of its worth at which slack is offered, one sweep each."""
SWEEPS = len(_SHARES) + 2
"""Sweeps over the graph for a trial: two more make the part faster and compare the plans."""
_MOST, _LEAST_NOISE, _MOST_NOISE = 1.2, 0.01, 0.3
"""Time is worth up to so much more in the part; and the standard deviation of its logarithm, by instruction."""
_LEAST_PART = 2.0**-3
"""The smallest part, a share of the levels of the graph; the largest is the whole."""


class Descent:
    """The search on one problem. It is reproducible: the same calls find the same plans."""

    def __init__(self, rounder: Rounder) -> None:
        """Prepare the search."""
        self._rounder, self._random = rounder, np.random.default_rng(0)
        levels = rounder.graph.levels
        self._levels = len(levels)
        self._level = np.repeat(np.arange(len(levels)), [part.end - part.begin for part in levels])[:, None]
        self._backward = False

    def run(self, choice: Index, deadline_ticks: Floats, through: Floats, tries: int) -> Index:
        """Return the best of some trials of each plan; the plan itself where none takes less energy.

        Args:
            choice: int[n, plans], each within its deadline.
            deadline_ticks: float[plans].
            through: float[kinds, plans], the worth of time at each kind of row, units of flow.
            tries: trials of each plan.

        Returns:
            int[n, plans].
        """
        rounder, random = self._rounder, self._random
        plans = choice.shape[1]
        of = np.repeat(np.arange(plans), tries)
        spread = np.exp(random.uniform(np.log(_LEAST_NOISE), np.log(_MOST_NOISE), len(of)))
        noise = np.exp(random.standard_normal((len(through), len(of)), dtype=np.float32) * spread)
        price = through[:, of] * noise * random.uniform(1.0, _MOST, len(of))
        # Up to twice the levels, so that a part around either end may still be the whole.
        reach = self._levels * np.exp(random.uniform(np.log(_LEAST_PART), np.log(2.0), len(of))) / 2.0
        inside = np.abs(self._level - random.uniform(0.0, self._levels, len(of))) <= reach
        trial = choice[:, of]
        np.minimum(trial, rounder.cheapest(rounder.worth(price)), out=trial, where=inside)
        offered = [rounder.worth(price * share) for share in _SHARES]
        rounder.reclaim(trial, deadline_ticks[of], *offered, backward=self._backward)
        self._backward = not self._backward
        energy_j = rounder.energy_j(trial).reshape(plans, tries)
        best = np.arange(plans) * tries + energy_j.argmin(axis=1)
        return np.where(energy_j.min(axis=1) < rounder.energy_j(choice), trial[:, best], choice)
