"""Local search on plans: ruin a small part, recreate it, keep the best outcome (Schrimpf et al., 2000).

A trial makes some instructions faster, near each other in the schedule and in the pipeline, and distributes the time
that this gains again: once at a random share of its worth, once for nothing. Many trials of many plans are swept side
by side. It is used on small graphs, where single options weigh most.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Floats, Index
from perseus_solver.search.rounding import Rounder

_SHARES = np.linspace(0.0, 1.4, 8)
"""Shares of the worth of time. Above 1, time is left for instructions that come later."""
_REACH, _DENSITY = 6, 0.6
"""A ruined part is within at most this distance of an instruction (in levels), and contains this share of those that
are.
"""
SWEEPS = 3
"""Sweeps over the graph for each trial of a round."""
_FEW, _FINE = 4, 3
"""Instructions ruined anywhere, on average at most; and how many options a small step back is."""


class Recreate:
    """The search on one problem. It is reproducible: the same calls find the same plans."""

    def __init__(self, rounder: Rounder, stage: Index) -> None:
        """Prepare the search; ``stage`` is int[n], the stage of each row."""
        self._rounder, self._random = rounder, np.random.default_rng(0)
        graph = rounder.graph
        self._level = np.repeat(np.arange(len(graph.levels)), [part.end - part.begin for part in graph.levels])
        self._stage = stage

    def run(self, choice: Index, deadline_ticks: Floats, through: Floats, tries: int, rounds: int) -> Index:
        """Return plans that take no more energy, each within its deadline.

        Args:
            choice: int[n, plans], where to begin.
            deadline_ticks: float[plans].
            through: float[kinds, plans], the worth of time.
            tries: trials of each plan in a round.
            rounds: number of rounds.
        """
        rounder, columns = self._rounder, choice.shape[1]
        of = np.repeat(np.arange(columns), tries)  # the plan that a trial starts from
        first, limit_ticks = np.arange(columns) * tries, deadline_ticks[of]
        worth = np.stack([rounder.worth(through * share) for share in _SHARES], axis=2)
        free = worth[:, of, 0]
        # Where time is worth nothing, an instruction is as slow as it can be already.
        scarce = (through > 0)[rounder.kind]
        scarce[:, ~scarce.any(axis=0)] = True
        scarce = scarce[:, of]
        energy = rounder.energy_j(choice)
        for turn in range(rounds):
            trial = self._ruined(choice[:, of], scarce)
            share = self._random.integers(0, len(_SHARES), len(of))
            rounder.reclaim(trial, limit_ticks, worth[:, of, share], backward=bool(turn % 2))
            rounder.reclaim(trial, limit_ticks, free, backward=bool(turn % 2))
            found = rounder.energy_j(trial).reshape(columns, tries)
            least, best = found.min(axis=1), found.argmin(axis=1)
            taken = least <= energy  # a plan of equal energy may lead to better ones
            choice = np.where(taken, trial[:, first + best], choice)
            energy = np.where(taken, least, energy)
        return choice

    def _ruined(self, trial: Index, scarce: npt.NDArray[np.bool_]) -> Index:
        """Make instructions faster: a neighbourhood in every other trial, a few anywhere in the others."""
        columns, random = trial.shape[1], self._random
        draw = random.random(trial.shape, dtype=np.float32)
        count = scarce.sum(axis=0)
        centre = (np.cumsum(scarce, axis=0) <= random.integers(0, count)).sum(axis=0)
        reach = random.integers(0, _REACH + 1, columns)
        near = (self._away(centre) <= reach) & (draw < _DENSITY)
        anywhere = scarce & (draw < random.integers(1, _FEW + 1, columns) / count)
        apart = np.arange(columns) % 2 == 1
        steps = np.asarray(random.integers(1, _FINE + 1, columns))
        steps[~apart & (random.random(columns) < 0.5)] = self._rounder.tables.time_ticks.shape[1]
        return np.where(np.where(apart, anywhere, near), np.maximum(trial - steps, 0), trial)

    def _away(self, centre: Index) -> Index:
        """Return how far each row is from these rows.

        On a stage a microbatch is two levels from the next, its forward and its backward; the next stage counts as
        much.
        """
        level, stage = self._level, self._stage
        away: Index = np.abs(level[:, None] - level[centre]) + 2 * np.abs(stage[:, None] - stage[centre])
        return away
