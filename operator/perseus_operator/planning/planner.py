"""The mind: what to do next about one job, from everything known about it. Pure: no I/O, no clock, no waiting.

``plan(state, now, limits)`` is called by ``JobRunner`` after every change and whenever ``Plan.wake_at_s`` has come;
it is level-triggered: asked twice without a change in between, it wants the same. It never changes the state. At most
one action per node is planned, and none for a node that is busy: a slow agent holds up nobody else.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import JobSpec, Mode, StragglerMode
from perseus_operator.planning.bound_guard import CONFIRM, Guard, Hold, about, judge
from perseus_operator.planning.objective import Infeasible, Target, bound_us, selections, target
from perseus_operator.planning.power_allocation import Share, copies_of, within
from perseus_operator.planning.profile_planner import Need, ProfilingAction, need
from perseus_operator.planning.state import Fault, JobState, Node
from perseus_operator.planning.stragglers.annotation import told_slowdowns
from perseus_operator.planning.workloads import absence, silent


@dataclass(frozen=True)
class Now:
    """Time, twice: monotonic for leases and retries, wall clock for a deadline by date."""

    monotonic_s: float
    wall_s: float


@dataclass(frozen=True)
class Limits:
    """What the planner must know of the operator's settings."""

    lease_ttl_s: float = 30.0
    profile_retry_s: float = 5.0
    """How soon to look again for a profile that is missing or wrong."""
    profile_refresh_s: float = 60.0
    """How soon to look whether a good profile has changed."""
    calibrate_after: int = 40
    """Iterations to have seen before the first calibration."""
    calibrate_again: int = 100
    """Further ones before the next."""


@dataclass(frozen=True)
class ReadProfile:
    """Read the ConfigMap."""


@dataclass(frozen=True)
class Solve:
    """Get the frontier of these inputs: from its ConfigMap, or by solving."""

    digest: str


@dataclass(frozen=True)
class Calibrate:
    """Learn from the iterations seen so far how long iterations really take."""


@dataclass(frozen=True)
class Acquire:
    """Take the lease on a node, for its pods as they are now."""

    node: str


@dataclass(frozen=True)
class Renew:
    """Keep the lease."""

    node: str


@dataclass(frozen=True)
class Release:
    """Give the node's GPUs back to their default clocks."""

    node: str


@dataclass(frozen=True)
class Push:
    """Give the agent the plans of these stages, out of the plans of this digest."""

    node: str
    stages: frozenset[int]
    plans: str


@dataclass(frozen=True)
class Select:
    """Choose a point for some pipelines."""

    node: str
    points: tuple[tuple[int, int], ...]
    from_iteration: int


Action = ReadProfile | Solve | Calibrate | ProfilingAction | Acquire | Renew | Release | Push | Select
NodeAction = Acquire | Renew | Release | Push | Select


@dataclass(frozen=True)
class Plan:
    """What to do, what to say, and when to think again.

    Attributes:
        actions: to be started now, concurrently.
        wanted: a point for every pipeline; empty: there is no plan to enforce (yet).
        waiting: why ``wanted`` is empty or not in force.
        applied: every agent has taken ``wanted``.
        slowdowns: of stragglers that count, told or detected.
        told: which of them were told.
        note: what the objective could not have, though a plan exists.
        advised_point: what the objective asks for, enforced or not; None: no frontier, or no point of it will do.
        limited: the share of a PowerBudget, where that and not the objective decides.
        guard: whether the objective's bound is kept, to be remembered.
        wake_at_s: monotonic.
        profiling: what is being done about a profile that is missing or no longer fits; None: nothing need be.
    """

    actions: tuple[Action, ...]
    wanted: dict[int, int]
    waiting: Fault | None
    applied: bool
    slowdowns: dict[int, float]
    told: frozenset[int]
    note: str
    advised_point: int | None
    guard: Guard
    wake_at_s: float
    profiling: Fault | None = None
    limited: Share | None = None


