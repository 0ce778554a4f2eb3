"""Minimum-cost flow on arrays. This is the only module that imports OR-Tools' minimum-cost flow.

OR-Tools is imported on the first call, so that a command that solves nothing starts fast.
"""

from __future__ import annotations

import numpy as np

from perseus_solver.kinds import Index, Int64s


class FlowFailed(RuntimeError):
    """The flow solver did not reach an optimum. This is a bug, never bad input."""


def min_cost_flow(tail: Index, head: Index, capacity: Int64s, cost: Int64s, supply: Int64s) -> Int64s:
    """Return the cheapest flow that moves the supply.

    Costs may be negative and cycles may have negative cost, as long as capacities bound them. Cost-scaling
    push-relabel: O(n²·m·log(n·C)) in the worst case, near-linear on pipeline graphs.

    Args:
        tail, head: int[arcs], the nodes that each arc joins.
        capacity, cost: int[arcs], largest flow, and cost of a unit of flow.
        supply: int[nodes], positive where flow enters, negative where it leaves; the sum is 0.

    Returns:
        int[arcs].

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
    flow: Int64s = solver.flows(np.arange(len(tail), dtype=np.int32))
    return flow
