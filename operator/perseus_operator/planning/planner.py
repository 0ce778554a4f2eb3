"""What to do next about one job, from everything that is known about it.

``decide(state, now, limits)`` is level-triggered: asked twice without a change in between, it decides the same. It
never changes the state. It goes through these steps, each a function below: which inputs to read and what to solve or
calibrate; whether the profile must be measured first; which pipelines are slow; which iteration time to aim at; what
the agents shall hold; what to do next on each node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec, Mode, StragglerMode
from perseus_operator.planning.bound_guard import CONFIRM, Guard, Hold, judge, next_coarser, subject_of
from perseus_operator.planning.fixed_clock import clock_intent
from perseus_operator.planning.frontier_inputs import InputAction, Limits, hardware_for, input_actions, inputs_wake_s
from perseus_operator.planning.guard_cause import why_slow
from perseus_operator.planning.hardware import Hardware
from perseus_operator.planning.lifecycle import DeleteJob, next_deletion
from perseus_operator.planning.node_actions import Intent, NodeAction, is_applied, next_actions
from perseus_operator.planning.objective import Grain, Infeasible, Target, bound_us, select_points, target_of
from perseus_operator.planning.power_allocation import Share, fastest_within, replicas_of, within_share
from perseus_operator.planning.profile_planner import ProfilingAction, ProfilingStep, next_profiling_step
from perseus_operator.planning.readiness import (
    baseline_pending,
    first_node_fault,
    frontier_pending,
    ranks_pending,
    rehearsal_pending,
    schedule_pending,
)
from perseus_operator.planning.state import JobState
from perseus_operator.planning.stragglers.declared import declared_slowdowns

_NEVER_S = 3600.0
"""How soon to look again at a job about which nothing is to be done."""


@dataclass(frozen=True)
class Now:
    """The time by two clocks: monotonic for leases and retries, wall clock for a deadline by date."""

    monotonic_s: float
    wall_s: float


Action = InputAction | ProfilingAction | NodeAction | DeleteJob


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, what to report, and when to decide again.

    Attributes:
        actions: to be started now, concurrently.
        wanted: point of every pipeline, by dp; empty: there is no plan to enforce (yet).
        waiting: why ``wanted`` is empty or not in force.
        applied: every agent holds ``wanted``.
        slowdowns: of the stragglers that count, declared or detected, by dp.
        declared: which of them are declared.
        note: what the objective could not have, though a plan exists.
        advised_point: what the objective asks for, enforced or not; None: no frontier, or no point of it fits.
        profiling: what is being done about a profile that is missing or no longer fits; None: nothing.
        limiting_share: of a PowerBudget, where that and not the objective decides.
        hardware: what plans are rehearsed under from now on, to be remembered; None: the GPUs are not known yet.
        bound_us: what an iteration may take, without an allowance for stragglers; None: no bound, or not known yet.
        guard: whether measured iterations keep the bound, to be remembered.
        wake_at_s: when to decide again at the latest (monotonic).
    """

    actions: tuple[Action, ...] = ()
    wanted: Mapping[int, int] = field(default_factory=dict)
    waiting: Explanation | None = None
    applied: bool = False
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    declared: frozenset[int] = frozenset()
    note: str = ""
    advised_point: int | None = None
    profiling: Explanation | None = None
    limiting_share: Share | None = None
    hardware: Hardware | None = None
    guard: Guard
    bound_us: float | None = None
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
    if not spec.is_planned:
        intent = clock_intent(state, spec)
        nodes = list(next_actions(state, spec, intent, now_s=now.monotonic_s))
        return Decision(
            actions=(*(action for action, _ in nodes if action is not None), *deletions),
            waiting=intent.waiting,
            applied=intent.waiting is None,
            guard=state.guard,
            wake_at_s=min(now.monotonic_s + _NEVER_S, deletion_wake_s, *(wake_at_s for _, wake_at_s in nodes)),
        )
    hardware = hardware_for(state, spec)
    inputs = input_actions(state, spec, hardware, now_s=now.monotonic_s, limits=limits)
    not_ready = schedule_pending(state) or ranks_pending(state, spec) or baseline_pending(state, spec)
    profiling = next_profiling_step(state, spec, not_ready, now_s=now.monotonic_s)
    stragglers = _Stragglers() if profiling else _stragglers(state, spec, now)
    aim = _aim(state, spec, stragglers, now, profiling=profiling)
    intent = _intent(state, spec, aim, stragglers, profiling=profiling)
    nodes = list(next_actions(state, spec, intent, now_s=now.monotonic_s))

    applied = profiling is None and bool(intent.wanted) and is_applied(state, intent)
    waiting = intent.waiting
    if intent.wanted and not applied and waiting is None:
        waiting = first_node_fault(state) or Explanation(Reason.APPLYING, "The plans are being sent to the agents.")
    target = aim.target if isinstance(aim.target, Target) else None
    return Decision(
        actions=(
            *inputs,
            *(profiling.actions if profiling else ()),
            *(action for action, _ in nodes if action is not None),
            *deletions,
        ),
        wanted=intent.wanted,
        waiting=waiting,
        applied=applied,
        slowdowns=stragglers.slowdowns,
        declared=stragglers.declared,
        note=target.note if target else "",
        advised_point=state.frontier.lookup(target.time_us) if state.frontier and target else None,
        profiling=profiling.explanation if profiling else None,
        limiting_share=state.share if aim.limited_by_share else None,
        hardware=hardware,
        guard=aim.guard,
        bound_us=aim.bound_us,
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
        dp_of_gpu={rank.gpu_uuid: rank.dp for rank in state.ranks},
        pipelines=spec.pipeline.data_parallel,
    )
    detected = state.detector.slowdowns if spec.straggler.mode is StragglerMode.AUTOMATIC else {}
    merged = {dp: max(declared.get(dp, 1.0), detected.get(dp, 1.0)) for dp in declared.keys() | detected.keys()}
    return _Stragglers(merged, frozenset(declared))