def inputs_digest(
    spec: JobSpec,
    profile_digest: str,
    calibration_digest: str = "",
    *,
    measured_power_mw: int | None = None,
    order: str = "",
) -> str:
    """SHA-256 over everything that the frontier depends on; the leading word changes with the solver's format."""
    given = spec.profile.blocking_power_milliwatts
    parts = (
        "perseus.frontier.1",
        profile_digest,
        spec.pipeline.schedule.value if spec.pipeline.schedule else "",
        spec.pipeline.stages,
        spec.pipeline.microbatches,
        spec.pipeline.chunks,
        measured_power_mw if given is None else given,
        spec.points,
        calibration_digest,
        *([order] if order else ()),
        *([f"switching {spec.switching.max_energy_loss_ratio}"] if spec.switching else ()),
    )
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def plan(state: JobState, now: Now, limits: Limits) -> Plan:
    """Decide. See the module's docstring."""
    if state.spec is None or state.fenced is not None:
        # Nothing accepted yet, or a newer operator is in command: hands off. Leases that we hold run out by themselves.
        fault, wake_at_s = state.fenced or state.spec_fault, now.monotonic_s + 3600
        return Plan((), {}, fault, False, {}, frozenset(), "", None, state.guard, wake_at_s)
    spec = state.spec
    actions: list[Action] = []
    wake = [now.monotonic_s + limits.profile_refresh_s]

    due_s = _profile_due_s(state, limits)
    if not state.reading and due_s <= now.monotonic_s:
        actions.append(ReadProfile())
    elif not state.reading:
        wake.append(due_s)

    if state.profile_digest is not None and state.order_known:
        digest = inputs_digest(
            spec,
            state.profile_digest,
            state.learning.in_use,
            measured_power_mw=state.measured_power_mw,
            order=state.order or "",
        )
        if _solve_due(state, digest):
            actions.append(Solve(digest))
        elif _calibrate_due(state, limits):
            actions.append(Calibrate())

    unready = _order_fault(state) or _ranks_fault(state, spec) or _baseline_fault(state, spec)
    needed = need(state, spec, unready, now_s=now.monotonic_s)
    if needed is not None:
        actions.extend(needed.actions)
        wake.append(needed.wake_at_s)
    slowdowns, told = ({}, frozenset[int]()) if needed else _slowdowns(state, spec, now)
    wake.extend(notice.from_s for notice in state.told if notice.from_s > now.monotonic_s)

    asked, limited = within(goal(state, spec, now), state.share, state.frontier, copies_of(spec))
    # Slower because watts are short is slower by intent: no bound is kept then, and no fallback may draw more.
    guard = state.guard if needed or limited else _guard(state, spec, slowdowns, now)
    hold = Hold.NOTHING if limited else guard.hold
    if needed is None and (guard.hold is not Hold.NOTHING or guard.trips):
        wake.append(guard.until_s if guard.hold else guard.until_s + guard.pause_s)
    if hold is Hold.FASTEST_PLAN and state.frontier is not None and isinstance(asked, Target):
        asked = Target(state.frontier.t_min_us, asked.note)
    note = asked.note if isinstance(asked, Target) else ""
    advised = state.frontier.lookup(asked.time_us) if state.frontier and isinstance(asked, Target) else None
    intent = _intent(state, spec, asked, slowdowns, hold=hold, needed=needed, limited=limited)
    for action, wake_at_s in _on_nodes(state, spec, intent, now):
        if action is not None:
            actions.append(action)
        wake.append(wake_at_s)

    wanted, waiting = intent.wanted, intent.waiting
    applied = needed is None and bool(wanted) and _in_force(state, intent)
    if wanted and not applied and waiting is None:
        waiting = first_fault(state) or Fault(Reason.APPLYING, "Agents are being told.")
    said = needed.said if needed else None
    share = state.share if limited else None
    return Plan(tuple(actions), wanted, waiting, applied, slowdowns, told, note, advised, guard, min(wake), said, share)


