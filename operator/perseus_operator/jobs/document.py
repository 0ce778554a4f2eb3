"""The whole status of a PerseusJob or ServingPool, made of conditions and figures, and what of it is urgent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perseus_operator.api.conditions import Condition, ConditionType, merge_conditions
from perseus_operator.api.schema import dump
from perseus_operator.api.serving.status import PoolFigures
from perseus_operator.api.status import StatusFigures
from perseus_operator.objects.formatting import stamp
from perseus_operator.objects.values import Json


def document(
    conditions: Iterable[Condition],
    figures: StatusFigures | PoolFigures,
    stored: Mapping[str, Any],
    *,
    generation: int,
    wall_s: float,
) -> Json:
    """Build the whole status as it should be stored.

    Args:
        conditions: that hold now.
        figures: the typed part of the status.
        stored: the status as it is stored now; conditions of types that are not known here are kept.
        generation: of the spec that the status describes.
        wall_s: the time now, seconds since 1970; the transition time of conditions whose status changes.
    """
    old = stored.get("conditions", ())
    return {
        "observedGeneration": generation,
        "conditions": merge_conditions(old, conditions, generation=generation, now_rfc3339=stamp(wall_s)),
        **dump(figures),
    }


def essence(status: Mapping[str, Any]) -> Json:
    """Return the part of a status whose changes are written at once: neither what is counted or measured nor wordings.

    Returns:
        The status without what is measured, predicted and counted; ``conditions`` maps each type to its status and
        reason.
    """
    at_leisure = {"measured", "savings", "comparison", "predicted", "clock", "conditions", "powerBudget"}
    at_leisure |= {"replicas", "replicaCount", "attainment", "proposedLimits", "engine"}  # of a pool
    figures = {key: value for key, value in status.items() if key not in at_leisure}
    hardware = {key: value for key, value in status.get("hardware", {}).items() if key != "medianLeadMicroseconds"}
    share = {key: value for key, value in status.get("powerBudget", {}).items() if key != "slowdown"}
    share["draw"] = sorted(share.get("draw", {}))  # a draw that is known at last, not one that is a little different
    return {
        **figures,
        "hardware": hardware,
        "powerBudget": share,
        "conditions": {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())},
    }


def was_ready(stored: Mapping[str, Any]) -> bool:
    """Return whether the condition Ready of a stored status is True."""
    return bool(essence(stored)["conditions"].get(ConditionType.READY.value, ("", ""))[0] == "True")
