"""Kubernetes events about a PerseusJob: which changes of conditions deserve one, and what it says.

An event is posted once for each change of a condition's status or reason. Conditions whose change another event
describes better, and those that are only steps on the way, have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from perseus_operator.api.conditions import Condition, ConditionType, Reason
from perseus_operator.formatting import joules, percent, seconds
from perseus_operator.planning.iterations import Measured
from perseus_operator.planning.planner import Decision
from perseus_operator.planning.state import JobState
from perseus_operator.reporting.recommendation import slowed
from perseus_operator.reporting.status import essence, planned_slowdown
from perseus_operator.reporting.unmeasured import why_unmeasured

WARNINGS: Final = frozenset(
    {
        Reason.SPEC_INVALID,
        Reason.ANNOTATION_INVALID,
        Reason.CONFIG_MAP_NOT_FOUND,
        Reason.PROFILE_NOT_FOUND,
        Reason.KEY_NOT_FOUND,
        Reason.PROFILE_INVALID,
        Reason.PROFILE_MISMATCH,
        Reason.PROFILE_UNREADABLE,
        Reason.PROFILING_FAILED,
        Reason.PROFILING_NEEDS_ENFORCE,
        Reason.SCHEDULE_INVALID,
        Reason.SCHEDULE_UNREADABLE,
        Reason.SOLVE_FAILED,
        Reason.SOLVE_TIMEOUT,
        Reason.NO_AGENT,
        Reason.AGENT_UNAVAILABLE,
        Reason.AGENT_REFUSED,
        Reason.GPU_NOT_CONTROLLABLE,
        Reason.FENCED,
        Reason.RANKS_MISMATCH,
        Reason.OBJECTIVE_INFEASIBLE,
        Reason.DEADLINE_OUT_OF_REACH,
        Reason.STRAGGLER_DETECTED,
        Reason.STRAGGLER_DECLARED,
        Reason.BOUND_EXCEEDED,
        Reason.CANARY_FAILED,
        Reason.MODEL_DOES_NOT_EXPLAIN,
        Reason.CALIBRATION_INVALID,
        Reason.CALIBRATION_FAILED,
    }
)
"""Reasons whose event is a Warning."""

_UNEVENTFUL: Final = frozenset(
    {
        Reason.ACCEPTED,
        Reason.APPLYING,
        Reason.PLAN_IN_FORCE,  # PlanChanged says more
        Reason.STRAGGLERS_IGNORED,
        Reason.NO_BOUND,
        Reason.WAITING_FOR_FRONTIER,
        Reason.RUNNING,
        Reason.NOT_SUSPENDED,
        Reason.NOT_FINISHED,
    }
)
"""Reasons whose conditions change without an event."""


@dataclass(frozen=True)
class JobEvent:
    """A Kubernetes event about a PerseusJob."""

    reason: Reason
    message: str

    @property
    def kind(self) -> str:
        """Normal or Warning."""
        return "Warning" if self.reason in WARNINGS else "Normal"


def condition_events(stored: Mapping[str, Any], conditions: Iterable[Condition]) -> list[JobEvent]:
    """List the events of conditions whose status or reason differs from the stored one.

    ``Ready`` repeats other conditions and has no events. A condition whose status is unknown has none yet.

    Args:
        stored: the status as it is stored.
        conditions: that hold now.
    """
    previous = essence(stored)["conditions"]
    events = []
    for condition in conditions:
        before = previous.get(condition.type.value, ("", ""))
        unchanged = before == (str(condition.status), condition.reason.value)
        if unchanged or condition.type is ConditionType.READY or condition.status is None:
            continue
        if condition.reason is Reason.NO_STRAGGLER:
            if before[0] == "True":
                events.append(JobEvent(Reason.STRAGGLER_RECOVERED, condition.message))
        elif condition.reason is Reason.BOUND_KEPT:
            if before[0] == "False":
                events.append(JobEvent(Reason.PLAN_RETRIED, condition.message))
        elif condition.reason not in _UNEVENTFUL:
            events.append(JobEvent(condition.reason, condition.message))
    return events


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


def discarded_event(stored: Mapping[str, Any], wanted: Mapping[str, Any], state: JobState) -> list[JobEvent]:
    """Build the event that a baseline does not count any more; none: it counts, or there was none.

    Args:
        stored: the status as it is stored.
        wanted: the status that replaces it.
        state: of the job.
    """
    spec = state.spec
    if spec is None or state.baseline is not None or "baseline" not in stored:
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


def plan_event(state: JobState, decision: Decision) -> JobEvent:
    """Build the event that other plans are in force: which ones, and from which iteration on."""
    assert state.frontier is not None
    times, counts = state.frontier.times_us, Counter(decision.wanted.values())
    parts = [f"point {point} ({seconds(times[point])}) on {n} pipelines" for point, n in counts.most_common(4)]
    slower = planned_slowdown(state, decision) - 1
    intent = f"; up to {percent(slower)} slower than T_min on purpose" if slower > 0 else ""
    if why := slowed(state, decision):
        intent += f", {why}"
    return JobEvent(Reason.PLAN_CHANGED, f"{', '.join(parts)}, from iteration {state.plan_since}{intent}.")