@dataclass(frozen=True)
class _Intent:
    """What agents shall be told: to hold the plans of this digest, and the point of each pipeline; whether clocks may
    be touched at all; and why there is nothing to tell."""

    plans: str | None
    wanted: dict[int, int]
    drive: bool
    waiting: Fault | None


def _intent(
    state: JobState,
    spec: JobSpec,
    asked: Target | Infeasible | None,
    slowdowns: dict[int, float],
    *,
    hold: Hold,
    needed: Need | None,
    limited: bool,
) -> _Intent:
    if needed is not None:  # a sweep keeps a bound of its own: that of the objective is for plans
        sweep = needed.sweep
        points = dict.fromkeys(range(spec.pipeline.data_parallel), sweep.point) if sweep else {}
        return _Intent(sweep.digest if sweep else None, points, needed.drive, needed.said)
    plans = state.frontier.digest if state.frontier else None
    wanted, waiting = _wanted(state, spec, asked, slowdowns, limited=limited)
    if wanted and hold is Hold.DEFAULT_CLOCKS:
        waiting = Fault(Reason.BOUND_EXCEEDED, "The bound was exceeded: default clocks until the next attempt.")
        return _Intent(plans, {}, False, waiting)
    return _Intent(plans, wanted, spec.mode is Mode.ENFORCE, waiting)


def _in_force(state: JobState, intent: _Intent) -> bool:
    nodes = [node for node in state.nodes.values() if node.ranks]
    return all(_holds(node, intent.plans) and _selected(node, intent.wanted) for node in nodes)


def _on_nodes(state: JobState, spec: JobSpec, intent: _Intent, now: Now) -> Iterator[tuple[NodeAction | None, float]]:
    """At most one action for every node, and when to look at it again."""
    may_select = bool(intent.wanted) and all(
        _holds(node, intent.plans) or (node.fault is not None and node.selected)
        for node in state.nodes.values()
        if node.pods
    )
    wanted = intent.wanted if may_select else {}
    from_iteration = state.furthest_iteration + 1
    for node in state.nodes.values():
        if node.busy or node.address is None:
            continue
        if node.retry_at_s > now.monotonic_s:
            yield None, node.retry_at_s
            continue
        # No plans are to be had for a stage that a process made up.
        plans = intent.plans if max(node.stages, default=0) < spec.pipeline.stages else None
        action = _node_action(node, intent.drive, plans, wanted, from_iteration=from_iteration, now=now)
        leased = action is None and node.leased_pods is not None
        yield action, node.renew_at_s if leased else math.inf


def _profile_due_s(state: JobState, limits: Limits) -> float:
    if state.profile_read_at_s is None:
        return 0.0
    return state.profile_read_at_s + (
        limits.profile_retry_s if state.profile_fault or state.order_fault else limits.profile_refresh_s
    )


def _solve_due(state: JobState, digest: str) -> bool:
    have = state.frontier is not None and state.frontier.digest == digest
    refused = state.solve_fault is not None and state.solve_fault[0] == digest
    return not have and not refused and state.solving is None


def _calibrate_due(state: JobState, limits: Limits) -> bool:
    learning = state.learning
    if learning.running or state.solving is not None or state.frontier is None:
        return False
    return learning.kept >= limits.calibrate_after and (not learning.begun or learning.since >= limits.calibrate_again)


def _slowdowns(state: JobState, spec: JobSpec, now: Now) -> tuple[dict[int, float], frozenset[int]]:
    """Stragglers that count, told ones over detected ones; and which were told."""
    if spec.straggler.mode is StragglerMode.OFF:
        return {}, frozenset()
    told = told_slowdowns(
        state.told,
        now_s=now.monotonic_s,
        pipeline_of_gpu={rank.gpu_uuid: rank.pipeline for rank in state.ranks},
        pipelines=spec.pipeline.data_parallel,
    )
    detected = state.detector.slowdowns if spec.straggler.mode is StragglerMode.AUTOMATIC else {}
    merged = {p: max(told.get(p, 1.0), detected.get(p, 1.0)) for p in told.keys() | detected.keys()}
    return merged, frozenset(told)


