"""What the Prometheus series of a ServingPool say: its state, and what is counted of each window."""

from __future__ import annotations

from perseus_core.serving import ServingLimits
from perseus_operator.families.serving.decide import ServingDecision
from perseus_operator.families.serving.features.objective.requests import LEAST_REQUESTS, Block, kept
from perseus_operator.families.serving.pool import ServingPool
from perseus_operator.jobs.pools.figures import (
    DIFFERENT,
    FIRST_TOKEN,
    OUTPUT_TOKEN,
    SEEN,
    SILENT,
    TIMES,
    UNKNOWN,
    PoolCounts,
    PoolState,
    SavedShare,
)
from perseus_operator.nodes.engines import EngineWindow
from perseus_solver.serving import Verdict


def state_of(pool: ServingPool, decision: ServingDecision, lately: Block) -> PoolState:
    """Return the state.

    Args:
        pool: whose it is.
        decision: the latest.
        lately: what its replicas did.
    """
    signals, model, saved = pool.signals, pool.model, pool.switchback.saved
    highest_mhz = signals.replicas[0].highest_mhz if signals.replicas else None
    limits = pool.limits
    attained = lately.attainment(limits) if limits is not None and lately.requests >= LEAST_REQUESTS else (None, None)
    return PoolState(
        pods={
            SEEN: len(signals.replicas),
            SILENT: len(signals.silent),
            UNKNOWN: len(signals.unknown),
            DIFFERENT: len(signals.different),
        },
        clock_mhz=lately.mean_mhz(highest_mhz) if highest_mhz is not None and lately.time_us else None,
        limits_s=_limits_s(limits),
        attainment={time: share for time, share in zip(TIMES, attained, strict=True) if share is not None},
        attainment_wanted=limits.attainment if limits is not None else None,
        saved=SavedShare(saved.share, saved.low, saved.high, saved.comparisons) if saved else None,
        advised=pool.adviser.advice.replicas,
        overloaded=len(pool.overload.replicas),
        canary_mhz=(pool.trials.clock_mhz or highest_mhz) if decision.trying else None,
        table=model.table is not None,
        lowest_mhz=model.lowest_mhz,
        explained=model.explained if model.result is not None and model.result.verdict is not Verdict.TOO_FEW else None,
    )


def counts_of(window: EngineWindow, limits: ServingLimits | None) -> PoolCounts:
    """Return what is counted of a window.

    Args:
        window: of any replica.
        limits: of its requests; None: there are none.
    """
    limits_s = _limits_s(limits)
    times = {FIRST_TOKEN: window.first_tokens, OUTPUT_TOKEN: window.tokens}
    judged = {time: sum(times[time].values()) for time in limits_s}
    return PoolCounts(
        requests=window.requests,
        judged=judged,
        late={time: judged[time] - kept(times[time], limit_s) for time, limit_s in limits_s.items()},
        prompt_tokens=window.prompt_tokens,
        generated_tokens=window.generated_tokens,
        energy_mj=window.energy_mj,
        running_us=window.running * (window.steps_us + window.prompt_steps_us),
        held_us=window.held_us,
    )


def _limits_s(limits: ServingLimits | None) -> dict[str, float]:
    if limits is None:
        return {}
    pairs = zip(TIMES, (limits.first_token_s, limits.per_token_s), strict=True)
    return {time: limit_s for time, limit_s in pairs if limit_s is not None}
