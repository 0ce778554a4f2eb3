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
_CACHED = 2**14
"""Numbers in a work array that stays in a processor's cache."""
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
        self._limits = _Grid.of(np.pad(tables.time_ticks, ((0, 0), (0, 1)), constant_values=np.inf), table_of)
        self._prices = _Grid.of(_thresholds(tables), self._table_of_kind)
        # In front of the fastest option there is one place for limits that nothing meets.
        prefixes = np.pad(_best_in_prefix(tables), ((0, 0), (0, 0), (1, 0)))
        self._prefix = prefixes.ravel()
        corners, self._prefix_width = prefixes.shape[1:]
        first = self._table_of_kind * (corners * self._prefix_width - self._width) + 1
        self._free = (first + (tables.hull_size[self._table_of_kind] - 1) * self._prefix_width)[:, None]

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
        found = np.empty(price.shape, dtype=np.intp)
        step = max(_CACHED // price.shape[1], 1)
        for begin in range(0, len(price), step):
            rows = slice(begin, begin + step)
            above = self._prices.last(rows, price[rows])
            above -= self._prices.first[rows]
            above *= -self._prefix_width
            np.add(above, self._free[rows], out=found[rows])
        return found

    def free(self, columns: int) -> Index:
        """Return the same where time is worth nothing."""
        found: Index = np.broadcast_to(self._free, (len(self._free), columns))
        return found

    def best_option(self, rows: slice, limit_ticks: Floats, worth: Index) -> Index:
        """Return the best option of each row within a limit; the fastest option if none is.

        Args:
            rows: of the graph.
            limit_ticks: float[rows, columns].
            worth: int[rows, columns], from `worth`, what unused time is worth there.
        """
        at = self._limits.last(rows, limit_ticks)
        at += worth
        best: Index = self._prefix.take(at)
        return best

    def cheapest(self, worth: Index) -> Index:
        """Return the option of each row that is best at a worth of time, int[n, columns], however long it takes."""
        last = (self._table_of_kind * self._width + self.tables.size[self._table_of_kind])[:, None] - 1
        best: Index = self._prefix.take(worth + last)
        return best if self._all_differ else best.take(self.kind, axis=0)

    def _worth_of(self, rows: slice, worth: Index) -> Index:
        """Return what time is worth at some rows, given what it is at each kind."""
        return worth[rows] if self._all_differ else worth.take(self.kind[rows], axis=0)

    def follow(self, target_ticks: Floats, worth: Index, *, backward: bool = False) -> Index:
        """Return options that keep up with a timetable; what one leaves of its time, others may use.

        Args:
            target_ticks: float[n, columns], when each row ends; or, swept backward, the time from each row's start to
                the end of the iteration.
            worth: from `worth`, what time is worth.
            backward: sweep from the end.

        Returns:
            int[n, columns].
        """
        graph = self.graph
        choice = np.empty((graph.n, target_ticks.shape[1]), dtype=np.intp)
        swept_ticks = np.zeros((graph.n + 1, target_ticks.shape[1]))
        for level in reversed(graph.levels) if backward else graph.levels:
            rows = slice(level.begin, level.end)
            near_ticks = latest_of(swept_ticks, level.after if backward else level.before)
            choice[rows] = self.best_option(rows, target_ticks[rows] - near_ticks, self._worth_of(rows, worth))
            np.add(near_ticks, self.duration_ticks(choice[rows], rows), out=swept_ticks[rows])
        return choice

    def reclaim(self, choice: Index, deadline_ticks: Floats, *worths: Index, backward: bool = False) -> Floats:
        """Distribute slack, one sweep over the levels for each worth, from alternate ends; makes options slower.

        What one sweep finds out about times is what the next one, from the other end, needs.

        Args:
            choice: int[n, columns], changed in place.
            deadline_ticks: float[columns].
            worths: from `worth`, what time is worth in each sweep.
            backward: the first sweep begins at the end.

        Returns:
            float[columns], the ticks from start to end.
        """
        graph = self.graph
        duration_ticks = self.duration_ticks(choice)
        swept_ticks = graph.finish_ticks(duration_ticks) if backward else graph.reach_ticks(duration_ticks)
        for worth in worths:
            other_ticks, swept_ticks = swept_ticks, np.zeros_like(swept_ticks)
            other_ticks[:-1] -= duration_ticks
            for level in reversed(graph.levels) if backward else graph.levels:
                rows = slice(level.begin, level.end)
                near_ticks = latest_of(swept_ticks, level.after if backward else level.before)
                limit_ticks = deadline_ticks - other_ticks[rows]
                limit_ticks -= near_ticks
                slower = self.best_option(rows, limit_ticks, self._worth_of(rows, worth))
                np.maximum(choice[rows], slower, out=choice[rows])
                duration_ticks[rows] = self.duration_ticks(choice[rows], rows)
                np.add(near_ticks, duration_ticks[rows], out=swept_ticks[rows])
            backward = not backward
        makespan_ticks: Floats = swept_ticks.max(axis=0)
        return makespan_ticks


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Finds the last entry of a table within a limit: a bisection without branches, because most cells are empty.

    Attributes:
        entries: float[tables × width], each table increasing and padded with infinity.
        first: int[rows, 1], where the table of each row begins.
        least, scale: float[rows, 1], the first entry of that table, and cells in a unit.
        cell: int[rows, 1], its first cell.
        before: int[tables × cells], the last entry of an earlier cell, which is within any limit of this cell; one
            before the table's first where there is none.
        depth: the most entries in a cell.
    """

    entries: Floats
    first: Index
    least: Floats
    scale: Floats
    cell: Index
    before: Index
    depth: int

    @classmethod
    def of(cls, entries: Floats, table_of: Index) -> _Grid:
        count, width = entries.shape
        size = np.isfinite(entries).sum(axis=1)
        least = entries[:, 0]
        scale = _CELLS / np.maximum(entries[np.arange(count), size - 1] - least, 1.0)
        before = np.empty((count, _CELLS + 1), dtype=np.intp)
        depth = 1
        for k, filled in enumerate(size.tolist()):
            cell = ((entries[k, :filled] - least[k]) * scale[k]).clip(0.0, _CELLS).astype(np.intp)
            before[k] = k * width + cell.searchsorted(np.arange(_CELLS + 1)) - 1
            depth = max(depth, int(np.bincount(cell).max()))
        return cls(
            entries=entries.ravel(),
            first=(table_of * width)[:, None],
            least=least[table_of][:, None],
            scale=scale[table_of][:, None],
            cell=(table_of * (_CELLS + 1))[:, None],
            before=before.ravel(),
            depth=depth,
        )

    def last(self, rows: slice, limit: Floats) -> Index:
        """Return where the last entry within each limit is, int[rows, columns]."""
        place = limit - self.least[rows]
        place *= self.scale[rows]
        np.maximum(place, 0.0, out=place)
        np.minimum(place, _CELLS, out=place)
        cell = place.astype(np.intp)
        cell += self.cell[rows]
        at: Index = self.before.take(cell)
        for _ in range(self.depth):
            at += self.entries.take(at + 1) <= limit
        return at


def _thresholds(tables: Tables) -> Floats:
    """Return float[tables, corners + 1]: −1, and the prices of time above which a faster corner of the hull is better.

    A price that is met exactly leaves the slower corner.
    """
    found = np.full((len(tables.size), tables.hull_price.shape[1] + 1), np.inf)
    found[:, 0] = -1.0
    for k, corners in enumerate(tables.hull_size.tolist()):
        found[k, 1:corners] = np.nextafter(tables.hull_price[k, : corners - 1][::-1].astype(np.float64), np.inf)
    return found


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
        target_ticks = limit_ticks - start_ticks if backward else finish_ticks
        choice = rounder.follow(target_ticks, tie_worth, backward=backward)
        makespan_ticks = rounder.reclaim(choice, limit_ticks, *worth, backward=backward)
        energy = np.where(makespan_ticks <= limit_ticks, rounder.energy_j(choice), np.inf)
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
