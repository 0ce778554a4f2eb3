"""Solve long schedules at the cost of short ones: solve the ends, repeat the middle.

In the middle of many equal blocks (``periods``) an optimal timetable becomes periodic. Its dual is a *circulation* on
the graph of one block, closed upon itself: flow that leaves a block is flow that enters the next. So the flow of the
whole graph is composed of parts, each the optimum of its own small network:

- the circulation of each repetition, which carries the price across every boundary between two blocks;
- the pieces before, between and after the repetitions, with a few of their blocks, where the timetable is not periodic
yet. Each takes in and gives out exactly what the circulations carry across its boundaries.

The result conserves flow on the full graph and hence proves a bound there, whatever the circulations are. That the
bound is good shows in the gap. The cost does not depend on the number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from perseus_solver.certify import Bound
from perseus_solver.kinds import Index, Int64s
from perseus_solver.model.problem import Problem
from perseus_solver.relaxation.flow import min_cost_flow
from perseus_solver.relaxation.graph import Graph, build_graph
from perseus_solver.relaxation.network import Dual, Network
from perseus_solver.relaxation.periods import Repetition
from perseus_solver.relaxation.simplex import ENDLESS
from perseus_solver.relaxation.tables import Tables


class Circulations:
    """The circulations of one repetition, by price."""

    def __init__(self, tables: Tables, repetition: Repetition) -> None:
        """Build the network of one block of the repetition."""
        self._tables = tables
        self._found: dict[int, tuple[Int64s, Int64s]] = {}
        row, corner = np.nonzero(
            np.arange(tables.hull_ticks.shape[1]) < tables.hull_size[repetition.option_of][:, None]
        )
        table = repetition.option_of[row]
        below = tables.hull_price[table, corner]
        above = tables.hull_price[table, np.maximum(corner - 1, 0)]
        self._tail = np.concatenate((2 * repetition.tail + 1, 2 * row))
        self._head = np.concatenate((2 * repetition.head, 2 * row + 1))
        self._room = np.concatenate((np.full(len(repetition.tail), -1), np.where(corner == 0, -1, above - below)))
        self._gain_ticks = np.concatenate(
            (np.ceil(repetition.delay_s / tables.tick_s), tables.hull_ticks[table, corner])
        )
        self._gain_ticks = self._gain_ticks.astype(np.int64)
        self._back = np.concatenate((repetition.back, np.zeros(len(row), dtype=np.int64)))
        self._row = row
        self._repetition = repetition
        # A cycle through the instructions of stage 0: one unit more on it is one unit more of value.
        nodes = int(repetition.step[0])
        wraps = (np.arange(nodes) == nodes - 1).astype(np.int64)
        chain = (repetition.tail[:, None] == np.arange(nodes)) & (
            repetition.head[:, None] == (np.arange(nodes) + 1) % nodes
        )
        chain &= repetition.back[:, None] == wraps
        self._chain = chain.argmax(axis=0)
        self._chain_nodes = nodes

    def at(self, price: int) -> tuple[Int64s, Int64s]:
        """Return the circulation of value ``price``, which is its flow over a boundary between blocks.

        Returns:
            int[classes] on edges, and int[nodes] through nodes.
        """
        if price not in self._found:
            self._found[price] = self._circulation(price)
        return self._found[price]

    def line(self, price: int) -> Bound:
        """Return what the circulation proves about all blocks, if nothing preceded or followed them."""
        tables, repetition = self._tables, self._repetition
        edge, through = self.at(price)
        watts = through * tables.unit_w
        seconds = tables.hull_ticks[repetition.option_of] * tables.tick_s
        best = (tables.hull_energy_j[repetition.option_of] + watts[:, None] * seconds).min(axis=1)
        best += np.bincount(
            repetition.head, weights=edge * tables.unit_w * repetition.delay_s, minlength=repetition.nodes
        )
        return Bound(float(np.dot(repetition.count, best)), price * tables.unit_w)

    def _circulation(self, price: int) -> tuple[Int64s, Int64s]:
        """Find the circulation by Newton's method.

        For a period τ the best circulation is a minimum-cost flow, and its value decreases with τ. Two periods enclose
        the wanted value. The next to try is where their lines cross, so every step finds a new line of a concave
        function, or the two that meet at the price.
        """
        # With period 0 every cycle gains, so some arc without limit carries ``price``, which is value enough.
        short, long = self._best(0, price), np.zeros(len(self._tail), dtype=np.int64)
        while True:
            gain_ticks = self._total(self._gain_ticks, short) - self._total(self._gain_ticks, long)
            most, least = self._total(self._back, short), self._total(self._back, long)
            if most == price:
                break
            flow = self._best(gain_ticks // (most - least), price)
            value = self._total(self._back, flow)
            if value >= most or value <= least:
                short = self._blend(short, long, (price - least) / (most - least))
                break
            short, long = (flow, long) if value >= price else (short, flow)
        edge = short[: len(self._repetition.tail)].copy()
        through = np.zeros(self._repetition.nodes, dtype=np.int64)
        np.add.at(through, self._row, short[len(self._repetition.tail) :])
        missing = price - self._total(self._back, short)
        edge[self._chain] += missing
        through[: self._chain_nodes] += missing
        return edge, through

    @staticmethod
    def _total(weight: Int64s, flow: Int64s) -> int:
        """Return Σ weight · flow in Python's integers, because it may exceed 63 bits."""
        high, low = np.divmod(flow, 1 << 20)
        return (int(weight @ high) << 20) + int(weight @ low)

    def _best(self, period_ticks: int, price: int) -> Int64s:
        capacity = np.where(self._room < 0, price, np.minimum(self._room, price))
        nothing = np.zeros(2 * self._repetition.nodes, dtype=np.int64)
        return min_cost_flow(self._tail, self._head, capacity, period_ticks * self._back - self._gain_ticks, nothing)

    def _blend(self, one: Int64s, other: Int64s, share: float) -> Int64s:
        """Return a convex combination, rounded to integers so that flow is conserved.

        Its value is slightly less rather than more. Flow rounded down leaves imbalances. The fractional arcs, one unit
        each, can settle them, because circulations between integral limits are integral. Both carry less than a unit on
        each arc: the value is too small by less than the number of arcs, which the caller adds along one cycle.
        """
        exact = other + (one - other) * share
        whole = np.floor(exact).astype(np.int64)
        supply = np.zeros(2 * self._repetition.nodes, dtype=np.int64)
        np.add.at(supply, self._head, whole)
        np.subtract.at(supply, self._tail, whole)
        loose = (exact > whole).astype(np.int64)
        return whole + min_cost_flow(self._tail, self._head, loose, self._back, supply)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A part of the graph that is solved as it is.

    Attributes:
        graph, network: of this part.
        rows, edges: its instructions and edges, numbered as in the problem.
        passes: pairs of a network node and the class of a repetition's edges whose flow comes in or goes out there. The
            classes of all repetitions are numbered together.
    """

    graph: Graph
    network: Network
    rows: Index
    edges: Index
    passes: tuple[Index, Index]


class Steady:
    """A problem whose repetitions are solved by their circulations. Flows are numbered as in the problem."""

    def __init__(self, problem: Problem, tables: Tables, repetitions: list[Repetition], keep: int) -> None:
        """Cut the graph into repetitions and pieces.

        Args:
            problem: the problem.
            tables: its options in ticks.
            repetitions: its repeated parts.
            keep: blocks at either end of each repetition that belong to the neighbouring pieces.

        Raises:
            NotSteady: the graph does not repeat where its blocks suggest it.
        """
        self._tables = tables
        self._circulations = [Circulations(tables, repetition) for repetition in repetitions]
        stage = np.repeat(np.arange(problem.stages), np.diff(problem.stage_offset))
        piece = np.zeros(problem.instructions, dtype=np.intp)
        self._node = np.full(problem.instructions, -1, dtype=np.intp)
        edge_class = np.full(len(problem.edge_from), -1, dtype=np.intp)
        tail, head = problem.edge_from, problem.edge_to
        nodes = classes = 0
        for number, repetition in enumerate(repetitions):
            block, node = repetition.locate(problem)
            before, after = block < (repetition.low + keep)[stage], block >= (repetition.high - keep)[stage]
            piece[after] = number + 1
            middle = ~(before | after)
            self._node[middle] = nodes + node[middle]
            # Edges with an end in the middle, and those that cross it.
            crossing = middle[tail] | middle[head] | (before[tail] & after[head])
            crossing_class = repetition.classify(problem, block, node)[crossing]
            if (crossing_class < 0).any():
                raise NotSteady
            edge_class[crossing] = classes + crossing_class
            nodes, classes = nodes + repetition.nodes, classes + len(repetition.tail)
        self._edge_class = edge_class
        piece[self._node >= 0] = -1
        self._pieces = [self._cut(problem, piece == p, p, len(repetitions)) for p in range(len(repetitions) + 1)]

    def _cut(self, problem: Problem, inside: np.ndarray, number: int, repetitions: int) -> _Piece:
        rows = np.flatnonzero(inside)
        renumber = np.full(problem.instructions, -1, dtype=np.int32)
        renumber[rows] = np.arange(len(rows))
        tail, head = problem.edge_from, problem.edge_to
        edges = np.flatnonzero(inside[tail] & inside[head] & (self._edge_class < 0))
        part = replace(
            problem,
            option_of=problem.option_of[rows],
            edge_from=renumber[tail[edges]],
            edge_to=renumber[head[edges]],
            edge_delay_s=problem.edge_delay_s[edges],
        )
        graph = build_graph(part, self._tables.tick_s)
        enters = np.flatnonzero((self._edge_class >= 0) & inside[head])
        leaves = np.flatnonzero((self._edge_class >= 0) & inside[tail])
        nodes = np.concatenate((2 * graph.rank[renumber[head[enters]]], 2 * graph.rank[renumber[tail[leaves]]] + 1))
        network = Network(
            self._tables,
            graph,
            part.option_of[graph.order].astype(np.intp),
            back=[(0, ENDLESS)] if number == 0 else [],
            ends=number == repetitions,
            outside=np.unique(nodes),
        )
        return _Piece(graph, network, rows, edges, (nodes, self._edge_class[np.concatenate((enters, leaves))]))

    @property
    def rows(self) -> int:
        """Number of instructions that are solved for each price."""
        return sum(len(piece.rows) for piece in self._pieces)

    def kinds(self) -> Index:
        """Return the kind of each instruction, int[n]: repeated instructions are of one kind; all others differ."""
        apart = int(self._node.max()) + 1
        label = np.where(self._node >= 0, self._node, apart + np.arange(len(self._node)))
        kind: Index = np.unique(label, return_inverse=True)[1]
        return kind

    def lines(self, price: int) -> Bound:
        """Return what the circulations alone prove at a price: a cheap forecast of the full bound."""
        lines = [circulations.line(price) for circulations in self._circulations]
        return Bound(sum(line.constant_j for line in lines), lines[0].price_w)

    def solve(self, prices: list[int]) -> list[Dual]:
        """Return the composed flows at these prices."""
        return [self._solve(price) for price in prices]

    def _solve(self, price: int) -> Dual:
        if price == 0:
            return Dual(0, np.zeros(len(self._edge_class), dtype=np.int64), np.zeros(len(self._node), dtype=np.int64))
        parts = [circulations.at(price) for circulations in self._circulations]
        on_edge = np.concatenate([edge for edge, _ in parts])
        on_node = np.concatenate([node for _, node in parts])
        edge = np.where(self._edge_class >= 0, on_edge[self._edge_class], 0)
        through = np.where(self._node >= 0, on_node[self._node], 0)
        for piece in self._pieces:
            nodes, passing = piece.passes
            flow = np.zeros(2 * piece.graph.n, dtype=np.int64)
            np.add.at(flow, nodes, on_edge[passing])
            piece.network.exchange(flow)
            dual = piece.network.solve()
            edge[piece.edges] = dual.edge
            through[piece.rows] = dual.through
        return Dual(price, edge, through)


class NotSteady(Exception):
    """The graph does not repeat where its blocks suggest it."""
