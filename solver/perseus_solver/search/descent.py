"""Local search on plans: ruin a part of the iteration by price, and recreate it as the price falls.

A trial makes the instructions of a random part of the iteration as fast as they would be if time were worth slightly
more than it is, with some noise. Then the slack of the whole plan is offered at a falling share of that worth, first to
the instructions that save most with it, and in the end for nothing. (Ruin and recreate: Schrimpf et al., 2000; a noisy
greedy choice: GRASP, Feo and Resende, 1995.) Where the schedule repeats, instructions of one kind share their noise, so
trials of long schedules are periodic.
"""

from __future__ import annotations

import numpy as np

from perseus_solver.kinds import Floats
from perseus_solver.search.sweeps import Plans, Ruin, Sweeps

_SHARES = np.array([1.0, 0.75, 0.5, 0.25, 0.0])
"""Shares of its worth at which slack is offered, one sweep each."""
SWEEPS = len(_SHARES) + 2
"""Sweeps over the graph for a trial: two more make the part faster and compare the plans."""
_RUIN = Ruin(most_worth=1.2, least_noise=0.01, most_noise=0.3, least_part=2.0**-3)


class Descent:
    """The search on one problem. It is reproducible: the same calls find the same plans."""

    def __init__(self, sweeps: Sweeps) -> None:
        """Prepare the search."""
        self._sweeps = sweeps
        self._runs = 0

    def run(self, plans: Plans, deadline_ticks: Floats, through: Floats, tries: int, rounds: int = 1) -> Plans:
        """Return the best of some trials of each plan; the plan itself where none takes less energy.

        Args:
            plans: each within its deadline.
            deadline_ticks: float[plans].
            through: float[plans, kinds], the worth of time at each kind of row, units of flow.
            tries: trials of each plan in a round.
            rounds: each begins with the best plans of the one before.
        """
        self._runs += rounds
        return self._sweeps.descended(
            plans, deadline_ticks, through, _RUIN, _SHARES, tries=tries, rounds=rounds, seed=self._runs
        )
