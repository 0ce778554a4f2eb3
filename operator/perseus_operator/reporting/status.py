"""What is said about a job: conditions and figures, from what is known and what was planned. Pure.

Called by ``JobRunner`` after every plan; what changed is written, and a change of a condition's reason is an event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perseus_operator.api.conditions import Condition, ConditionType, Reason, merge_conditions
from perseus_operator.api.job import JobSpec, Mode, StragglerMode
from perseus_operator.api.schema import dump
from perseus_operator.api.status import (
    CalibrationStatus,
    Figures,
    FrontierStatus,
    PlanStatus,
    Savings,
    StatusFigures,
    StragglerStatus,
)
from perseus_operator.formatting import joules, percent, seconds, small_percent, stamp
from perseus_operator.planning.bound_guard import Hold, guard_to_status
from perseus_operator.planning.calibration_progress import CalibrationQuality
from perseus_operator.planning.iterations import Measured
from perseus_operator.planning.objective import bound_us, predict
from perseus_operator.planning.planner import Decision, common_point, fastest_iteration_us
from perseus_operator.planning.readiness import first_node_fault
from perseus_operator.planning.state import JobState
from perseus_operator.planning.workloads import absence
from perseus_operator.reporting import recommendation
from perseus_operator.reporting.straggler_cause import cause
from perseus_operator.reporting.straggler_cause import events as events_of

_SHOWN_STRAGGLERS = 32

WARNINGS = frozenset(
    {
        Reason.SPEC_INVALID,
        Reason.ANNOTATION_INVALID,
        Reason.CONFIG_MAP_NOT_FOUND,
        Reason.KEY_NOT_FOUND,
        Reason.PROFILE_INVALID,
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
        Reason.MODEL_DOES_NOT_EXPLAIN,
        Reason.CALIBRATION_INVALID,
        Reason.CALIBRATION_FAILED,
    }
)
"""Reasons whose event is a Warning."""


@dataclass(frozen=True)
class JobEvent:
    """A Kubernetes event about a PerseusJob."""

    reason: Reason
    message: str

    @property
    def kind(self) -> str:
        """Normal or Warning."""
        return "Warning" if self.reason in WARNINGS else "Normal"


def conditions(state: JobState, decision: Decision) -> list[Condition]:
    """One for every type, ``Ready`` last."""
    said = [_accepted(state)]
    spec = state.spec
    if spec is not None:
        applied = _plan_applied(state, decision, spec)
        said += [_profile(state, decision), _frontier(state), _agents(state), applied]
        said += [_straggler(state, decision, spec), _model(state), _bound(state, decision, spec)]
    return [*said, _ready(said, spec)]


def _accepted(state: JobState) -> Condition:
    fault = state.spec_fault or state.declaration_fault
    if fault is None:
        return Condition(ConditionType.ACCEPTED, True, Reason.ACCEPTED, "The manifest is understood.")
    kept = " What was accepted before stays in force." if state.spec is not None else ""
    return Condition(ConditionType.ACCEPTED, False, fault.reason, fault.message + kept)


def _profile(state: JobState, decision: Decision) -> Condition:
    if decision.profiling is not None:
        return Condition(ConditionType.PROFILE_READY, False, decision.profiling.reason, decision.profiling.message)
    if state.profile_fault is not None:
        kept = " The profile read before stays in use." if state.profile_digest is not None else ""
        message = state.profile_fault.message + kept
        return Condition(ConditionType.PROFILE_READY, False, state.profile_fault.reason, message)
    if state.profile_digest is None:
        return Condition(ConditionType.PROFILE_READY, None, Reason.PROFILE_UNREADABLE, "The profile is being read.")
    said = f"The profile is valid. {state.profiling.summary}".strip()
    return Condition(ConditionType.PROFILE_READY, True, Reason.PROFILE_READ, said)


def _frontier(state: JobState) -> Condition:
    kind = ConditionType.FRONTIER_READY
    if state.schedule_fault is not None and state.frontier is None:
        return Condition(kind, False, state.schedule_fault.reason, state.schedule_fault.message)
    if state.solving is not None:
        return Condition(kind, False, Reason.SOLVING, "The time-energy frontier is being computed.")
    if state.solve_fault is not None and state.frontier is None:
        return Condition(kind, False, state.solve_fault[1].reason, state.solve_fault[1].message)
    if state.frontier is None:
        return Condition(kind, None, Reason.SOLVING, "There is no profile to solve yet.")
    view = state.frontier
    figures = (
        f"{len(view.times_us)} points from T_min = {seconds(view.t_min_us)} to T* = {seconds(view.t_star_us)},"
        f" certified gap median {small_percent(view.median_gap_ppm / 1e6)},"
        f" at most {small_percent(view.maximum_gap_ppm / 1e6)}"
    )
    if view.restored:
        said = f"{figures}; read back from ConfigMap {state.ref.frontier_config_map}."
        return Condition(kind, True, Reason.RESTORED, said)
    return Condition(kind, True, Reason.SOLVED, f"{figures}; solved in {view.solve_ms / 1000:.3f} s.")


def _agents(state: JobState) -> Condition:
    kind = ConditionType.AGENTS_READY
    if state.fenced is not None:
        return Condition(kind, False, state.fenced.reason, state.fenced.message)
    nodes = [node for node in state.nodes.values() if node.pods]
    if not nodes:
        absent = absence(state)
        return Condition(kind, False, absent.reason, absent.message)
    fault = first_node_fault(state)
    if fault is not None:
        return Condition(kind, False, fault.reason, fault.message)
    pending = sorted(node.name for node in nodes if node.leased_pods is None)
    if pending:
        message = f"Waiting for the agent of {len(pending)} of {len(nodes)} nodes, first {pending[0]}."
        return Condition(kind, None, Reason.AGENT_UNAVAILABLE, message)
    locked = [f"{gpu} on {node.name}: {why}" for node in nodes for gpu, why in sorted(node.uncontrollable.items())]
    if locked:
        message = f"{len(locked)} GPUs cannot be driven, first {locked[0]}"
        return Condition(kind, False, Reason.GPU_NOT_CONTROLLABLE, message)
    return Condition(kind, True, Reason.LEASED, f"Leases are held on {len(nodes)} nodes.")


def _plan_applied(state: JobState, decision: Decision, spec: JobSpec) -> Condition:
    kind = ConditionType.PLAN_APPLIED
    if not decision.applied:
        waiting = decision.waiting
        if waiting is None:
            return Condition(kind, False, Reason.APPLYING, "The plans are being sent to the agents.")
        if waiting.reason is Reason.RECOMMEND_ONLY and state.frontier is not None:
            said = f"{waiting.message} {recommendation.recommendation(state, decision)}".strip()
            return Condition(kind, False, waiting.reason, said)
        stays = not decision.wanted and in_force(state) and waiting.reason is not Reason.SUSPENDED
        kept = " The plan in force before stays." if stays else ""
        return Condition(kind, False, waiting.reason, waiting.message + kept)
    assert state.frontier is not None
    point = common_point(decision.wanted, decision.slowdowns)
    message = f"Point {point} of {len(state.frontier.times_us)} for objective {spec.objective.type.value}."
    if decision.limiting_share is not None:
        return Condition(
            kind, True, Reason.LIMITED_BY_BUDGET, f"{message} {recommendation.limited(state, decision, point)}"
        )
    if decision.note:
        return Condition(kind, True, Reason.DEADLINE_OUT_OF_REACH, f"{message} {decision.note}.")
    return Condition(kind, True, Reason.PLAN_IN_FORCE, message)


def _straggler(state: JobState, decision: Decision, spec: JobSpec) -> Condition:
    kind = ConditionType.STRAGGLER_DETECTED
    if spec.straggler.mode is StragglerMode.OFF:
        return Condition(kind, False, Reason.STRAGGLERS_IGNORED, "spec.straggler.mode is Off.")
    if not decision.slowdowns:
        return Condition(kind, False, Reason.NO_STRAGGLER, "No pipeline is slower than the others.")
    pipeline, slowdown = max(decision.slowdowns.items(), key=lambda item: item[1])
    more = f", and {len(decision.slowdowns) - 1} more" if len(decision.slowdowns) > 1 else ""
    if pipeline in decision.declared:
        said = f"Pipeline {pipeline} is declared {percent(slowdown - 1)} slower than planned{more}."
        return Condition(kind, True, Reason.STRAGGLER_DECLARED, said)
    stage = _slowest_stage(state, pipeline)
    where = "" if stage is None else f", its stage {stage} first of all"
    said = f"Pipeline {pipeline} is {percent(slowdown - 1)} slower than planned{where}{more}."
    why = cause(state, pipeline).value.lower()
    evidence = _evidence(state, pipeline)
    return Condition(kind, True, Reason.STRAGGLER_DETECTED, f"{said} Cause: {why}. Evidence: {evidence}.")


def _evidence(state: JobState, pipeline: int) -> str:
    """What GPUs of the pipeline say about themselves."""
    told = events_of(state, pipeline)
    said = [f"{rank.gpu_uuid} on {node}: {kind.replace('_', ' ').lower()}" for rank, kind, node in told]
    return "; ".join(said[:4]) or "timing alone"


def _model(state: JobState) -> Condition:
    kind, progress = ConditionType.MODEL_EXPLAINS, state.calibration
    if progress.fault is not None:
        return Condition(kind, False, progress.fault.reason, progress.fault.message)
    quality = progress.quality
    if quality is None:
        said = f"{progress.recorded} iterations seen so far."
        return Condition(kind, None, Reason.CALIBRATING, f"The model is not calibrated yet; {said}")
    if not quality.explains:
        kept = "The calibration used before stays." if progress.digest_in_use else "Plans count computations alone."
        return Condition(kind, False, Reason.MODEL_DOES_NOT_EXPLAIN, f"{quality.reason}. {kept}")
    error = quality.heldout_error
    judged = "Iterations" if error is None else f"With a mean error of {_fine(error)}, iterations"
    return Condition(
        kind,
        True,
        Reason.MODEL_EXPLAINS,
        f"{judged} take as long as predicted; {_fine(quality.uncalibrated_error)} without calibration.",
    )


def _bound(state: JobState, decision: Decision, spec: JobSpec) -> Condition:
    kind, guard = ConditionType.BOUND_KEPT, decision.guard
    if decision.limiting_share is not None:
        said = f"PowerBudget {decision.limiting_share.budget} decides how fast the job runs: no bound on time is kept."
        return Condition(kind, True, Reason.NO_BOUND, said)
    if guard.hold is not Hold.NOTHING:
        at = "T_min" if guard.hold is Hold.FASTEST_PLAN else "default clocks"
        return Condition(
            kind,
            False,
            Reason.BOUND_EXCEEDED,
            f"Iterations took {seconds(guard.measured_us)} where {spec.objective.type.value} allows"
            f" {seconds(guard.bound_us)}: held at {at}, to be tried again after {guard.pause_s:.0f} s.",
        )
    bound = bound_us(spec.objective, fastest_iteration_us(state, guard))
    if bound is None:
        return Condition(kind, True, Reason.NO_BOUND, "No bound on iteration time is asked for, or known yet.")
    return Condition(kind, True, Reason.BOUND_KEPT, f"An iteration may take {seconds(bound)}.")


def _ready(said: Iterable[Condition], spec: JobSpec | None) -> Condition:
    """The first thing that is not as it should be, in the order in which things depend on each other."""
    needed = {
        ConditionType.ACCEPTED,
        ConditionType.PROFILE_READY,
        ConditionType.FRONTIER_READY,
        ConditionType.AGENTS_READY,
        ConditionType.PLAN_APPLIED,
    }
    if spec is not None and spec.mode is Mode.RECOMMEND:
        needed -= {ConditionType.AGENTS_READY, ConditionType.PLAN_APPLIED}
    for condition in said:
        if condition.type in needed and condition.status is not True:
            return Condition(ConditionType.READY, False, condition.reason, condition.message)
    return Condition(ConditionType.READY, True, Reason.READY, "Everything asked for is in force.")


def figures(state: JobState, decision: Decision) -> StatusFigures:
    """The figures of the status."""
    view, spec = state.frontier, state.spec
    if view is None or spec is None:
        return StatusFigures(baseline=_figures(state.baseline), calibration=_calibration(state.calibration.quality))
    measured = current(state, decision)
    predicted, following = None, None
    if decision.applied:
        time_us, energy_mj = predict(view, decision.wanted, decision.slowdowns, spec.pipeline.tensor_parallel)
        predicted = Figures(iteration_time_microseconds=time_us, energy_millijoules=energy_mj)
        point = common_point(decision.wanted, decision.slowdowns)
        following = PlanStatus(
            point=point,
            from_iteration=state.plan_since,
            planned_slowdown=percent(planned_slowdown(state, decision) - 1),
            clock_changes=view.clock_changes[point] if view.clock_changes else None,
        )
    slowest = sorted(decision.slowdowns.items(), key=lambda item: -item[1])[:_SHOWN_STRAGGLERS]
    return StatusFigures(
        frontier=FrontierStatus(
            config_map_name=state.ref.frontier_config_map,
            digest=view.digest,
            points=len(view.times_us),
            minimum_time_microseconds=view.t_min_us,
            minimum_energy_time_microseconds=view.least_energy_us,
            slowest_time_microseconds=view.t_star_us,
            median_gap_parts_per_million=view.median_gap_ppm,
            maximum_gap_parts_per_million=view.maximum_gap_ppm,
            solve_milliseconds=view.solve_ms,
        ),
        plan=following,
        predicted=predicted,
        measured=_figures(measured),
        calibration=_calibration(state.calibration.quality),
        baseline=_figures(state.baseline),
        advised=recommendation.advised(state, decision),
        power_budget=recommendation.share_status(state.share),
        guard=guard_to_status(decision.guard),
        savings=savings(state.baseline, measured),
        stragglers=tuple(
            StragglerStatus(
                data_parallel_rank=pipeline,
                slowdown=percent(slowdown - 1),
                stage=_slowest_stage(state, pipeline),
                source="Declared" if pipeline in decision.declared else "Detected",
                cause=cause(state, pipeline).value,
                point=decision.wanted.get(pipeline, 0),
            )
            for pipeline, slowdown in sorted(slowest)
        ),
    )


def current(state: JobState, decision: Decision) -> Measured | None:
    """What iterations under the plan in force take; None: not measured yet."""
    if not decision.applied or state.history is None:
        return None
    return state.history.measured(decision.wanted, since=state.plan_since)


def curve(state: JobState) -> list[tuple[int, int]]:
    """Time (µs) and energy (mJ) of one iteration of the whole job at each point of its frontier."""
    if state.frontier is None or state.spec is None:
        return []
    copies = state.spec.pipeline.data_parallel * state.spec.pipeline.tensor_parallel
    view = state.frontier
    return [(time_us, copies * energy_mj) for time_us, energy_mj in zip(view.times_us, view.energies_mj, strict=True)]


def in_force(state: JobState) -> bool:
    """Whether some agent follows a plan of ours, wanted now or earlier."""
    return any(node.driven for node in state.nodes.values())


def planned_slowdown(state: JobState, decision: Decision) -> float:
    """By how much pipelines are slowed on purpose: the largest ratio of a plan's time to T_min; while a profile is
    being measured at most that of the clocks.
    """
    sweep = state.profiling.sweep
    if decision.profiling is not None and decision.wanted and sweep is not None:
        return sweep.clocks_mhz[0] / sweep.clocks_mhz[sweep.point]
    if not decision.applied or state.frontier is None:
        return 1.0
    return max(state.frontier.times_us[point] for point in decision.wanted.values()) / state.frontier.t_min_us


def savings(baseline: Measured | None, measured: Measured | None) -> Savings | None:
    """Measured against measured, or nothing."""
    if baseline is None or measured is None or not baseline.energy_mj or measured.energy_mj is None:
        return None
    return Savings(
        energy=percent(1 - measured.energy_mj / baseline.energy_mj),
        slowdown=percent(measured.time_us / baseline.time_us - 1),
    )


def _fine(share: float) -> str:
    """As ``percent``, for small errors."""
    return f"{min(100 * share, 999.0):.3f}%"


def _slowest_stage(state: JobState, pipeline: int) -> int | None:
    slowdowns = state.detector.stages.get(pipeline)
    return max(slowdowns, key=slowdowns.__getitem__) if slowdowns else None


def _calibration(quality: CalibrationQuality | None) -> CalibrationStatus | None:
    if quality is None:
        return None
    return CalibrationStatus(
        quality="Explains" if quality.explains else "DoesNotExplain",
        held_out_error=None if quality.heldout_error is None else _fine(quality.heldout_error),
        uncalibrated_error=_fine(quality.uncalibrated_error),
        allowance=_fine(quality.allowance),
        iterations=quality.iterations,
    )


def _figures(measured: Measured | None) -> Figures | None:
    if measured is None:
        return None
    return Figures(
        iteration_time_microseconds=measured.time_us,
        energy_millijoules=measured.energy_mj,
        iterations=measured.iterations,
    )


def document(
    said: Iterable[Condition], figures: StatusFigures, written: Mapping[str, Any], *, generation: int, wall_s: float
) -> dict[str, Any]:
    """The whole status as it should be stored."""
    old = written.get("conditions", ())
    return {
        "observedGeneration": generation,
        "conditions": merge_conditions(old, said, generation=generation, now_rfc3339=stamp(wall_s)),
        **dump(figures),
    }


def essence(written: Mapping[str, Any]) -> dict[str, Any]:
    """What of a status must be written at once. Measured figures and the wording of messages may wait."""
    return {
        **{
            key: value
            for key, value in written.items()
            if key not in {"measured", "savings", "predicted", "conditions"}
        },
        "conditions": {c["type"]: (c["status"], c["reason"]) for c in written.get("conditions", ())},
    }


def was_ready(written: Mapping[str, Any]) -> bool:
    """Whether a stored status says Ready."""
    return bool(essence(written)["conditions"].get(ConditionType.READY.value, ("", ""))[0] == "True")


def events(written: Mapping[str, Any], after: Iterable[Condition]) -> list[JobEvent]:
    """What has become so: a condition whose status or reason is not the stored one. ``Ready`` only repeats others."""
    was = essence(written)["conditions"]
    told = []
    for condition in after:
        before = was.get(condition.type.value, ("", ""))
        same = before == (str(condition.status), condition.reason.value)
        if same or condition.type is ConditionType.READY or condition.status is None:
            continue
        if condition.reason is Reason.NO_STRAGGLER:
            if before[0] == "True":
                told.append(JobEvent(Reason.STRAGGLER_RECOVERED, condition.message))
        elif condition.reason is Reason.BOUND_KEPT:
            if before[0] == "False":
                told.append(JobEvent(Reason.PLAN_RETRIED, condition.message))
        elif condition.reason not in _UNEVENTFUL:
            told.append(JobEvent(condition.reason, condition.message))
    return told


def baseline_event(baseline: Measured) -> JobEvent:
    """The baseline is known."""
    energy = "no energy counter" if baseline.energy_mj is None else joules(baseline.energy_mj)
    return JobEvent(
        Reason.BASELINE_MEASURED,
        f"At default clocks an iteration takes {seconds(baseline.time_us)} and {energy}"
        f" (median of {baseline.iterations}).",
    )


def plan_event(state: JobState, decision: Decision) -> JobEvent:
    """Which plans are in force now, and from when."""
    assert state.frontier is not None
    times, counts = state.frontier.times_us, Counter(decision.wanted.values())
    parts = [f"point {point} ({seconds(times[point])}) on {n} pipelines" for point, n in counts.most_common(4)]
    slower = planned_slowdown(state, decision) - 1
    intent = f"; up to {percent(slower)} slower than T_min on purpose" if slower > 0 else ""
    return JobEvent(Reason.PLAN_CHANGED, f"{', '.join(parts)}, from iteration {state.plan_since}{intent}.")


_UNEVENTFUL = frozenset(
    {
        Reason.ACCEPTED,
        Reason.APPLYING,
        Reason.PLAN_IN_FORCE,  # PlanChanged says more
        Reason.STRAGGLERS_IGNORED,
        Reason.NO_BOUND,
        Reason.WAITING_FOR_FRONTIER,
    }
)
