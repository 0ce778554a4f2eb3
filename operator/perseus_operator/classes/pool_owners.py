"""With what a ServingPool of a class goes: the ReplicaSets and StatefulSets that make the pods of its workload.

The pods of a Deployment name no Deployment, and each rollout makes another ReplicaSet. So each that makes pods becomes
an owner too, and the pool is garbage-collected once all are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from perseus_core import keys
from perseus_operator.nodes.workloads import PodWorkload, server_of
from perseus_operator.objects.values import FIELD_MANAGER, MANAGED_BY, Json, Pod

MOST_OWNERS: Final = 20
"""Of a pool, the latest: a Deployment keeps ten ReplicaSets unless it says otherwise, and has two with pods."""


def server_of_class(pod: Pod) -> PodWorkload | None:
    """The server whose replica a pod is for which the webhook asked for a ServingPool; None: it did not."""
    return server_of(pod.labels, pod.owner) if keys.LABEL_SERVING in pod.labels else None


def pod_of_new_owner(pool: Mapping[str, Any], pods: Iterable[Pod]) -> Pod | None:
    """The latest pod of a pool's workload, if the pool was made of a class and does not go with what made that pod.

    Only the latest pod counts: of owners that pods make up, in any number, one is added and the next tick adds none.
    """
    metadata = pool["metadata"]
    if (metadata.get("labels") or {}).get(MANAGED_BY) != FIELD_MANAGER:
        return None
    owners, there = {owner.get("uid") for owner in _owners(pool)}, list(pods)
    if all(pod.owner_uid in owners for pod in there):
        return None
    workload = (pool.get("spec") or {}).get("workload") or {}
    wanted = workload.get("kind"), workload.get("name")
    of_pool = [pod for pod in there if (server := server_of_class(pod)) and (server.kind, server.name) == wanted]
    latest = max(of_pool, key=lambda pod: (pod.created, pod.name), default=None)
    return None if latest is None or latest.owner_uid in owners else latest


def owners_with(pool: Mapping[str, Any], pod: Pod) -> list[Json]:
    """The ``ownerReferences`` of a pool and what made a pod, the latest ``MOST_OWNERS``."""
    assert pod.owner is not None
    return [*_owners(pool), pod.owner.reference()][-MOST_OWNERS:]


def _owners(pool: Mapping[str, Any]) -> list[Json]:
    return list(pool["metadata"].get("ownerReferences") or ())
