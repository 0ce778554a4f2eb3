"""What an earlier operator left in a PerseusJob's status: the baseline, plans that are on hold, and the hardware that
plans were rehearsed under.

All outlive a restart: a plan that broke its bound is not tried again at once, and the stored frontier is found again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perseus_operator.planning import bound_guard
from perseus_operator.planning.hardware import hardware_from_status
from perseus_operator.planning.iterations import Measured
from perseus_operator.planning.state import JobState


def restore_from_status(state: JobState, status: Mapping[str, Any], *, now_s: float, wall_s: float) -> None:
    """Take baseline, guard and hardware from a stored status.

    Args:
        state: of the job; changed.
        status: as stored in the cluster.
        now_s: monotonic.
        wall_s: the same moment by the wall clock, in seconds since 1970.
    """
    baseline, guard = status.get("baseline"), status.get("guard")
    measured = None
    if isinstance(baseline, Mapping):
        measured = Measured(
            int(baseline["iterationTimeMicroseconds"]),
            baseline.get("energyMillijoules"),
            int(baseline.get("iterations", 1)),
        )
    restored_guard = (
        bound_guard.guard_from_status(guard, now_s=now_s, wall_s=wall_s) if isinstance(guard, Mapping) else None
    )
    state.restored(baseline=measured, guard=restored_guard, hardware=hardware_from_status(status.get("hardware")))
