"""The figures of a ServingPool's status, and what a later operator restores from them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from perseus_core.serving import ServingLimits
from perseus_core.units import j_from_mj, mj_from_j
from perseus_operator.api.conditions import Reason
from perseus_operator.api.serving.spec import PoolSpec, Role, Scaling, duration, seconds
from perseus_operator.api.serving.status import (
    MOST_REPLICAS,
    AdviceStatus,
    AttainmentStatus,
    BaselineStatus,
    CanaryStatus,
    EngineStatus,
    LengthClass,
    LengthsFrom,
    LengthsStatus,
    LoadStatus,
    MissedClock,
    PoolFigures,
    PoolPlanStatus,
    PoolSavings,
    ProposedLimits,
    ReplicaStatus,
)
from perseus_operator.api.stored import parse_stored
from perseus_operator.budgets.draw import share_to_status
from perseus_operator.families.serving.decide import ServingDecision
from perseus_operator.families.serving.features.comparison.switchback import Saved
from perseus_operator.families.serving.features.exploration.trials import Missed
from perseus_operator.families.serving.features.objective.baseline import BaselineTimes
from perseus_operator.families.serving.features.objective.requests import Block, quantile_s, worst_share
from perseus_operator.families.serving.features.signals.replicas import Replica
from perseus_operator.families.serving.pool import ServingPool
from perseus_operator.jobs.report import smoothing_to_status
from perseus_operator.objects.formatting import percent, stamp

_LONGEST_NAME = 256
_LONGEST_WHY = 512
_FAR_S = 4_102_444_800.0
"""The end of this century stands for never."""


def figures_of(pool: ServingPool, decision: ServingDecision, lately: Block) -> PoolFigures:
    """Return the figures.

    Args:
        pool: whose they are.
        decision: the latest.
        lately: what its replicas did.
    """
    spec, replicas = pool.spec, pool.signals.replicas
    limits = pool.limits
    return PoolFigures(
        replicas=_replicas(pool, limits) if replicas else None,
        replica_count=len(replicas),
        attainment=None if limits is None or not lately.requests else _attainment(lately, limits),
        proposed_limits=_proposed(lately, pool.role) if spec is not None and _proposes(pool, spec) else None,
        baseline=_baseline(pool) if spec is not None and spec.objective.max_slowdown is not None else None,
        advice=_advice(pool) if spec is not None and spec.scaling is Scaling.ADVISE else None,
        load=_load(pool) if spec is not None and spec.scaling is Scaling.ADVISE else None,
        lengths=_lengths(pool),
        plan=pool.planning.plan if spec is not None and spec.scaling is Scaling.ADVISE else None,
        canary=_canary(pool) if decision.trying else None,
        engine=_engine(pool),
        savings=_savings(pool),
        power_budget=share_to_status(pool.job.share, pool.job.draw, decision.slowdown),
        power_profiles=pool.job.nodes.power_profiles or None,
        power_smoothing=smoothing_to_status(pool.job.nodes.power_smoothing),
    )


def _replicas(pool: ServingPool, limits: ServingLimits | None) -> tuple[ReplicaStatus, ...]:
    """The replicas that keep the limits least, and then by name."""
    blocks = {replica.pod: (replica, pool.requests.of_pod(replica.pod_uid)) for replica in pool.signals.replicas}
    shares = {pod: worst_share(block, limits) if limits else None for pod, (_, block) in blocks.items()}
    ordered = sorted(blocks, key=lambda pod: (1.0 if (share := shares[pod]) is None else share, pod))
    held = Reason.AUTOSCALER_NEAR.value if pool.restraint.near else None
    return tuple(_replica(*blocks[pod], shares[pod], held) for pod in ordered[:MOST_REPLICAS])


def _replica(replica: Replica, block: Block, share: float | None, held: str | None) -> ReplicaStatus:
    longest = held or max(block.held_us, key=lambda reason: (block.held_us[reason], reason), default=None)
    return ReplicaStatus(
        pod=replica.pod,
        clock_megahertz=block.mean_mhz(replica.highest_mhz) if block.time_us else None,
        limited_by=longest,
        attainment=None if share is None else percent(share),
    )


def _attainment(lately: Block, limits: ServingLimits) -> AttainmentStatus:
    first, token = lately.attainment(limits)
    return AttainmentStatus(
        requests=lately.requests,
        time_to_first_token=None if first is None else percent(first),
        time_per_output_token=None if token is None else percent(token),
    )


def _proposes(pool: ServingPool, spec: PoolSpec) -> bool:
    """Whether limits are proposed: there are none, and none will follow from a slowdown."""
    return not spec.limited or (spec.objective.max_slowdown is not None and bool(pool.by_page))


def _proposed(lately: Block, role: Role) -> ProposedLimits | None:
    """Limits of the times that engines of this role have."""
    first, token = (_duration(quantile_s(times, 0.99)) for times in (lately.first_tokens, lately.tokens))
    first, token = (None if role is Role.DECODE else first), (None if role is Role.PREFILL else token)
    return None if first is None and token is None else ProposedLimits(
        time_to_first_token=first, time_per_output_token=token
    )  # fmt: skip


def _duration(value_s: float | None) -> str | None:
    if value_s is None or value_s > 3_600.0:
        return None
    return duration(value_s)  # rounded up: what is proposed was kept


def _baseline(pool: ServingPool) -> BaselineStatus | None:
    times = pool.baseline.times
    return None if times is None else BaselineStatus(
        time_to_first_token=_duration(times.first_token_s), time_per_output_token=_duration(times.per_token_s)
    )  # fmt: skip


def _advice(pool: ServingPool) -> AdviceStatus:
    advice = pool.adviser.advice
    return AdviceStatus(
        replicas=advice.replicas,
        why=advice.why[:_LONGEST_WHY] or "Nothing is known yet.",
        since=None if advice.replicas is None else stamp(advice.since_s),
        requests_per_minute=None if advice.per_s is None else round(60 * advice.per_s),
        expected_per_minute=None if advice.expected_per_s is None else round(60 * advice.expected_per_s),
        start_seconds=None if (start_s := pool.adviser.starts.measured_s) is None else round(start_s),
    )


def _load(pool: ServingPool) -> LoadStatus | None:
    forecast = pool.adviser.forecast
    return LoadStatus(until=stamp(forecast.until_s), epochs=forecast.text) if forecast.text else None


def _lengths(pool: ServingPool) -> LengthsStatus | None:
    if not pool.lengths.known:
        return None
    classes, together = pool.lengths.classes()
    return LengthsStatus(
        requests=pool.lengths.requests,
        source=LengthsFrom.REQUESTS if together else LengthsFrom.HISTOGRAMS,
        classes=tuple(
            LengthClass(
                name=one.name,
                share=percent(one.share),
                prompt_tokens=round(one.prompt_tokens),
                output_tokens=round(one.output_tokens),
            )
            for one in classes
        ),
    )


def _canary(pool: ServingPool) -> CanaryStatus | None:
    replica, exploration = pool.signals.of_pod(pool.trials.canary), pool.trials.exploration
    if replica is None or exploration is None:
        return None
    return CanaryStatus(pod=replica.pod, clock_megahertz=pool.trials.clock_mhz, why=exploration.attempt.why.value)


def _savings(pool: ServingPool) -> PoolSavings | None:
    saved = pool.switchback.saved
    if saved is None:
        return None
    return PoolSavings(
        energy=percent(saved.share),
        low=percent(saved.low),
        high=percent(saved.high),
        blocks=saved.comparisons,
        millijoules_per_token=mj_from_j(saved.law_j),
    )


def _engine(pool: ServingPool) -> EngineStatus | None:
    if not pool.signals.replicas:
        return None
    replica = pool.signals.replicas[0]
    missed = tuple(
        MissedClock(clock_megahertz=one.mhz, misses=one.misses, not_before=stamp(min(one.barred_until_s, _FAR_S)))
        for one in pool.trials.missed
    )
    return EngineStatus(
        fingerprint=replica.fingerprint,
        engine=f"{replica.engine.name} {replica.engine.version}"[:_LONGEST_NAME],
        model=replica.engine.model,
        role=pool.role.value,
        windows=pool.model.count,
        lowest_megahertz=pool.model.lowest_mhz,
        missed_clocks=missed or None,
        profile=pool.model.stored_as or None,
    )


def restore_from_status(pool: ServingPool, status: Mapping[str, Any], *, wall_s: float) -> None:
    """Take from a stored status what was saved, advised and counted, and which clocks have missed a limit: they are
    not tried again yet.
    """
    advice = parse_stored(AdviceStatus, status.get("advice"))
    if advice is not None and advice.replicas is not None and advice.since is not None:
        pool.adviser.restored(advice.replicas, datetime.fromisoformat(advice.since).timestamp(), wall_s)
    if advice is not None and advice.start_seconds is not None:
        pool.adviser.starts.restored(advice.start_seconds)
    load = parse_stored(LoadStatus, status.get("load"))
    if load is not None:
        pool.adviser.forecast.restored(load.epochs, datetime.fromisoformat(load.until).timestamp())
    plan = parse_stored(PoolPlanStatus, status.get("plan"))
    if plan is not None:
        pool.planning.restored(plan, datetime.fromisoformat(plan.computed_at).timestamp())
    stored = parse_stored(EngineStatus, status.get("engine"))
    if stored is None:
        return
    misses = {}
    for one in stored.missed_clocks or ():
        until_s = datetime.fromisoformat(one.not_before).timestamp()
        misses[one.clock_megahertz] = Missed(one.clock_megahertz, one.misses, until_s)
    savings = parse_stored(PoolSavings, status.get("savings"))
    baseline = parse_stored(BaselineStatus, status.get("baseline"))
    saved = None if savings is None else _saved(savings)
    pool.restored(stored.fingerprint, misses, saved, None if baseline is None else _times(baseline))


def _times(stored: BaselineStatus) -> BaselineTimes:
    first, token = stored.time_to_first_token, stored.time_per_output_token
    return BaselineTimes(None if first is None else seconds(first), None if token is None else seconds(token))


def _saved(stored: PoolSavings) -> Saved:
    share, low, high = (float(text.removesuffix("%")) / 100 for text in (stored.energy, stored.low, stored.high))
    return Saved(share, low, high, stored.blocks, j_from_mj(stored.millijoules_per_token))
