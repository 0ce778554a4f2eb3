"""A plan of pools by length: what a worker is asked, by whom else it may be served, and the sentence that comes of it.

Engines of other pools of the namespace that serve the same model on another number of GPUs are variants: what the
operator has stored of them, as PerseusProfiles, says what they take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from perseus_operator.api.schema import parse
from perseus_operator.api.serving.status import PlannedPoolStatus, PoolPlanStatus
from perseus_operator.api.stored import ProfileSpec
from perseus_operator.errors import InvalidSpec, KubeError, SolveFailed
from perseus_operator.families.serving.features.advice.forecast import hours_ahead
from perseus_operator.families.serving.features.model.state import KV_CAPACITY, NO_LIMIT_S
from perseus_operator.families.serving.features.split.planning import PlanWork
from perseus_operator.families.serving.pool import ServingPool
from perseus_operator.families.serving.profiles import profile_name
from perseus_operator.families.serving.work import LEAST_CHUNK, most_running
from perseus_operator.jobs.services import Services
from perseus_operator.objects.formatting import counted, percent, stamp
from perseus_operator.objects.values import StoredObject
from perseus_operator.solving.serving_plan import MeasuredVariant, ServingPlan, ServingPlanRequest
from perseus_solver.serving import windows_to_csv

logger = logging.getLogger(__name__)

_LOOKED_AT = 64
_MOST_VARIANTS = 4
_LONGEST_WHY = 512
_J_OF_A_WH = 3_600.0


async def run_plan(pool: ServingPool, wanted: PlanWork, services: Services) -> None:
    """Have it planned, and give the pool what came of it."""
    ref, planning, now = pool.job.ref, pool.planning, stamp(services.wall_s())
    try:
        profiles = await _profiles(pool, services)
        request = await asyncio.to_thread(request_of, wanted, profiles)
        plan = await services.solver.plan_serving(request, ref.namespace)
    except SolveFailed as error:
        logger.warning("%s: no plan of pools by length: %s", ref, error)
        planning.planned(PoolPlanStatus(computed_at=now, why=f"There is no plan: {error}"[:_LONGEST_WHY]))
    except BaseException:
        planning.given_up()
        raise
    else:
        planning.planned(plan_status(plan, now))


async def _profiles(pool: ServingPool, services: Services) -> list[StoredObject]:
    """What the operator has stored of engines in the pool's namespace; none where they cannot be read."""
    namespace = pool.job.ref.namespace
    try:
        return [one async for one in services.kube.list_profiles(namespace, _LOOKED_AT, of_engines=True) if one.ours]
    except KubeError as error:
        logger.warning("%s: planned without engines of other pools: %s", pool.job.ref, error)
        return []


def request_of(wanted: PlanWork, profiles: Sequence[StoredObject]) -> ServingPlanRequest:
    """Return what a worker is asked; some hundredths of a second.

    Args:
        wanted: the pool's own part.
        profiles: of engines, stored by an operator, in its namespace.
    """
    kind, limits = wanted.kind, wanted.basis.limits
    expected, upper = hours_ahead(wanted.epochs)
    return ServingPlanRequest(
        counts=[(place, count) for place, count in sorted(wanted.counts.items())],
        prompt_tokens=max(1.0, kind.prompt_tokens),
        output_tokens=max(1.0, kind.output_tokens),
        variants=[MeasuredVariant(wanted.gpus, windows_to_csv(wanted.windows)), *_variants(wanted, profiles)],
        highest_mhz=wanted.highest_mhz,
        kv_capacity=KV_CAPACITY,
        most_running=most_running(wanted.flags),
        step_tokens=max(LEAST_CHUNK, round(kind.chunk_tokens)),
        start_s=min(3_600.0, wanted.start_s),
        first_token_s=limits.first_token_s or NO_LIMIT_S,
        per_token_s=limits.per_token_s or NO_LIMIT_S,
        attainment=limits.attainment,
        expected=expected,
        upper=upper,
    )


def _variants(wanted: PlanWork, profiles: Sequence[StoredObject]) -> list[MeasuredVariant]:
    """Engines of the same model on other numbers of GPUs, one of each, the one that was stored last."""
    variants: dict[int, tuple[str, MeasuredVariant]] = {}
    for one in profiles:
        try:
            stored = parse(ProfileSpec, one.spec, "spec").serving
        except InvalidSpec:
            continue
        if stored is None or stored.gpus is None or stored.gpus == wanted.gpus or stored.model != wanted.model:
            continue
        if one.name == profile_name(wanted.basis.fingerprint):
            continue
        variant = stored.measured_at, MeasuredVariant(stored.gpus, stored.windows)
        variants[stored.gpus] = max(variants.get(stored.gpus, variant), variant, key=lambda each: each[0])
    return [variant for _, variant in sorted(variants.values(), key=lambda each: each[1].gpus)][:_MOST_VARIANTS]


def plan_status(plan: ServingPlan, computed_at: str) -> PoolPlanStatus:
    """Return a plan as a status has it."""
    return PoolPlanStatus(
        computed_at=computed_at,
        why=_why(plan),
        pools=tuple(
            PlannedPoolStatus(
                name=one.name,
                share=percent(one.share),
                gpus=one.gpus,
                replicas=one.replicas,
                fewest_replicas=one.fewest,
                clock_megahertz=one.clock_mhz,
                watt_hours=round(one.joules / _J_OF_A_WH),
            )
            for one in plan.pools
        ),
        watt_hours=round(plan.joules / _J_OF_A_WH),
        saved=percent(1.0 - plan.joules / plan.one_pool_joules),
        gap=percent(min(plan.gap, 9.0)),
    )


def _why(plan: ServingPlan) -> str:
    one = _kwh(plan.one_pool_joules)
    if len(plan.pools) > 1:
        saved = percent(1.0 - plan.joules / plan.one_pool_joules)
        said = (
            f"{len(plan.pools)} pools by length need {_kwh(plan.joules)} a day, and one needs {one}: {saved} is saved."
        )
    elif plan.other_pools:
        more = percent(plan.other_joules / plan.one_pool_joules - 1.0)
        other = f"the best split by length, into {counted(plan.other_pools, 'pool')}, needs {_kwh(plan.other_joules)}"
        said = f"One pool needs {one} a day, and {other}: {more} more, so no split pays."
    else:
        said = f"One pool needs {one} a day; no split by length keeps the limits, or all requests are of one class."
    if not plan.together:
        said += " Prompts and answers are taken as independent of each other: metrics pages do not say more."
    return said


def _kwh(joules: float) -> str:
    return f"{joules / _J_OF_A_WH / 1_000:,.2f} kWh"