def _guard(state: JobState, spec: JobSpec, slowdowns: dict[int, float], now: Now) -> Guard:
    """Whether measured iterations keep the bound, stragglers allowed for."""
    if state.frontier is None or state.history is None:
        return state.guard
    subject = about(state.frontier.digest, spec.objective)
    guard = state.guard if state.guard.about == subject else Guard(subject)
    fastest_us = fastest(state, guard)
    bound = bound_us(spec.objective, fastest_us)
    slowest = max([*slowdowns.values(), *state.detector.slowdowns.values()], default=1.0)
    if bound is not None:
        bound = max(bound, slowest * (fastest_us or state.frontier.t_min_us))
    return judge(
        guard,
        [i for i in state.history.recent if i.iteration >= state.plan_since],
        bound_us=bound,
        confirm=min(max(CONFIRM, spec.straggler.confirm_iterations + 1), state.history.recent.maxlen or CONFIRM),
        furthest=state.furthest_iteration,
        now_s=now.monotonic_s,
        wall_s=now.wall_s,
    )


def fastest(state: JobState, guard: Guard) -> int | None:
    """What an iteration takes without any slowdown, as measured; None: not known."""
    if guard.reference_us is not None:
        return guard.reference_us
    if state.baseline is not None:
        return state.baseline.time_us
    return state.frontier.t_min_us if state.frontier is not None and state.learning.in_use else None


def _wanted(
    state: JobState, spec: JobSpec, asked: Target | Infeasible | None, slowdowns: dict[int, float], *, limited: bool
) -> tuple[dict[int, int], Fault | None]:
    """A point for every pipeline; or none and why."""
    if state.frontier is None or asked is None:
        return {}, _frontier_fault(state)
    if isinstance(asked, Infeasible):
        return {}, Fault(Reason.OBJECTIVE_INFEASIBLE, asked.message)
    if spec.mode is Mode.RECOMMEND:
        return {}, Fault(Reason.RECOMMEND_ONLY, "spec.mode is Recommend: clocks are not touched.")
    if state.share is not None and state.share.watts is None:
        return {}, Fault(Reason.APPLYING, f"PowerBudget {state.share.budget} is being shared.")
    # At default clocks a job draws more than its share.
    fault = _ranks_fault(state, spec) or (None if limited else _baseline_fault(state, spec))
    if fault is not None:
        return {}, fault
    return selections(state.frontier, asked.time_us, spec.pipeline.data_parallel, slowdowns), None


def goal(state: JobState, spec: JobSpec, now: Now) -> Target | Infeasible | None:
    """The iteration time that the objective asks for at this moment; None: no frontier yet."""
    if state.frontier is None:
        return None
    finish_by = spec.objective.deadline.finish_by if spec.objective.deadline else None
    return target(
        spec.objective,
        state.frontier,
        gpus_per_stage=copies_of(spec),
        iterations_done=state.furthest_iteration,
        remaining_s=datetime.fromisoformat(finish_by).timestamp() - now.wall_s if finish_by else None,
    )


def _order_fault(state: JobState) -> Fault | None:
    """Why it is not known what the pipelines run."""
    if state.order_known:
        return None
    asked = Fault(Reason.WAITING_FOR_RANKS, "Not all training processes have told yet what they run.")
    return state.order_fault or asked


def _frontier_fault(state: JobState) -> Fault:
    unknown = _order_fault(state)
    if unknown is not None:
        return Fault(Reason.WAITING_FOR_FRONTIER, unknown.message)
    if state.profile_fault is not None:
        return Fault(Reason.WAITING_FOR_FRONTIER, state.profile_fault.message)
    if state.solve_fault is not None and state.solving is None:
        return Fault(Reason.WAITING_FOR_FRONTIER, state.solve_fault[1].message)
    return Fault(Reason.WAITING_FOR_FRONTIER, "The frontier is being solved.")


