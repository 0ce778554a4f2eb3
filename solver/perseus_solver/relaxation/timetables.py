"""Timetables that belong to flows: complementary slackness.

With an optimal flow, edges that carry flow are tight, and each duration is between the corners of its hull that are
best at its flow.
"""

from __future__ import annotations

import numpy as np

from perseus_solver.kinds import Floats, Index, Int64s
from perseus_solver.relaxation.graph import Graph, latest_of
from perseus_solver.relaxation.tables import Tables


def intervals(tables: Tables, table_of: Index, through: Int64s) -> tuple[Floats, Floats]:
    """Return the least and the greatest duration that is best at each flow.

    Args:
        tables: options in ticks.
        table_of: int[n], the table of each row.
        through: int[n, columns], flow through each row.

    Returns:
        Two arrays float[n, columns] of ticks.
    """
    shortest_ticks, longest_ticks = np.empty(through.shape), np.empty(through.shape)
    for table in range(len(tables.size)):
        rows = np.flatnonzero(table_of == table)
        corners = int(tables.hull_size[table])
        corner_ticks = tables.hull_ticks[table, :corners]
        falling = -tables.hull_price[table, : corners - 1]
        flow = -through[rows]
        shortest_ticks[rows] = corner_ticks[np.searchsorted(falling, flow, side="left")]
        longest_ticks[rows] = corner_ticks[np.searchsorted(falling, flow, side="right")]
    return shortest_ticks, longest_ticks


def stretch(graph: Graph, shortest_ticks: Floats, longest_ticks: Floats, end_ticks: Floats) -> tuple[Floats, Floats]:
    """Return timetables between shortest and longest durations that end at given times, or as early as they can.

    Some flows are nearly optimal only, so no exact fit is sought. One sweep lets each instruction, in order, grow as
    far as it may and the time allows.

    Args:
        graph: precedence in levels.
        shortest_ticks, longest_ticks: float[n, columns].
        end_ticks: float[columns], when to end.

    Returns:
        Durations in ticks, float[n, columns], and makespans in ticks, float[columns].
    """
    duration_ticks = shortest_ticks.copy()
    rest_ticks = graph.reach_ticks(duration_ticks)[:-1] - duration_ticks
    end_ticks = np.maximum(end_ticks, graph.finish_ticks(duration_ticks).max(axis=0))
    done_ticks = np.zeros((graph.n + 1, duration_ticks.shape[1]))
    for level in graph.levels:
        rows = slice(level.begin, level.end)
        ready_ticks = latest_of(done_ticks, level.before)
        room_ticks = np.minimum(longest_ticks[rows], end_ticks - rest_ticks[rows] - ready_ticks)
        np.maximum(duration_ticks[rows], room_ticks, out=duration_ticks[rows])
        done_ticks[rows] = ready_ticks + duration_ticks[rows]
    return duration_ticks, done_ticks.max(axis=0)
