"""The counter of epochs, compared and swapped: the transitions of a Lease in the agents' namespace.

The Lease is not held or renewed. It is a counter that the operator may change by a Role in that one namespace.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import kubernetes.aio.client as k8s

from perseus_operator.clients.kube_requests import ATTEMPTS, TIMEOUT_S, KubeRequests
from perseus_operator.errors import KubeConflict, KubeError, KubeNotFound
from perseus_operator.objects import FIELD_MANAGER, MANAGED_BY

EPOCH_LEASE: Final = "perseus-epoch"


class EpochCounter(KubeRequests):
    """Draws epochs. Every method raises ``KubeError`` if the API server does not answer."""

    async def next_epoch(self, namespace: str) -> int:
        """Draw a number larger than any drawn before.

        Raises:
            KubeError: no answer, or lost every race.
        """
        for _ in range(ATTEMPTS):
            try:
                return await self._draw_epoch(namespace)
            except KubeConflict:
                await asyncio.sleep(0.05)
        raise KubeConflict(f"Lease {namespace}/{EPOCH_LEASE}: changed by others {ATTEMPTS} times in a row")

    async def newest_epoch(self, namespace: str) -> int:
        """The last one drawn, by whomever; 0: none is known any more."""
        try:
            return _epoch_in(await self._read_lease(namespace), namespace)
        except KubeNotFound:
            return 0

    async def raise_epoch(self, namespace: str, epoch: int, *, known: int) -> int:
        """Count on from an epoch, if nobody else has drawn one since ``known``.

        Returns:
            The counter: ``epoch``, or what another operator has drawn.

        Raises:
            KubeError: no answer, or another writer was faster.
        """
        return await self._draw_epoch(namespace, epoch, known)

    async def _draw_epoch(self, namespace: str, least: int = 1, known: int | None = None) -> int:
        leases = k8s.CoordinationV1Api(self._api)
        try:
            found = await self._read_lease(namespace)
        except KubeNotFound:
            body: Any = {
                "metadata": {"name": EPOCH_LEASE, "namespace": namespace, "labels": {MANAGED_BY: FIELD_MANAGER}},
                "spec": {"leaseTransitions": least},
            }
            await self._request(leases.create_namespaced_lease(namespace, body, _request_timeout=TIMEOUT_S))
            return least
        newest = _epoch_in(found, namespace)
        if known is not None and newest > known:
            return newest
        # Carries the resourceVersion that was read: a write in between is a conflict.
        found.spec.lease_transitions = epoch = max(least, newest + 1)
        await self._request(leases.replace_namespaced_lease(EPOCH_LEASE, namespace, found, _request_timeout=TIMEOUT_S))
        return epoch

    async def _read_lease(self, namespace: str) -> Any:
        leases = k8s.CoordinationV1Api(self._api)
        return await self._request(leases.read_namespaced_lease(EPOCH_LEASE, namespace, _request_timeout=TIMEOUT_S))


def _epoch_in(lease: Any, namespace: str) -> int:
    epoch = lease.spec.lease_transitions if lease.spec else None
    if epoch is None:
        raise KubeError(f"Lease {namespace}/{EPOCH_LEASE}: spec.leaseTransitions must be the epoch")
    return int(epoch)