def _ranks_fault(state: JobState, spec: JobSpec) -> Fault | None:
    """Whether every place of the job's shape is taken by exactly one process."""
    shape = spec.pipeline
    if not any(node.pods for node in state.nodes.values()):
        absent = absence(state)
        return absent if absent.reason is Reason.SUSPENDED else Fault(Reason.WAITING_FOR_AGENTS, absent.message)
    ranks = state.ranks
    for rank in ranks:
        if rank.pipeline >= shape.data_parallel or rank.stage >= shape.stages or rank.tensor >= shape.tensor_parallel:
            return Fault(
                Reason.RANKS_MISMATCH,
                f"A training process says it is pipeline {rank.pipeline}, stage {rank.stage}, tensor rank"
                f" {rank.tensor}; spec.pipeline has {shape.data_parallel} × {shape.stages} × {shape.tensor_parallel}.",
            )
    expected = shape.data_parallel * shape.stages * shape.tensor_parallel
    if len(ranks) > expected or len({rank.place for rank in ranks}) < len(ranks):
        return Fault(
            Reason.RANKS_MISMATCH, f"{len(ranks)} training processes for {expected} places: some place is taken twice."
        )
    if len(ranks) < expected:
        fault = first_fault(state)
        if fault is not None:
            return Fault(Reason.WAITING_FOR_AGENTS, fault.message)
        said = f"{len(ranks)} of {expected} training processes have connected{silent(state)}."
        return Fault(Reason.WAITING_FOR_RANKS, said)
    return None


def _baseline_fault(state: JobState, spec: JobSpec) -> Fault | None:
    """Iterations at default clocks come first, unless a plan is in force already (this operator has restarted)."""
    if spec.baseline_iterations == 0 or state.baseline is not None or state.history is None:
        return None
    seen = [point for iteration in state.history.recent for point in iteration.points.values()]
    if any(node.driven for node in state.nodes.values()) or any(point is not None for point in seen):
        return None
    return Fault(
        Reason.MEASURING_BASELINE,
        f"{len(state.history.unplanned)} of {spec.baseline_iterations} iterations measured at default clocks.",
    )


def first_fault(state: JobState) -> Fault | None:
    """What keeps some node that runs pods of the job from being commanded."""
    for node in state.nodes.values():
        if node.pods and node.address is None:
            return Fault(Reason.NO_AGENT, f"Node {node.name} runs pods of the job but no Perseus agent.")
        if node.pods and node.fault is not None:
            return node.fault
    return None


def _holds(node: Node, plans: str | None) -> bool:
    """The agent has these plans for every stage it runs."""
    return (
        node.leased_pods is not None
        and node.pushed is not None
        and plans is not None
        and node.pushed[0] == plans
        and node.stages <= node.pushed[1]
    )


def _selected(node: Node, wanted: dict[int, int]) -> bool:
    return all(node.selected.get(pipeline) == wanted.get(pipeline) for pipeline in node.pipelines)


def _node_action(
    node: Node, drive: bool, plans: str | None, wanted: dict[int, int], *, from_iteration: int, now: Now
) -> NodeAction | None:
    """The one thing to do next on a node. Keeping the lease goes first: without it nothing else lasts."""
    if not node.pods or (not drive and node.driven):
        return Release(node.name)
    if node.leased_pods != node.pods or node.expires_at_s <= now.monotonic_s:
        return Acquire(node.name)
    if node.renew_at_s <= now.monotonic_s:
        return Renew(node.name)
    if drive and plans is not None and node.ranks and not _holds(node, plans):
        return Push(node.name, node.stages, plans)
    if wanted and node.ranks and not _selected(node, wanted):
        points = tuple((pipeline, wanted[pipeline]) for pipeline in sorted(node.pipelines))
        return Select(node.name, points, from_iteration)
    return None


def common_point(wanted: dict[int, int], slowdowns: dict[int, float]) -> int:
    """The point of the pipelines that are not slow; of all, if all are."""
    healthy = [point for pipeline, point in wanted.items() if pipeline not in slowdowns]
    return Counter(healthy or wanted.values()).most_common(1)[0][0]
