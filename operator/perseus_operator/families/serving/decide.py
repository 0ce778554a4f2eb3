"""What the agents of a pool shall hold, and whether to fit: a pure function of what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perseus_core.leases import RestingClock
from perseus_core.serving import DEFAULT_CLOCKS, FOLLOW_TABLE, EngineOrders, PageAddress, ServingLimits
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import Mode
from perseus_operator.api.serving.spec import PoolSpec, Role, Scaling
from perseus_operator.families.serving.features.advice.capacity import CapacityWork, ReplicaModels
from perseus_operator.families.serving.features.groups.clocks import LOOK_S, confirmed, worker_clocks
from perseus_operator.families.serving.features.inheritance.inheritance import ReadProfile
from perseus_operator.families.serving.features.model.state import FitWork, StoreProfile
from perseus_operator.families.serving.features.objective.baseline import REQUESTS, SHARE
from perseus_operator.families.serving.features.power.ceiling import PoolCeiling, resting_clock
from perseus_operator.families.serving.features.split.planning import PlanBasis, PlanWork
from perseus_operator.families.serving.pool import ServingPool
from perseus_operator.jobs.decision import Decision
from perseus_operator.jobs.waiting import no_clocks
from perseus_operator.nodes.actions import Intent
from perseus_operator.nodes.engines import orders_for
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.node import Node
from perseus_operator.objects.values import Now
from perseus_solver.serving import LEAST_WINDOWS, MARGIN

_LOOK_S: Final = 5.0
"""How often figures are reported though nothing happens."""


@dataclass(frozen=True, kw_only=True)
class ServingDecision(Decision):
    """What is decided about a pool.

    Attributes:
        trying: whether the canary holds a clock that is tried.
        granted: what a share of a PowerBudget allows; None: no budget limits the pool.
    """

    actions: tuple[FitWork | ReadProfile | StoreProfile | CapacityWork | PlanWork, ...] = ()
    trying: bool = False
    granted: PoolCeiling | None = None

    @property
    def slowdown(self) -> float | None:
        """By what share the pool could do more without its PowerBudget; None: no budget slows it."""
        return None if self.granted is None or self.granted.speed >= 1.0 else 1.0 / self.granted.speed - 1.0


def decide(pool: ServingPool, now: Now) -> ServingDecision:
    """Decide what all engines run at."""
    spec = pool.spec
    if spec is None:
        return ServingDecision(intent=None)
    limits = pool.limits
    if not spec.sets_clocks or limits is None:
        waiting = no_limits(pool) if spec.mode.sets_clocks else no_clocks(spec.mode)
        orders = EngineOrders(limits or ServingLimits(None, None), pages=_pages(pool, spec))
        intent = Intent(None, {}, drive=False, waiting=waiting, orders=orders)
        actions = _capacity(pool, now) + _plan(pool, now)
        return ServingDecision(intent=intent, actions=actions, wake_at_s=now.monotonic_s + _LOOK_S)
    trying, granted = pool.trying(now.wall_s), pool.granted
    advising = _capacity(pool, now) + _plan(pool, now)
    table = None if pool.model.table is None else pool.model.table.under(pool.ceiling_mhz)
    wanted_mhz = _clocks(pool, now, trying=trying)
    orders = EngineOrders(limits, table, _confirmed(pool, wanted_mhz), _pages(pool, spec))
    resting = resting_clock(granted, pool.job.share)
    resting_at = worker_clocks(wanted_mhz, pool.signals.replicas, resting)
    intent = Intent(None, {}, drive=True, waiting=None, resting=resting, orders=orders, resting_at=resting_at)
    applied = holds_orders(pool.job.nodes, orders) and rests_at(pool.job.nodes, intent)
    return ServingDecision(
        intent=intent,
        actions=_fit(pool, spec, limits, now) + _profile(pool, now, trying=trying) + advising,
        applied=applied and pool.model.table is not None and not pool.inheritance.confirming,
        trying=trying,
        granted=granted,
        wake_at_s=now.monotonic_s + (LOOK_S if resting_at else _LOOK_S),
    )


def _clocks(pool: ServingPool, now: Now, *, trying: bool) -> dict[str, int]:
    """The clock of each replica, by the UID of its pod; those that are not named run at default clocks."""
    canary, back = pool.trials.canary, pool.switched_back(now.wall_s)
    clocks_mhz: dict[str, int] = {}
    for replica in pool.signals.replicas:
        uid = replica.pod_uid
        if uid == canary and trying:
            clocks_mhz[uid] = pool.trials.clock_mhz
        elif pool.model.table is not None and pool.follows(uid) and uid != back:
            clocks_mhz[uid] = FOLLOW_TABLE
        if replica.workers and uid in clocks_mhz:
            clocks_mhz[uid] = pool.group_mhz(replica, clocks_mhz[uid], now.wall_s)
    return {uid: mhz for uid, mhz in clocks_mhz.items() if mhz != DEFAULT_CLOCKS}


def _confirmed(pool: ServingPool, wanted_mhz: dict[str, int]) -> dict[str, int]:
    """What may be ordered by now: a group's leader is lowered once the agents of all its workers hold the clock."""
    groups = {replica.pod_uid: replica for replica in pool.signals.replicas if replica.workers}
    nodes = pool.job.nodes
    return {uid: mhz for uid, mhz in wanted_mhz.items() if uid not in groups or confirmed(groups[uid], mhz, nodes)}