def _stragglers_wake_s(state: JobState, now: Now) -> float:
    """When the next declared straggler takes effect (monotonic); infinite: none is to come."""
    starts = (straggler.from_s for straggler in state.declared_stragglers)
    return min((start_s for start_s in starts if start_s > now.monotonic_s), default=math.inf)


# --------------------------------------------------------------------------------------------- objective and bound


@dataclass(frozen=True)
class _Aim:
    """The iteration time to aim at, and what holds the job back from it."""

    target: Target | Infeasible | None
    limited_by_share: bool
    hold: Hold
    guard: Guard
    bound_us: float | None
    wake_at_s: float


def _aim(state: JobState, spec: JobSpec, stragglers: _Stragglers, now: Now, *, profiling: ProfilingStep | None) -> _Aim:
    wanted, replicas = current_target(state, spec, now), replicas_of(spec)
    target, limited = within_share(wanted, state.share, state.frontier, replicas)
    guard = state.guard
    if profiling is None:
        guard = _guard(state, spec, target, stragglers.slowdowns, now, limited=limited)
    # A job that is slowed because watts are short is slowed on purpose: no step of the guard may draw more.
    hold = min(guard.hold, Hold.FASTEST_PLAN) if limited else guard.hold
    if limited:
        target, _ = within_share(wanted, state.share, state.frontier, replicas, hold.finest)
    wake_at_s = math.inf
    if profiling is None and (guard.hold is not Hold.NOTHING or guard.trips):
        wake_at_s = guard.until_s if guard.hold else guard.until_s + guard.pause_s
    if hold is Hold.FASTEST_PLAN and not limited and state.frontier is not None and isinstance(target, Target):
        target = Target(state.frontier.t_min_us, target.note)
    return _Aim(target, limited, hold, guard, _bound_us(state, spec, guard, target, limited=limited), wake_at_s)


def current_target(state: JobState, spec: JobSpec, now: Now) -> Target | Infeasible | None:
    """The iteration time that the objective asks for now; None: there is no frontier yet."""
    if state.frontier is None:
        return None
    finish_by = spec.objective.deadline.finish_by if spec.objective.deadline else None
    return target_of(
        spec.objective,
        state.frontier,
        gpus_per_stage=replicas_of(spec),
        iterations_done=state.furthest_iteration,
        remaining_s=datetime.fromisoformat(finish_by).timestamp() - now.wall_s if finish_by else None,
    )


def _guard(
    state: JobState,
    spec: JobSpec,
    target: Target | Infeasible | None,
    slowdowns: Mapping[int, float],
    now: Now,
    *,
    limited: bool,
) -> Guard:
    """Whether measured iterations keep the bound, with an allowance for stragglers."""
    if state.frontier is None or state.history is None:
        return state.guard
    subject = subject_of(state.frontier.digest, spec.objective)
    guard = state.guard if state.guard.subject == subject else Guard(subject)
    bound = _bound_us(state, spec, guard, target, limited=limited)
    slowest = max([*slowdowns.values(), *state.detector.slowdowns.values()], default=1.0)
    if bound is not None:
        bound = max(bound, slowest * (fastest_iteration_us(state, guard) or state.frontier.t_min_us))
    coarser = None
    if isinstance(target, Target):
        coarser = next_coarser(state.frontier, _allowed(state, spec, target, limited=limited), guard.hold)
    return judge(
        guard,
        [i for i in state.history.recent if i.iteration >= state.plan_since],
        bound_us=bound,
        coarser=coarser,
        limited=limited,
        why=lambda slow: why_slow(slow, state.hardware.in_use),
        confirm=min(max(CONFIRM, spec.straggler.confirm_iterations + 1), state.history.recent.maxlen or CONFIRM),
        furthest=state.furthest_iteration,
        now_s=now.monotonic_s,
        wall_s=now.wall_s,
    )


