"""The conditions of a PerseusJob, one function for each type.

Every function turns the job's state and decision into a status, a reason and a message, without side effects.
``Ready`` summarises the others: it repeats the first one that is not as it should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from perseus_operator.api.conditions import Condition, ConditionType, Explanation, Reason
from perseus_operator.api.job import JobSpec, Mode, StragglerMode
from perseus_operator.formatting import counted, fine_percent, percent, seconds, small_percent
from perseus_operator.planning.bound_guard import TOLERANCE, Hold
from perseus_operator.planning.fixed_clock import gpus_at_clock
from perseus_operator.planning.observation import Basis
from perseus_operator.planning.planner import Decision, common_point
from perseus_operator.planning.readiness import first_node_fault, no_clocks, profile_mismatch
from perseus_operator.planning.state import JobState
from perseus_operator.planning.stragglers.declared import outside
from perseus_operator.planning.workloads import absence
from perseus_operator.reporting.recommendation import limited, recommendation, slowed
from perseus_operator.reporting.status import in_force
from perseus_operator.reporting.straggler_cause import cause_of, gpu_events, slowest_stage
from perseus_proto import keys
from perseus_proto.units import ratio_from_ppm, s_from_ms

_HELD_AT: Final = {
    Hold.SEGMENTS: "a plan with one clock for each part of a stage",
    Hold.STAGES: "a plan with one clock for each stage",
    Hold.FASTEST_PLAN: "the fastest plan",
    Hold.DEFAULT_CLOCKS: "default clocks",
}


def conditions_of(state: JobState, decision: Decision) -> list[Condition]:
    """Report every aspect of a job.

    Args:
        state: what is known about the job.
        decision: what the planner returned for this state.

    Returns:
        One condition for each type, ``Ready`` last. A job whose spec was never valid has ``Accepted`` and ``Ready``
        alone; one without a plan has none that is about plans and iterations but ``PlanApplied``.
    """
    conditions = [_accepted(state)]
    spec = state.spec
    if spec is not None and not spec.is_planned:
        conditions += [_agents_ready(state), _clock_applied(state, decision, spec), *_life(state, spec)]
    elif spec is not None:
        conditions += [
            _profile_ready(state, decision),
            _frontier_ready(state, decision),
            _agents_ready(state),
            _plan_applied(state, decision, spec),
            _straggler_detected(state, decision, spec),
            _model_explains(state),
            _bound_kept(decision, spec),
            *_life(state, spec),
        ]
    return [*conditions, _ready(conditions, spec, slowed(state, decision))]


def _accepted(state: JobState) -> Condition:
    fault = state.spec_fault or state.declaration_fault
    if fault is None and (absent := _outside(state)):
        return Condition(ConditionType.ACCEPTED, False, absent.reason, absent.message)
    if fault is None:
        return Condition(ConditionType.ACCEPTED, True, Reason.ACCEPTED, "The manifest is valid.")
    previous = " The previously accepted spec stays in force." if state.spec is not None else ""
    return Condition(ConditionType.ACCEPTED, False, fault.reason, fault.message + previous)


def _outside(state: JobState) -> Explanation | None:
    """Say which declared straggler is a pipeline that the job does not have; None: none is, or its shape is unknown."""
    if state.spec is None or not state.spec.is_planned or not state.spec.shape_known:
        return None
    rule = outside(state.declared_stragglers, state.spec.pipeline.data_parallel)
    if not rule:
        return None
    message = f"annotation {keys.ANNOTATION_STRAGGLER}: {rule}. That entry does not count."
    return Explanation(Reason.ANNOTATION_INVALID, message)


def _profile_ready(state: JobState, decision: Decision) -> Condition:
    kind = ConditionType.PROFILE_READY
    if decision.profiling is not None:
        return Condition(kind, False, decision.profiling.reason, decision.profiling.message)
    if state.inputs.profile_fault is not None:
        previous = " The previous profile stays in use." if state.inputs.profile_digest is not None else ""
        return Condition(kind, False, state.inputs.profile_fault.reason, state.inputs.profile_fault.message + previous)
    if state.spec is not None and not state.spec.shape_known and decision.waiting is not None:
        return Condition(kind, None, decision.waiting.reason, decision.waiting.message)
    if instead := profile_mismatch(state) or _estimated(state, decision):
        return Condition(kind, False, instead.reason, instead.message)
    if state.inputs.profile_digest is None:
        return Condition(kind, None, Reason.PROFILE_UNREADABLE, "The profile is being read.")
    message = f"The profile is valid. {state.profiling.summary}".strip()
    return Condition(kind, True, Reason.PROFILE_READ, message)


def _estimated(state: JobState, decision: Decision) -> Explanation | None:
    """Say what predictions rest on where it is no profile of the job; None: there is one."""
    if state.observation.basis is Basis.PROFILE:
        return None
    costs = f" Measuring one sets clocks. {decision.sweep_cost}" if decision.sweep_cost else ""
    message = f"The job has no profile: predictions rest on {state.observation.basis_source}.{costs}"
    return Explanation(Reason.ESTIMATED, message)


def _frontier_ready(state: JobState, decision: Decision) -> Condition:
    kind = ConditionType.FRONTIER_READY
    if state.inputs.schedule_fault is not None and state.frontier is None:
        return Condition(kind, False, state.inputs.schedule_fault.reason, state.inputs.schedule_fault.message)
    if state.solving is not None and not state.refining:
        return Condition(kind, False, Reason.SOLVING, "The time-energy frontier is being computed.")
    if state.solve_fault is not None and state.frontier is None:
        return Condition(kind, False, state.solve_fault[1].reason, state.solve_fault[1].message)
    if state.frontier is None:
        status = None if state.inputs.profile_fault is None else False
        return Condition(kind, status, Reason.WAITING_FOR_PROFILE, "There is no usable profile yet; see ProfileReady.")
    view = state.frontier
    figures = (
        f"{len(view.times_us)} points from T_min = {seconds(view.t_min_us)} to T* = {seconds(view.t_star_us)},"
        f" certified gap over all deadlines {small_percent(ratio_from_ppm(view.mean_gap_ppm))} on average,"
        f" {small_percent(ratio_from_ppm(view.maximum_gap_ppm))} at most"
    )
    rehearsed = "" if decision.hardware is None else f", rehearsed for {decision.hardware.model}"
    figures += rehearsed if view.grains else ""
    again = f" It could not be solved again: {state.solve_fault[1].message}" if state.solve_fault else ""
    if state.refining:
        again = " It is being computed again with what was measured since; until then it stays in use."
    if view.restored:
        message = f"{figures}; restored from PerseusFrontier {state.ref.name}.{again}"
        return Condition(kind, True, Reason.RESTORED, message)
    return Condition(kind, True, Reason.SOLVED, f"{figures}; solved in {s_from_ms(view.solve_ms):.3f} s.{again}")


def _agents_ready(state: JobState) -> Condition:
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
        message = f"{len(pending)} of {len(nodes)} nodes have not granted a lease yet; the first is {pending[0]}."
        return Condition(kind, None, Reason.AGENT_UNAVAILABLE, message)
    locked = [f"{gpu} on {node.name}: {why}" for node in nodes for gpu, why in sorted(node.uncontrollable.items())]
    if locked:
        message = f"The clocks of {len(locked)} GPUs cannot be set; the first is {locked[0]}"
        return Condition(kind, False, Reason.GPU_NOT_CONTROLLABLE, message)
    return Condition(kind, True, Reason.LEASED, f"Leases are held on {counted(len(nodes), 'node')}.")


_NOTHING_STAYS: Final = (Reason.SUSPENDED, Reason.CANARY, Reason.CANARY_FAILED, Reason.PROFILE_MISMATCH)
"""Reasons for which clocks that were set before are given back."""


def _plan_applied(state: JobState, decision: Decision, spec: JobSpec) -> Condition:
    kind = ConditionType.PLAN_APPLIED
    if not decision.applied:
        waiting = decision.waiting
        if spec.mode is Mode.OBSERVE:
            waiting = _observes(waiting)
        if waiting is None:
            return Condition(kind, False, Reason.APPLYING, "The plans are being sent to the agents.")
        if not spec.mode.sets_clocks and state.frontier is not None:
            message = f"{waiting.message} {recommendation(state, decision)}".strip()
            return Condition(kind, False, waiting.reason, message)
        stays = not decision.wanted and in_force(state) and waiting.reason not in _NOTHING_STAYS
        previous = " The previous plan stays in force." if stays else ""
        return Condition(kind, False, waiting.reason, waiting.message + previous)
    assert state.frontier is not None
    point = common_point(decision.wanted, decision.slowdowns)
    message = f"Point {point} of {len(state.frontier.times_us)} for objective {spec.objective.type.value}."
    slower = [dp for dp, own in decision.wanted.items() if own > point and dp in decision.factors]
    if slower:
        apart = max(decision.factors.values()) / min(decision.factors.values()) - 1
        message += f" {counted(len(slower), 'pipeline')} of {len(decision.wanted)}, up to {percent(apart)} faster than"
        message += " the slowest, run slower plans and end with it."
    if decision.limiting_share is not None:
        return Condition(kind, True, Reason.LIMITED_BY_BUDGET, f"{message} {limited(state, decision, point)}")
    if decision.note:
        return Condition(kind, True, Reason.DEADLINE_OUT_OF_REACH, f"{message} {decision.note}.")
    return Condition(kind, True, Reason.PLAN_IN_FORCE, message)


def _observes(waiting: Explanation | None) -> Explanation:
    """Say that no clock is written, before anything that is waited for."""
    observes = no_clocks(Mode.OBSERVE)
    more = "" if waiting is None or waiting == observes else f" {waiting.message}"
    return Explanation(observes.reason, observes.message + more)


def _clock_applied(state: JobState, decision: Decision, spec: JobSpec) -> Condition:
    kind, waiting = ConditionType.PLAN_APPLIED, decision.waiting
    if waiting is not None:
        return Condition(kind, False, waiting.reason, waiting.message)
    mhz = spec.objective.clock_megahertz or 0
    locked, _ = gpus_at_clock(state, mhz)
    message = f"{counted(locked, 'GPU')} locked at {mhz} MHz. Iterations are not measured: no slowdown is promised."
    return Condition(kind, True, Reason.CLOCK_IN_FORCE, message)


def _straggler_detected(state: JobState, decision: Decision, spec: JobSpec) -> Condition:
    kind = ConditionType.STRAGGLER_DETECTED
    if spec.straggler.mode is StragglerMode.IGNORE:
        message = "spec.straggler.mode is Ignore: stragglers are ignored."
        return Condition(kind, False, Reason.STRAGGLERS_IGNORED, message)
    automatic = spec.straggler.mode is StragglerMode.AUTOMATIC and spec.pipeline.data_parallel > 1
    if automatic and not decision.slowdowns and not state.ranks_comparable:
        message = (
            "Steps include the wait for other ranks, so they last equally long on all and a slow rank does not show:"
            " pass the model to perseus_client.steps."
        )
        return Condition(kind, None, Reason.WAITS_NOT_MARKED, message)
    if not decision.slowdowns:
        least = state.detector.least_slowdown
        vary = ""
        if least is not None and least > 1 + 2 * spec.straggler.slowdown_ratio:
            vary = f" Iterations vary: less than {percent(least - 1)} cannot be distinguished from load."
        return Condition(kind, False, Reason.NO_STRAGGLER, f"No pipeline is slower than the others.{vary}")
    dp, slowdown = max(decision.slowdowns.items(), key=lambda item: item[1])
    more = f", and {len(decision.slowdowns) - 1} more" if len(decision.slowdowns) > 1 else ""
    if dp in decision.declared:
        message = f"Pipeline {dp} is declared {percent(slowdown - 1)} slower than planned{more}."
        return Condition(kind, True, Reason.STRAGGLER_DECLARED, message)
    stage = slowest_stage(state, dp)
    where = "" if stage is None else f" (its slowest stage is {stage})"
    cause, evidence = cause_of(state, dp).value.lower(), _evidence(state, dp)
    message = (
        f"Pipeline {dp} is {percent(slowdown - 1)} slower than planned{where}{more}."
        f" Cause: {cause}. Evidence: {evidence}."
    )
    return Condition(kind, True, Reason.STRAGGLER_DETECTED, message)


def _evidence(state: JobState, dp: int) -> str:
    """Return the events that the pipeline's GPUs report, four at most."""
    events = [
        f"{rank.gpu_uuid} on {node}: {kind.replace('_', ' ').lower()}" for rank, kind, node in gpu_events(state, dp)
    ]
    return "; ".join(events[:4]) or "timing alone"


