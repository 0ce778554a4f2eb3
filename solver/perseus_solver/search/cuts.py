"""Move whole parts of a timetable, each move the best of its kind, by a minimum cut.

A move divides the starts and ends of all instructions into those that stay and those that shift by one span, later or
earlier. Instructions between a part that stays and one that shifts gain the span, others lose it; all of these take
their best options within the time that they then have. So what no single instruction can do alone becomes one move: a
few on which all paths meet become faster, so that many that run side by side become slower. With the span by which a
plan is late, the same cut makes it end in time.

The cheapest division is a minimum cut, as in the crashing of Phillips and Dessouky, but on measured options and in both
directions (expansion moves: Boykov, Veksler, Zabih, 2001). A saving counts at most what the opposite would cost, which
makes the sum submodular; a plan never becomes more expensive by that. The results are proposals: the caller must
simulate them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from ortools.graph.python import max_flow

from perseus_solver.kinds import Floats, Index, Int64s
from perseus_solver.search.rounding import Rounder

_UNITS = 2.0**32
"""Units of capacity in the largest difference of energy that one instruction can make. Sums over 2^17 of them stay
below `_FORBIDDEN`, and that times 2^12 below 2^63.
"""
_FORBIDDEN = 1 << 50
_SPANS, _MOST_ROUNDS, _TRIED = 6, 8, 3
"""Spans tried in a round, in both directions; rounds; and moves of a round whose slack is distributed."""
_MOST_CUTS = 16
"""Cuts for a plan that ends too late."""
_ROUNDING = 1e-12
"""Relative difference between the same sum in two orders of addition."""


@dataclass(frozen=True, slots=True, eq=False)
class _Timetable:
    """One plan: option, duration and end of each row.

    Attributes:
        choice: int[n].
        duration_ticks, end_ticks: float[n].
    """

    choice: Index
    duration_ticks: Floats
    end_ticks: Floats

    @property
    def begin_ticks(self) -> Floats:
        """Start of each row."""
        return self.end_ticks - self.duration_ticks


class Cuts:
    """The moves on one problem."""

    def __init__(self, rounder: Rounder) -> None:
        self._rounder = rounder
        tables, graph = rounder.tables, rounder.graph
        self._rows = [np.flatnonzero(rounder.table_of == k) for k in range(len(tables.size))]
        widest = float((tables.energy_j[:, 0] - tables.energy_j[:, -1]).max())
        self._unit_j = max(widest, 1e-300) / _UNITS
        row = np.arange(graph.n)
        self._begins, self._ends = row, graph.n + row

    def reach(self, choice: Index) -> float:
        """Return about how many ticks late a plan may be for `shortened`."""
        spans_ticks = self._spans_ticks(choice)
        return _MOST_CUTS * float(spans_ticks[0]) if len(spans_ticks) else 0.0

    def shortened(self, choice: Index, deadline_ticks: float) -> Index | None:
        """Shorten a plan that ends too late, cut by cut, each as cheap as it can be.

        Args:
            choice: int[n], the plan.
            deadline_ticks: when it must end.

        Returns:
            The plan in time; None if the cuts do not suffice.
        """
        for _ in range(_MOST_CUTS):
            plan = self._timetable(choice)
            last_ticks = float(plan.end_ticks.max())
            late_ticks = last_ticks - deadline_ticks
            if late_ticks <= 0:
                return choice
            spans_ticks = self._spans_ticks(choice)
            span_ticks = min(late_ticks, float(spans_ticks[0])) if len(spans_ticks) else late_ticks
            moved = self._moved(plan, -span_ticks, last_ticks - span_ticks)
            if moved is None:
                return None
            choice = moved
        return choice if float(self._timetable(choice).end_ticks.max()) <= deadline_ticks else None

    def improved(self, choice: Index, deadline_ticks: float) -> Index:
        """Improve a plan that is in time, move by move, until no move makes it cheaper.

        Args:
            choice: int[n], the plan.
            deadline_ticks: when it must end.
        """
        rounder = self._rounder
        choice, least_j = self._relaxed(choice[:, None], deadline_ticks)
        at_the_latest = False
        for _ in range(_MOST_ROUNDS):
            plan = self._timetable(choice, deadline_ticks if at_the_latest else None)
            spans_ticks = [sign * span for span in self._spans_ticks(choice)[:_SPANS].tolist() for sign in (1.0, -1.0)]
            moved = [one for span in spans_ticks if (one := self._moved(plan, span, deadline_ticks)) is not None]
            found_j = np.inf
            if moved:
                columns = np.stack(moved, axis=1)
                columns = columns[:, np.argsort(rounder.energy_j(columns), kind="stable")[:_TRIED]]
                columns = columns[:, rounder.makespan_ticks(columns) <= deadline_ticks]
                if columns.shape[1]:
                    found, found_j = self._relaxed(columns, deadline_ticks)
            if least_j - found_j > _ROUNDING * abs(least_j):
                choice, least_j, at_the_latest = found, found_j, False
            elif at_the_latest:
                break
            else:
                at_the_latest = True  # the same plan has other moves if every instruction is as late as possible
        return choice

    def _relaxed(self, columns: Index, deadline_ticks: float) -> tuple[Index, float]:
        """Distribute all slack of these plans, and return the cheapest of them with its effective energy."""
        rounder, limit = self._rounder, np.full(columns.shape[1], deadline_ticks)
        free = rounder.free(columns.shape[1])
        both = [columns.copy(), columns.copy()]
        for backward, one in enumerate(both):
            rounder.reclaim(one, limit, free, backward=bool(backward))
        plans = np.concatenate(both, axis=1)
        energy = rounder.energy_j(plans)
        best = int(energy.argmin())
        return plans[:, best], float(energy[best])

    def _timetable(self, choice: Index, deadline_ticks: float | None = None) -> _Timetable:
        """Return the timetable with everything as early as possible, or as late as a deadline allows."""
        graph = self._rounder.graph
        duration_ticks = self._rounder.duration_ticks(choice[:, None])
        end_ticks = graph.finish_ticks(duration_ticks)[:-1, 0]
        if deadline_ticks is not None:
            end_ticks = deadline_ticks - graph.tail_ticks(duration_ticks)[:-1, 0]
        return _Timetable(choice, duration_ticks[:, 0], end_ticks)

    def _spans_ticks(self, choice: Index) -> Floats:
        """Return the ticks between neighbouring options of the rows, those of most rows first."""
        tables = self._rounder.tables
        width = tables.time_ticks.shape[1]
        count = np.bincount(self._rounder.table_of * width + choice, minlength=tables.time_ticks.size)
        count = count.reshape(tables.time_ticks.shape)
        steps = np.arange(1, width) < tables.size[:, None]
        gain_ticks = np.where(steps, tables.time_ticks[:, 1:], 0.0) - np.where(steps, tables.time_ticks[:, :-1], 0.0)
        weight = count[:, 1:] + count[:, :-1]
        used = steps & (weight > 0)
        span_ticks, of = np.unique(gain_ticks[used], return_inverse=True)
        found: Floats = span_ticks[np.argsort(-np.bincount(of, weights=weight[used]), kind="stable")]
        return found

    def _within(self, window_ticks: Floats) -> Index:
        """Return the slowest option of each row that fits a window; −1 where none does."""
        tables = self._rounder.tables
        found = np.empty(len(window_ticks), dtype=np.intp)
        for rows, option_ticks, size in zip(self._rows, tables.time_ticks, tables.size.tolist(), strict=True):
            found[rows] = option_ticks[:size].searchsorted(window_ticks[rows], side="right") - 1
        return found

    def _moved(self, plan: _Timetable, span_ticks: float, deadline_ticks: float) -> Index | None:
        """Return the plan after the cheapest move by a span (positive: later) after which it ends by the deadline.

        None if nothing moves, or no move meets the deadline.
        """
        graph, tables, of = self._rounder.graph, self._rounder.tables, self._rounder.table_of
        choice, size_ticks = plan.choice, abs(span_ticks)
        more = np.maximum(self._within(plan.duration_ticks + size_ticks), choice)
        less = self._within(plan.duration_ticks - size_ticks)
        energy = tables.energy_j[of, choice]
        saving = np.rint((energy - tables.energy_j[of, more]) / self._unit_j).astype(np.int64)
        price = np.rint((tables.energy_j[of, np.maximum(less, 0)] - energy) / self._unit_j).astype(np.int64)
        price[less < 0] = _FORBIDDEN
        saving = np.minimum(saving, price)
        # With s, e = 1 where start and end move, a row costs −saving·(1−s)·e + price·s·(1−e), and (1−s)·e is
        # s·(1−e) + e − s: a capacity from one to the other, and a cost of each alone. For a move to earlier times, s
        # and e are exchanged.
        first, last = (self._begins, self._ends) if span_ticks > 0 else (self._ends, self._begins)
        alone = np.zeros(2 * graph.n, dtype=np.int64)
        alone[last] -= saving
        alone[first] += saving
        tight = plan.begin_ticks[graph.head] - plan.end_ticks[graph.tail] - graph.delay_ticks < size_ticks
        before, after = self._ends[graph.tail[tight]], self._begins[graph.head[tight]]
        if span_ticks > 0:
            stay, go = self._ends[plan.end_ticks + size_ticks > deadline_ticks], self._ends[:0]
        else:
            before, after = after, before
            stay, go = self._begins[plan.begin_ticks < size_ticks], self._ends[plan.end_ticks > deadline_ticks]
        moves = _cut(
            2 * graph.n,
            [(first, last, price - saving), (before, after, np.full(len(before), _FORBIDDEN))],
            alone,
            go,
            stay,
        )
        if moves is None:
            return None
        gains, loses = moves[last] & ~moves[first], moves[first] & ~moves[last]
        moved: Index = np.where(gains, more, np.where(loses, less, choice))
        return moved if (gains | loses).any() else None


def _cut(
    nodes: int, arcs: list[tuple[Index, Index, Int64s]], alone: Int64s, go: Index, stay: Index
) -> npt.NDArray[np.bool_] | None:
    """Return which nodes move in the cheapest division; None if it is impossible or one side would be empty.

    The cost is the capacity of arcs from a node that moves to one that stays, plus what moving costs each node alone.
    Nodes in ``go`` must move, nodes in ``stay`` must stay.
    """
    costs, earns = np.flatnonzero(alone > 0), np.flatnonzero(alone < 0)
    if not len(earns) + len(go) or not len(costs) + len(stay):
        return None  # one side of the cut would be empty
    source, sink = nodes, nodes + 1
    all_arcs = [
        *arcs,
        (costs, np.full(len(costs), sink), alone[costs]),
        (stay, np.full(len(stay), sink), np.full(len(stay), _FORBIDDEN)),
        (np.full(len(earns), source), earns, -alone[earns]),
        (np.full(len(go), source), go, np.full(len(go), _FORBIDDEN)),
    ]
    tail, head, capacity = (np.concatenate(part) for part in zip(*all_arcs, strict=True))
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(tail.astype(np.int32), head.astype(np.int32), capacity)
    if flow.solve(source, sink) != flow.OPTIMAL or flow.optimal_flow() >= _FORBIDDEN:
        return None
    moves = np.zeros(nodes + 2, dtype=np.bool_)
    moves[flow.get_source_side_min_cut()] = True
    return moves