def _pages(pool: ServingPool, spec: PoolSpec) -> dict[str, PageAddress]:
    """Where engines without the plugin show their metrics, by the UID of the pod."""
    pods = [pod for node in pool.job.nodes.values() for pod in node.pods if pod.address]
    return {pod.uid: PageAddress(pod.address, spec.engine.port, spec.engine.path) for pod in pods}


def _fit(pool: ServingPool, spec: PoolSpec, limits: ServingLimits, now: Now) -> tuple[FitWork, ...]:
    """The fit that is due; empty: none is."""
    model, replicas = pool.model, pool.signals.replicas
    if not replicas or not model.fit_due(now.monotonic_s):
        return ()
    slowdown = spec.max_slowdown_ratio
    wanted = FitWork(
        windows=model.windows,
        highest_mhz=replicas[0].highest_mhz,
        ladder_mhz=pool.ladder_mhz(spec.clocks.minimum_megahertz),
        limits=limits,
        prompt_tokens=model.prompt_tokens,
        mix=model.mix,
        switch_s=max(replica.switch_s for replica in replicas),
        prompts=pool.role is Role.PREFILL,
        margin=MARGIN if slowdown is None else SHARE,
        slower=0.0 if slowdown is None else SHARE * (1.0 + slowdown),
    )
    return (wanted,) if wanted.ladder_mhz else ()


def _profile(pool: ServingPool, now: Now, *, trying: bool) -> tuple[ReadProfile | StoreProfile, ...]:
    """Whether a profile of the engine is to be read, or stored."""
    model = pool.model
    if not pool.signals.replicas:
        return ()
    if pool.inheritance.read_due(now.monotonic_s):
        return (ReadProfile(),)
    if trying or pool.inheritance.confirming or not model.store_due(now.monotonic_s):
        return ()
    return (StoreProfile(model.windows_to_store, model.prompt_tokens),)


def _capacity(pool: ServingPool, now: Now) -> tuple[CapacityWork, ...]:
    """What a replica carries, if that is to be computed; empty: it is not, or cannot be yet."""
    spec, limits, kind, adviser, model = pool.spec, pool.limits, pool.arrivals.kind, pool.adviser, pool.model
    if spec is None or spec.scaling is not Scaling.ADVISE or limits is None or kind is None:
        return ()
    if not pool.signals.replicas or not adviser.compute_due(now.monotonic_s):
        return ()
    replica, result = pool.signals.replicas[0], model.result
    steps, fits = adviser.capacity.steps, adviser.fit_due(now.monotonic_s)
    if result is not None and result.models is not None and model.explained and not pool.inheritance.confirming:
        steps, fits = ReplicaModels(result.models.best, result.watts), False
    windows = model.windows_at(replica.highest_mhz) if fits else ()
    if steps is None and len(windows) < LEAST_WINDOWS:
        return ()
    prompts = pool.role is Role.PREFILL
    return (CapacityWork(steps, windows, replica.highest_mhz, kind, limits, replica.engine.flags, prompts),)


