"""What to do next about one job, from everything that is known about it.

``decide(state, now, limits)`` is level-triggered: asked twice without a change in between, it decides the same. It
never changes the state. It goes through these steps, each a function below: which inputs to read and what to solve or
calibrate; whether the profile must be measured first; which pipelines are slow; which iteration time to aim at; what
the agents shall hold; what to do next on each node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec, StragglerMode
from perseus_operator.planning.aim import Aim, Now, aim_of
from perseus_operator.planning.bound_guard import Guard, Hold
from perseus_operator.planning.canary import JudgeCanary
from perseus_operator.planning.canary_planner import next_canary_step
from perseus_operator.planning.comparison_planner import next_comparison_action
from perseus_operator.planning.comparisons import ComparisonAction
from perseus_operator.planning.fixed_clock import clock_intent
from perseus_operator.planning.frontier_inputs import InputAction, Limits, hardware_for, input_actions, inputs_wake_s
from perseus_operator.planning.hardware import Hardware
from perseus_operator.planning.lifecycle import DeleteJob, next_deletion
from perseus_operator.planning.node_actions import Intent, NodeAction, is_applied, may_adopt, next_actions
from perseus_operator.planning.objective import Infeasible, PipelineSpread, Target, select_points
from perseus_operator.planning.power_allocation import Share, replicas_of
from perseus_operator.planning.profile_planner import (
    ProfilingAction,
    ProfilingStep,
    next_profiling_step,
    next_sweep_cost,
)
from perseus_operator.planning.profiling.cost import SweepCost
from perseus_operator.planning.readiness import (
    baseline_pending,
    first_node_fault,
    frontier_pending,
    no_clocks,
    profile_mismatch,
    ranks_pending,
    rehearsal_pending,
    schedule_pending,
)
from perseus_operator.planning.resting_clock import resting_clock
from perseus_operator.planning.shape import shape_of_ranks
from perseus_operator.planning.state import JobState
from perseus_operator.planning.stragglers.declared import declared_slowdowns

_NEVER_S = 3600.0
"""How soon to look again at a job about which nothing is to be done."""
_AT_DEFAULT = (Reason.MEASURING_BASELINE, Reason.CANARY, Reason.OBJECTIVE_INFEASIBLE)
"""A budget reserves what a job draws at default clocks that waits for these."""


Action = InputAction | ProfilingAction | NodeAction | ComparisonAction | JudgeCanary | DeleteJob


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, what to report, and when to decide again.

    Attributes:
        actions: to be started now, concurrently.
        adopt: the coming frontier is to be in force, for every agent that answers has its plans. The rest of the
            decision is for the one in force until then.
        wanted: point of every pipeline, by dp; empty: there is no plan to enforce (yet).
        waiting: why ``wanted`` is empty or not in force.
        applied: every agent holds ``wanted``.
        slowdowns: of the stragglers that count, declared or detected, by dp.
        declared: which of them are declared.
        factors: how many times as long as predicted pipelines take, by dp; empty: all alike, or not known.
        note: what the objective could not have, though a plan exists.
        advised_point: what the objective asks for, enforced or not; None: no frontier, or no point of it fits.
        profiling: what is being done about a profile that is missing or no longer fits; None: nothing.
        sweep_cost: what measuring the profile will cost, or would; None: nothing, or it is not known yet.
        limiting_share: of a PowerBudget, where that and not the objective decides.
        unlimited_point: what the objective would have without that share; None: there is no such share.
        hardware: what plans are rehearsed under from now on, to be remembered; None: the GPUs are not known yet.
        bound_us: what an iteration may take, without an allowance for stragglers; None: no bound, or not known yet.
        least_excess: by what share iterations must exceed it to be distinguished from load; None: not known yet.
        guard: whether measured iterations keep the bound, to be remembered.
        wake_at_s: when to decide again at the latest (monotonic).
    """

    actions: tuple[Action, ...] = ()
    adopt: bool = False
    wanted: Mapping[int, int] = field(default_factory=dict)
    waiting: Explanation | None = None
    applied: bool = False
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    declared: frozenset[int] = frozenset()
    factors: Mapping[int, float] = field(default_factory=dict)
    note: str = ""
    advised_point: int | None = None
    profiling: Explanation | None = None
    sweep_cost: SweepCost | None = None
    limiting_share: Share | None = None
    unlimited_point: int | None = None
    hardware: Hardware | None = None
    guard: Guard
    bound_us: float | None = None
    least_excess: float | None = None
    wake_at_s: float


