"""Turn relaxed timetables into plans of measured options: never later than the deadline, and as cheap as possible.

Many plans are handled at once, a column each, in ticks. Two facts guide the rounding. First, timetables that satisfy
the precedence form a lattice: the earlier (or the later) of two timetables, one of them shifted, is again a timetable.
So between two optimal timetables there is one that follows the slow one until some moment and the fast one from there
on, instead of being slightly slow everywhere, which measured options cannot express. Second, the flow through an
instruction says what time is worth there, so a slower option that saves less than that leaves its time to others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.relaxation.graph import Graph, latest_of
from perseus_solver.relaxation.tables import Tables

SHARES, QUICK_SHARES = (1.0, 0.7, 0.4, 0.2, 0.0), (0.6, 0.0)
"""Slack is offered at these shares of its worth, one sweep each: first to those instructions that save most with it."""
TIE_SHARE = 0.99
"""When following a timetable, an instruction whose flow is between two corners takes the slower one; with slightly less
flow, it would leave its time to others. Slightly less than the full worth decides for the slower option.
"""
_CELLS = 1024
"""Cells of the grid over each table's durations; a table has tens of options."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Relaxed timetables, fast to slow, a column each.

    Attributes:
        start_ticks, finish_ticks: float[n, columns].
        through: float[kinds, columns], flows through each kind of row (see `Rounder`).
        makespan_ticks: float[columns], increasing.
    """

    start_ticks: Floats
    finish_ticks: Floats
    through: Floats
    makespan_ticks: Floats

    def around(self, deadline_ticks: Floats) -> tuple[Index, Index]:
        """Return the neighbours of each deadline on the curve."""
        last = len(self.makespan_ticks) - 1
        left = np.clip(np.searchsorted(self.makespan_ticks, deadline_ticks, side="right") - 1, 0, max(last - 1, 0))
        return left, np.minimum(left + 1, last)


class Rounder:
    """The tables and the graph of one problem, laid out for sweeps. Choices count from the fastest option.

    Rows of one kind have the same table and, in whatever flow, the same worth of time: the blocks of a steady state
    have as many kinds as one of them has instructions. Without ``kind``, each row is a kind of its own.
    """

    def __init__(self, tables: Tables, graph: Graph, table_of: Index, kind: Index | None = None) -> None:
        self.tables, self.graph, self.table_of = tables, graph, table_of
        self.kind = np.arange(graph.n) if kind is None else kind
        self._all_differ = kind is None
        self._table_of_kind = table_of[np.unique(self.kind, return_index=True)[1]]
        # One column more than the widest table: behind its slowest option every table has one of infinite time.
        self._width = tables.time_ticks.shape[1] + 1
        self._first = (table_of * self._width)[:, None]
        self._option_ticks = np.pad(tables.time_ticks, ((0, 0), (0, 1)), constant_values=np.inf).ravel()
        self._energy = np.pad(tables.energy_j, ((0, 0), (0, 1))).ravel()
        self._grid = _Grid.of(tables)
        self._fastest_ticks, self._scale = (
            part[table_of][:, None] for part in (tables.time_ticks[:, 0], self._grid.scale)
        )
        self._cell_first = (table_of * (_CELLS + 1))[:, None]
        prefixes = _best_in_prefix(tables)
        self._prefix = prefixes.ravel()
        self._prefix_width = prefixes.shape[2]
        self._prefix_first = (self._table_of_kind * (prefixes.shape[1] * self._prefix_width))[:, None]

    def duration_ticks(self, choice: Index, rows: slice = slice(None)) -> Floats:
        """Return the durations of a choice, float[rows, columns]."""
        duration_ticks: Floats = self._option_ticks.take(self._first[rows] + choice)
        return duration_ticks

    def energy_j(self, choice: Index, rows: slice = slice(None)) -> Floats:
        """Return the effective energy of each column, float[columns], of these rows alone."""
        total: Floats = self._energy.take(self._first[rows] + choice).sum(axis=0)
        return total

    def curve(self, choice: Index, through_at: Callable[[Floats], Floats]) -> Curve:
        """Return plans (columns, by increasing makespan) as timetables, each with the worth of time for its makespan.

        Their durations are measured options already, so a mixture of two of them has few durations in between.
        """
        duration_ticks = self.duration_ticks(choice)
        finish_ticks = self.graph.finish_ticks(duration_ticks)[:-1]
        makespan_ticks = finish_ticks.max(axis=0)
        return Curve(finish_ticks - duration_ticks, finish_ticks, through_at(makespan_ticks), makespan_ticks)

    def makespan_ticks(self, choice: Index) -> Floats:
        """Return the ticks from start to end of each column."""
        makespan_ticks: Floats = self.graph.finish_ticks(self.duration_ticks(choice)).max(axis=0)
        return makespan_ticks

    def worth(self, price: Floats) -> Index:
        """Encode a price of time (units) at each kind of instruction for `follow` and `reclaim`."""
        tables = self.tables
        corner = np.empty(price.shape, dtype=np.intp)
        for k in range(len(tables.size)):
            rows = np.flatnonzero(self._table_of_kind == k)
            falling = -tables.hull_price[k, : int(tables.hull_size[k]) - 1]
            corner[rows] = np.searchsorted(falling, -price[rows], side="right")
        found: Index = self._prefix_first + corner * self._prefix_width
        return found

    def free(self, columns: int) -> Index:
        """Return the same where time is worth nothing."""
        last = self.tables.hull_size[self._table_of_kind][:, None] - 1
        found: Index = np.broadcast_to(self._prefix_first + last * self._prefix_width, (len(last), columns))
        return found

    def best_option(self, rows: slice, limit_ticks: Floats, worth: Index) -> Index:
        """Return the best option of each row within a limit; the fastest option if none is.

        Args:
            rows: of the graph.
            limit_ticks: float[rows, columns].
            worth: int[rows, columns], from `worth`, what unused time is worth there.
        """
        place = limit_ticks - self._fastest_ticks[rows]
        place *= self._scale[rows]
        np.clip(place, 0.0, _CELLS, out=place)
        cell = place.astype(np.intp)
        cell += self._cell_first[rows]
        at = self._grid.before.take(cell)
        for _ in range(self._grid.depth):
            at += self._option_ticks.take(at + 1) <= limit_ticks
        at -= self._first[rows]
        np.maximum(at, 0, out=at)
        at += worth
        best: Index = self._prefix.take(at)
        return best

    def cheapest(self, worth: Index) -> Index:
        """Return the option of each row that is best at a worth of time, int[n, columns], however long it takes."""
        last = self.tables.size[self._table_of_kind][:, None] - 1
        best: Index = self._prefix.take(worth + last)
        return best if self._all_differ else best.take(self.kind, axis=0)

    def _worth_of(self, rows: slice, worth: Index) -> Index:
        """Return what time is worth at some rows, given what it is at each kind."""
        return worth[rows] if self._all_differ else worth.take(self.kind[rows], axis=0)

    def follow(self, finish_ticks: Floats, worth: Index) -> Index:
        """Return options that keep up with a timetable, from the start; what one leaves of its time, others may use."""
        graph = self.graph
        choice = np.empty((graph.n, finish_ticks.shape[1]), dtype=np.intp)
        end_ticks = np.zeros((graph.n + 1, finish_ticks.shape[1]))
        for level in graph.levels:
            rows = slice(level.begin, level.end)
            ready_ticks = latest_of(end_ticks, level.before)
            choice[rows] = self.best_option(rows, finish_ticks[rows] - ready_ticks, self._worth_of(rows, worth))
            end_ticks[rows] = ready_ticks + self._option_ticks[self._first[rows] + choice[rows]]
        return choice

    def follow_back(self, reach_ticks: Floats, worth: Index) -> Index:
        """Return the same from the end; ``reach_ticks`` is the time from each planned start to the iteration's end."""
        graph = self.graph
        choice = np.empty((graph.n, reach_ticks.shape[1]), dtype=np.intp)
        far_ticks = np.zeros((graph.n + 1, reach_ticks.shape[1]))
        for level in reversed(graph.levels):
            rows = slice(level.begin, level.end)
            rest_ticks = latest_of(far_ticks, level.after)
            choice[rows] = self.best_option(rows, reach_ticks[rows] - rest_ticks, self._worth_of(rows, worth))
            far_ticks[rows] = rest_ticks + self._option_ticks[self._first[rows] + choice[rows]]
        return choice

    def reclaim(self, choice: Index, deadline_ticks: Floats, worth: Index, *, backward: bool = False) -> None:
        """Distribute slack in the order of the levels (or in reverse); makes options slower in place.

        Args:
            choice: int[n, columns], changed in place.
            deadline_ticks: float[columns].
            worth: from `worth`, what time is worth.
            backward: sweep from the end.
        """
        graph = self.graph
        duration_ticks = self.duration_ticks(choice)
        swept_ticks = np.zeros((graph.n + 1, choice.shape[1]))
        if backward:
            start_ticks = graph.finish_ticks(duration_ticks)[:-1] - duration_ticks
            levels, other_ticks = graph.levels[::-1], start_ticks
        else:
            levels, other_ticks = graph.levels, graph.tail_ticks(duration_ticks)
        for level in levels:
            rows = slice(level.begin, level.end)
            near_ticks = latest_of(swept_ticks, level.after if backward else level.before)
            limit_ticks = deadline_ticks - other_ticks[rows] - near_ticks
            slower = self.best_option(rows, limit_ticks, self._worth_of(rows, worth))
            choice[rows] = np.maximum(choice[rows], slower)
            swept_ticks[rows] = near_ticks + self._option_ticks[self._first[rows] + choice[rows]]


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Finds the slowest option within a limit: a bisection without branches, because most cells are empty.

    Attributes:
        scale: float[tables], cells in a tick.
        before: int[tables × cells], the last option (in the padded tables) of an earlier cell, which is within any
            limit of this cell; one before the table's first where there is none.
        depth: the most options in a cell.
    """

    scale: Floats
    before: Index
    depth: int

    @classmethod
    def of(cls, tables: Tables) -> _Grid:
        count, width = tables.time_ticks.shape
        fastest_ticks = tables.time_ticks[:, 0]
        slowest_ticks = tables.time_ticks[np.arange(count), tables.size - 1]
        scale = _CELLS / np.maximum(slowest_ticks - fastest_ticks, 1.0)
        before = np.empty((count, _CELLS + 1), dtype=np.intp)
        depth = 1
        for k, options in enumerate(tables.size.tolist()):
            cell = ((tables.time_ticks[k, :options] - fastest_ticks[k]) * scale[k]).clip(0.0, _CELLS).astype(np.intp)
            before[k] = k * (width + 1) + cell.searchsorted(np.arange(_CELLS + 1)) - 1
            depth = max(depth, int(np.bincount(cell).max()))
        return cls(scale, before.ravel(), depth)


def _best_in_prefix(tables: Tables) -> Index:
    """Return int[table, corner, k]: the best of options 0 … k at a price for which that corner of the hull is best."""
    shape = (len(tables.size), tables.hull_price.shape[1], tables.time_ticks.shape[1])
    best = np.zeros(shape, dtype=np.intp)
    for k, (options, corners) in enumerate(zip(tables.size.tolist(), tables.hull_size.tolist(), strict=True)):
        price = tables.hull_price[k, :corners] * tables.unit_w
        seconds = tables.time_ticks[k, :options] * tables.tick_s
        for corner in range(corners):
            # Any price between the neighbouring ones serves; the middle is least sensitive to rounding.
            above = price[corner - 1] if corner else 2.0 * price[0]
            value = tables.energy_j[k, :options] + (above + price[corner]) / 2.0 * seconds
            position = np.arange(options)
            position[value > np.minimum.accumulate(value)] = 0
            best[k, corner, :options] = np.maximum.accumulate(position)
    return best


def round_plans(
    rounder: Rounder,
    curve: Curve,
    deadline_ticks: Floats,
    spans: list[tuple[int, int]],
    through: Floats,
    *,
    ways: tuple[bool, ...] = (False, True),
) -> Index:
    """Return the best plans found for each deadline: rounded mixtures of two timetables of the curve.

    All mixtures are swept side by side, ``2 · len(spans)`` columns for each deadline, and their slack is distributed.
    With both ways, mixtures of each are also swept in the direction of the other. A single way takes a sixth of the
    work, and offers slack in fewer steps.

    Args:
        rounder: of the problem.
        curve: timetables to mix.
        deadline_ticks: float[deadlines].
        through: float[kinds, deadlines], what time is worth at each kind of row, units of flow.
        spans: for each mixture, how many samples further than the nearest the two timetables are, before and after the
            deadline; distant ones have fewer durations between two options.
        ways: False mixes early and sweeps from the start, True mixes late and sweeps from the end.

    Returns:
        int[n, deadlines].
    """
    shares = SHARES if len(ways) > 1 else QUICK_SHARES
    last = len(curve.makespan_ticks) - 1
    left, right = curve.around(deadline_ticks)
    mixed, least = [], []
    for before, after in spans:
        fast, slow = np.maximum(left - before, 0), np.minimum(right + after, last)
        mixed += [_mix(curve, fast, slow, deadline_ticks, late=late) for late in ways]
        least += [np.minimum(curve.through[:, fast], curve.through[:, slow])] * len(ways)
    start_ticks, finish_ticks = (np.concatenate(part, axis=1) for part in zip(*mixed, strict=True))
    times = len(mixed)
    tie_worth = rounder.worth(np.concatenate(least, axis=1) * TIE_SHARE)
    worth = [np.tile(rounder.worth(through * s), times) for s in shares]
    limit_ticks = np.tile(deadline_ticks, times)
    best = np.zeros((rounder.graph.n, len(deadline_ticks)), dtype=np.intp)  # the fastest plan meets every deadline
    best_j = rounder.energy_j(best)
    for backward in ways:
        choice = (
            rounder.follow_back(limit_ticks - start_ticks, tie_worth)
            if backward
            else rounder.follow(finish_ticks, tie_worth)
        )
        for w in worth:
            rounder.reclaim(choice, limit_ticks, w, backward=backward)
        energy = np.where(rounder.makespan_ticks(choice) <= limit_ticks, rounder.energy_j(choice), np.inf)
        winner = energy.reshape(times, -1).argmin(axis=0) * len(deadline_ticks) + np.arange(len(deadline_ticks))
        better = energy[winner] < best_j
        best[:, better], best_j[better] = choice[:, winner[better]], energy[winner[better]]
    return best


def sweeps(spans: list[tuple[int, int]], ways: tuple[bool, ...]) -> int:
    """Return how many times `round_plans` sweeps over the graph for each deadline."""
    shares = SHARES if len(ways) > 1 else QUICK_SHARES
    return len(spans) * len(ways) ** 2 * (len(shares) + 2)


def improve(rounder: Rounder, choices: Index, deadline_ticks: Floats) -> Index:
    """Return the plans with their slack distributed, up to their own end or a later deadline, at no more energy."""
    choice = choices.copy()
    limit_ticks = np.maximum(deadline_ticks, rounder.makespan_ticks(choice))
    rounder.reclaim(choice, limit_ticks, rounder.free(choice.shape[1]))
    return choice


def _mix(curve: Curve, fast: Index, slow: Index, deadline_ticks: Floats, *, late: bool) -> tuple[Floats, Floats]:
    """Return timetables that end at the deadline: first the slow one and then the fast one, or (late) vice versa."""
    if late:
        ahead_ticks = np.maximum(curve.makespan_ticks[slow] - deadline_ticks, 0.0)
        return (
            np.maximum(curve.start_ticks[:, fast], curve.start_ticks[:, slow] - ahead_ticks),
            np.maximum(curve.finish_ticks[:, fast], curve.finish_ticks[:, slow] - ahead_ticks),
        )
    behind_ticks = np.maximum(deadline_ticks - curve.makespan_ticks[fast], 0.0)
    return (
        np.minimum(curve.start_ticks[:, slow], curve.start_ticks[:, fast] + behind_ticks),
        np.minimum(curve.finish_ticks[:, slow], curve.finish_ticks[:, fast] + behind_ticks),
    )