def _plan(pool: ServingPool, now: Now) -> tuple[PlanWork, ...]:
    """The plan of pools by length that is to be made; empty: none is, or what it needs is not known yet."""
    spec, limits, kind, model, adviser = pool.spec, pool.limits, pool.arrivals.kind, pool.model, pool.adviser
    if spec is None or spec.scaling is not Scaling.ADVISE or limits is None or kind is None:
        return ()
    # Engines that do one part alone are planned with their counterparts, of which this pool knows nothing.
    if not pool.signals.replicas or pool.role is not Role.MIXED or not pool.planning.may_begin(now.wall_s):
        return ()
    if not model.explained or pool.inheritance.confirming or not adviser.forecast.text or not pool.lengths.known:
        return ()
    replica = pool.signals.replicas[0]
    shares = {one.name: one.share for one in pool.lengths.classes()[0]}
    basis = PlanBasis(replica.fingerprint, limits, adviser.forecast.mean_of_day, shares)
    if not pool.planning.due(basis, now.wall_s):
        return ()
    work = PlanWork(
        basis=basis,
        counts=pool.lengths.counts,
        epochs=adviser.forecast.text,
        kind=kind,
        windows=model.windows_to_store,
        highest_mhz=replica.highest_mhz,
        gpus=replica.gpus,
        model=replica.engine.model,
        flags=replica.engine.flags,
        start_s=adviser.starts.start_s,
    )
    return (work,)


def are_lowered(pool: ServingPool) -> bool:
    """Whether the clocks of all replicas follow a table that has lower clocks than the default ones."""
    enforced = pool.spec is not None and pool.spec.mode is Mode.ENFORCE and pool.limits is not None
    return enforced and pool.model.lowest_mhz is not None and not (pool.inheritance.confirming or pool.restraint.near)


def holds_orders(nodes: JobNodes, orders: EngineOrders) -> bool:
    """Whether every agent that has pods of the pool holds its part of the orders."""
    return all(node.engines.holds(orders_for(orders, [pod.uid for pod in node.pods])) for node in nodes.occupied)


def rests_at(nodes: JobNodes, intent: Intent) -> bool:
    """Whether every agent that has pods of the pool holds their GPUs at the clock of its lease at most."""
    return all(_rests(node, intent.resting_of(node.name)) for node in nodes.occupied)


def _rests(node: Node, resting: RestingClock) -> bool:
    held = not resting.mhz or (node.clock is not None and node.clock.mhz == resting.mhz and not node.clock.faulty)
    return node.resting == resting and held


def no_limits(pool: ServingPool) -> Explanation:
    """Why no clock is set without a limit, or before there is one."""
    slowdown = None if pool.spec is None else pool.spec.objective.max_slowdown
    if slowdown is not None and pool.by_page:
        message = (
            f"The buckets of the metrics page of {pool.by_page} are too wide for a slowdown of {slowdown}: no clock"
        )
        message += " is set. Install the plugin, or set limits; status.proposedLimits has limits to begin with."
        return Explanation(Reason.NO_LIMITS, message)
    if slowdown is not None:
        message = f"{pool.baseline.counted} of {REQUESTS:,} requests have ended at default clocks, for the baseline."
        return Explanation(Reason.MEASURING_BASELINE, message)
    if pool.spec is not None and pool.spec.limited:
        message = f"spec.objective has no limit of a time that {pool.role.value} engines have: no clock is set."
        return Explanation(Reason.NO_LIMITS, message)
    message = "spec.objective has no limit: no clock is set. status.proposedLimits has limits to begin with."
    return Explanation(Reason.NO_LIMITS, message)
