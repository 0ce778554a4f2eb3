"""Reads and stores what was measured of an engine: a PerseusProfile, in the pool's namespace, named by the fingerprint.

Pools of one namespace share it, and those of others where an EnergyClass grants it, as profiles of training are. It has
no owner, and outlives pool and operator; of each namespace the newest ``KEPT`` stay.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from typing import Any, Final

from perseus_operator.api.schema import dump, parse
from perseus_operator.api.stored import EngineProfile, ProfileSpec
from perseus_operator.clients.kube.interface import Kube
from perseus_operator.errors import InvalidSpec, KubeConflict, KubeError, KubeNotFound
from perseus_operator.families.serving.features.inheritance.inheritance import StoredWindows
from perseus_operator.families.serving.features.model.state import StoreProfile
from perseus_operator.families.serving.features.signals.replicas import Replica
from perseus_operator.families.serving.pool import ServingPool
from perseus_operator.jobs.services import Services, backoff_s
from perseus_operator.objects.formatting import megahertz, stamp
from perseus_operator.objects.values import Json, StoredObject
from perseus_solver.errors import InvalidProblem
from perseus_solver.serving import windows_from_csv, windows_to_csv

logger = logging.getLogger(__name__)

KEPT: Final = 16
"""Profiles of engines in a namespace: a rollout makes another fingerprint, and a rollback wants the one before."""
_LOOKED_AT: Final = 64
_LONGEST: Final = 512


def profile_name(fingerprint: str) -> str:
    """Return the name of the PerseusProfile of a fingerprint.

    >>> profile_name("0123456789abcdef" * 4)
    'serving-0123456789abcdef'
    """
    return f"serving-{fingerprint[:16]}"


async def read_profile(pool: ServingPool, services: Services) -> None:
    """Look for a profile of the pool's engine, and give the pool what it holds."""
    inheritance, replicas = pool.inheritance, pool.signals.replicas
    if not replicas:
        inheritance.absent()
        return
    fingerprint, highest_mhz = replicas[0].fingerprint, replicas[0].highest_mhz
    try:
        profile, where = await _find(pool, services, profile_name(fingerprint))
        stored = await asyncio.to_thread(stored_windows, profile, where, fingerprint, highest_mhz) if profile else None
    except InvalidSpec as error:
        logger.warning("%s: %s", pool.job.ref, error)
        inheritance.absent(str(error))
    except KubeError as error:
        logger.warning("%s: no profile was read: %s", pool.job.ref, error)
        again_at_s = services.monotonic_s() + backoff_s(1)
        inheritance.read_failed(f"No PerseusProfile could be read: {error}.", again_at_s=again_at_s)
    else:
        if pool.inheritance is inheritance:  # no other engine has come meanwhile
            pool.profile_read(stored)


async def _find(pool: ServingPool, services: Services, name: str) -> tuple[StoredObject | None, str]:
    """The profile of the pool's namespace, or of the one that its class shares, and how it is called."""
    ref, grants = pool.job.ref, services.grants
    try:
        return await services.kube.read_profile(ref.namespace, name), name
    except KubeNotFound:
        shared = await grants.shared_namespace(pool.job.energy_class, ref.namespace) if grants else None
    if shared in (None, ref.namespace):
        return None, name
    assert shared is not None
    try:
        return await services.kube.read_profile(shared, name), f"{name} of namespace {shared}"
    except KubeNotFound:
        return None, name


def stored_windows(stored: StoredObject, where: str, fingerprint: str, highest_mhz: int) -> StoredWindows:
    """Return what a profile holds, which anybody may have written.

    Args:
        stored: as it was read.
        where: how it is called.
        fingerprint: of the engine.
        highest_mhz: of its GPUs.

    Raises:
        InvalidSpec: it holds nothing that may be used for this engine; the message names the field and the rule.
    """
    path = f"PerseusProfile {where}: spec"
    profile = parse(ProfileSpec, stored.spec, path)
    if profile.serving is None:
        raise InvalidSpec(f"{path}.serving: is required")
    if profile.serving.fingerprint != fingerprint:
        raise InvalidSpec(f"{path}.serving.fingerprint: must be that of the engine, {fingerprint}")
    try:
        windows = windows_from_csv(profile.serving.windows)
    except InvalidProblem as error:
        raise InvalidSpec(f"{path}.serving.windows: {error}") from error
    if max((window.clock_mhz for window in windows), default=0) > highest_mhz:
        rule = f"must be at most {megahertz(highest_mhz)}, the highest of the GPUs"
        raise InvalidSpec(f"{path}.serving.windows: clock_mhz {rule}")
    return StoredWindows(where, windows, float(profile.serving.prompt_tokens))


async def store_profile(pool: ServingPool, replica: Replica, action: StoreProfile, services: Services) -> None:
    """Store what was measured; what somebody else has written under the name stays."""
    model, namespace = pool.model, pool.job.ref.namespace
    name = profile_name(replica.fingerprint)
    try:
        spec = await asyncio.to_thread(profile_spec, replica, action, wall_s=services.wall_s())
        await services.kube.write_profile(namespace, name, spec)
    except KubeConflict as error:
        logger.warning("%s: what was measured is not stored: %s", pool.job.ref, error)
    except KubeError as error:
        logger.warning("%s: what was measured is not stored yet: %s", pool.job.ref, error)
        model.store_failed(services.monotonic_s())
    else:
        model.store_ended(name)
        await _prune(services.kube, namespace)


def profile_spec(replica: Replica, action: StoreProfile, *, wall_s: float) -> Json:
    """Return the spec of the PerseusProfile that holds what was measured of a replica's engine."""
    engine = replica.engine
    profile = EngineProfile(
        fingerprint=replica.fingerprint,
        engine=f"{engine.name} {engine.version}"[:_LONGEST],
        model=engine.model[:_LONGEST],
        windows=windows_to_csv(action.windows),
        prompt_tokens=round(action.prompt_tokens),
        gpus=replica.gpus or None,
        measured_at=stamp(wall_s),
    )
    spec: Json = dump(ProfileSpec(serving=profile))
    return spec


async def _prune(kube: Kube, namespace: str) -> None:
    """Delete the oldest of the operator's own profiles of engines; pools that still use one store it again."""
    try:
        stored = [one async for one in kube.list_profiles(namespace, _LOOKED_AT, of_engines=True) if one.ours]
        for old in sorted(stored, key=_measured_at, reverse=True)[KEPT:]:
            await kube.delete_profile(namespace, old)
            logger.info("PerseusProfile %s/%s: deleted: %d of engines are newer", namespace, old.name, KEPT)
    except KubeError as error:
        logger.warning("namespace %s: old profiles of engines are not deleted yet: %s", namespace, error)


def _measured_at(stored: StoredObject) -> float:
    said: Any = stored.spec.get("serving")
    try:
        return datetime.fromisoformat(said["measuredAt"]).timestamp()
    except (TypeError, KeyError, ValueError):
        return 0.0
