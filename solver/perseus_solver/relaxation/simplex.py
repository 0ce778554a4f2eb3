"""Circulations of least cost where arcs have convex, piecewise linear costs, by a network simplex.

Flow on an arc costs more from one segment to the next, so a table of options is one arc. When the cost of an arc
changes, the flow found before is the start for the next optimum. All numbers are integers: an optimum is exact.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from perseus_solver.compiled import at, library
from perseus_solver.kinds import Index, Int64s
from perseus_solver.relaxation.flow import FlowFailed

ENDLESS = 1 << 61
"""A segment without end; no flow comes near it."""
FORBIDDEN = 1 << 58
"""A cost that no flow pays, far above the sum of all others, far below what 64 bits hold."""
_BLOCK = 2.0
"""Of the arcs, about twice the square root of their number are looked at for the next pivot."""
_NODE = np.dtype(
    [("potential", np.int64), *((name, np.int32) for name in ("parent", "arc", "depth", "child", "after", "before"))]
)
_ARC = np.dtype([("flow", np.int64), *((name, np.int32) for name in ("source", "target", "segment", "in_tree"))])


class _Simplex(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("nodes", "arcs", "root", "next")),
        *((name, ctypes.c_void_p) for name in ("cost", "low", "node", "arc")),
    )


class Segments:
    """The costs of arcs, shared by those that are alike."""

    def __init__(self) -> None:
        self.cost: list[int] = []
        self.low: list[int] = []

    def add(self, cost: Sequence[int], end: Sequence[int]) -> int:
        """Add the costs of an arc, and return which they are.

        Args:
            cost: of a unit of flow in each segment, increasing.
            end: the flow at which each segment ends, increasing from above 0.
        """
        first = len(self.cost) + 1
        # Beyond the last segment flow is forbidden, and below nothing, too.
        self.cost += [-FORBIDDEN << 1, *cost, FORBIDDEN << 1]
        self.low += [0, 0, *end]
        return first


class Simplex:
    """One network. It begins without any flow, which must be the optimum for the costs given."""

    def __init__(
        self, segments: Segments, source: Index, target: Index, segment: Index, *, potential: Int64s, root: int
    ) -> None:
        """Prepare a network.

        Args:
            segments: costs.
            source, target: int[arcs], the nodes that each arc joins.
            segment: int[arcs], the costs of each.
            potential: int[nodes], of the optimum: no arc's cost is below the rise of the potential along it, and from
                each node but the root there is an arc whose cost is just that.
            root: a node.
        """
        self._cost = np.array(segments.cost, dtype=np.int64)
        self._low = np.array(segments.low, dtype=np.int64)
        self._arc = np.zeros(len(source), dtype=_ARC)
        self._arc["source"], self._arc["target"], self._arc["segment"] = source, target, segment
        self._own = segment
        tight = np.flatnonzero(potential[target] - potential[source] == self._cost[segment])
        self._node = np.full(len(potential), -1, dtype=_NODE)
        self._node["potential"] = potential
        self._node["arc"][source[tight]] = tight
        self._node["arc"][root] = -1
        inner = np.flatnonzero(np.arange(len(potential)) != root)
        tree = self._node["arc"][inner]
        assert (tree >= 0).all()
        self._node["parent"][inner] = target[tree]
        self._arc["in_tree"][tree] = 1
        self._block = max(int(_BLOCK * len(source) ** 0.5), 10)
        self._state = _Simplex(
            len(potential),
            len(source),
            root,
            0,
            *(at(array, array.dtype) for array in (self._cost, self._low, self._node, self._arc)),
        )
        library().simplex_start(ctypes.byref(self._state))

    @property
    def flow(self) -> Int64s:
        """The flow on every arc, int[arcs]."""
        flow: Int64s = self._arc["flow"].copy()
        return flow

    def set_cost(self, arc: int, cost: int) -> None:
        """Change the cost of an arc that has one segment, which must be its own."""
        own = self._own[arc]
        by = cost - int(self._cost[own])
        self._cost[own] = cost
        library().simplex_follow(ctypes.byref(self._state), arc, by)

    def solve(self) -> None:
        """Find the optimum for the costs as they are.

        Raises:
            FlowFailed: there is none: flow around a cycle saves without end.
        """
        if library().simplex_solve(ctypes.byref(self._state), self._block) < 0:
            raise FlowFailed("network simplex: flow around a cycle saves without end")
