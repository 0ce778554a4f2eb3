"""The conditions of a training job, one function for each type.

Every function turns what is known and what was decided into a status, a reason and a message, without side effects.
Those that every PerseusJob has are in ``job_conditions``.
"""

from __future__ import annotations

from typing import Final

from perseus_core import keys
from perseus_core.units import ratio_from_ppm, s_from_ms
from perseus_operator.api.conditions import Condition, ConditionType, Explanation, Reason
from perseus_operator.api.job import JobSpec, Mode, StragglerMode
from perseus_operator.families.training.decide import TrainingDecision, common_point
from perseus_operator.families.training.features.bound.guard import TOLERANCE, Hold
from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.features.frontier.calibration_progress import CalibrationProgress
from perseus_operator.families.training.features.frontier.input_progress import InputProgress
from perseus_operator.families.training.features.frontier.readiness import profile_mismatch
from perseus_operator.families.training.features.frontier.solve_progress import SolveProgress
from perseus_operator.families.training.features.stragglers.cause import cause_of, gpu_events, slowest_stage
from perseus_operator.families.training.features.stragglers.declared import outside
from perseus_operator.families.training.status.recommendation import limited, recommendation, slowed
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.conditions import agents_ready, all_conditions
from perseus_operator.jobs.waiting import no_clocks
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.objects.formatting import counted, fine_percent, percent, seconds, small_percent

_HELD_AT: Final = {
    Hold.SEGMENTS: "a plan with one clock for each part of a stage",
    Hold.STAGES: "a plan with one clock for each stage",
    Hold.FASTEST_PLAN: "the fastest plan",
    Hold.DEFAULT_CLOCKS: "default clocks",
}


def conditions_of(training: Training, decision: TrainingDecision) -> list[Condition]:
    """Report every aspect of a training job.

    Args:
        training: what is known about the job.
        decision: what was decided for this training.

    Returns:
        One condition for each type, ``Ready`` last. A job whose spec was never valid has ``Accepted`` and ``Ready``
        alone.
    """
    spec, conditions = training.spec, []
    if spec is not None:
        conditions = [
            _profile_ready(training, decision),
            _frontier_ready(training.solve, training.inputs, decision, training.ref.name),
            agents_ready(training.job),
            _plan_applied(training, decision, spec),
            _straggler_detected(training, decision, spec),
            _model_explains(training.calibration),
            _bound_kept(decision, spec),
        ]
    return all_conditions(training.job, conditions, _fault(training), _summary(training, decision))


def _summary(training: Training, decision: TrainingDecision) -> str:
    """What ``Ready`` says if all is as it should be."""
    spec = training.spec
    if spec is not None and spec.mode is Mode.OBSERVE:
        return "No clock is written. What the plan would save is predicted."
    if spec is not None and not spec.mode.sets_clocks:
        return "The frontier and the recommended plan are known."
    by_budget = slowed(training, decision)
    if training.shape.misfit is not None:
        clock = "One clock for whole iterations is in force; PlanApplied says why."
        return f"{clock} The plan is {by_budget}." if by_budget else clock
    return f"The plan is in force, {by_budget}." if by_budget else "The plan is in force."


def _fault(training: Training) -> Explanation | None:
    """What is wrong with the annotation that declares stragglers; None: nothing."""
    fault = training.stragglers.fault
    if fault is None:
        return _outside(training)
    previous = " The previously accepted spec stays in force." if training.spec is not None else ""
    return Explanation(fault.reason, fault.message + previous)


def _outside(training: Training) -> Explanation | None:
    """Say which declared straggler is a pipeline that the job does not have; None: none is, or its shape is unknown."""
    if training.spec is None or not training.spec.shape_known:
        return None
    rule = outside(training.stragglers.declared, training.spec.pipeline.data_parallel)
    if not rule:
        return None
    message = f"annotation {keys.ANNOTATION_STRAGGLER}: {rule}; that entry does not count."
    return Explanation(Reason.ANNOTATION_INVALID, message)


def _profile_ready(training: Training, decision: TrainingDecision) -> Condition:
    kind = ConditionType.PROFILE_READY
    if decision.profiling is not None:
        return Condition(kind, False, decision.profiling.reason, decision.profiling.message)
    if training.inputs.profile_fault is not None:
        previous = " The previous profile stays in use." if training.inputs.profile_digest is not None else ""
        return Condition(
            kind, False, training.inputs.profile_fault.reason, training.inputs.profile_fault.message + previous
        )
    if training.spec is not None and not training.spec.shape_known and decision.waiting is not None:
        return Condition(kind, None, decision.waiting.reason, decision.waiting.message)
    if instead := profile_mismatch(training.inputs, training.spec, training.nodes) or _estimated(training, decision):
        return Condition(kind, False, instead.reason, instead.message)
    if training.inputs.profile_digest is None:
        return Condition(kind, None, Reason.PROFILE_UNREADABLE, "The profile is being read.")
    message = f"The profile is valid. {training.profiling.summary}".strip()
    return Condition(kind, True, Reason.PROFILE_READ, message)