def decide(state: JobState, now: Now, limits: Limits) -> Decision:
    """Decide what to do next about a job.

    Args:
        state: everything known about the job; it is not changed.
        now: the time.
        limits: the operator's settings that matter here.

    Returns:
        Actions to start now, the plans that are wanted, what to report, and when to decide again.
    """
    if state.spec is None or state.fenced is not None:
        # Nothing is accepted yet, or a newer operator is in command. Leases that this operator holds expire.
        return Decision(
            waiting=state.fenced or state.spec_fault,
            hardware=state.hardware.in_use,
            guard=state.guard,
            wake_at_s=now.monotonic_s + _NEVER_S,
        )
    spec = state.spec
    deletion, deletion_wake_s = next_deletion(state.end, spec, now_s=now.monotonic_s, wall_s=now.wall_s)
    deletions = (deletion,) if deletion else ()
    if not spec.shape_known:
        intent = _shape_intent(state) if spec.is_planned else clock_intent(state, spec)
        nodes = list(next_actions(state, spec, intent, now_s=now.monotonic_s))
        return Decision(
            actions=(*(action for action, _ in nodes if action is not None), *deletions),
            waiting=intent.waiting,
            applied=not spec.is_planned and intent.waiting is None,
            guard=state.guard,
            wake_at_s=min(now.monotonic_s + _NEVER_S, deletion_wake_s, *(wake_at_s for _, wake_at_s in nodes)),
        )
    hardware = hardware_for(state, spec)
    inputs = input_actions(state, spec, hardware, now_s=now.monotonic_s, limits=limits)
    lacking = ranks_pending(state, spec)
    not_ready = schedule_pending(state) or lacking or baseline_pending(state, spec)
    profiling = next_profiling_step(state, spec, not_ready, now_s=now.monotonic_s)
    stragglers = _Stragglers() if profiling else _stragglers(state, spec, now)
    aim = aim_of(state, spec, stragglers.slowdowns, now, profiling=profiling is not None)
    intent = _intent(state, spec, aim, stragglers, profiling=profiling, lacking=lacking)
    wanted = {dp: point for dp, point in intent.wanted.items() if point is not None}
    canary = None
    if wanted and profiling is None and intent.waiting is None and not aim.limited_by_share:
        canary = next_canary_step(state, spec, wanted, stragglers.slowdowns)
    if canary is not None:
        intent = replace(intent, wanted=canary.points, waiting=canary.waiting, drive=canary.drive)
        wanted = {}
    elif profiling is None and state.comparisons.interrupting:
        intent = replace(intent, wanted=dict.fromkeys(wanted))
    if intent.drive and profiling is None and (intent.waiting is None or intent.waiting.reason not in _AT_DEFAULT):
        intent = replace(intent, resting=resting_clock(state.share, state.frontier, replicas_of(spec)))
    adopt = state.coming is not None and (not wanted or profiling is not None or may_adopt(state))
    if state.coming is not None and not adopt:
        intent = replace(intent, coming=state.coming.digest)
    nodes = list(next_actions(state, spec, intent, now_s=now.monotonic_s))

    applied = profiling is None and bool(wanted) and is_applied(state, intent)
    comparison = next_comparison_action(
        state,
        spec,
        wanted,
        aim.hold,
        applied=applied,
        disturbed=profiling is not None or bool(stragglers.slowdowns) or intent.waiting is not None,
    )
    applied |= bool(wanted) and state.comparisons.running
    waiting = intent.waiting
    if wanted and not applied and waiting is None:
        waiting = first_node_fault(state) or Explanation(Reason.APPLYING, "The plans are being sent to the agents.")
    target = aim.target if isinstance(aim.target, Target) else None
    alone = aim.of_objective if aim.limited_by_share and isinstance(aim.of_objective, Target) else None
    return Decision(
        actions=(
            *inputs,
            *(profiling.actions if profiling else ()),
            *(action for action, _ in nodes if action is not None),
            *((comparison,) if comparison else ()),
            *((canary.action,) if canary and canary.action else ()),
            *deletions,
        ),
        adopt=adopt,
        wanted=wanted,
        waiting=waiting,
        applied=applied,
        slowdowns=stragglers.slowdowns,
        declared=stragglers.declared,
        factors=_spread(state, spec, aim).factors if wanted and profiling is None else {},
        note=target.note if target else "",
        advised_point=state.frontier.lookup(target.time_us) if state.frontier and target else None,
        profiling=profiling.explanation if profiling else None,
        sweep_cost=next_sweep_cost(state, spec),
        limiting_share=state.share if aim.limited_by_share else None,
        unlimited_point=state.frontier.lookup(alone.time_us) if state.frontier and alone else None,
        hardware=hardware,
        guard=aim.guard,
        bound_us=aim.bound_us,
        least_excess=aim.least_excess,
        wake_at_s=min(
            inputs_wake_s(state, now_s=now.monotonic_s, limits=limits),
            profiling.wake_at_s if profiling else math.inf,
            _stragglers_wake_s(state, now),
            aim.wake_at_s,
            deletion_wake_s,
            *(wake_at_s for _, wake_at_s in nodes),
        ),
    )


