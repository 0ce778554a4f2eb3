"""Decides what to do next about one training job. Pure: state and time in, actions and the next date out.

Level-triggered: asked twice without a change in between, it decides the same. Each feature decides by its own part and
the facts; this module asks them in turn, and lets those that interrupt a plan go before those that make one: a profile
that is measured, a canary, a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import StragglerMode
from perseus_operator.budgets.allocation import Share
from perseus_operator.families.training.facts import Facts
from perseus_operator.families.training.features.bound.aim import Aim, Seen, aim_of
from perseus_operator.families.training.features.bound.guard import Guard, Hold
from perseus_operator.families.training.features.canary.decision import CanaryStep, next_canary_step
from perseus_operator.families.training.features.comparison.decision import next_comparison_action
from perseus_operator.families.training.features.comparison.state import ComparisonAction
from perseus_operator.families.training.features.frontier.inputs import (
    FrontierParts,
    hardware_for,
    input_actions,
    inputs_wake_s,
)
from perseus_operator.families.training.features.frontier.objective import (
    Infeasible,
    PipelineSpread,
    Target,
    select_points,
)
from perseus_operator.families.training.features.frontier.readiness import (
    baseline_pending,
    frontier_pending,
    profile_mismatch,
    ranks_pending,
    rehearsal_pending,
    schedule_pending,
)
from perseus_operator.families.training.features.hardware.hardware import JobHardware
from perseus_operator.families.training.features.power.plans import replicas_of
from perseus_operator.families.training.features.power.resting_clock import resting_clock
from perseus_operator.families.training.features.profile.cost import SweepCost
from perseus_operator.families.training.features.profile.decision import (
    ProfileParts,
    ProfilingStep,
    next_profiling_step,
    next_sweep_cost,
)
from perseus_operator.families.training.features.stragglers.progress import Stragglers, counting
from perseus_operator.families.training.shape import Misfit, shape_of_ranks
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.decision import Decision
from perseus_operator.jobs.limits import Limits
from perseus_operator.jobs.waiting import first_node_fault, no_clocks
from perseus_operator.nodes.actions import Intent, is_applied, may_adopt
from perseus_operator.objects.values import Now

_AT_DEFAULT = (Reason.MEASURING_BASELINE, Reason.CANARY, Reason.OBJECTIVE_INFEASIBLE)
"""A budget reserves what a job draws at default clocks that waits for these."""


@dataclass(frozen=True, kw_only=True)
class TrainingDecision(Decision):
    """What to do, what to report, and when to decide again.

    Attributes:
        adopt: the coming frontier is to be in force, for every agent that answers has its plans. The rest of the
            decision is for the one in force until then.
        wanted: point of every pipeline, by dp; empty: there is no plan to enforce (yet).
        waiting: why ``wanted`` is empty or not in force.
        slowdowns: of the stragglers that count, declared or detected, by dp.
        declared: which of them are declared.
        factors: how many times as long as predicted pipelines take, by dp; empty: all alike, or not known.
        note: what the objective could not have, though a plan exists.
        advised_point: what the objective asks for, enforced or not; None: no frontier, or no point of it fits.
        profiling: what is being done about a profile that is missing or no longer fits; None: nothing.
        sweep_cost: what measuring the profile will cost, or would; None: nothing, or it is not known yet.
        limiting_share: of a PowerBudget, where that and not the objective decides.
        unlimited_point: what the job would have without that share; None: there is no such share.
        hardware: what plans are rehearsed under from now on, to be remembered; None: the GPUs are not known yet.
        bound_us: what an iteration may take, without an allowance for stragglers; None: no bound, or not known yet.
        least_excess: by what share iterations must exceed it to be distinguished from load; None: not known yet.
        guard: whether measured iterations keep the bound, to be remembered.
    """

    adopt: bool = False
    wanted: Mapping[int, int] = field(default_factory=dict)
    waiting: Explanation | None = None
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    declared: frozenset[int] = frozenset()
    factors: Mapping[int, float] = field(default_factory=dict)
    note: str = ""
    advised_point: int | None = None
    profiling: Explanation | None = None
    sweep_cost: SweepCost | None = None
    limiting_share: Share | None = None
    unlimited_point: int | None = None
    hardware: JobHardware | None = None
    guard: Guard
    bound_us: float | None = None
    least_excess: float | None = None


@dataclass(frozen=True)
class _Situation:
    """What all features together say of the job now.

    Attributes:
        facts: of the job.
        hardware: that plans are to be rehearsed under; None: the GPUs are not known yet.
        lacking: why not every rank is there; None: each is.
        profiling: the step of measuring a profile; None: none is measured.
        stragglers: that count.
        aim: the iteration time to aim at.
    """

    facts: Facts
    hardware: JobHardware | None
    lacking: Explanation | None
    profiling: ProfilingStep | None
    stragglers: Stragglers
    aim: Aim


@dataclass(frozen=True)
class _Course:
    """What the agents shall hold.

    Attributes:
        intent: for the agents, with whatever interrupts the plan.
        wanted: points of the plan, by dp; empty: there is none to enforce.
        canary: the step of the canary; None: the plan is for all pipelines.
    """

    intent: Intent
    wanted: Mapping[int, int]
    canary: CanaryStep | None


def decide(training: Training, now: Now, limits: Limits) -> TrainingDecision:
    """Decide what to do next about a training job.

    Args:
        training: everything known about the job; it is not changed.
        now: the time.
        limits: the operator's settings that matter here.

    Returns:
        Actions to start now, the plans that are wanted, what to report, and when to decide again.
    """
    spec = training.spec
    if spec is None:  # nothing is accepted yet
        waiting, hardware = training.job.spec_fault, training.hardware.in_use
        return TrainingDecision(intent=None, waiting=waiting, hardware=hardware, guard=training.guard)
    if not spec.shape_known:
        return _without_shape(training)
    parts = FrontierParts(training.inputs, training.solve, training.calibration)
    profile = _profile_parts(training)
    seen = _situation(training, training.facts(spec), profile, now)
    facts, profiling, stragglers, aim = seen.facts, seen.profiling, seen.stragglers, seen.aim
    basis = training.observation.basis
    course = _course(training, seen)
    adopt, intent = _adoption(training, seen, course)
    wanted, advice = course.wanted, _advice(facts, aim)
    held = profiling is None and bool(wanted) and is_applied(facts.nodes, intent)
    comparison = next_comparison_action(
        training.comparisons,
        facts,
        wanted,
        aim.hold,
        applied=held,
        disturbed=profiling is not None or bool(stragglers.slowdowns) or intent.waiting is not None,
    )
    applied = held or (bool(wanted) and training.comparisons.running)
    return TrainingDecision(
        intent=intent,
        actions=(
            *input_actions(parts, spec, seen.hardware, basis, now_s=now.monotonic_s, limits=limits),
            *_interruptions(profiling, comparison, course.canary),
        ),
        adopt=adopt,
        wanted=wanted,
        waiting=intent.waiting or _sending(facts, applied=applied or not wanted),
        applied=applied,
        slowdowns=stragglers.slowdowns,
        declared=stragglers.declared,
        factors=_spread(training, facts, aim).factors if wanted and profiling is None else {},
        note=advice.note,
        advised_point=advice.advised_point,
        limiting_share=advice.limiting_share,
        unlimited_point=advice.unlimited_point,
        profiling=profiling.explanation if profiling else None,
        sweep_cost=next_sweep_cost(profile, facts),
        hardware=seen.hardware,
        guard=aim.guard,
        bound_us=aim.bound_us,
        least_excess=aim.least_excess,
        wake_at_s=min(
            inputs_wake_s(training.inputs, training.solve, now_s=now.monotonic_s, limits=limits),
            profiling.wake_at_s if profiling else math.inf,
            stragglers.wake_at_s,
            aim.wake_at_s,
        ),
    )


def _without_shape(training: Training) -> TrainingDecision:
    """Leases alone, by which the training processes become known."""
    shape = shape_of_ranks(training.job)
    comparing = Explanation(Reason.WAITING_FOR_RANKS, "What the training processes execute is being compared.")
    waiting = shape if isinstance(shape, Explanation) else comparing
    intent = Intent(None, {}, drive=False, waiting=waiting)
    return TrainingDecision(intent=intent, waiting=waiting, guard=training.guard)


def _profile_parts(training: Training) -> ProfileParts:
    return ProfileParts(training.profiling, training.inputs, training.observation.basis, training.without_plan)


def _situation(training: Training, facts: Facts, profile: ProfileParts, now: Now) -> _Situation:
    spec = facts.spec
    lacking = ranks_pending(training.job, spec, training.shape.misfit)
    not_ready = schedule_pending(training.inputs, spec) or lacking or baseline_pending(facts, training.baseline_wanted)
    profiling = next_profiling_step(profile, facts, not_ready, now_s=now.monotonic_s)
    stragglers = counting(training.stragglers, spec, facts.nodes, now_s=now.monotonic_s)
    if profiling is not None:
        stragglers = Stragglers(wake_at_s=stragglers.wake_at_s)
    seen = Seen(stragglers.slowdowns, training.stragglers.detector.slowdowns, training.hardware.in_use)
    return _Situation(
        facts=facts,
        hardware=hardware_for(training.hardware, spec, facts.nodes, training.evidence),
        lacking=lacking,
        profiling=profiling,
        stragglers=stragglers,
        aim=aim_of(training.guard, facts, seen, now, profiling=profiling is not None),
    )


def _course(training: Training, seen: _Situation) -> _Course:
    """The plan, and what interrupts it: first a profile that is measured, then the canary, then a comparison."""
    facts, profiling = seen.facts, seen.profiling
    intent = _profiling_intent(facts, profiling) if profiling is not None else _plan_intent(training, seen)
    intent = replace(intent, stages=facts.spec.pipeline.stages)
    wanted = {dp: point for dp, point in intent.wanted.items() if point is not None}
    canary = None
    if wanted and profiling is None and intent.waiting is None and not seen.aim.limited_by_share:
        canary = next_canary_step(training.canary, facts, wanted, seen.stragglers.slowdowns)
    if canary is not None:
        intent = replace(intent, wanted=canary.points, waiting=canary.waiting, drive=canary.drive)
        wanted = {}
    elif profiling is None and training.comparisons.interrupting:
        intent = replace(intent, wanted=dict.fromkeys(wanted))
    if intent.drive and profiling is None and (intent.waiting is None or intent.waiting.reason not in _AT_DEFAULT):
        intent = replace(intent, resting=resting_clock(facts.share, facts.frontier, replicas_of(facts.spec)))
    return _Course(_for_ranks(intent, training.shape.misfit), wanted, canary)


def _for_ranks(intent: Intent, misfit: Misfit | None) -> Intent:
    """The same in terms of what ranks say of themselves: all that fit no pipeline run what the one pipeline does."""
    if misfit is None:
        return intent
    points = {dp: point for point in intent.wanted.values() for dp in misfit.pipelines}
    return replace(intent, wanted=points, stages=misfit.stages)


def _adoption(training: Training, seen: _Situation, course: _Course) -> tuple[bool, Intent]:
    """Whether a refined frontier is to be in force now, and what agents shall hold until then."""
    coming = training.solve.coming
    if coming is None:
        return False, course.intent
    unused = not course.wanted or seen.profiling is not None
    if unused or may_adopt(seen.facts.nodes, coming.digest):
        return True, course.intent
    return False, replace(course.intent, coming=coming.digest)


def _interruptions(
    profiling: ProfilingStep | None, comparison: ComparisonAction | None, canary: CanaryStep | None
) -> list[object]:
    judged = canary.action if canary is not None else None
    return [*(profiling.actions if profiling else ()), *filter(None, (comparison, judged))]


def _sending(facts: Facts, *, applied: bool) -> Explanation | None:
    """Why a plan that nothing speaks against is not in force yet; None: it is."""
    if applied:
        return None
    return first_node_fault(facts.nodes) or Explanation(Reason.APPLYING, "The plans are being sent to the agents.")


@dataclass(frozen=True)
class _Advice:
    """What the objective asks for, and what a PowerBudget leaves of it: see ``TrainingDecision``."""

    note: str
    advised_point: int | None
    limiting_share: Share | None
    unlimited_point: int | None


def _advice(facts: Facts, aim: Aim) -> _Advice:
    target = aim.target if isinstance(aim.target, Target) else None
    alone = aim.unlimited if aim.limited_by_share and isinstance(aim.unlimited, Target) else None
    frontier = facts.frontier
    return _Advice(
        note=target.note if target else "",
        advised_point=frontier.lookup(target.time_us) if frontier and target else None,
        limiting_share=facts.share if aim.limited_by_share else None,
        unlimited_point=frontier.lookup(alone.time_us) if frontier and alone else None,
    )


def _spread(training: Training, facts: Facts, aim: Aim) -> PipelineSpread:
    """How pipelines differ, as telemetry shows. After a plan was withdrawn nothing counts that was measured."""
    relative = facts.spec.objective.deadline is None or aim.limited_by_share
    if facts.spec.straggler.mode is not StragglerMode.AUTOMATIC or aim.hold is not Hold.NOTHING:
        return PipelineSpread(relative=relative)
    measured = training.stragglers.detector.spread
    return PipelineSpread(measured.factors, measured.margin, relative)


# ------------------------------------------------------------------------------------------ what agents shall hold


def _profiling_intent(facts: Facts, profiling: ProfilingStep) -> Intent:
    """A sweep has a bound of its own; the objective's is for plans."""
    sweep = profiling.sweep
    points = dict.fromkeys(range(facts.spec.pipeline.data_parallel), sweep.point) if sweep else {}
    return Intent(sweep.digest if sweep else None, points, profiling.drive, profiling.explanation)