def _estimated(training: Training, decision: TrainingDecision) -> Explanation | None:
    """Say what predictions rest on where it is no profile of the job; None: there is one."""
    if training.observation.basis is PlanBasis.PROFILE:
        return None
    costs = f" Measuring one sets clocks. {decision.sweep_cost}" if decision.sweep_cost else ""
    message = f"The job has no profile: predictions rest on {training.observation.basis_source}.{costs}"
    return Explanation(Reason.ESTIMATED, message)


def _frontier_ready(solve: SolveProgress, inputs: InputProgress, decision: TrainingDecision, name: str) -> Condition:
    kind = ConditionType.FRONTIER_READY
    if inputs.schedule_fault is not None and solve.frontier is None:
        return Condition(kind, False, inputs.schedule_fault.reason, inputs.schedule_fault.message)
    if solve.solving is not None and not solve.refining:
        return Condition(kind, False, Reason.SOLVING, "The time-energy frontier is being computed.")
    if solve.fault is not None and solve.frontier is None:
        return Condition(kind, False, solve.fault[1].reason, solve.fault[1].message)
    if solve.frontier is None:
        status = None if inputs.profile_fault is None else False
        return Condition(kind, status, Reason.WAITING_FOR_PROFILE, "There is no usable profile yet; see ProfileReady.")
    view = solve.frontier
    figures = (
        f"{len(view.times_us)} points from T_min = {seconds(view.t_min_us)} to T* = {seconds(view.t_star_us)},"
        f" certified gap over all deadlines {small_percent(ratio_from_ppm(view.mean_gap_ppm))} on average,"
        f" {small_percent(ratio_from_ppm(view.maximum_gap_ppm))} at most"
    )
    rehearsed = "" if decision.hardware is None else f", rehearsed for {decision.hardware.model}"
    figures += rehearsed if view.grains else ""
    again = f" It could not be solved again: {solve.fault[1].message}" if solve.fault else ""
    if solve.refining:
        again = " It is being computed again with what was measured since; until then it stays in use."
    if view.restored:
        message = f"{figures}; restored from PerseusFrontier {name}.{again}"
        return Condition(kind, True, Reason.RESTORED, message)
    return Condition(kind, True, Reason.SOLVED, f"{figures}; solved in {s_from_ms(view.solve_ms):.3f} s.{again}")


_NOTHING_STAYS: Final = (Reason.SUSPENDED, Reason.CANARY, Reason.CANARY_FAILED, Reason.PROFILE_MISMATCH)
"""Reasons for which clocks that were set before are given back."""


def _plan_applied(training: Training, decision: TrainingDecision, spec: JobSpec) -> Condition:
    """Whether a plan is in force, and why it is one of whole iterations where the job has a pipeline."""
    condition, misfit = _applied(training, decision, spec), training.shape.misfit
    if misfit is None:
        return condition
    message = (
        f"{condition.message} {misfit.why} So whole iterations are planned, with one clock for all"
        f" {counted(spec.pipeline.places, 'rank')}; processes that fit have plans of their pipeline once they restart."
    )
    reason = Reason.RANKS_MISMATCH if condition.reason is Reason.PLAN_IN_FORCE else condition.reason
    return Condition(condition.type, condition.status, reason, message)


def _applied(training: Training, decision: TrainingDecision, spec: JobSpec) -> Condition:
    kind = ConditionType.PLAN_APPLIED
    if not decision.applied:
        waiting = decision.waiting
        if spec.mode is Mode.OBSERVE:
            waiting = _observes(waiting)
        if waiting is None:
            return Condition(kind, False, Reason.APPLYING, "The plans are being sent to the agents.")
        if not spec.mode.sets_clocks and training.frontier is not None:
            message = f"{waiting.message} {recommendation(training, decision)}".strip()
            return Condition(kind, False, waiting.reason, message)
        stays = not decision.wanted and training.nodes.driven and waiting.reason not in _NOTHING_STAYS
        previous = " The previous plan stays in force." if stays else ""
        return Condition(kind, False, waiting.reason, waiting.message + previous)
    assert training.frontier is not None
    point = common_point(decision.wanted, decision.slowdowns)
    message = f"Point {point} of {len(training.frontier.times_us)} for objective {spec.objective.type.value}."
    slower = [dp for dp, pipeline_point in decision.wanted.items() if pipeline_point > point and dp in decision.factors]
    if slower:
        apart = max(decision.factors.values()) / min(decision.factors.values()) - 1
        message += f" {counted(len(slower), 'pipeline')} of {len(decision.wanted)}, up to {percent(apart)} faster than"
        message += " the slowest, run slower plans and end with it."
    if decision.limiting_share is not None:
        return Condition(kind, True, Reason.LIMITED_BY_BUDGET, f"{message} {limited(training, decision, point)}")
    if decision.note:
        return Condition(kind, True, Reason.DEADLINE_OUT_OF_REACH, f"{message} {decision.note}.")
    return Condition(kind, True, Reason.PLAN_IN_FORCE, message)


