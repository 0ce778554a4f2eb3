"""A pool at a glance, from the object as the API server has it: the same line for the plugin and the web page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Final

from perseus_core.units import ratio_from_percent
from perseus_operator.api.conditions import ConditionType
from perseus_operator.api.job import Mode
from perseus_operator.api.serving.spec import Role, duration, seconds
from perseus_operator.objects.values import Json

TIMES: Final[Mapping[str, str]] = {"timeToFirstToken": "to the first token", "timePerOutputToken": "per token"}
"""The two times that have a limit, by the name of their field, as what follows a time in a sentence."""
_NOT_OF: Final[Mapping[str, str]] = {Role.PREFILL: "timePerOutputToken", Role.DECODE: "timeToFirstToken"}
"""The time that engines of a role do not answer for."""
_ATTAINMENT: Final = "99%"
"""Of a limit that was stored without one."""
_COMPARING: Final = "It takes ten comparisons, about two and a half hours after clocks follow the load."


def summary(pool: Mapping[str, Any]) -> Json:
    """Return what a list says of a pool.

    Args:
        pool: with metadata, spec and status.

    Returns:
        ``namespace``, ``name``, ``mode``, ``replicas``, ``ready`` (as the condition), ``state``, the reason that says
        most; ``clockMegahertz``, the mean of the replicas in the status, and ``limitedBy``, what held most of them,
        unless not known; ``maxSlowdown`` of the spec, if it has one; ``advised``, how many replicas, if a number is;
        ``limits`` by the field's name, those that follow from the slowdown once there is a baseline, each with
        ``limit``, ``attainment`` that is asked for and ``kept``, the share that kept it lately; ``savings`` and
        ``proposedLimits`` of the status, if there are any; ``unmeasured``, why there are no savings.
    """
    metadata, status = pool["metadata"], pool.get("status") or {}
    replicas = status.get("replicas") or ()
    clocks_mhz = [one["clockMegahertz"] for one in replicas if "clockMegahertz" in one]
    held = Counter(one["limitedBy"] for one in replicas if "limitedBy" in one)
    states = conditions(pool)
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "mode": (pool.get("spec") or {}).get("mode", Mode.OBSERVE.value),
        "replicas": status.get("replicaCount", 0),
        "ready": states.get(ConditionType.READY, {}).get("status", "Unknown"),
        "state": _state(states),
        **({"clockMegahertz": round(fmean(clocks_mhz))} if clocks_mhz else {}),
        **({"limitedBy": max(sorted(held), key=held.__getitem__)} if held else {}),
        **({"maxSlowdown": slowdown} if (slowdown := _objective(pool).get("maxSlowdown")) else {}),
        "limits": _limits(pool),
        **({"advised": advised} if (advised := (status.get("advice") or {}).get("replicas")) else {}),
        **{name: status[name] for name in ("savings", "proposedLimits") if status.get(name)},
        **({} if status.get("savings") else {"unmeasured": _why_unmeasured(states)}),
    }


def conditions(pool: Mapping[str, Any]) -> dict[str, Json]:
    """The conditions of an object, by type."""
    return {one["type"]: one for one in (pool.get("status") or {}).get("conditions", ())}


def _state(states: Mapping[str, Json]) -> str:
    """Why it is not ready, or what its clocks do."""
    ready = states.get(ConditionType.READY)
    if ready is None:
        return "NotSeen"
    clocks = states.get(ConditionType.CLOCKS_APPLIED)
    return str((ready if clocks is None or ready["status"] != "True" else clocks)["reason"])


def _why_unmeasured(states: Mapping[str, Json]) -> str:
    """What its savings wait for: the message of the condition that fails, or the comparisons that are made by then."""
    if ConditionType.READY not in states:
        return "No operator has reported on the pool yet."
    needed = (states.get(kind) for kind in (ConditionType.READY, ConditionType.CLOCKS_APPLIED))
    failed = next((one for one in needed if one is not None and one["status"] != "True"), None)
    return _COMPARING if failed is None else str(failed["message"])


def _objective(pool: Mapping[str, Any]) -> Json:
    objective: Json = (pool.get("spec") or {}).get("objective") or {}
    return objective


def _relative(pool: Mapping[str, Any], slowdown: str) -> Json:
    """The limits that follow from the stored baseline."""
    status = pool.get("status") or {}
    baseline = status.get("baseline") or {}
    role = (pool.get("spec") or {}).get("role", Role.AUTO.value)
    if role == Role.AUTO:
        role = (status.get("engine") or {}).get("role", Role.MIXED.value)
    times = [name for name in TIMES if name != _NOT_OF.get(role) and name in baseline]
    slower = 1.0 + ratio_from_percent(slowdown)
    return {name: {"limit": duration(slower * seconds(baseline[name]))} for name in times}


def _limits(pool: Mapping[str, Any]) -> dict[str, Json]:
    objective = _objective(pool)
    if slowdown := objective.get("maxSlowdown"):
        objective = _relative(pool, slowdown)
    kept = (pool.get("status") or {}).get("attainment") or {}
    return {
        name: {
            "limit": objective[name]["limit"],
            "attainment": objective[name].get("attainment", _ATTAINMENT),
            **({"kept": kept[name]} if name in kept else {}),
        }
        for name in TIMES
        if objective.get(name)
    }
