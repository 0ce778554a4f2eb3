"""From relaxed schedules to measured options: never later than the deadline, as cheap as we can make it.

Works on many plans at once, a column each, in ticks. Called by ``frontier``; proves nothing.

Two facts guide it. Schedules that satisfy precedence form a lattice: the earlier (or the later) of two timetables,
one of them shifted, is again a timetable; so between two optimal schedules there is one that follows the slow one up
to some moment and the fast one from there on, instead of being a little slow everywhere, which measured options
cannot express. And the flow through an instruction says what time is worth there, so a slower option that saves less
than that leaves its time to others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.engine.graph import Graph, Index, latest_of
from perseus_solver.engine.tables import Tables
from perseus_solver.problem import Floats

SHARES, QUICK_SHARES = (1.0, 0.7, 0.4, 0.2, 0.0), (1.0, 0.4, 0.0)
"""Slack is offered at these shares of its worth, one sweep each: first to those who save most by it."""
SHY = 0.99
"""When following a timetable an instruction whose flow lies on the verge between two corners takes the slower one;
just below, it would hand its time on. Slightly less than the full worth decides for the slower."""
SPANS = (0, 1, 2, 4, 7)
"""How many samples away from the deadline the two mixed schedules are taken: far ones have fewer fractional
durations.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Optimal relaxed schedules, fast to slow: columns of start and finish ticks and of flows; makespans increase."""

    start: Floats
    finish: Floats
    through: Floats
    makespan: Floats


class Rounder:
    """The tables and the graph of one problem, laid out for sweeps. Choices count from the fastest."""

    def __init__(self, tables: Tables, graph: Graph, table_of: Index) -> None:
        self.tables, self.graph, self.table_of = tables, graph, table_of
        self._width = tables.ticks.shape[1]
        finite = tables.ticks[np.isfinite(tables.ticks)]
        # One sorted array for all tables: table k lies in [k·stride, (k + 1)·stride).
        self._stride = 2.0 ** (np.ceil(np.log2(finite.max() + 1.0)) + 1.0)
        padded = np.where(np.isfinite(tables.ticks), tables.ticks, self._stride - 1.0)
        self._keys = (padded + np.arange(len(padded))[:, None] * self._stride).ravel()
        self._first = (table_of * self._width)[:, None]
        self._shift = (table_of * self._stride)[:, None]
        self._ticks = tables.ticks.ravel()
        self._energy = tables.energy_j.ravel()
        prefixes = _best_in_prefix(tables)
        self._prefix = prefixes.ravel()
        self._prefix_first = (table_of * (prefixes.shape[1] * self._width))[:, None]

    def ticks(self, choice: Index) -> Floats:
        """Durations of a choice."""
        duration: Floats = self._ticks[self._first + choice]
        return duration

    def energy_j(self, choice: Index) -> Floats:
        """Effective energy of each column."""
        total: Floats = self._energy[self._first + choice].sum(axis=0)
        return total

    def makespan(self, choice: Index) -> Floats:
        """Ticks from start to end of each column."""
        end: Floats = self.graph.finish(self.ticks(choice)).max(axis=0)
        return end

    def worth(self, price: Floats) -> Index:
        """What `_pick` needs to know about a price of time (units) at each instruction."""
        tables = self.tables
        corner = np.empty(price.shape, dtype=np.intp)
        for k in range(len(tables.size)):
            rows = np.flatnonzero(self.table_of == k)
            falling = -tables.hull_price[k, : int(tables.hull_size[k]) - 1]
            corner[rows] = np.searchsorted(falling, -price[rows], side="right")
        found: Index = self._prefix_first + corner * self._width
        return found

    def held(self, worth: Index, row: Index) -> Index:
        """The same worth, except that in each column one row keeps to the fastest corner of its hull."""
        held = worth.copy()
        held[row, np.arange(worth.shape[1])] = self._prefix_first[row, 0]
        return held

    def _pick(self, rows: slice, limit: Floats, worth: Index) -> Index:
        """The best option that takes at most ``limit``, unused time being worth its price; the fastest if none does."""
        key = np.minimum(limit, self._stride - 2.0) + self._shift[rows]
        slowest = self._keys.searchsorted(key, side="right") - 1 - self._first[rows]
        best: Index = self._prefix[worth[rows] + np.maximum(slowest, 0)]
        return best

    def follow(self, finish: Floats, worth: Index) -> Index:
        """Options that keep up with a timetable, from the start: what one leaves of its time, others may use."""
        graph = self.graph
        choice = np.empty((graph.n, finish.shape[1]), dtype=np.intp)
        done = np.zeros((graph.n + 1, finish.shape[1]))
        for level in graph.levels:
            rows = slice(level.begin, level.end)
            ready = latest_of(done, level.before)
            choice[rows] = self._pick(rows, finish[rows] - ready, worth)
            done[rows] = ready + self._ticks[self._first[rows] + choice[rows]]
        return choice

    def follow_back(self, reach: Floats, worth: Index) -> Index:
        """The same from the end: ``reach`` is the time from each planned start to the end of the iteration."""
        graph = self.graph
        choice = np.empty((graph.n, reach.shape[1]), dtype=np.intp)
        far = np.zeros((graph.n + 1, reach.shape[1]))
        for level in reversed(graph.levels):
            rows = slice(level.begin, level.end)
            rest = latest_of(far, level.after)
            choice[rows] = self._pick(rows, reach[rows] - rest, worth)
            far[rows] = rest + self._ticks[self._first[rows] + choice[rows]]
        return choice

    def reclaim(self, choice: Index, deadline: Floats, worth: Index, *, back: bool = False) -> None:
        """Give slack away, first come first served along the levels (or against them); slows options in place."""
        graph = self.graph
        duration = self.ticks(choice)
        edge_of_time = np.zeros((graph.n + 1, choice.shape[1]))
        if back:
            start = graph.finish(duration)[:-1] - duration
            levels, other = graph.levels[::-1], start
        else:
            levels, other = graph.levels, graph.tail_length(duration)
        for level in levels:
            rows = slice(level.begin, level.end)
            near = latest_of(edge_of_time, level.after if back else level.before)
            slower = self._pick(rows, deadline - other[rows] - near, worth)
            choice[rows] = np.maximum(choice[rows], slower)
            edge_of_time[rows] = near + self._ticks[self._first[rows] + choice[rows]]


def _best_in_prefix(tables: Tables) -> Index:
    """[table, corner, k]: the best of options 0 … k when time has a price at which that corner of the hull is best."""
    shape = (len(tables.size), tables.hull_price.shape[1], tables.ticks.shape[1])
    best = np.zeros(shape, dtype=np.intp)
    for k, (options, corners) in enumerate(zip(tables.size.tolist(), tables.hull_size.tolist(), strict=True)):
        price = tables.hull_price[k, :corners] * tables.unit_w
        seconds = tables.ticks[k, :options] * tables.tick_s
        for corner in range(corners):
            # Any price between the neighbours' will do; the middle is least sensitive to rounding.
            above = price[corner - 1] if corner else 2.0 * price[0]
            value = tables.energy_j[k, :options] + (above + price[corner]) / 2.0 * seconds
            position = np.arange(options)
            position[value > np.minimum.accumulate(value)] = 0
            best[k, corner, :options] = np.maximum.accumulate(position)
    return best


def round_plans(
    rounder: Rounder, curve: Curve, deadline: Floats, spans: list[tuple[int, int]], *, quick: bool = False
) -> Index:
    """The best plans found for each deadline: mixtures of two schedules of the curve, rounded, slack given away.

    A span counts how many samples further than the nearest the two schedules lie, before and after the deadline: far
    ones have fewer durations between two options. All mixtures are swept side by side, ``2 · len(spans)`` columns a
    deadline. ``quick`` tries one way instead of four and offers slack in fewer steps: a sixth of the work.
    """
    ways, shares = ((False,), QUICK_SHARES) if quick else ((False, True), SHARES)
    last = len(curve.makespan) - 1
    left = np.clip(np.searchsorted(curve.makespan, deadline, side="right") - 1, 0, max(last - 1, 0))
    right = np.minimum(left + 1, last)
    gap = np.maximum(curve.makespan[right] - curve.makespan[left], 1.0)
    share = np.clip((deadline - curve.makespan[left]) / gap, 0.0, 1.0)
    through = curve.through[:, left] * (1.0 - share) + curve.through[:, right] * share
    mixed, least = [], []
    for before, after in spans:
        fast, slow = np.maximum(left - before, 0), np.minimum(right + after, last)
        mixed += [_mix(curve, fast, slow, deadline, late=late) for late in ways]
        least += [np.minimum(curve.through[:, fast], curve.through[:, slow])] * len(ways)
    start, finish = (np.concatenate(part, axis=1) for part in zip(*mixed, strict=True))
    times = len(mixed)
    shy = rounder.worth(np.concatenate(least, axis=1) * SHY)
    worth = [np.tile(rounder.worth(through * s), times) for s in shares]
    limit = np.tile(deadline, times)
    best = np.zeros((rounder.graph.n, len(deadline)), dtype=np.intp)  # the fastest plan meets every deadline
    best_j = rounder.energy_j(best)
    for back in ways:
        choice = rounder.follow_back(limit - start, shy) if back else rounder.follow(finish, shy)
        for w in worth:
            rounder.reclaim(choice, limit, w, back=back)
        energy = np.where(rounder.makespan(choice) <= limit, rounder.energy_j(choice), np.inf)
        winner = energy.reshape(times, -1).argmin(axis=0) * len(deadline) + np.arange(len(deadline))
        better = energy[winner] < best_j
        best[:, better], best_j[better] = choice[:, winner[better]], energy[winner[better]]
    return best


def exchange(rounder: Rounder, choice: Index, deadline: Floats, tries: int, rounds: int) -> Index:
    """Local search: take its time from one instruction, offer it to all others, and keep the best outcome."""
    random = np.random.default_rng(0)  # reproducible: the same problem always gets the same plans
    n, columns = choice.shape
    tries = min(tries, n)
    limit = np.repeat(deadline, tries)
    free = rounder.worth(np.zeros((n, columns * tries)))
    trial_of = np.arange(columns * tries)
    for turn in range(rounds):
        row = np.tile(random.permutation(n)[:tries], columns)
        trial = np.repeat(choice, tries, axis=1)
        # To the fastest and to the next faster in turn: far from T* much time has to move, near T* hardly any.
        trial[row, trial_of] = np.maximum(trial[row, trial_of] - 1, 0) if turn % 4 > 1 else 0
        rounder.reclaim(trial, limit, rounder.held(free, row), back=bool(turn % 2))
        rounder.reclaim(trial, limit, free)
        energy = rounder.energy_j(trial).reshape(columns, tries)
        best = energy.argmin(axis=1) + np.arange(columns) * tries
        better = energy.min(axis=1) < rounder.energy_j(choice)
        choice = np.where(better, trial[:, best], choice)
    return choice


def improve(rounder: Rounder, choices: Index, deadline: Floats) -> Index:
    """Given plans made no dearer: what they leave unused, up to their own end or a later deadline, is given away."""
    choice = choices.copy()
    limit = np.maximum(deadline, rounder.makespan(choice))
    rounder.reclaim(choice, limit, rounder.worth(np.zeros(choice.shape)))
    return choice


def _mix(curve: Curve, fast: Index, slow: Index, deadline: Floats, *, late: bool) -> tuple[Floats, Floats]:
    """Timetables that end at the deadline: the slow schedule first and then the fast one, or (late) the other way."""
    if late:
        ahead = np.maximum(curve.makespan[slow] - deadline, 0.0)
        return (
            np.maximum(curve.start[:, fast], curve.start[:, slow] - ahead),
            np.maximum(curve.finish[:, fast], curve.finish[:, slow] - ahead),
        )
    behind = np.maximum(deadline - curve.makespan[fast], 0.0)
    return (
        np.minimum(curve.start[:, slow], curve.start[:, fast] + behind),
        np.minimum(curve.finish[:, slow], curve.finish[:, fast] + behind),
    )
