"""Topological levels of a precedence graph that is given as flat arrays of edges.

A level holds the instructions whose longest chain of predecessors has the same length. Sweeping a graph one level at a
time needs a few numpy calls for each level instead of Python code for each instruction.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Ints

STUCK = -1
"""Level of an instruction that is on a cycle or behind one."""


def levels(n: int, before: Ints, after: Ints) -> npt.NDArray[np.intp]:
    """Return the number of edges on the longest chain that ends in each node (Kahn's algorithm, a level at a time).

    O(n + m) work in a few numpy calls for each level.

    Args:
        n: number of nodes.
        before, after: int32[m], the ends of each edge; ``after`` waits for ``before``.

    Returns:
        int[n], the level of each node, `STUCK` where a cycle precedes it.
    """
    successors = after[np.argsort(before, kind="stable")]
    first = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=n))])
    waiting = np.bincount(after, minlength=n)
    level = np.full(n, STUCK, dtype=np.intp)
    ready = np.flatnonzero(waiting == 0)
    depth = 0
    while ready.size:
        level[ready] = depth
        depth += 1
        counts = first[ready + 1] - first[ready]
        base = np.repeat(first[ready] - (np.cumsum(counts) - counts), counts)
        freed = successors[base + np.arange(base.size)]
        np.subtract.at(waiting, freed, 1)
        ready = np.unique(freed[waiting[freed] == 0])
    return level
