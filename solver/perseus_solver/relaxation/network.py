"""The relaxation at one price of time: every table widened to its lower convex hull, solved exactly as a network flow.

Lagrange's price v (watts) on the makespan T splits the problem: minimise Σ ε_i(d_i) + v·T. Its dual is a flow of value
v from the start of the iteration to its end, through the instructions. An instruction that carries x watts takes the
duration that minimises ε(d) + x·d, so each corner of its hull is an arc, with the drop in slope as capacity and the
duration as gain. The cheapest flow gives the bound. Complementary slackness gives the timetable: edges that carry flow
are tight, and an instruction's duration lies between the corners that are best at its flow. (Fulkerson 1961; Phillips
and Dessouky 1977.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats, Index, Int64s
from perseus_solver.relaxation.flow import min_cost_flow
from perseus_solver.relaxation.graph import Graph, latest_of
from perseus_solver.relaxation.tables import Tables

COST_BITS = 9
"""Costs are rounded to this many bits. Any flow that results is proven on the measurements, and a path averages the
rounding out: bounds change by less than 10^-6, and the flow solver takes half the time.
"""


@dataclass(frozen=True, slots=True)
class Network:
    """The dual network without its price.

    Node 2i enters row i, node 2i + 1 leaves it, 2n is the start and 2n + 1 the end.

    Attributes:
        tail, head: int[arcs], the nodes that each arc joins.
        capacity: int[arcs], units of flow; −1: without limit.
        gain: int[arcs], the duration or delay that flow on the arc counts, rounded to `COST_BITS`.
        from_price: int[arcs], an instruction uses the arc only when it carries more than this.
        nodes: number of nodes.
    """

    tail: Index
    head: Index
    capacity: Int64s
    gain: Int64s
    from_price: Int64s
    nodes: int


def build_network(tables: Tables, graph: Graph, table_of: Index) -> Network:
    """Build the dual network: one arc for each edge, first and last instruction, and hull corner.

    Args:
        tables: options in ticks.
        graph: precedence in levels.
        table_of: int[n], the table of each row.

    Returns:
        The network; the arcs of edges come first, in order.
    """
    n = graph.n
    rows = np.arange(n)
    first = np.setdiff1d(rows, graph.head)
    last = np.setdiff1d(rows, graph.tail)
    corner = np.arange(tables.hull_ticks.shape[1])
    row, column = np.nonzero(corner < tables.hull_size[table_of][:, None])
    table = table_of[row]
    below = tables.hull_price[table, column]
    above = tables.hull_price[table, np.maximum(column - 1, 0)]
    plain = len(graph.tail) + len(first) + len(last)
    free = np.full(plain, -1, dtype=np.int64)
    gain_ticks = np.concatenate((np.zeros(plain), tables.hull_ticks[table, column]))
    gain_ticks[: len(graph.tail)] = graph.delay_ticks
    unit_ticks = max(float(gain_ticks.max(initial=0.0)) / 2**COST_BITS, 1.0)
    return Network(
        tail=np.concatenate((2 * graph.tail + 1, np.full(len(first), 2 * n), 2 * last + 1, 2 * row)),
        head=np.concatenate((2 * graph.head, 2 * first, np.full(len(last), 2 * n + 1), 2 * row + 1)),
        capacity=np.concatenate((free, np.where(column == 0, -1, above - below))),
        gain=np.rint(gain_ticks / unit_ticks).astype(np.int64),
        from_price=np.concatenate((np.full(plain, -1), below)),
        nodes=2 * n + 2,
    )


@dataclass(frozen=True, slots=True)
class Dual:
    """A flow of value ``price``, in units.

    Attributes:
        price: its value.
        edge: int[m], on every edge.
        through: int[n], through every row.
    """

    price: int
    edge: Int64s
    through: Int64s


def solve_supply(network: Network, graph: Graph, price: int, supply: Int64s) -> Dual:
    """Return the best flow that meets a supply at the nodes.

    Args:
        network: from `build_network`.
        graph: of the same problem.
        price: flow on arcs without limit is at most this, units of `Tables.unit_w`.
        supply: int[nodes], positive where flow enters, negative where it leaves.

    Raises:
        FlowFailed: no optimal flow was found.
    """
    # Corners that are best only above the price carry no flow.
    used = network.from_price < price
    capacity = network.capacity[used]
    capacity = np.where(capacity < 0, price, np.minimum(capacity, price))
    flow = min_cost_flow(network.tail[used], network.head[used], capacity, -network.gain[used], supply)
    return _dual(network, graph, used, flow, price)


def _dual(network: Network, graph: Graph, used: np.ndarray, flow: Int64s, price: int) -> Dual:
    m = len(graph.tail)
    full = np.zeros(len(network.tail), dtype=np.int64)
    full[used] = flow
    through = np.zeros(graph.n, dtype=np.int64)
    node = network.tail
    corners = (node < network.nodes - 2) & (node % 2 == 0)
    np.add.at(through, node[corners] // 2, full[corners])
    return Dual(price, full[:m], through)


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

    Complementary slackness: with an optimal flow, edges that carry flow are tight, and each duration is between the
    corners that are best at its flow. Flows are optimal up to rounding only, so no exact fit is sought. One sweep lets
    each instruction, in order, grow as far as it may and the time allows.

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
