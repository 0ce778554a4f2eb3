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
_NEVER = FORBIDDEN << 3
"""A cost that even required flow does not pay."""
_BLOCK = 4.0
"""Of the arcs, about twice the square root of their number are looked at for the next pivot."""
_NODE = np.dtype([("room", np.int64, 2), ("arc", np.int32), ("segment", np.int32), ("away", np.int64)])
_ARC = np.dtype([(name, np.int32) for name in ("source", "target", "arc", "segment")])


class _Simplex(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("nodes", "others", "root", "next")),
        *((name, ctypes.c_void_p) for name in ("cost", "low", "other", "node", "potential")),
        *((name, ctypes.c_void_p) for name in ("parent", "depth", "after", "before", "last")),
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
        self.cost += [-_NEVER, *cost, _NEVER]
        self.low += [0, 0, *end]
        return first

    def required(self) -> int:
        """Add the costs of an arc whose flow is required, nothing at first, and return which they are."""
        return self.add([-_NEVER, FORBIDDEN, FORBIDDEN], [0, 1, ENDLESS]) + 1


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
        self._own = segment
        inner = np.flatnonzero(np.arange(len(potential)) != root)
        tight = np.flatnonzero(potential[target] - potential[source] == self._cost[segment])
        up = np.full(len(potential), -1)
        up[source[tight]] = tight
        tree = up[inner]
        assert (tree >= 0).all()
        self._node = np.zeros(len(potential), dtype=_NODE)
        self._node["arc"] = -1
        self._node["arc"][inner] = tree
        self._node["segment"][inner] = segment[tree]
        self._node["room"][inner, 0] = self._low[segment[tree] + 1]
        others = np.setdiff1d(np.arange(len(source)), tree)
        self._other = np.empty(len(others), dtype=_ARC)
        for name, values in (("source", source), ("target", target), ("segment", segment)):
            self._other[name] = values[others]
        self._other["arc"] = others
        self._potential = potential.copy()
        self._block = max(int(_BLOCK * len(others) ** 0.5), 10)
        self._order = np.full((5, len(potential)), -1, dtype=np.int32)
        self._order[0, inner] = target[tree]
        self._state = _Simplex(
            len(potential),
            len(others),
            root,
            0,
            *(at(array, array.dtype) for array in (self._cost, self._low, self._other, self._node, self._potential)),
            *(at(array, np.int32) for array in self._order),
        )
        library().simplex_start(ctypes.byref(self._state))

    @property
    def flow(self) -> Int64s:
        """The flow on every arc, int[arcs]."""
        flow = np.empty(len(self._own), dtype=np.int64)
        flow[self._other["arc"]] = self._low[self._other["segment"]]
        tree = self._node[self._node["arc"] >= 0]
        back = tree["room"][np.arange(len(tree)), 1 - tree["away"]]
        flow[tree["arc"]] = self._low[tree["segment"]] + back
        return flow

    def set_cost(self, arc: int, cost: int) -> None:
        """Change the cost of an arc that has one segment, which must be its own."""
        segment = self._own[arc]
        by = cost - int(self._cost[segment])
        self._cost[segment] = cost
        self._follow(arc, by)

    def require(self, first: int, wanted: Int64s) -> None:
        """Require so much flow on arcs, each with costs of its own from `Segments.required`.

        The flow stays what it is until the next `solve`. Until then what is missing would save more than all else, and
        what is too much costs more.

        Args:
            first: the first of these arcs.
            wanted: int[k], units of flow.
        """
        arcs = slice(first, first + len(wanted))
        flow, middle = self.flow[arcs], self._own[arcs]
        inner, outer = (
            np.flatnonzero((first <= arc) & (arc < arcs.stop)) for arc in (self._node["arc"], self._other["arc"])
        )
        of_inner, of_outer = self._node["arc"][inner] - first, self._other["arc"][outer] - first
        before = self._cost[self._node["segment"][inner]]
        missing = flow < wanted
        self._low[middle] = np.minimum(flow, wanted)
        self._low[middle + 1] = np.where(missing, wanted, np.maximum(flow, wanted + 1))
        self._cost[middle - 1] = np.where(self._low[middle] > 0, -FORBIDDEN, -_NEVER)
        self._cost[middle] = np.where(missing, -FORBIDDEN, FORBIDDEN)
        above = middle + (flow > wanted)
        self._other["segment"][outer] = above[of_outer]
        # Of the two segments that meet at the flow, the one in which flow can go to the root.
        away = self._node["away"][inner]
        segment = above[of_inner] - away
        self._node["segment"][inner] = segment
        self._node["room"][inner, away] = self._low[segment + 1] - flow[of_inner]
        self._node["room"][inner, 1 - away] = flow[of_inner] - self._low[segment]
        for arc, by in zip((first + of_inner).tolist(), (self._cost[segment] - before).tolist(), strict=True):
            self._follow(arc, by)

    def _follow(self, arc: int, by: int) -> None:
        """Correct the potentials after the cost of an arc has changed."""
        library().simplex_follow(ctypes.byref(self._state), arc, by)

    def solve(self) -> None:
        """Find the optimum for the costs as they are.

        Raises:
            FlowFailed: there is none: flow around a cycle saves without end.
        """
        # Arcs are looked at in the order of the graph. Of several optima that is one in which equal blocks carry nearly
        # equal flows, and plans that are made of them are better. Pivots disturb it.
        self._other[:] = self._other[np.argsort(self._other["arc"])]
        if library().simplex_solve(ctypes.byref(self._state), self._block) < 0:
            raise FlowFailed("network simplex: flow around a cycle saves without end")
