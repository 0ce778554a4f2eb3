"""From planned durations to measured options: never later than the deadline, as cheap as we can make it.

Works on many plans at once, a column each, in ticks. Called by ``frontier``; proves nothing.
"""

from __future__ import annotations

import numpy as np

from perseus_solver.engine.graph import Graph, Index, latest_of
from perseus_solver.engine.tables import Tables
from perseus_solver.problem import Floats


class Rounder:
    """The tables and the graph of one problem, laid out for sweeps. Choices are positions in `Tables` rows, fastest
    first.
    """

    def __init__(self, tables: Tables, graph: Graph, table_of: Index) -> None:
        self.tables, self.graph, self.table_of = tables, graph, table_of
        width = tables.ticks.shape[1]
        finite = tables.ticks[np.isfinite(tables.ticks)]
        # One sorted array for all tables: table k lies in [k·stride, (k + 1)·stride).
        self._stride = 2.0 ** (np.ceil(np.log2(finite.max() + 1.0)) + 1.0)
        padded = np.where(np.isfinite(tables.ticks), tables.ticks, self._stride - 1.0)
        self._keys = (padded + np.arange(len(padded))[:, None] * self._stride).ravel()
        self._first = (table_of * width)[:, None]
        self._shift = (table_of * self._stride)[:, None]
        self._ticks = tables.ticks.ravel()
        self._energy = tables.energy_j.ravel()

    def ticks(self, choice: Index) -> Floats:
        """Durations of a choice."""
        duration: Floats = self._ticks[self._first + choice]
        return duration

    def energy_j(self, choice: Index) -> Floats:
        """Effective energy of each column."""
        total: Floats = self._energy[self._first + choice].sum(axis=0)
        return total

    def _slowest(self, rows: slice, limit: Floats) -> Index:
        """The slowest option that takes at most ``limit``; the fastest where none does."""
        key = np.minimum(limit, self._stride - 2.0) + self._shift[rows]
        found: Index = self._keys.searchsorted(key, side="right") - 1 - self._first[rows]
        return np.maximum(found, 0)

    def follow(self, finish: Floats, cap: Index) -> Index:
        """Slowest options that keep up with a timetable: what one instruction leaves of its time, its successors use."""
        graph = self.graph
        choice = np.empty((graph.n, finish.shape[1]), dtype=np.intp)
        done = np.zeros((graph.n + 1, finish.shape[1]))
        for level in graph.levels:
            rows = slice(level.begin, level.end)
            ready = latest_of(done, level.before)
            choice[rows] = np.minimum(self._slowest(rows, finish[rows] - ready), cap[rows])
            done[rows] = ready + self._ticks[self._first[rows] + choice[rows]]
        return choice

    def reclaim(self, choice: Index, deadline: Floats, cap: Index) -> None:
        """Give slack away, first come first served along the levels; slows options in place, never beyond ``cap``."""
        graph = self.graph
        rest = graph.tail_length(self.ticks(choice))
        done = np.zeros((graph.n + 1, choice.shape[1]))
        for level in graph.levels:
            rows = slice(level.begin, level.end)
            ready = latest_of(done, level.before)
            slower = np.minimum(self._slowest(rows, deadline - rest[rows] - ready), cap[rows])
            choice[rows] = np.maximum(choice[rows], slower)
            done[rows] = ready + self._ticks[self._first[rows] + choice[rows]]

    def worth(self, price: Floats) -> Index:
        """The slowest option on the hull that is best when time costs ``price`` (units) at each instruction."""
        tables = self.tables
        out = np.empty(price.shape, dtype=np.intp)
        for k in range(len(tables.size)):
            rows = np.flatnonzero(self.table_of == k)
            corners = int(tables.hull_size[k])
            at = np.searchsorted(tables.ticks[k, : tables.size[k]], tables.hull_ticks[k, :corners])
            out[rows] = at[np.searchsorted(-tables.hull_price[k, : corners - 1], -price[rows], side="right")]
        return out


def round_plans(rounder: Rounder, planned: Floats, through: Floats, deadline: Floats) -> Index:
    """Options for planned durations (columns), none ending after its deadline; ``through`` are the flows that price
    time.
    """
    finish = rounder.graph.finish(planned)[:-1]
    choice = rounder.follow(finish, rounder.worth(through * 0.99))
    for share in (1.0, 0.5, 0.0):
        rounder.reclaim(choice, deadline, rounder.worth(through * share))
    return choice
