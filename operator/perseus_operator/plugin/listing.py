"""All jobs of a namespace or of the cluster at a glance, and the watts that they save together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from perseus_core.units import mean_power_w
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.objects.formatting import slowed_by
from perseus_operator.objects.values import Json

_PREDICTED: Final = ("energySaved", "energySavedLow", "energySavedHigh", "restsOn")


def listing(jobs: Iterable[Json], classes: Sequence[Json] = ()) -> Json:
    """List PerseusJobs as the API server returns them.

    Args:
        jobs: with metadata, spec and status.
        classes: what is to be said of namespaces that ask for an EnergyClass.

    Returns:
        ``jobs`` by namespace and name; ``savedWatts``: of all jobs that run and whose savings are measured, and
        ``measured``: how many these are; ``classes``. Of a job without measured savings the predicted ones.
    """
    lines = sorted((_line(job) for job in jobs), key=lambda line: (line["namespace"], line["name"]))
    saved = [line["savedWatts"] for line in lines if "savedWatts" in line]
    return {"jobs": lines, "savedWatts": sum(saved), "measured": len(saved), "classes": list(classes)}


def _line(job: Json) -> Json:
    metadata, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    ready: Any = next((c for c in status.get("conditions", ()) if c.get("type") == ConditionType.READY), {})
    line: Json = {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "mode": spec.get("mode", "Enforce"),
        "objective": (spec.get("objective") or {}).get("type", ""),
        "state": ready.get("reason", "NotSeen"),
        **status.get("savings", {}),
    }
    share = status.get("powerBudget") or {}
    if "slowdown" in share:
        line["limited"] = slowed_by(share["name"], share["slowdown"])
    if "savings" not in status:
        line |= {name: status["advised"][name] for name in _PREDICTED if name in status.get("advised", {})}
    baseline, measured = _watts(status.get("baseline")), _watts(status.get("measured"))
    running = line["state"] != Reason.FINISHED
    if running and "savings" in status and baseline is not None and measured is not None:
        line["savedWatts"] = round(baseline - measured)
    return line


def _watts(figures: Json | None) -> float | None:
    if not figures or "energyMillijoules" not in figures or not figures.get("iterationTimeMicroseconds"):
        return None
    return mean_power_w(figures["energyMillijoules"], figures["iterationTimeMicroseconds"])
