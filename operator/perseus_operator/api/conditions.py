"""Condition types, the closed list of reasons, and how new conditions are merged into the stored ones.

Every reason of a condition or an event is a member of ``Reason``. ``Ready`` summarises; there is no phase. A condition
whose status does not change keeps its transition time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class ConditionType(StrEnum):
    """Type of a condition of a PerseusJob or a ServingPool."""

    ACCEPTED = "Accepted"
    """The manifest is valid. While an edit is refused, the job runs on with the previously accepted spec."""
    PROFILE_READY = "ProfileReady"
    FRONTIER_READY = "FrontierReady"
    AGENTS_READY = "AgentsReady"
    """Every pod of the job runs on a node whose agent has granted a lease, and the clocks of every GPU can be set."""
    PLAN_APPLIED = "PlanApplied"
    STRAGGLER_DETECTED = "StragglerDetected"
    MODEL_EXPLAINS = "ModelExplains"
    """The model of the pipeline, calibrated on measured iterations, predicts iterations that it was not fitted to."""
    BOUND_KEPT = "BoundKept"
    """Measured iterations keep the time that the objective allows."""
    ACTIVE = "Active"
    """Pods of the job run. Alerts look at no other job."""
    SUSPENDED = "Suspended"
    FINISHED = "Finished"
    SIGNALS_READY = "SignalsReady"
    """Every pod of a pool has an engine that says what it does."""
    CLOCKS_APPLIED = "ClocksApplied"
    """The agents hold what the pool's mode asks for: the table that clocks follow."""
    OBJECTIVE_KEPT = "ObjectiveKept"
    """Measured requests keep the limits of the pool."""
    FOREIGN_CONTROL = "ForeignControl"
    """Another program sets clocks, power limits or power profiles of the GPUs: it is left alone."""
    READY = "Ready"


class Reason(StrEnum):
    """Reason of a condition or an event. Stable: alerts and scripts match on these."""

    # Accepted
    ACCEPTED = "Accepted"
    SPEC_INVALID = "SpecInvalid"
    ANNOTATION_INVALID = "AnnotationInvalid"
    NAME_TAKEN = "NameTaken"
    # ProfileReady
    PROFILE_READ = "ProfileRead"
    CONFIG_MAP_NOT_FOUND = "ConfigMapNotFound"
    PROFILE_NOT_FOUND = "ProfileNotFound"
    KEY_NOT_FOUND = "KeyNotFound"
    PROFILE_INVALID = "ProfileInvalid"
    PROFILE_MISMATCH = "ProfileMismatch"
    PROFILE_UNREADABLE = "ProfileUnreadable"
    PROFILING = "Profiling"
    PROFILING_FAILED = "ProfilingFailed"
    PROFILING_NEEDS_ENFORCE = "ProfilingNeedsEnforce"
    OBSERVING = "Observing"
    ESTIMATED = "Estimated"
    # FrontierReady
    SCHEDULE_INVALID = "ScheduleInvalid"
    SCHEDULE_UNREADABLE = "ScheduleUnreadable"
    SOLVED = "Solved"
    RESTORED = "Restored"
    WAITING_FOR_PROFILE = "WaitingForProfile"
    SOLVING = "Solving"
    SOLVE_FAILED = "SolveFailed"
    SOLVE_TIMEOUT = "SolveTimeout"
    # AgentsReady
    LEASED = "Leased"
    NO_PODS = "NoPods"
    PODS_TAKEN = "PodsTaken"
    SUSPENDED = "Suspended"
    NO_AGENT = "NoAgent"
    AGENT_UNAVAILABLE = "AgentUnavailable"
    AGENT_REFUSED = "AgentRefused"
    GPU_NOT_CONTROLLABLE = "GpuNotControllable"
    FENCED = "Fenced"
    # PlanApplied
    PLAN_IN_FORCE = "PlanInForce"
    CLOCK_IN_FORCE = "ClockInForce"
    LIMITED_BY_BUDGET = "LimitedByBudget"
    DEADLINE_OUT_OF_REACH = "DeadlineOutOfReach"
    RECOMMEND_ONLY = "RecommendOnly"
    OBSERVE_ONLY = "ObserveOnly"
    WAITING_FOR_FRONTIER = "WaitingForFrontier"
    WAITING_FOR_AGENTS = "WaitingForAgents"
    WAITING_FOR_RANKS = "WaitingForRanks"
    RANKS_MISMATCH = "RanksMismatch"
    MEASURING_BASELINE = "MeasuringBaseline"
    CANARY = "Canary"
    CANARY_FAILED = "CanaryFailed"
    APPLYING = "Applying"
    OBJECTIVE_INFEASIBLE = "ObjectiveInfeasible"
    # StragglerDetected
    NO_STRAGGLER = "NoStraggler"
    STRAGGLER_DETECTED = "StragglerDetected"
    STRAGGLER_DECLARED = "StragglerDeclared"
    STRAGGLERS_IGNORED = "StragglersIgnored"
    WAITS_NOT_MARKED = "WaitsNotMarked"
    # ModelExplains
    MODEL_EXPLAINS = "ModelExplains"
    MODEL_DOES_NOT_EXPLAIN = "ModelDoesNotExplain"
    CALIBRATING = "Calibrating"
    CALIBRATION_INVALID = "CalibrationInvalid"
    CALIBRATION_FAILED = "CalibrationFailed"
    # BoundKept
    BOUND_KEPT = "BoundKept"
    BOUND_EXCEEDED = "BoundExceeded"
    NO_BOUND = "NoBound"
    # Active, Suspended and Finished; also Suspended of AgentsReady
    RUNNING = "Running"
    NOT_SUSPENDED = "NotSuspended"
    FINISHED = "Finished"
    NOT_FINISHED = "NotFinished"
    # SignalsReady
    SIGNALS_SEEN = "SignalsSeen"
    NO_SIGNAL = "NoSignal"
    ENGINE_UNKNOWN = "EngineUnknown"
    ENGINES_DIFFER = "EnginesDiffer"
    # ProfileReady of a pool; also ModelDoesNotExplain, Profiling and ProfilingNeedsEnforce
    PROFILE_FITTED = "ProfileFitted"
    CONFIRMING_PROFILE = "ConfirmingProfile"
    WAITING_FOR_SIGNALS = "WaitingForSignals"
    # ClocksApplied; also Applying, Canary, ObserveOnly and RecommendOnly
    TABLE_IN_FORCE = "TableInForce"
    NO_LIMITS = "NoLimits"
    AUTOSCALER_NEAR = "AutoscalerNear"
    # ObjectiveKept; also NoLimits
    OVERLOADED = "Overloaded"
    OBJECTIVE_KEPT = "ObjectiveKept"
    OBJECTIVE_MISSED = "ObjectiveMissed"
    NOT_MEASURED = "NotMeasured"
    # ForeignControl
    FOREIGN_POWER_LIMIT = "ForeignPowerLimit"
    FOREIGN_CLOCK = "ForeignClock"
    POWER_PROFILE_ENFORCED = "PowerProfileEnforced"
    NO_FOREIGN_CONTROL = "NoForeignControl"
    # Ready
    READY = "Ready"
    # Events only
    STRAGGLER_RECOVERED = "StragglerRecovered"
    PLAN_RETRIED = "PlanRetried"
    PLAN_CHANGED = "PlanChanged"
    BASELINE_MEASURED = "BaselineMeasured"
    BASELINE_DISCARDED = "BaselineDiscarded"
    CLOCKS_RELEASED = "ClocksReleased"


