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

from perseus_solver.kinds import Floats
from perseus_solver.relaxation.graph import Graph, Index, latest_of
from perseus_solver.relaxation.tables import Tables

SHARES, QUICK_SHARES = (1.0, 0.7, 0.4, 0.2, 0.0), (1.0, 0.4, 0.0)
"""Slack is offered at these shares of its worth, one sweep each: first to those who save most by it."""
SHY = 0.99
"""When following a timetable an instruction whose flow lies on the verge between two corners takes the slower one;
just below, it would hand its time on. Slightly less than the full worth decides for the slower."""
_CELLS = 1024
"""Cells of the grid over each table's durations; a table has tens of options."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Optimal relaxed schedules, fast to slow: columns of start and finish ticks, and of flows through each kind of row
    (see `Rounder`); makespans increase.
    """

    start: Floats
    finish: Floats
    through: Floats
    makespan: Floats

    def around(self, deadline: Floats) -> tuple[Index, Index, Floats]:
        """The neighbours of each deadline on the curve, and how far it lies from the first to the second."""
        last = len(self.makespan) - 1
        left = np.clip(np.searchsorted(self.makespan, deadline, side="right") - 1, 0, max(last - 1, 0))
        right = np.minimum(left + 1, last)
        gap = np.maximum(self.makespan[right] - self.makespan[left], 1.0)
        return left, right, np.clip((deadline - self.makespan[left]) / gap, 0.0, 1.0)

    def through_at(self, deadline: Floats) -> Floats:
        """The flow for a deadline: what time is worth at each kind of instruction."""
        left, right, share = self.around(deadline)
        return self.through[:, left] * (1.0 - share) + self.through[:, right] * share