def _model_explains(state: JobState) -> Condition:
    kind, progress = ConditionType.MODEL_EXPLAINS, state.calibration
    if progress.fault is not None:
        return Condition(kind, False, progress.fault.reason, progress.fault.message)
    quality = progress.quality
    if quality is None:
        message = f"The model is not calibrated yet: {progress.recorded} iterations are recorded."
        return Condition(kind, None, Reason.CALIBRATING, message)
    if not quality.explains:
        in_use = (
            "The previous calibration stays in use."
            if progress.digest_in_use
            else "Plans are made without calibration."
        )
        return Condition(kind, False, Reason.MODEL_DOES_NOT_EXPLAIN, f"{quality.reason}. {in_use}")
    uncalibrated = fine_percent(quality.uncalibrated_error)
    if quality.heldout_error is None:
        message = f"Iterations take as long as predicted. The mean error without calibration is {uncalibrated}."
    else:
        error = fine_percent(quality.heldout_error)
        message = f"The mean error of predicted iteration times is {error}, without calibration {uncalibrated}."
    return Condition(kind, True, Reason.MODEL_EXPLAINS, message)


def _bound_kept(decision: Decision, spec: JobSpec) -> Condition:
    kind, guard, share = ConditionType.BOUND_KEPT, decision.guard, decision.limiting_share
    budget = f"the plan that PowerBudget {share.budget} allows" if share is not None else ""
    if guard.hold is not Hold.NOTHING:
        cause = f" Cause: {guard.finding.evidence}." if guard.finding else ""
        stays = share is not None and guard.hold >= Hold.FASTEST_PLAN
        message = (
            f"Iterations took {seconds(guard.measured_us)}; {budget or spec.objective.type.value} allows"
            f" {seconds(guard.bound_us)}. The job runs at {budget if stays else _HELD_AT[guard.hold]}; the plan is"
            f" tried again after {guard.pause_s:.0f} s.{cause}"
        )
        return Condition(kind, False, Reason.BOUND_EXCEEDED, message)
    bound = decision.bound_us
    if bound is None:
        message = "The objective sets no bound on iteration time, or the bound is not known yet."
        return Condition(kind, True, Reason.NO_BOUND, message)
    why = f": {budget} is predicted to take no longer" if budget else ""
    excess, vary = decision.least_excess, ""
    if excess is not None and excess > 2 * TOLERANCE:
        vary = f" Iterations vary: less than {percent(excess)} above it cannot be distinguished from load."
    return Condition(kind, True, Reason.BOUND_KEPT, f"An iteration may take {seconds(bound)}{why}.{vary}")


