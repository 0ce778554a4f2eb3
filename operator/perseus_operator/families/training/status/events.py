"""Kubernetes events about a training job that no condition says: its baseline, and the plans in force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from perseus_operator.api.conditions import Reason
from perseus_operator.families.training.decide import TrainingDecision
from perseus_operator.families.training.status.recommendation import slowed
from perseus_operator.families.training.status.status import planned_slowdown
from perseus_operator.families.training.status.unmeasured import why_unmeasured
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.events import JobEvent
from perseus_operator.nodes.iterations import Measured
from perseus_operator.objects.formatting import joules, percent, seconds


def baseline_event(baseline: Measured) -> JobEvent:
    """Build the event that the baseline is measured."""
    if baseline.energy_mj is None:
        energy = " (its energy is not known: some GPU has no energy counter)"
    else:
        energy = f" and {joules(baseline.energy_mj)}"
    return JobEvent(
        Reason.BASELINE_MEASURED,
        f"At default clocks an iteration takes {seconds(baseline.time_us)}{energy} (median of {baseline.iterations}).",
    )


def discarded_event(training: Training, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[JobEvent]:
    """Build the event that a baseline does not count any more; none: it counts, or there was none.

    Args:
        training: the job.
        stored: the status as it is stored.
        wanted: the status that replaces it.
    """
    spec = training.spec
    if spec is None or training.baseline is not None or "baseline" not in stored:
        return []
    shape = spec.pipeline
    return [
        JobEvent(
            Reason.BASELINE_DISCARDED,
            f"The job has another shape, {shape.data_parallel} (dp) × {shape.stages} (stages) ×"
            f" {shape.tensor_parallel} (tp): what was measured at default clocks does not count any more."
            f" {why_unmeasured(spec, wanted)}",
        )
    ]


def plan_event(training: Training, decision: TrainingDecision) -> JobEvent:
    """Build the event that other plans are in force: which ones, and from which iteration on."""
    assert training.frontier is not None
    times, counts = training.frontier.times_us, Counter(decision.wanted.values())
    parts = [f"point {point} ({seconds(times[point])}) on {n} pipelines" for point, n in counts.most_common(4)]
    slower = planned_slowdown(training, decision) - 1
    intent = f"; up to {percent(slower)} slower than T_min on purpose" if slower > 0 else ""
    if why := slowed(training, decision):
        intent += f", {why}"
    return JobEvent(Reason.PLAN_CHANGED, f"{', '.join(parts)}, from iteration {training.nodes.plan_since}{intent}.")
