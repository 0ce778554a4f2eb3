"""The network simplex: it ends at an optimum, from whatever costs it was at before."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_solver.kinds import Int64s
from perseus_solver.relaxation.flow import FlowFailed, min_cost_flow
from perseus_solver.relaxation.simplex import ENDLESS, FORBIDDEN, Segments, Simplex

WIDTH, DEPTH = 5, 8


class Layers:
    """Layers of nodes with random arcs of several segments, and a way back from the end, whose cost is set."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        inner = WIDTH * DEPTH
        self.start, self.end = inner, inner + 1
        source, target, self.parts = [], [], []
        segments = Segments()
        costs = []
        for layer in range(DEPTH - 1):
            for _ in range(3 * WIDTH):
                source.append(layer * WIDTH + int(random.integers(WIDTH)))
                target.append((layer + 1) * WIDTH + int(random.integers(WIDTH)))
                cost = np.sort(random.choice(60, 3, replace=False)) - 60
                end = np.cumsum(random.integers(1, 20, 3))
                costs.append(segments.add(cost.tolist(), end.tolist()))
                self.parts.append((cost, np.diff(end, prepend=0)))
        free = segments.add([0], [ENDLESS])
        for k in range(WIDTH):
            source += [self.start, (DEPTH - 1) * WIDTH + k]
            target += [k, self.end]
            costs += [free, free]
        for node in range(inner):  # a way for each node, so that there is a tree
            source.append(node)
            target.append(self.end)
            costs.append(free)
        source.append(self.end)
        target.append(self.start)
        costs.append(segments.add([FORBIDDEN], [1_000]))
        self.source, self.target = np.array(source), np.array(target)
        potential = self._longest(np.array([segments.cost[c] for c in costs]))
        self.simplex = Simplex(segments, self.source, self.target, np.array(costs), potential=potential, root=self.end)

    def _longest(self, cost: Int64s) -> Int64s:
        potential = np.zeros(self.end + 1, dtype=np.int64)
        for _ in range(DEPTH + 2):
            for arc in range(len(cost) - 1):
                potential[self.source[arc]] = max(
                    potential[self.source[arc]], potential[self.target[arc]] - int(cost[arc])
                )
        return potential

    def solve(self, back: int) -> int:
        """The cost of the best circulation."""
        self.simplex.set_cost(len(self.source) - 1, back)
        self.simplex.solve()
        flow = self.simplex.flow
        balance = np.zeros(self.end + 1, dtype=np.int64)
        np.add.at(balance, self.target, flow)
        np.subtract.at(balance, self.source, flow)
        assert not balance.any()
        total = back * int(flow[-1])
        for (cost, room), units in zip(self.parts, flow.tolist(), strict=False):
            used = np.clip(units - (np.cumsum(room) - room), 0, room)
            assert used.sum() == units
            total += int(used @ cost)
        return total

    def peer(self, back: int) -> int:
        """The same by OR-Tools, an arc for each segment."""
        parallel = len(self.parts)
        source = np.concatenate((np.repeat(self.source[:parallel], 3), self.source[parallel:]))
        target = np.concatenate((np.repeat(self.target[:parallel], 3), self.target[parallel:]))
        cost = np.concatenate([*(cost for cost, _ in self.parts), np.zeros(len(self.source) - parallel)])
        room = np.concatenate([*(room for _, room in self.parts), np.full(len(self.source) - parallel, 1_000)])
        cost[-1] = back
        cost, room = cost.astype(np.int64), room.astype(np.int64)
        flow = min_cost_flow(source, target, room, cost, np.zeros(self.end + 1, dtype=np.int64))
        return int(flow @ cost)


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_another_solver_finds_from_any_cost_to_any_other(seed: int) -> None:
    layers = Layers(seed)
    for back in (500, 380, 200, 120, 0, 350, 10, 419):
        assert layers.solve(back) == layers.peer(back)


def test_saving_without_end_is_an_error() -> None:
    segments = Segments()
    costs = [segments.add([-1], [ENDLESS]), segments.add([FORBIDDEN], [ENDLESS])]
    simplex = Simplex(
        segments,
        np.array([0, 1]),
        np.array([1, 0]),
        np.array(costs),
        potential=np.array([1, 0], dtype=np.int64),
        root=1,
    )
    simplex.set_cost(1, 1)
    simplex.solve()
    assert not simplex.flow.any()
    simplex.set_cost(1, 0)
    with pytest.raises(FlowFailed, match="saves without end"):
        simplex.solve()