def _allowed(state: JobState, spec: JobSpec, target: Target, *, limited: bool) -> Callable[[Grain], int | None]:
    """The point that share or objective allow where plans are not finer than a grain."""
    frontier, share = state.frontier, state.share
    assert frontier is not None
    if limited and share is not None:
        return lambda grain: fastest_within(share, frontier, replicas_of(spec), grain)
    return lambda grain: frontier.lookup(target.time_us + 0.5, grain)


def _bound_us(
    state: JobState, spec: JobSpec, guard: Guard, target: Target | Infeasible | None, *, limited: bool
) -> float | None:
    """What an iteration may take; None: no bound, or it is not known yet.

    That of the objective; where a PowerBudget decides, what the plans within the share are predicted to take. Of a job
    that is known to be slower than predicted at its fastest, they are slower by as much.
    """
    fastest_us, frontier = fastest_iteration_us(state, guard), state.frontier
    bound = bound_us(spec.objective, fastest_us, frontier.scatter if frontier else 1.0)
    if not limited or frontier is None or not isinstance(target, Target):
        return bound
    recent = state.history.recent if state.history is not None else ()
    ran = {point for i in recent if i.iteration >= state.plan_since for point in i.points.values() if point is not None}
    # The share may just have moved: iterations under the plan before are no evidence against the next one.
    slowest_us = frontier.times_us[min(max([frontier.lookup(target.time_us), *ran]), len(frontier.times_us) - 1)]
    slower = max(1.0, fastest_us / frontier.expected_us[0]) if fastest_us else 1.0
    return max(bound or 0.0, slowest_us * (1 + frontier.allowance) * slower)


def fastest_iteration_us(state: JobState, guard: Guard) -> int | None:
    """What an iteration takes without any slowdown, as measured, in microseconds; None: not known."""
    if guard.reference_us is not None:
        return guard.reference_us
    if state.baseline is not None:
        return state.baseline.time_us
    return state.frontier.t_min_us if state.frontier is not None and state.calibration.digest_in_use else None


# ------------------------------------------------------------------------------------------ what agents shall hold


def _intent(
    state: JobState, spec: JobSpec, aim: _Aim, stragglers: _Stragglers, *, profiling: ProfilingStep | None
) -> Intent:
    if profiling is not None:  # a sweep has a bound of its own; the objective's is for plans
        sweep = profiling.sweep
        points = dict.fromkeys(range(spec.pipeline.data_parallel), sweep.point) if sweep else {}
        return Intent(sweep.digest if sweep else None, points, profiling.drive, profiling.explanation)
    plans = state.frontier.digest if state.frontier else None
    waiting = _why_no_plan(state, spec, aim)
    if waiting is not None or state.frontier is None or not isinstance(aim.target, Target):
        return Intent(plans, {}, spec.mode is Mode.ENFORCE, waiting)
    if aim.hold is Hold.DEFAULT_CLOCKS:
        message = "Measured iterations exceeded the bound: default clocks until the next attempt."
        return Intent(plans, {}, False, Explanation(Reason.BOUND_EXCEEDED, message))
    wanted = select_points(
        state.frontier, aim.target.time_us, spec.pipeline.data_parallel, stragglers.slowdowns, aim.hold.finest
    )
    return Intent(plans, wanted, spec.mode is Mode.ENFORCE, None)


def _why_no_plan(state: JobState, spec: JobSpec, aim: _Aim) -> Explanation | None:
    if state.frontier is None or aim.target is None:
        return frontier_pending(state)
    if isinstance(aim.target, Infeasible):
        return Explanation(Reason.OBJECTIVE_INFEASIBLE, aim.target.message)
    if spec.mode is Mode.RECOMMEND:
        return Explanation(Reason.RECOMMEND_ONLY, "spec.mode is Recommend: no clocks are set.")
    if state.share is not None and state.share.watts is None:
        return Explanation(Reason.APPLYING, f"PowerBudget {state.share.budget} has not allotted a share yet.")
    rehearsing = rehearsal_pending(state)
    if rehearsing is not None:
        return rehearsing
    # A job that a budget limits skips the baseline: at default clocks it would draw more than its share.
    return ranks_pending(state, spec) or (None if aim.limited_by_share else baseline_pending(state, spec))


def common_point(wanted: Mapping[int, int], slowdowns: Mapping[int, float]) -> int:
    """The point of the pipelines that are no stragglers; of all pipelines, if all are."""
    healthy = [point for dp, point in wanted.items() if dp not in slowdowns]
    return Counter(healthy or wanted.values()).most_common(1)[0][0]
