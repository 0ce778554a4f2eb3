"""What an earlier operator left in the status of a training job: the baseline, plans that are on hold, the hardware
that plans were rehearsed under, the canary, comparisons, and the result of a job that has finished.

All outlive a restart: a plan that broke its bound is not tried again at once, and the stored frontier is found again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perseus_operator.api.status import FrontierStatus, PlanStatus
from perseus_operator.api.stored import parse_stored
from perseus_operator.families.training.features.bound.guard import guard_from_status
from perseus_operator.families.training.features.canary.state import canary_from_status
from perseus_operator.families.training.features.comparison.state import comparisons_from_status
from perseus_operator.families.training.features.hardware.hardware import hardware_from_status
from perseus_operator.families.training.shape import shape_from_status
from perseus_operator.families.training.training import Training
from perseus_operator.nodes.iterations import measured_from_status


def restore_from_status(training: Training, status: Mapping[str, Any], *, now_s: float, wall_s: float) -> None:
    """Take baseline, comparisons, guard, hardware, shape, canary and result from a stored status.

    Args:
        training: changed.
        status: as stored in the cluster.
        now_s: monotonic.
        wall_s: the same moment by the wall clock, in seconds since 1970.
    """
    training.restored(
        baseline=measured_from_status(status.get("baseline")),
        guard=guard_from_status(status.get("guard"), now_s=now_s, wall_s=wall_s),
        hardware=hardware_from_status(status.get("hardware")),
        shape=shape_from_status(status.get("shape")),
        comparisons=comparisons_from_status(status.get("comparison")),
        canary=canary_from_status(status.get("canary")),
        result=measured_from_status(status.get("measured")),
        result_of=_plan_of(status),
        power_profiles=_profiles_of(status),
    )


def _profiles_of(status: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The power profiles under which the stored figures were measured; None: there are no figures."""
    if "baseline" not in status:
        return None
    written = status.get("powerProfiles")
    return tuple(sorted(map(str, written))) if isinstance(written, list) else ()


def _plan_of(status: Mapping[str, Any]) -> tuple[str, int] | None:
    """The plan under which the stored figures were measured; None: there was none."""
    frontier, plan = parse_stored(FrontierStatus, status.get("frontier")), parse_stored(PlanStatus, status.get("plan"))
    return None if frontier is None or plan is None else (frontier.digest, plan.point)
