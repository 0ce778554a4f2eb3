"""Kubernetes events about a PerseusJob: which changes of conditions deserve one, and what it says.

An event is posted once for each change of a condition's status or reason. Conditions whose change another event
describes better, and those that are only steps on the way, have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from perseus_operator.api.conditions import Condition, ConditionType, Reason
from perseus_operator.jobs.document import essence

WARNINGS: Final = frozenset(
    {
        Reason.SPEC_INVALID,
        Reason.ANNOTATION_INVALID,
        Reason.NAME_TAKEN,
        Reason.PODS_TAKEN,
        Reason.ENGINE_UNKNOWN,
        Reason.OVERLOADED,
        Reason.OBJECTIVE_MISSED,
        Reason.FOREIGN_POWER_LIMIT,
        Reason.FOREIGN_CLOCK,
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
        Reason.WAITING_FOR_SIGNALS,
        Reason.WAITING_FOR_PROFILE,
        Reason.RUNNING,
        Reason.NOT_SUSPENDED,
        Reason.NOT_FINISHED,
        Reason.NO_FOREIGN_CONTROL,
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