class Rounder:
    """The tables and the graph of one problem, laid out for sweeps. Choices count from the fastest.

    Rows of one kind share their table and, in whatever flow, what time is worth to them: the blocks of a steady state
    have as many kinds as one of them has instructions. Left out, each row is a kind of its own.
    """

    def __init__(self, tables: Tables, graph: Graph, table_of: Index, kind: Index | None = None) -> None:
        self.tables, self.graph, self.table_of = tables, graph, table_of
        self.kind = np.arange(graph.n) if kind is None else kind
        self._all_differ = kind is None
        self._table_of_kind = table_of[np.unique(self.kind, return_index=True)[1]]
        # One column more than the widest table: behind its slowest option every table has one that takes for ever.
        self._width = tables.ticks.shape[1] + 1
        self._first = (table_of * self._width)[:, None]
        self._ticks = np.pad(tables.ticks, ((0, 0), (0, 1)), constant_values=np.inf).ravel()
        self._energy = np.pad(tables.energy_j, ((0, 0), (0, 1))).ravel()
        self._grid = _Grid.of(tables)
        self._fastest, self._scale = (part[table_of][:, None] for part in (tables.ticks[:, 0], self._grid.scale))
        self._cell_first = (table_of * (_CELLS + 1))[:, None]
        prefixes = _best_in_prefix(tables)
        self._prefix = prefixes.ravel()
        self._prefix_width = prefixes.shape[2]
        self._prefix_first = (self._table_of_kind * (prefixes.shape[1] * self._prefix_width))[:, None]

    def ticks(self, choice: Index) -> Floats:
        """Durations of a choice."""
        duration: Floats = self._ticks[self._first + choice]
        return duration

    def energy_j(self, choice: Index) -> Floats:
        """Effective energy of each column."""
        total: Floats = self._energy[self._first + choice].sum(axis=0)
        return total

    def curve(self, choice: Index, relaxed: Curve) -> Curve:
        """Plans (columns, by rising makespan) as timetables, each with the relaxation's flow for its makespan.

        Their durations are measured options already, so what is mixed from two of them has hardly any in between.
        """
        duration = self.ticks(choice)
        finish = self.graph.finish(duration)[:-1]
        makespan = finish.max(axis=0)
        return Curve(finish - duration, finish, relaxed.through_at(makespan), makespan)

    def makespan(self, choice: Index) -> Floats:
        """Ticks from start to end of each column."""
        end: Floats = self.graph.finish(self.ticks(choice)).max(axis=0)
        return end

    def worth(self, price: Floats) -> Index:
        """What `_pick` needs to know about a price of time (units) at each kind of instruction."""
        tables = self.tables
        corner = np.empty(price.shape, dtype=np.intp)
        for k in range(len(tables.size)):
            rows = np.flatnonzero(self._table_of_kind == k)
            falling = -tables.hull_price[k, : int(tables.hull_size[k]) - 1]
            corner[rows] = np.searchsorted(falling, -price[rows], side="right")
        found: Index = self._prefix_first + corner * self._prefix_width
        return found

    def free(self, columns: int) -> Index:
        """The same where time is worth nothing."""
        return self.worth(np.zeros((len(self._table_of_kind), columns)))

    def _pick(self, rows: slice, limit: Floats, worth: Index) -> Index:
        """The best option that takes at most ``limit``, unused time being worth its price; the fastest if none does."""
        place = limit - self._fastest[rows]
        place *= self._scale[rows]
        np.clip(place, 0.0, _CELLS, out=place)
        cell = place.astype(np.intp)
        cell += self._cell_first[rows]
        at = self._grid.before.take(cell)
        for _ in range(self._grid.depth):
            at += self._ticks.take(at + 1) <= limit
        at -= self._first[rows]
        np.maximum(at, 0, out=at)
        at += worth[rows] if self._all_differ else worth.take(self.kind[rows], axis=0)
        best: Index = self._prefix.take(at)
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


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Where to look for the slowest option within a limit: a bisection without branches, as most cells hold none.

    Attributes:
        scale: cells in a tick, by table.
        before: flat [table, cell], the last option (in the padded tables) of an earlier cell, which is within any limit
            of this cell; one before the table's first where there is none.
        depth: the most options in a cell.
    """

    scale: Floats
    before: Index
    depth: int

    @classmethod
    def of(cls, tables: Tables) -> _Grid:
        count, width = tables.ticks.shape
        fastest = tables.ticks[:, 0]
        slowest = tables.ticks[np.arange(count), tables.size - 1]
        scale = _CELLS / np.maximum(slowest - fastest, 1.0)
        before = np.empty((count, _CELLS + 1), dtype=np.intp)
        depth = 1
        for k, options in enumerate(tables.size.tolist()):
            cell = ((tables.ticks[k, :options] - fastest[k]) * scale[k]).clip(0.0, _CELLS).astype(np.intp)
            before[k] = k * (width + 1) + cell.searchsorted(np.arange(_CELLS + 1)) - 1
            depth = max(depth, int(np.bincount(cell).max()))
        return cls(scale, before.ravel(), depth)


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
    rounder: Rounder,
    curve: Curve,
    deadline: Floats,
    spans: list[tuple[int, int]],
    *,
    ways: tuple[bool, ...] = (False, True),
) -> Index:
    """The best plans found for each deadline: mixtures of two schedules of the curve, rounded, slack given away.

    A span counts how many samples further than the nearest the two schedules lie, before and after the deadline: far
    ones have fewer durations between two options. All mixtures are swept side by side, ``2 · len(spans)`` columns a
    deadline. Of the ``ways``, False mixes early and sweeps from the start, True mixes late and sweeps from the end;
    both are crossed as well, and a single one, a sixth of the work, offers slack in fewer steps.
    """
    shares = SHARES if len(ways) > 1 else QUICK_SHARES
    last = len(curve.makespan) - 1
    left, right, _ = curve.around(deadline)
    through = curve.through_at(deadline)
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


def improve(rounder: Rounder, choices: Index, deadline: Floats) -> Index:
    """Given plans made no dearer: what they leave unused, up to their own end or a later deadline, is given away."""
    choice = choices.copy()
    limit = np.maximum(deadline, rounder.makespan(choice))
    rounder.reclaim(choice, limit, rounder.free(choice.shape[1]))
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
