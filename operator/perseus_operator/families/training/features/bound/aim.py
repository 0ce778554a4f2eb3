"""The iteration time to aim at: what the objective asks for, what a PowerBudget leaves of it, and what a job is held
at after measured iterations did not keep the bound (``bound_guard``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from perseus_core.grain import Grain
from perseus_operator.api.job import JobSpec
from perseus_operator.families.training.facts import Facts
from perseus_operator.families.training.features.bound.cause import why_slow
from perseus_operator.families.training.features.bound.guard import (
    CONFIRM,
    Bound,
    Guard,
    Hold,
    judge,
    least_excess,
    next_coarser,
    scatter_of,
    subject_of,
)
from perseus_operator.families.training.features.frontier.objective import Infeasible, Target, bound_us, target_of
from perseus_operator.families.training.features.hardware.hardware import JobHardware
from perseus_operator.families.training.features.power.plans import fastest_within, replicas_of, spent_by, within_share
from perseus_operator.nodes.iterations import KEPT, JobIteration
from perseus_operator.objects.values import Now
from perseus_operator.solving.view import FrontierView


@dataclass(frozen=True)
class Aim:
    """The iteration time to aim at, and what holds the job back from it.

    Attributes:
        target: as the objective asks, or as a PowerBudget allows; None: there is no frontier yet.
        unlimited: as the objective, or the guard, asks without a PowerBudget; None: there is no frontier yet.
        limited_by_share: a PowerBudget decides and not these.
        hold: what the job is held at, after measured iterations did not keep the bound.
        guard: whether they do, to be remembered.
        bound_us: what an iteration may take, without an allowance for stragglers; None: no bound, or not known yet.
        least_excess: by what share iterations must exceed it to be distinguished from load; None: not known yet.
        wake_at_s: when a hold ends (monotonic); infinite: there is none.
    """

    target: Target | Infeasible | None
    unlimited: Target | Infeasible | None
    limited_by_share: bool
    hold: Hold
    guard: Guard
    bound_us: float | None
    least_excess: float | None
    wake_at_s: float


@dataclass(frozen=True)
class Seen:
    """What telemetry shows, by which measured iterations are judged.

    Attributes:
        slowdowns: of the stragglers that count, declared or detected, by dp.
        detected: of those that are detected, whether they count or not.
        hardware: what its plans were rehearsed under; None: the GPUs are not known yet.
    """

    slowdowns: Mapping[int, float]
    detected: Mapping[int, float]
    hardware: JobHardware | None


def aim_of(guard: Guard, facts: Facts, seen: Seen, now: Now, *, profiling: bool) -> Aim:
    """The iteration time to aim at now.

    Args:
        guard: whether measured iterations have kept the bound so far.
        facts: of the job.
        seen: what telemetry shows.
        now: the time.
        profiling: whether a profile is measured first: then measured iterations are not judged.
    """
    wanted = current_target(facts.spec, facts.frontier, facts.nodes.furthest_iteration, now)
    spent = spent_by(facts)
    target, limited = within_share(wanted, facts.share, facts.frontier, spent)
    if not profiling:
        guard = _guard(guard, facts, seen, target, now, limited=limited)
    # No step of the guard may draw more than a share: a job gets no watts of others by being slow.
    hold = guard.hold if facts.share is None else min(guard.hold, Hold.FASTEST_PLAN)
    if hold is Hold.FASTEST_PLAN and not limited and facts.frontier is not None and isinstance(wanted, Target):
        wanted = Target(facts.frontier.t_min_us, wanted.note)
    target, limited = within_share(wanted, facts.share, facts.frontier, spent, hold.finest)
    wake_at_s = math.inf
    if not profiling and (guard.hold is not Hold.NOTHING or guard.trips):
        wake_at_s = guard.until_s if guard.hold else guard.until_s + guard.pause_s
    bound, excess = _bound(facts, guard, target, limited=limited), None
    if bound is not None and facts.history is not None:
        excess = least_excess(scatter_of(facts.history.recent), bound, confirm=_confirm(facts.spec))
    return Aim(target, wanted, limited, hold, guard, bound.time_us if bound else None, excess, wake_at_s)


def current_target(
    spec: JobSpec, frontier: FrontierView | None, iterations_done: int, now: Now
) -> Target | Infeasible | None:
    """The iteration time that the objective asks for now; None: there is no frontier yet."""
    if frontier is None:
        return None
    finish_by = spec.objective.deadline.finish_by if spec.objective.deadline else None
    return target_of(
        spec.objective,
        frontier,
        gpus_per_stage=replicas_of(spec),
        iterations_done=iterations_done,
        remaining_s=datetime.fromisoformat(finish_by).timestamp() - now.wall_s if finish_by else None,
    )


def _guard(
    guard: Guard, facts: Facts, seen: Seen, target: Target | Infeasible | None, now: Now, *, limited: bool
) -> Guard:
    """Whether measured iterations keep the bound, with an allowance for stragglers."""
    if facts.frontier is None or facts.history is None:
        return guard
    subject = subject_of(facts.frontier.digest, facts.spec.objective)
    guard = guard if guard.subject == subject else Guard(subject)
    since = facts.nodes.plan_since
    bound = _bound(facts, guard, target, limited=limited)
    stragglers = [*seen.slowdowns.values(), *seen.detected.values()]
    slowest = max(stragglers, default=1.0)
    if stragglers:
        guard = replace(guard, beside_straggler=facts.nodes.furthest_iteration)
    else:
        since = max(since, guard.beside_straggler + 1)
    if bound is not None:
        waited_us = slowest * (fastest_iteration_us(facts, guard) or facts.frontier.t_min_us)
        bound = replace(bound, time_us=max(bound.time_us, waited_us))
    coarser = None
    if isinstance(target, Target):
        coarser = next_coarser(facts.frontier, _allowed(facts, target, limited=limited), guard.hold)
    slower_aim = partial(_of_slower_aim, frontier=facts.frontier, target=target)
    return judge(
        guard,
        [i for i in facts.history.recent if i.iteration >= since and (limited or not slower_aim(i))],
        bound=bound,
        scatter=scatter_of(facts.history.recent),
        coarser=coarser,
        limited=limited,
        why=lambda slow: why_slow(slow, seen.hardware),
        confirm=_confirm(facts.spec),
        furthest=facts.nodes.furthest_iteration,
        now_s=now.monotonic_s,
        wall_s=now.wall_s,
    )


def _of_slower_aim(iteration: JobIteration, frontier: FrontierView, target: Target | Infeasible | None) -> bool:
    """Whether all pipelines ran slower plans than those aimed at now, as before a PowerBudget went or the objective was
    edited: such an iteration was slow on purpose.
    """
    points = [point for point in iteration.points.values() if point is not None]
    aimed = frontier.lookup(target.time_us + 0.5) if isinstance(target, Target) else None
    return aimed is not None and bool(points) and min(points) > aimed


def _confirm(spec: JobSpec) -> int:
    """Iterations in a row that withdraw a plan: more than a straggler needs to be found."""
    return min(max(CONFIRM, spec.straggler.confirm_iterations + 1), KEPT)


def _bound(facts: Facts, guard: Guard, target: Target | Infeasible | None, *, limited: bool) -> Bound | None:
    """What iterations without stragglers may take, and how well it is known; None: no bound, or not known yet."""
    time_us, frontier = _bound_us(facts, guard, target, limited=limited), facts.frontier
    if time_us is None or frontier is None:
        return None
    point = frontier.lookup(target.time_us + 0.5) if isinstance(target, Target) else 0
    typical = frontier.expected_us[point] / frontier.times_us[point]
    if facts.spec.objective.deadline is not None:
        return Bound(time_us, typical)
    if guard.reference_us is not None:
        return Bound(time_us, typical, guard.reference_iterations)
    return Bound(time_us, typical, max(1, facts.baseline.iterations) if facts.baseline is not None else math.inf)


def _allowed(facts: Facts, target: Target, *, limited: bool) -> Callable[[Grain], int | None]:
    """The point that share or objective allow where plans are not finer than a grain."""
    frontier, share = facts.frontier, facts.share
    assert frontier is not None
    if limited and share is not None:
        return lambda grain: fastest_within(share, frontier, spent_by(facts), grain)
    return lambda grain: frontier.lookup(target.time_us + 0.5, grain)


def _bound_us(facts: Facts, guard: Guard, target: Target | Infeasible | None, *, limited: bool) -> float | None:
    """What an iteration may take; None: no bound, or it is not known yet.

    That of the objective; where a PowerBudget decides, what the plans within the share are predicted to take. Of a job
    that is known to be slower than predicted at its fastest, they are slower by as much.
    """
    fastest_us, frontier = fastest_iteration_us(facts, guard), facts.frontier
    bound = bound_us(facts.spec.objective, fastest_us, frontier.scatter if frontier else 1.0)
    if not limited or frontier is None or not isinstance(target, Target):
        return bound
    recent, since = facts.history.recent if facts.history is not None else (), facts.nodes.plan_since
    ran = {point for i in recent if i.iteration >= since for point in i.points.values() if point is not None}
    # The share may just have moved: iterations under the plan before are no evidence against the next one.
    slowest_us = frontier.times_us[min(max([frontier.lookup(target.time_us), *ran]), len(frontier.times_us) - 1)]
    slower = max(1.0, fastest_us / frontier.expected_us[0]) if fastest_us else 1.0
    return max(bound or 0.0, slowest_us * (1 + frontier.allowance) * slower)


def fastest_iteration_us(facts: Facts, guard: Guard) -> int | None:
    """What an iteration takes without any slowdown, as measured, in microseconds; None: not known."""
    if guard.reference_us is not None:
        return guard.reference_us
    if facts.baseline is not None:
        return facts.baseline.time_us
    return facts.frontier.t_min_us if facts.frontier is not None and facts.calibrated else None
