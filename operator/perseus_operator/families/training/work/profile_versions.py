"""Stores a measured profile, and keeps what it replaces.

A PerseusProfile that is measured again holds the newest version; each one before is a PerseusProfile of its name with
``-v`` and a number, which a job may name to go back to it. The newest ``KEPT`` of these stay, and every one that some
PerseusJob names. Only what an operator wrote is copied, or deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from perseus_operator.clients.kube.interface import Kube
from perseus_operator.errors import KubeError, KubeNotFound
from perseus_operator.objects.values import JobRef, Json, StoredObject

logger = logging.getLogger(__name__)

KEPT: Final = 3
"""Versions before the present one: more than a bad measurement, the good one before it, and one for comparison."""
_LOOKED_AT: Final = 16
"""Versions older than these that are looked at for deletion: those that were named by a job when they became old."""


async def store_profile(
    kube: Kube, namespace: str, name: str, spec: Json, owner: JobRef | None = None, *, served: Iterable[str] = ()
) -> int:
    """Store a profile as the newest version of its name, and delete old ones that nobody uses.

    Args:
        kube: the API server.
        namespace: of the profile.
        name: of the PerseusProfile.
        spec: as of ``api.stored.ProfileSpec``, without a version.
        owner: with which it and its versions are garbage-collected; None: they stay.
        served: namespaces whose PerseusJobs may name a version; none: all.

    Returns:
        Its version.

    Raises:
        KubeConflict: a user wrote the PerseusProfile of this name.
        KubeError: it was not stored.
    """
    before = await _read(kube, namespace, name)
    version = 1
    if before is not None and before.ours and before.spec.get("csv"):
        version = int(before.spec.get("version", 1)) + 1
        try:
            await kube.write_profile(namespace, _old(name, version - 1), before.spec, owner)
        except KubeError as error:  # somebody's, or a name too long: the new measurement matters more
            logger.warning("PerseusProfile %s/%s: version %d is not kept: %s", namespace, name, version - 1, error)
    await kube.write_profile(namespace, name, {**spec, "version": version}, owner)
    try:
        await _prune(kube, namespace, name, version, served)
    except KubeError as error:
        logger.warning("PerseusProfile %s/%s: old versions are not deleted yet: %s", namespace, name, error)
    return version


async def _prune(kube: Kube, namespace: str, name: str, version: int, served: Iterable[str]) -> None:
    newest_old = version - 1 - KEPT
    names = [_old(name, number) for number in range(newest_old, max(0, newest_old - _LOOKED_AT), -1)]
    versions = [stored for each in names if (stored := await _read(kube, namespace, each)) is not None and stored.ours]
    if not versions:
        return
    in_use = await kube.named_profiles(served)
    for stored in versions:
        if stored.name not in in_use:
            await kube.delete_profile(namespace, stored)
            logger.info("PerseusProfile %s/%s: an old version that no job names, deleted", namespace, stored.name)


async def _read(kube: Kube, namespace: str, name: str) -> StoredObject | None:
    try:
        return await kube.read_profile(namespace, name)
    except KubeNotFound:
        return None


def _old(name: str, version: int) -> str:
    return f"{name}-v{version}"
