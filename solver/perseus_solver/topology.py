"""Topological levels of a precedence graph given as flat edge arrays.

Used by the simulator, the order reader and the engine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Ints

STUCK = -1
"""Level of an instruction on or behind a cycle."""


def levels(n: int, before: Ints, after: Ints) -> npt.NDArray[np.intp]:
    """Number of edges on the longest chain that ends in each of n nodes; `STUCK` where a cycle stands before it.

    Peels off what waits for nothing, a level at a time: O(n + m) work in a few numpy calls a level.
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
