"""Why it is not known what the plan in force saves, and what would measure it: one sentence, from spec and status.

The operator's event and the plugin say it in the same words; the plugin has nothing but the stored object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perseus_operator.api.job import JobSpec
from perseus_operator.objects.formatting import counted


def why_unmeasured(spec: JobSpec, status: Mapping[str, Any]) -> str:
    """Say why a status has no savings though a plan is in force.

    Args:
        spec: of the PerseusJob.
        status: as it is stored, or to be stored.

    Returns:
        A sentence; the first of several reasons.
    """
    measured, baseline = status.get("measured"), status.get("baseline")
    if baseline is None:
        return _without_baseline(spec, status)
    if measured is None:
        return "Iterations under the plan are being measured."
    if "energyMillijoules" not in measured or "energyMillijoules" not in baseline:
        return "The energy of an iteration is not known: some GPU has no energy counter."
    return "Iterations under the plan are compared next."


def _without_baseline(spec: JobSpec, status: Mapping[str, Any]) -> str:
    if budget := (status.get("powerBudget") or {}).get("name"):
        return (
            f"PowerBudget {budget} selects the job, which may draw more than its share at default clocks: nothing is"
            " measured there until no budget selects it."
        )
    every = spec.comparison.every_iterations
    if spec.baseline_iterations:
        return (
            "No iteration of this shape is measured at default clocks: once some have run under the plan, it is"
            f" interrupted for about {counted(spec.comparison.iterations + 1, 'iteration')} to measure them."
        )
    if every:
        return f"spec.baselineIterations is 0: the plan is first compared with default clocks at iteration {every}."
    return "spec.baselineIterations and spec.comparison.everyIterations are 0: nothing is measured at default clocks."
