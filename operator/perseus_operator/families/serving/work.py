"""The fit of a pool's windows, the table that it makes, and what a replica carries: up to a second of a core, so in a
thread, one at a time over all pools, in turn between namespaces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from perseus_core.serving import ClockTable
from perseus_operator.families.serving.features.advice.capacity import Capacity, CapacityWork, ReplicaModels
from perseus_operator.families.serving.features.model.state import KV_CAPACITY, NO_LIMIT_S, FitWork
from perseus_operator.families.serving.pool import ServingPool
from perseus_operator.jobs.pools.figures import FAILED
from perseus_operator.jobs.services import Services
from perseus_solver.errors import SolverError
from perseus_solver.serving import (
    Ceiling,
    FitResult,
    TableRequest,
    Verdict,
    WattModel,
    ceilings,
    clock_table,
    fit,
    prompt_table,
)
from perseus_solver.serving.planner import FittedSteps, LatencyLimits, ReplicaModel, RequestClass

logger = logging.getLogger(__name__)

_MOST_RUNNING: Final = 256
"""Requests that an engine decodes at once, unless its flags say: vLLM's own default."""
_LARGEST_RUNNING: Final = 4_096
LEAST_CHUNK: Final = 64
"""Tokens of prompts that a step computes at least."""


async def run_fit(pool: ServingPool, wanted: FitWork, services: Services) -> None:
    """Fit, and give the pool what came of it; of an engine that was replaced meanwhile nobody asks any more."""
    model, metrics = pool.model, services.metrics.pools
    try:
        async with services.fits.turn(pool.job.ref.namespace):
            result, table, under = await asyncio.to_thread(fit_and_table, wanted)
    except SolverError as error:
        logger.warning("%s: no fit of %d windows: %s", pool.job.ref, len(wanted.windows), error)
        model.fit_failed()
        metrics.count_fit(pool.job.ref, FAILED)
        return
    except BaseException:
        model.fit_failed()
        raise
    metrics.count_fit(pool.job.ref, result.verdict.value)
    if pool.limits == wanted.limits:
        model.fitted(result, table, under)
    else:
        model.fit_failed()
        model.limits_changed()


async def run_capacity(pool: ServingPool, wanted: CapacityWork, services: Services) -> None:
    """Compute what a replica carries, and give the pool's adviser what came of it."""
    adviser = pool.adviser
    try:
        async with services.fits.turn(pool.job.ref.namespace):
            capacity = await asyncio.to_thread(capacity_of, wanted)
    except SolverError as error:
        logger.warning("%s: what a replica carries was not computed: %s", pool.job.ref, error)
        capacity = Capacity(refusal=str(error))
    adviser.computed(capacity if pool.limits == wanted.limits else Capacity(steps=capacity.steps))


def fit_and_table(wanted: FitWork) -> tuple[FitResult, ClockTable | None, tuple[Ceiling, ...]]:
    """Fit, and make the table and what replicas carry under each ceiling; None: the windows do not explain the engine,
    or no watts were measured. Of engines that compute prompts alone no ceiling is known.

    Raises:
        SolverError: what was asked for cannot be fitted.
    """
    result = fit(wanted.windows, wanted.highest_mhz, prompts=wanted.prompts)
    if result.verdict is not Verdict.EXPLAINED or result.models is None or result.watts is None:
        return result, None, ()
    if result.seen is None or not any(mhz >= result.seen.lowest_mhz for mhz in wanted.ladder_mhz):
        return result, None, ()
    request = TableRequest(
        result.models,
        result.watts,
        wanted.ladder_mhz,
        wanted.limits.per_token_s or NO_LIMIT_S,
        KV_CAPACITY,
        wanted.limits.first_token_s,
        wanted.prompt_tokens,
        wanted.switch_s,
        wanted.margin,
        wanted.slower,
        seen=result.seen,
    )
    if wanted.prompts:
        return result, prompt_table(request), ()
    return result, clock_table(request).table, ceilings(request, wanted.mix)


def capacity_of(work: CapacityWork) -> Capacity:
    """Compute it: some hundredths of a second, and up to one more for a fit.

    Raises:
        SolverError: what was measured cannot be computed with.
    """
    steps = work.steps
    if steps is None or work.windows:
        result = fit(work.windows, work.highest_mhz, least_clocks=1, prompts=work.prompts)
        if result.verdict is Verdict.NOT_EXPLAINED:
            return Capacity(refusal="no model explains the engine")
        if result.models is not None:
            steps = ReplicaModels(result.models.best, result.watts)
        elif steps is None:
            return Capacity(refusal=f"too little was seen of the engine: {', '.join(result.missing)}")
    kind, limits = work.kind, work.limits
    watts = steps.watts or WattModel(work.highest_mhz, *(0.0,) * 6, floor_mhz=1.0)
    replica = ReplicaModel(
        gpus=1,  # whose number only plans with several variants need
        steps=FittedSteps(steps.times, watts),
        highest_mhz=work.highest_mhz,
        kv_capacity=KV_CAPACITY,
        most_running=most_running(work.flags),
        step_tokens=max(LEAST_CHUNK, round(kind.chunk_tokens)),
    )
    requests = RequestClass(
        max(1.0, kind.prompt_tokens),
        1.0 if work.prompts else max(1.0, kind.output_tokens),
        min(1.0, kind.kv_share) * KV_CAPACITY,
    )
    promised = LatencyLimits(
        limits.first_token_s or NO_LIMIT_S, 0.0, limits.per_token_s or NO_LIMIT_S, limits.attainment
    )
    points = replica.points(requests, promised, [work.highest_mhz])
    if not points:
        return Capacity(refusal="by its model no load keeps the limits, even at the highest clock", steps=steps)
    return Capacity(points[0], steps=steps)


def most_running(flags: Sequence[tuple[str, str]]) -> int:
    """Return how many requests an engine decodes at once, by its flags; what is no number counts as not said."""
    value = dict(flags).get("max-num-seqs", "")
    said = int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0
    return min(_LARGEST_RUNNING, said or _MOST_RUNNING)
