"""Parts of a graph, where flow comes in and goes out: the best flow is found from one amount to any other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.solver.test_repetition import repeating

from perseus_solver.kinds import Index, Int64s
from perseus_solver.relaxation.curve import Engine
from perseus_solver.relaxation.flow import min_cost_flow
from perseus_solver.relaxation.network import Network
from perseus_solver.relaxation.simplex import ENDLESS
from perseus_solver.relaxation.tables import Tables

PLENTY = 1 << 40
COARSE = 2.0**30
"""Durations are this many ticks, because of OR-Tools' sums."""


class Part:
    """A graph in which flow may come in, or go out, at every node."""

    def __init__(self, *, starts: bool, ends: bool) -> None:
        engine = Engine(repeating("1f1b", 3, 8))
        self.graph, self.table_of, self.starts, self.ends = engine.graph, engine.table_of, starts, ends
        self.tables = replace(engine.tables, hull_ticks=np.ceil(engine.tables.hull_ticks / COARSE))
        back = [(0, ENDLESS)] if starts else []
        outside = np.arange(2 * self.graph.n)
        self.network = Network(self.tables, self.graph, self.table_of, back=back, ends=ends, outside=outside)

    def walks(self, random: np.random.Generator) -> Int64s:
        """The amounts that come in (even) and go out (odd) with flows along some random ways."""
        amount = np.zeros(2 * self.graph.n, dtype=np.int64)
        for _ in range(random.integers(1, 12)):
            row, units = int(random.integers(self.graph.n)), int(random.integers(1 << 24))
            amount[2 * row] += 0 if self.starts else units
            while len(onward := self.graph.head[self.graph.tail == row]) and (self.ends or random.random() < 0.8):
                row = int(random.choice(onward))
            amount[2 * row + 1] += 0 if self.ends else units
        return amount

    def cost(self, amount: Int64s) -> int:
        """What the best flow costs."""
        self.network.exchange(amount)
        dual = self.network.solve()
        through = dual.through[self.graph.order]
        for ends, others, outside, here in (
            (self.graph.head, self.graph.tail, amount[0::2], self.starts),
            (self.graph.tail, self.graph.head, amount[1::2], self.ends),
        ):
            missing = through - outside
            np.subtract.at(missing, ends, dual.edge)
            first = np.setdiff1d(others, ends)
            assert (missing >= 0).all()
            assert not np.delete(missing, first[: len(first) * here]).any(), "flow is lost"
        row, corner, room = corners(self.tables, self.table_of)
        used = np.clip(through[row] - self.tables.hull_price[self.table_of[row], corner], 0, room)
        return -int(used.astype(object) @ self.tables.hull_ticks[self.table_of[row], corner].astype(np.int64))

    def peer(self, amount: Int64s) -> int:
        """The same by OR-Tools, an arc for each corner."""
        n, rows = self.graph.n, np.arange(self.graph.n)
        first, last = (np.setdiff1d(rows, some) for some in (self.graph.head, self.graph.tail))
        row, corner, room = corners(self.tables, self.table_of)
        tail = np.concatenate((2 * self.graph.tail + 1, np.full(len(first), 2 * n), 2 * last + 1, 2 * row))
        head = np.concatenate((2 * self.graph.head, 2 * first, np.full(len(last), 2 * n + 1), 2 * row + 1))
        plain = len(tail) - len(row)
        cost = np.append(np.zeros(plain), -self.tables.hull_ticks[self.table_of[row], corner]).astype(np.int64)
        supply = np.append(np.where(np.arange(2 * n) % 2, -amount, amount), [0, 0])
        supply[2 * n if self.starts else 2 * n + 1] -= supply.sum()
        flow = min_cost_flow(tail, head, np.append(np.full(plain, PLENTY), room), cost, supply)
        return int(flow.astype(object) @ cost)


def corners(tables: Tables, table_of: Index) -> tuple[Index, Index, Int64s]:
    """Row, corner, and the flow that finds room there, of every corner of every row."""
    row, corner = np.nonzero(np.arange(tables.hull_ticks.shape[1]) < tables.hull_size[table_of][:, None])
    price = tables.hull_price[table_of[row]]
    own = np.arange(len(row))
    room = np.where(corner == 0, PLENTY, price[own, np.maximum(corner - 1, 0)] - price[own, corner])
    return row, corner, room


@pytest.mark.parametrize(("starts", "ends"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("seed", range(3))
def test_required_flow_is_met_at_the_least_cost(seed: int, starts: bool, ends: bool) -> None:
    random, part = np.random.default_rng(seed), Part(starts=starts, ends=ends)
    for _ in range(12):
        amount = part.walks(random)
        assert part.cost(amount) == part.peer(amount)
    assert part.cost(0 * amount) == 0
