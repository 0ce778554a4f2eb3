"""The cheapest sequences of clocks when a clock change has a price: Viterbi, over all stages and plans at once.

It only makes instructions faster, so precedence cannot be violated: the idle time of a plan only grows.
"""

from __future__ import annotations

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.switching.runs import Clocks

_CELLS = 100_000_000
"""Positions × stages × clocks × plans in memory at once, a byte each."""


class Smoother:
    """Arrays are [position, points, stages, clocks]; a plan is a row of positions in ``clocks.mhz``."""

    def __init__(self, clocks: Clocks, plans: Index) -> None:
        self._clocks, self._plans = clocks, plans
        # Only instructions that set a clock take part; stages are padded to the longest.
        self._row_at = np.full((max(map(len, clocks.rows_of_stage)), len(clocks.rows_of_stage)), -1, dtype=np.intp)
        for stage, rows in enumerate(clocks.rows_of_stage):
            self._row_at[: len(rows), stage] = rows

    def plan(self, price_j: Floats) -> Index:
        """Return the cheapest plans in which no instruction is slower than planned.

        ``price_j`` is the price of a change, one for each plan.
        """
        size = max(_CELLS // (self._row_at.size * len(self._clocks.mhz)), 1)
        parts = [slice(begin, begin + size) for begin in range(0, len(self._plans), size)]
        return np.concatenate([self._plan(self._plans[part], price_j[part]) for part in parts])

    def _plan(self, plans: Index, price_j: Floats) -> Index:
        # An iteration follows the other, so the sequence is closed. It is cut at the first instruction: the clock at
        # which the open sequence ends is the one at which the closed sequence begins.
        open_end = self._walk(plans, price_j, None)[0]
        _, chosen = self._walk(plans, price_j, open_end)
        smooth = plans.copy()
        at = self._row_at >= 0
        smooth[:, self._row_at[at]] = chosen[at].T
        return smooth

    def _walk(self, plans: Index, price_j: Floats, before: Index | None) -> tuple[Index, Index]:
        """Return the last clock [points, stages], and all clocks [position, stages, points]."""
        clocks = self._clocks
        positions, stages = self._row_at.shape
        points, width = len(plans), len(clocks.mhz)
        price = price_j[:, None, None]
        stays = np.empty((positions, points, stages, width), dtype=np.bool_)
        source = np.empty((positions, points, stages), dtype=np.intp)
        value = np.zeros((points, stages, width))
        if before is not None:
            value += np.where(np.arange(width) == before[:, :, None], 0.0, price)
        for i, rows in enumerate(self._row_at):
            source[i] = value.argmin(axis=2)
            other = np.take_along_axis(value, source[i][:, :, None], axis=2) + price
            stays[i] = value <= other
            option = clocks.option_of[rows]
            within = clocks.time_s[option] <= clocks.time_s[option, plans[:, rows]][:, :, None]
            cost = np.where(within, clocks.energy_j[option], np.inf)
            value = np.minimum(value, other) + np.where((rows >= 0)[:, None], cost, 0.0)
        here = value.argmin(axis=2)
        last = here
        chosen = np.empty((positions, stages, points), dtype=np.intp)
        for i in range(positions - 1, -1, -1):
            chosen[i] = here.T
            stay = np.take_along_axis(stays[i], here[:, :, None], axis=2)[:, :, 0]
            here = np.where(stay, here, source[i])
        return last, chosen
