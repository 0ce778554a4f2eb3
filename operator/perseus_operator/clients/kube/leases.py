"""The Leases in the agents' namespace: the counter of epochs, the seats of the operator's replicas, and the shards.

Every write carries the version that was read, so of several writers one wins. The connection is one of its own: who
renews a seat may not wait behind hundreds of status writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Self

import kubernetes.aio.client as k8s

from perseus_core import keys
from perseus_operator.clients.kube.requests import ATTEMPTS, KubeRequests, read_json
from perseus_operator.errors import KubeConflict, KubeError, KubeNotFound
from perseus_operator.objects.values import FIELD_MANAGER, MANAGED_BY, Json
from perseus_operator.replicas.shard import DEAD_AFTER_S, NO_NOTES, LeaseRecord, Notes, shard_lease

EPOCH_LEASE: Final = "perseus-epoch"
"""It is not held or renewed. It is a counter that the operator may change by a Role in that one namespace."""
_TIMEOUT_S: Final = DEAD_AFTER_S / 2
"""A seat must be renewed before it counts as empty, though one request is lost."""


class LeaseClient(KubeRequests):
    """Reads and writes Leases. Every method raises ``KubeError`` if the API server does not answer."""

    def __init__(self, api: Any) -> None:
        super().__init__(api)
        self.namespace = ""
        """Of the agents, where the Leases are."""
        self._coordination = k8s.CoordinationV1Api(api)

    @classmethod
    async def connect_to(cls, namespace: str) -> Self:
        """Connect, for the Leases of this namespace. Raises KubeUnavailable."""
        client = await cls.connect()
        client.namespace = namespace
        return client

    async def next_epoch(self, least: int = 1) -> int:
        """Draw a number larger than any drawn before, and not below ``least``.

        Raises:
            KubeError: no answer, or lost every race.
        """
        for _ in range(ATTEMPTS):
            try:
                counter = await self._read(EPOCH_LEASE)
                if counter.version and not counter.epoch:
                    raise KubeError(f"Lease {self.namespace}/{EPOCH_LEASE}: spec.leaseTransitions must be the epoch")
                return (await self.write(counter, "", max(least, counter.epoch + 1))).epoch
            except KubeConflict:
                await asyncio.sleep(0.05)
        raise KubeConflict(f"Lease {self.namespace}/{EPOCH_LEASE}: changed by others {ATTEMPTS} times in a row")

    async def shard(self, shard: int) -> LeaseRecord:
        """Read who holds a shard, and under which epoch; nobody if its Lease does not exist."""
        return await self._read(shard_lease(shard))

    async def leases(self) -> dict[str, LeaseRecord]:
        """Read all Leases that an operator wrote, by name."""
        request = self._coordination.list_namespaced_lease_without_preload_content(
            self.namespace, label_selector=f"{MANAGED_BY}={FIELD_MANAGER}", _request_timeout=_TIMEOUT_S
        )
        records = [_record(item) for item in (await self._request(read_json(request)))["items"]]
        return {record.name: record for record in records}

    async def write(self, lease: LeaseRecord, holder: str, epoch: int = 0, notes: Notes = NO_NOTES) -> LeaseRecord:
        """Write a Lease, if it is as it was read; if it did not exist, make it.

        Args:
            lease: as it was read.
            holder: from now on; empty: nobody.
            epoch: from now on; 0: none.
            notes: of the holder.

        Returns:
            The Lease after it.

        Raises:
            KubeConflict: it was changed, made or deleted since it was read.
        """
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        metadata: Json = {"name": lease.name, "namespace": self.namespace, "labels": {MANAGED_BY: FIELD_MANAGER}}
        written = {keys.ANNOTATION_ADDRESS: notes.address, keys.ANNOTATION_NAMESPACES: notes.namespaces}
        metadata["annotations"] = {key: value for key, value in written.items() if value}
        spec: Json = {}
        if holder:
            spec |= {"holderIdentity": holder, "renewTime": now, "leaseDurationSeconds": round(DEAD_AFTER_S)}
        if epoch:
            spec["leaseTransitions"] = epoch
        body: Any = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        options: Json = {"field_manager": FIELD_MANAGER, "_request_timeout": _TIMEOUT_S}
        api = self._coordination
        if not lease.version:
            request = api.create_namespaced_lease_without_preload_content(self.namespace, body, **options)
            return _record(await self._request(read_json(request)))
        metadata["resourceVersion"] = lease.version
        request = api.replace_namespaced_lease_without_preload_content(lease.name, self.namespace, body, **options)
        try:
            return _record(await self._request(read_json(request)))
        except KubeNotFound as error:
            raise KubeConflict(str(error)) from error

    async def _read(self, name: str) -> LeaseRecord:
        """Read a Lease; it has no version if it does not exist."""
        request = self._coordination.read_namespaced_lease_without_preload_content(
            name, self.namespace, _request_timeout=_TIMEOUT_S
        )
        try:
            return _record(await self._request(read_json(request)))
        except KubeNotFound:
            return LeaseRecord(name)


def _record(lease: Mapping[str, Any]) -> LeaseRecord:
    metadata, spec = lease["metadata"], lease.get("spec") or {}
    notes = metadata.get("annotations") or {}
    return LeaseRecord(
        metadata["name"],
        spec.get("holderIdentity") or "",
        int(spec.get("leaseTransitions") or 0),
        spec.get("renewTime") or "",
        metadata["resourceVersion"],
        Notes(notes.get(keys.ANNOTATION_ADDRESS, ""), notes.get(keys.ANNOTATION_NAMESPACES, "")),
    )
