"""The dual of the relaxation: every table widened to its lower convex hull, as a network of flows.

Lagrange's price v (watts) on the makespan T splits the problem: minimise Σ ε_i(d_i) + v·T. Its dual is a flow of value
v from the start of the iteration to its end, through the instructions. An instruction that carries x watts takes the
duration that minimises ε(d) + x·d, so flow through it costs, minus its duration, more from one corner of its hull to
the next. The cheapest flow gives the bound. (Fulkerson 1961; Phillips and Dessouky 1977.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Index, Int64s
from perseus_solver.relaxation.graph import Graph
from perseus_solver.relaxation.simplex import ENDLESS, FORBIDDEN, Segments, Simplex
from perseus_solver.relaxation.tables import Tables

_NOWHERE = np.zeros(0, dtype=np.intp)


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


class Network:
    """The network of a graph or of a part of one, with the flow that was best last.

    Node 2i enters row i, node 2i + 1 leaves it, 2n is the start and 2n + 1 the end, from where flow goes back to the
    start and, of a part, to where it comes in, and from where it goes out.
    """

    def __init__(
        self,
        tables: Tables,
        graph: Graph,
        table_of: Index,
        *,
        back: Sequence[tuple[int, int]],
        ends: bool = True,
        outside: Index = _NOWHERE,
    ) -> None:
        """Build the network, without flow.

        Args:
            tables: options in ticks.
            graph: precedence in levels.
            table_of: int[n], the table of each row.
            back: of each part of the way from the end to the start, the cost, and the flow at which it ends; none where
                the iteration does not start in this part of the graph.
            ends: whether the iteration ends in this part of the graph.
            outside: nodes where flow comes in, if they are even, or goes out.
        """
        n, rows = graph.n, np.arange(graph.n)
        start, end = 2 * n, 2 * n + 1
        first = np.setdiff1d(rows, graph.head)
        last = np.setdiff1d(rows, graph.tail) if ends else _NOWHERE
        comes, goes = outside[outside % 2 == 0], outside[outside % 2 == 1]
        segments = Segments()
        of_table = np.array([segments.add(*_corners(tables, table)) for table in range(len(tables.size))])
        of_delay = {ticks: segments.add([-int(ticks)], [ENDLESS]) for ticks in {0.0, *graph.delay_ticks.tolist()}}
        # With all instructions at their slowest, no time has a price, and the longest ways to the end are the tree. A
        # corner whose flow rounds to nothing is none.
        slow_ticks = -np.array([segments.cost[costs] for costs in of_table.tolist()], dtype=np.float64)[table_of]
        reach_ticks = graph.reach_ticks(slow_ticks[:, None])[:-1, 0].astype(np.int64)
        potential = np.empty(2 * n + 2, dtype=np.int64)
        potential[0:start:2], potential[1:start:2] = reach_ticks, reach_ticks - slow_ticks.astype(np.int64)
        potential[start] = reach_ticks.max(initial=0)
        if not ends:  # every way to the end costs as much as flow that is not required
            potential -= FORBIDDEN
        potential[end] = 0
        arcs = [
            (2 * graph.tail + 1, 2 * graph.head, [of_delay[ticks] for ticks in graph.delay_ticks.tolist()]),
            (2 * rows, 2 * rows + 1, of_table[table_of]),
            (np.full(len(first), start), 2 * first, [of_delay[0.0]] * len(first)),
            (2 * last + 1, np.full(len(last), end), [of_delay[0.0]] * len(last)),
            (np.full(len(comes), end), comes, [segments.required() for _ in comes]),
            (goes, np.full(len(goes), end), [segments.required() for _ in goes]),
            (np.full(len(back), end), np.full(len(back), start), [segments.add([cost], [to]) for cost, to in back]),
        ]
        source, target, segment = (np.concatenate([part[k] for part in arcs]).astype(np.intp) for k in range(3))
        self._graph, self._edges = graph, len(graph.tail)
        self._back = len(source) - len(back)
        self._outside = np.concatenate((comes, goes))
        self._simplex = Simplex(segments, source, target, segment, potential=potential, root=end)

    def set_back(self, part: int, cost: int) -> None:
        """Change what flow from the end to the start costs."""
        self._simplex.set_cost(self._back + part, cost)

    def exchange(self, flow: Int64s) -> None:
        """Require so much flow in or out, int[2n], at the nodes where there may be any."""
        self._simplex.require(self._back - len(self._outside), flow[self._outside])

    def solve(self) -> Dual:
        """Return the best flow.

        Raises:
            FlowFailed: there is none.
        """
        self._simplex.solve()
        flow = self._simplex.flow
        through = flow[self._edges : self._edges + self._graph.n][self._graph.rank]
        return Dual(int(flow[self._back :].sum()), flow[: self._edges], through)


def _corners(tables: Tables, table: int) -> tuple[list[int], list[int]]:
    """Return the costs of flow through an instruction, minus its duration in ticks, and where each ends."""
    corners = int(tables.hull_size[table])
    cost = -tables.hull_ticks[table, :corners][::-1].astype(np.int64)
    begin = tables.hull_price[table, :corners][::-1]
    end = np.append(begin[1:], ENDLESS)
    worth = end > begin
    return cost[worth].tolist(), end[worth].tolist()