def _plan_intent(training: Training, seen: _Situation) -> Intent:
    facts, aim = seen.facts, seen.aim
    spec, frontier = facts.spec, facts.frontier
    mismatch = profile_mismatch(training.inputs, spec, facts.nodes)
    if mismatch is not None:
        return Intent(None, {}, False, mismatch)
    plans = frontier.digest if frontier else None
    waiting = _why_no_plan(training, seen)
    if waiting is not None or frontier is None or not isinstance(aim.target, Target):
        return Intent(plans, {}, spec.mode.sets_clocks, waiting)
    if aim.hold is Hold.DEFAULT_CLOCKS:
        message = "Measured iterations exceeded the bound: default clocks until the next attempt."
        return Intent(plans, {}, False, Explanation(Reason.BOUND_EXCEEDED, message))
    wanted = select_points(
        frontier,
        aim.target.time_us,
        spec.pipeline.data_parallel,
        seen.stragglers.slowdowns,
        aim.hold.finest,
        spread=_spread(training, facts, aim),
        least_us=aim.target.time_us if aim.limited_by_share else 0.0,
    )
    return Intent(plans, wanted, spec.mode.sets_clocks, None)


def _why_no_plan(training: Training, seen: _Situation) -> Explanation | None:
    facts, aim = seen.facts, seen.aim
    spec, share = facts.spec, facts.share
    if facts.frontier is None or aim.target is None:
        return frontier_pending(training.inputs, training.solve, spec)
    if isinstance(aim.target, Infeasible):
        return Explanation(Reason.OBJECTIVE_INFEASIBLE, aim.target.message)
    if not spec.mode.sets_clocks:
        return no_clocks(spec.mode)
    if share is not None and share.watts is None:
        return Explanation(Reason.APPLYING, f"PowerBudget {share.budget} has not allotted a share yet.")
    rehearsing = rehearsal_pending(training.solve, training.hardware.in_use)
    if rehearsing is not None:
        return rehearsing
    # A job that a budget limits skips the baseline: at default clocks it would draw more than its share.
    return seen.lacking or (None if aim.limited_by_share else baseline_pending(facts, training.baseline_wanted))


def common_point(wanted: Mapping[int, int], slowdowns: Mapping[int, float]) -> int:
    """The point of the slowest pipeline that is no straggler: the objective's. Of all pipelines, if all are."""
    return min([point for dp, point in wanted.items() if dp not in slowdowns] or wanted.values())
