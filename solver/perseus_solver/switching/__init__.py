"""Clock changes: how many a plan has, and plans that need fewer of them for a bounded amount of energy.

A *clock change* is two consecutive instructions of a stage with different clocks. Each takes time on a real GPU, and
most buy little energy. `reduce_clock_changes` trades a bounded share of the iteration energy for fewer changes.
"""

from perseus_solver.switching.reduction import (
    DEFAULT_LOSS,
    clock_changes,
    proven_effective_j,
    reduce_clock_changes,
    reduce_clock_changes_of_point,
)

__all__ = [
    "DEFAULT_LOSS",
    "clock_changes",
    "proven_effective_j",
    "reduce_clock_changes",
    "reduce_clock_changes_of_point",
]
