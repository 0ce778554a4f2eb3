"""The fit of a pool's windows and the table that it makes: up to a second of a core, so in a thread, one at a time over
all pools, in turn between namespaces.
"""

from __future__ import annotations

import asyncio
import logging

from perseus_core.serving import ClockTable
from perseus_operator.families.serving.features.model.state import KV_CAPACITY, NO_LIMIT_S, FitWork
from perseus_operator.families.serving.pool import ServingPool
from perseus_operator.jobs.pools.figures import FAILED
from perseus_operator.jobs.services import Services
from perseus_solver.errors import SolverError
from perseus_solver.serving import Ceiling, FitResult, TableRequest, Verdict, ceilings, clock_table, fit

logger = logging.getLogger(__name__)


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


def fit_and_table(wanted: FitWork) -> tuple[FitResult, ClockTable | None, tuple[Ceiling, ...]]:
    """Fit, and make the table and what replicas carry under each ceiling; None: the windows do not explain the engine,
    or no watts were measured.

    Raises:
        SolverError: what was asked for cannot be fitted.
    """
    result = fit(wanted.windows, wanted.highest_mhz)
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
        wanted.limits.first_token_s or NO_LIMIT_S,
        wanted.prompt_tokens,
        wanted.switch_s,
        wanted.margin,
        seen=result.seen,
    )
    return result, clock_table(request).table, ceilings(request, wanted.mix)
