"""What an earlier operator left in a PerseusJob's status: the baseline, plans that are on hold, the hardware that plans
were rehearsed under, and when the job finished with what result.

All outlive a restart: a plan that broke its bound is not tried again at once, and the stored frontier is found again.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from perseus_operator.api.conditions import ConditionType
from perseus_operator.api.schema import stored_items
from perseus_operator.planning.bound_guard import guard_from_status
from perseus_operator.planning.canary import canary_from_status
from perseus_operator.planning.comparisons import comparisons_from_status
from perseus_operator.planning.hardware import hardware_from_status
from perseus_operator.planning.iterations import measured_from_status
from perseus_operator.planning.shape import shape_from_status
from perseus_operator.planning.state import JobState


def restore_from_status(state: JobState, status: Mapping[str, Any], *, now_s: float, wall_s: float) -> None:
    """Take baseline, comparisons, guard, hardware, shape and end from a stored status.

    Args:
        state: of the job; changed.
        status: as stored in the cluster.
        now_s: monotonic.
        wall_s: the same moment by the wall clock, in seconds since 1970.
    """
    state.restored(
        baseline=measured_from_status(status.get("baseline")),
        guard=guard_from_status(status.get("guard"), now_s=now_s, wall_s=wall_s),
        hardware=hardware_from_status(status.get("hardware")),
        shape=shape_from_status(status.get("shape")),
        comparisons=comparisons_from_status(status.get("comparison")),
        canary=canary_from_status(status.get("canary")),
    )
    state.end.restored(_finished_at_s(status), measured_from_status(status.get("measured")))


def _finished_at_s(status: Mapping[str, Any]) -> float | None:
    """When the job finished, in seconds since 1970; None: it has not."""
    conditions = stored_items(status.get("conditions"))
    finished = next((each for each in conditions if each.get("type") == ConditionType.FINISHED), {})
    if finished.get("status") != "True":
        return None
    try:
        return datetime.fromisoformat(str(finished.get("lastTransitionTime"))).timestamp()
    except ValueError:  # not as an operator writes it: the pods will say it again, if they are there
        return None