# --------------------------------------------------------------------------------------------------------- stragglers


@dataclass(frozen=True)
class _Stragglers:
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    declared: frozenset[int] = frozenset()


def _stragglers(state: JobState, spec: JobSpec, now: Now) -> _Stragglers:
    """Stragglers that count. Where one is both declared and detected, the larger slowdown does."""
    if spec.straggler.mode is StragglerMode.IGNORE:
        return _Stragglers()
    declared = declared_slowdowns(
        state.declared_stragglers,
        now_s=now.monotonic_s,
        dp_of_gpu={rank.gpu_uuid: rank.dp for rank in state.ranks} if state.declared_stragglers else {},
        pipelines=spec.pipeline.data_parallel,
    )
    detected = state.detector.slowdowns if spec.straggler.mode is StragglerMode.AUTOMATIC else {}
    merged = {dp: max(declared.get(dp, 1.0), detected.get(dp, 1.0)) for dp in declared.keys() | detected.keys()}
    return _Stragglers(merged, frozenset(declared))


def _spread(state: JobState, spec: JobSpec, aim: Aim) -> PipelineSpread:
    """How pipelines differ, as telemetry shows. After a plan was withdrawn nothing counts that was measured."""
    relative = spec.objective.deadline is None or aim.limited_by_share
    if spec.straggler.mode is not StragglerMode.AUTOMATIC or aim.hold is not Hold.NOTHING:
        return PipelineSpread(relative=relative)
    measured = state.detector.spread
    return PipelineSpread(measured.factors, measured.margin, relative)


def _stragglers_wake_s(state: JobState, now: Now) -> float:
    """When the next declared straggler takes effect (monotonic); infinite: none is to come."""
    starts = (straggler.from_s for straggler in state.declared_stragglers)
    return min((start_s for start_s in starts if start_s > now.monotonic_s), default=math.inf)


# ------------------------------------------------------------------------------------------ what agents shall hold


def _shape_intent(state: JobState) -> Intent:
    """Leases alone, by which the training processes become known."""
    shape = shape_of_ranks(state)
    return Intent(None, {}, drive=False, waiting=shape if isinstance(shape, Explanation) else None)


def _intent(
    state: JobState,
    spec: JobSpec,
    aim: Aim,
    stragglers: _Stragglers,
    *,
    profiling: ProfilingStep | None,
    lacking: Explanation | None,
) -> Intent:
    if profiling is not None:  # a sweep has a bound of its own; the objective's is for plans
        sweep = profiling.sweep
        points = dict.fromkeys(range(spec.pipeline.data_parallel), sweep.point) if sweep else {}
        return Intent(sweep.digest if sweep else None, points, profiling.drive, profiling.explanation)
    mismatch = profile_mismatch(state)
    if mismatch is not None:
        return Intent(None, {}, False, mismatch)
    plans = state.frontier.digest if state.frontier else None
    waiting = _why_no_plan(state, spec, aim, lacking)
    if waiting is not None or state.frontier is None or not isinstance(aim.target, Target):
        return Intent(plans, {}, spec.mode.sets_clocks, waiting)
    if aim.hold is Hold.DEFAULT_CLOCKS:
        message = "Measured iterations exceeded the bound: default clocks until the next attempt."
        return Intent(plans, {}, False, Explanation(Reason.BOUND_EXCEEDED, message))
    wanted = select_points(
        state.frontier,
        aim.target.time_us,
        spec.pipeline.data_parallel,
        stragglers.slowdowns,
        aim.hold.finest,
        spread=_spread(state, spec, aim),
    )
    return Intent(plans, wanted, spec.mode.sets_clocks, None)


def _why_no_plan(state: JobState, spec: JobSpec, aim: Aim, lacking: Explanation | None) -> Explanation | None:
    if state.frontier is None or aim.target is None:
        return frontier_pending(state)
    if isinstance(aim.target, Infeasible):
        return Explanation(Reason.OBJECTIVE_INFEASIBLE, aim.target.message)
    if not spec.mode.sets_clocks:
        return no_clocks(spec.mode)
    if state.share is not None and state.share.watts is None:
        return Explanation(Reason.APPLYING, f"PowerBudget {state.share.budget} has not allotted a share yet.")
    rehearsing = rehearsal_pending(state)
    if rehearsing is not None:
        return rehearsing
    # A job that a budget limits skips the baseline: at default clocks it would draw more than its share.
    return lacking or (None if aim.limited_by_share else baseline_pending(state, spec))


def common_point(wanted: Mapping[int, int], slowdowns: Mapping[int, float]) -> int:
    """The point of the slowest pipeline that is no straggler: the objective's. Of all pipelines, if all are."""
    return min([point for dp, point in wanted.items() if dp not in slowdowns] or wanted.values())