def _life(state: JobState, spec: JobSpec) -> Iterator[Condition]:
    """Report whether the job runs, is suspended, or has finished."""
    nodes = [node for node in state.nodes.values() if node.pods]
    absent = absence(state)
    if nodes:
        pods = counted(sum(len(node.pods) for node in nodes), "pod")
        yield Condition(ConditionType.ACTIVE, True, Reason.RUNNING, f"{pods} on {counted(len(nodes), 'node')}.")
    else:
        yield Condition(ConditionType.ACTIVE, False, absent.reason, absent.message)
    if spec.suspend:
        yield Condition(ConditionType.SUSPENDED, True, Reason.SUSPENDED, "spec.suspend is true.")
    else:
        yield Condition(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED, "spec.suspend is false.")
    if state.end.finished_at_s is not None:
        ttl_s = spec.ttl_seconds_after_finished
        then = f" The PerseusJob will be deleted {ttl_s} s after that." if ttl_s is not None else ""
        message = f"All pods of the job have succeeded.{then}"
        yield Condition(ConditionType.FINISHED, True, Reason.FINISHED, message)
    else:
        message = "Pods of the job run, or are to come."
        yield Condition(ConditionType.FINISHED, False, Reason.NOT_FINISHED, message)


def _ready(conditions: Iterable[Condition], spec: JobSpec | None, slowed_by_budget: str) -> Condition:
    """Return the first condition that is not as it should be, in the order in which they depend on each other."""
    needed = {
        ConditionType.ACCEPTED,
        ConditionType.PROFILE_READY,
        ConditionType.FRONTIER_READY,
        ConditionType.AGENTS_READY,
        ConditionType.PLAN_APPLIED,
    }
    found = {condition.type: condition for condition in conditions}
    finished = found.get(ConditionType.FINISHED)
    if finished is not None and finished.status:  # as tools expect of what has come to its end
        return Condition(ConditionType.READY, True, finished.reason, finished.message)
    recommends = spec is not None and not spec.mode.sets_clocks
    if recommends:
        needed -= {ConditionType.AGENTS_READY, ConditionType.PLAN_APPLIED}
    if spec is not None and spec.mode is Mode.OBSERVE:  # a prediction needs no profile
        needed -= {ConditionType.PROFILE_READY}
    for condition in conditions:
        if condition.type in needed and condition.status is not True:
            return Condition(ConditionType.READY, False, condition.reason, condition.message)
    in_place = f"The plan is in force, {slowed_by_budget}." if slowed_by_budget else "The plan is in force."
    message = "The frontier and the recommended plan are known." if recommends else in_place
    if spec is not None and spec.mode is Mode.OBSERVE:
        message = "No clock is written. What the plan would save is predicted."
    if spec is not None and not spec.is_planned:
        message = "No clock is to be set." if recommends else "All GPUs run at the clock that was asked for."
    return Condition(ConditionType.READY, True, Reason.READY, message)