@dataclass(frozen=True)
class Explanation:
    """A reason and a sentence: why something failed, or what the operator waits for. It becomes a condition's reason
    and message.
    """

    reason: Reason
    message: str


@dataclass(frozen=True)
class Condition:
    """What is true now; ``status`` None means Unknown."""

    type: ConditionType
    status: bool | None
    reason: Reason
    message: str


class Statement(Protocol):
    """A condition, of whatever kind of object."""

    @property
    def type(self) -> StrEnum:
        """Type of the condition."""
        ...

    @property
    def status(self) -> bool | None:
        """Whether it holds; None: unknown."""
        ...

    @property
    def reason(self) -> StrEnum:
        """Why, in one CamelCase word."""
        ...

    @property
    def message(self) -> str:
        """Why, in one line."""
        ...


_MAX_MESSAGE = 1024


def merge_conditions(
    old: Sequence[Mapping[str, Any]], new: Iterable[Statement], *, generation: int, now_rfc3339: str
) -> list[dict[str, Any]]:
    """Merge new conditions into the stored ones.

    Args:
        old: the conditions as stored; types that ``new`` does not have are kept.
        new: the conditions that hold now.
        generation: of the spec that they describe.
        now_rfc3339: transition time of conditions whose status changes.

    Returns:
        The conditions to store.
    """
    before = {str(condition.get("type")): condition for condition in old}
    merged = {name: dict(condition) for name, condition in before.items()}
    for condition in new:
        status = "Unknown" if condition.status is None else str(condition.status)
        previous = before.get(condition.type.value, {})
        merged[condition.type.value] = {
            "type": condition.type.value,
            "status": status,
            "reason": condition.reason.value,
            "message": condition.message[:_MAX_MESSAGE],
            "observedGeneration": generation,
            "lastTransitionTime": previous["lastTransitionTime"] if previous.get("status") == status else now_rfc3339,
        }
    return list(merged.values())