def _observes(waiting: Explanation | None) -> Explanation:
    """Say that no clock is written, before anything that is waited for."""
    observes = no_clocks(Mode.OBSERVE)
    more = "" if waiting is None or waiting == observes else f" {waiting.message}"
    return Explanation(observes.reason, observes.message + more)


def _straggler_detected(training: Training, decision: TrainingDecision, spec: JobSpec) -> Condition:
    kind = ConditionType.STRAGGLER_DETECTED
    if spec.straggler.mode is StragglerMode.IGNORE:
        message = "spec.straggler.mode is Ignore: stragglers are ignored."
        return Condition(kind, False, Reason.STRAGGLERS_IGNORED, message)
    automatic = spec.straggler.mode is StragglerMode.AUTOMATIC and spec.pipeline.data_parallel > 1
    if automatic and not decision.slowdowns and not training.ranks_comparable:
        message = (
            "Steps include the wait for other ranks, so they last equally long on all and a slow rank does not show:"
            " pass the model to perseus_client.steps."
        )
        return Condition(kind, None, Reason.WAITS_NOT_MARKED, message)
    if not decision.slowdowns:
        least = training.stragglers.detector.least_slowdown
        vary = ""
        if least is not None and least > 1 + 2 * spec.straggler.slowdown_ratio:
            vary = f" Iterations vary: less than {percent(least - 1)} cannot be distinguished from load."
        return Condition(kind, False, Reason.NO_STRAGGLER, f"No pipeline is slower than the others.{vary}")
    dp, slowdown = max(decision.slowdowns.items(), key=lambda item: item[1])
    more = f", and {len(decision.slowdowns) - 1} more" if len(decision.slowdowns) > 1 else ""
    if dp in decision.declared:
        message = f"Pipeline {dp} is declared {percent(slowdown - 1)} slower than planned{more}."
        return Condition(kind, True, Reason.STRAGGLER_DECLARED, message)
    detector = training.stragglers.detector
    stage = slowest_stage(detector, dp)
    where = "" if stage is None else f" (its slowest stage is {stage})"
    cause, evidence = cause_of(detector, training.nodes, dp).value.lower(), _evidence(training.nodes, dp)
    message = (
        f"Pipeline {dp} is {percent(slowdown - 1)} slower than planned{where}{more}."
        f" Cause: {cause}. Evidence: {evidence}."
    )
    return Condition(kind, True, Reason.STRAGGLER_DETECTED, message)


def _evidence(nodes: JobNodes, dp: int) -> str:
    """Return the events that the pipeline's GPUs report, four at most."""
    events = [
        f"{rank.gpu_uuid} on {node}: {kind.replace('_', ' ').lower()}" for rank, kind, node in gpu_events(nodes, dp)
    ]
    return "; ".join(events[:4]) or "timing alone"


def _model_explains(progress: CalibrationProgress) -> Condition:
    kind = ConditionType.MODEL_EXPLAINS
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


def _bound_kept(decision: TrainingDecision, spec: JobSpec) -> Condition:
    kind, guard, share = ConditionType.BOUND_KEPT, decision.guard, decision.limiting_share
    who = spec.objective.type.value if share is None else f"PowerBudget {share.budget}"
    budget = f"the plan that {who} allows" if share is not None else ""
    if guard.hold is not Hold.NOTHING:
        cause = f" Cause: {guard.finding.evidence}." if guard.finding else ""
        stays = share is not None and guard.hold >= Hold.FASTEST_PLAN
        message = (
            f"Iterations took {seconds(guard.measured_us)}; {who} allows {seconds(guard.bound_us)}."
            f" The job runs at {budget if stays else _HELD_AT[guard.hold]}; the plan is"
            f" tried again after {guard.pause_s:.0f} s.{cause}"
        )
        return Condition(kind, False, Reason.BOUND_EXCEEDED, message)
    bound = decision.bound_us
    if bound is None:
        message = "The objective sets no bound on iteration time, or the bound is not known yet."
        return Condition(kind, True, Reason.NO_BOUND, message)
    why = f": {budget} is predicted to take no longer" if budget else ""
    excess = decision.least_excess
    if excess is not None and excess > 2 * TOLERANCE:
        noise = f"Iterations vary: less than {percent(excess)} above it cannot be distinguished from load"
    else:
        noise = f"Up to {percent(TOLERANCE)} more is taken for noise"
    return Condition(kind, True, Reason.BOUND_KEPT, f"An iteration may take {seconds(bound)}{why}. {noise}.")
