"""The precedence graph in levels, which are swept one numpy operation at a time, for many plans at once.

A level holds the instructions whose longest chain of predecessors has the same length. No path joins two instructions
of a level, so what one of them does with its slack takes nothing from the others. Arrays are numbered by level
(``order`` maps back to the problem); a plan is a column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem
from perseus_solver.topology import STUCK
from perseus_solver.topology import levels as levels_of

Links = tuple[tuple[Index, Floats | None, Index], ...]
"""Columns of (neighbour, delay to it in ticks or None where all are 0, edge)."""


@dataclass(frozen=True, slots=True)
class Level:
    """Rows ``begin … end − 1`` of one level.

    The j-th column of ``before`` and ``after`` holds each row's j-th neighbour, or row n by edge m where it has fewer.
    """

    begin: int
    end: int
    before: Links
    after: Links


@dataclass(frozen=True, slots=True)
class Graph:
    """The levels of a problem. Row ``n`` of an array of times stands for "no neighbour".

    Attributes:
        n: number of instructions.
        order: int[n], the instruction of each row.
        rank: int[n], the row of each instruction.
        tail, head: int[m], the rows that each edge joins.
        delay_ticks: float[m], the delay of each edge.
        levels: the levels, in order.
    """

    n: int
    order: Index
    rank: Index
    tail: Index
    head: Index
    delay_ticks: Floats
    levels: tuple[Level, ...]

    def finish_ticks(self, duration_ticks: Floats) -> Floats:
        """Return the earliest end of every row (and 0 in row n). O(edges · plans).

        Args:
            duration_ticks: float[n, plans].

        Returns:
            float[n + 1, plans].
        """
        done_ticks = np.empty((self.n + 1, duration_ticks.shape[1]))
        done_ticks[self.n] = 0.0
        for level in self.levels:
            rows = slice(level.begin, level.end)
            np.add(latest_of(done_ticks, level.before), duration_ticks[rows], out=done_ticks[rows])
        return done_ticks

    def reach_ticks(self, duration_ticks: Floats) -> Floats:
        """Return the longest way from the start of each row to the end of the iteration (and 0 in row n).

        Args:
            duration_ticks: float[n, plans].

        Returns:
            float[n + 1, plans].
        """
        reach_ticks = np.empty((self.n + 1, duration_ticks.shape[1]))
        reach_ticks[self.n] = 0.0
        for level in reversed(self.levels):
            rows = slice(level.begin, level.end)
            np.add(latest_of(reach_ticks, level.after), duration_ticks[rows], out=reach_ticks[rows])
        return reach_ticks


def latest_of(times_ticks: Floats, links: Links) -> Floats | float:
    """Return the latest time among the neighbours of each row of a level, delays added."""
    if not links:
        return 0.0
    index, delay_ticks, _ = links[0]
    latest_ticks: Floats = times_ticks[index]
    if delay_ticks is not None:
        latest_ticks += delay_ticks
    for index, delay_ticks, _ in links[1:]:
        other_ticks = times_ticks[index]
        if delay_ticks is not None:
            other_ticks += delay_ticks
        np.maximum(latest_ticks, other_ticks, out=latest_ticks)
    return latest_ticks


def _links(edges: Index, ends: tuple[Index, Index], delay_ticks: Floats, rows: slice, none: int) -> Links:
    """Return columns of neighbours for a range of rows.

    ``edges`` are sorted by their near end; ``ends`` are the near and far ends of all edges.
    """
    near, far = ends
    begin, end = rows.start, rows.stop
    if not len(edges):
        return ()
    row = near[edges] - begin
    slot = np.arange(len(row)) - np.searchsorted(row, row)
    columns = []
    for j in range(int(slot.max()) + 1):
        chosen = slot == j
        index = np.full(end - begin, none, dtype=np.intp)
        wait_ticks = np.zeros((end - begin, 1))
        edge = np.full(end - begin, len(near), dtype=np.intp)
        index[row[chosen]] = far[edges[chosen]]
        wait_ticks[row[chosen], 0] = delay_ticks[edges[chosen]]
        edge[row[chosen]] = edges[chosen]
        columns.append((index, wait_ticks if wait_ticks.any() else None, edge))
    return tuple(columns)


def build_graph(problem: Problem, tick_s: float) -> Graph:
    """Level the graph of a problem. Delays are rounded up to ticks, like durations.

    Args:
        problem: the problem.
        tick_s: seconds in a tick.

    Raises:
        InvalidProblem: the edges contain a cycle.
    """
    n = problem.instructions
    tail, head = problem.edge_from.astype(np.intp), problem.edge_to.astype(np.intp)
    depth = levels_of(n, problem.edge_from, problem.edge_to)
    stuck = int((depth == STUCK).sum())
    if stuck:
        raise InvalidProblem(f"edges: {stuck} of {n} instructions wait for each other in a cycle")
    order = np.argsort(depth, kind="stable")
    rank = np.empty(n, dtype=np.intp)
    rank[order] = np.arange(n)
    tail, head = rank[tail], rank[head]
    delay_ticks = np.ceil(problem.edge_delay_s / tick_s)
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max(initial=-1)) + 2))
    into, out_of = np.argsort(head, kind="stable"), np.argsort(tail, kind="stable")
    into_at, out_at = np.searchsorted(head[into], bounds), np.searchsorted(tail[out_of], bounds)
    levels = tuple(
        Level(
            begin,
            end,
            before=_links(into[into_at[i] : into_at[i + 1]], (head, tail), delay_ticks, slice(begin, end), n),
            after=_links(out_of[out_at[i] : out_at[i + 1]], (tail, head), delay_ticks, slice(begin, end), n),
        )
        for i, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    )
    return Graph(n, order, rank, tail, head, delay_ticks, levels)
