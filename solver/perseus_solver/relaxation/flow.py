"""The door to OR-Tools for flows: minimum-cost flow on arrays, with its verdict turned into one error.

Called by ``relaxation`` and ``steady``. OR-Tools is imported on the first call, so that a command that solves nothing
starts fast.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]


class FlowFailed(RuntimeError):
    """The flow solver did not reach an optimum. Never the user's fault: the engine only builds feasible, bounded
    networks.
    """


def min_cost_flow(tail: Index, head: Index, capacity: Int64, cost: Int64, supply: Int64) -> Int64:
    """Cheapest flow that moves ``supply`` (positive: enters at the node, negative: leaves); one number an arc.

    Costs may be negative and cycles may gain, as long as capacities bound them. Cost-scaling push-relabel:
    O(n²·m·log(n·C)) in the worst case, near-linear on pipeline graphs.

    Raises:
        FlowFailed: no optimal flow was found.
    """
    from ortools.graph.python import min_cost_flow as ortools

    solver = ortools.SimpleMinCostFlow()
    solver.add_arcs_with_capacity_and_unit_cost(tail.astype(np.int32), head.astype(np.int32), capacity, cost)
    nodes = np.flatnonzero(supply)
    solver.set_nodes_supplies(nodes.astype(np.int32), supply[nodes])
    status = solver.solve()
    if status != solver.OPTIMAL:
        raise FlowFailed(f"minimum-cost flow on {len(supply)} nodes and {len(tail)} arcs ended with {status.name}")
    flow: Int64 = solver.flows(np.arange(len(tail), dtype=np.int32))
    return flow
