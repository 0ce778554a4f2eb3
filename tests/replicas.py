"""Several replicas of the operator over light agents: who holds which shards, and what a death costs.

Measured from outside: by the Leases that the API server has, and by the epochs that the agents have seen.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import kubernetes.aio.client as k8s
from tests.doubles.fleet_cluster import FleetCluster, Operator

from perseus_operator.replicas.shard import SEATS, SHARDS, seat_lease, shard_lease, shard_of


@dataclass
class Replicas:
    """The living replicas by name."""

    cluster: FleetCluster
    flags: Sequence[str]
    patience_s: float = 60.0
    living: dict[str, Operator] = field(default_factory=dict)
    _started: int = 0

    async def start(self, count: int = 1) -> None:
        """Start replicas, as pods of new names, and wait until all have even parts of the shards."""
        for _ in range(count):
            self._started += 1
            name = f"operator-{self._started}"
            self.living[name] = await self.cluster.start_operator(*self.flags, "--replica", name)
        await self.until("each has an even part", self._even)

    async def shards(self) -> dict[int, str]:
        """The name of the replica that holds each shard."""
        records = await self._records()
        held = {shard: records.get(shard_lease(shard), "") for shard in range(SHARDS)}
        return {shard: holder.rpartition("_")[0] for shard, holder in held.items()}

    async def jobs_of(self, name: str) -> set[str]:
        """UIDs of the jobs whose shards a replica holds."""
        held = await self.shards()
        return {job["metadata"]["uid"] for job in (await self.cluster.jobs()).values() if held[uid_shard(job)] == name}

    async def end(self, name: str, end: Callable[[Operator], object]) -> float:
        """End a replica; the seconds until others command every job that it has served.

        Args:
            name: of the replica.
            end: ends its process; it may take as long as it wants.
        """
        operator, jobs, before = self.living.pop(name), await self.jobs_of(name), self.epochs()
        begun_s = time.monotonic()
        ending = asyncio.create_task(asyncio.to_thread(end, operator))

        async def commanded() -> bool:
            now = self.epochs()
            return all(now.get(key, 0) > epoch for key, epoch in before.items() if key[1] in jobs)

        await self.until(f"the jobs of {name} are commanded by others", commanded)
        lasted_s = time.monotonic() - begun_s
        await ending
        return lasted_s

    def epochs(self) -> dict[tuple[str, str], int]:
        """The epoch of every lease of an agent, by node and job."""
        agents = self.cluster.fleet.agents.values()
        return {(agent.node, lease.job_uid): lease.epoch for agent in agents for lease in agent.leases.all()}

    @property
    def leases_lost(self) -> int:
        """Leases that have run out at any agent since the start."""
        return sum(agent.leases.expiries for agent in self.cluster.fleet.agents.values())

    async def until(self, what: str, check: Callable[[], Awaitable[bool]]) -> None:
        """Wait for something that is to become so. Raises TimeoutError."""
        try:
            async with asyncio.timeout(self.patience_s):
                while not await check():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            logs = "\n".join(operator.log[-1500:] for operator in self.living.values())
            held = Counter((await self.shards()).values())
            raise TimeoutError(f"not after {self.patience_s:g} s: {what}; {held}\n{logs}") from None

    async def _even(self) -> bool:
        records = await self._records()
        seated = {holder.rpartition("_")[0] for seat in range(SEATS) if (holder := records.get(seat_lease(seat), ""))}
        counts = Counter((await self.shards()).values())
        return set(counts) == set(self.living) <= seated and max(counts.values()) == -(-SHARDS // len(self.living))

    async def _records(self) -> dict[str, str]:
        api: Any = k8s.CoordinationV1Api(self.cluster.core.api_client)
        found = await api.list_namespaced_lease(self.cluster.system)
        return {lease.metadata.name: lease.spec.holder_identity or "" for lease in found.items}


def uid_shard(job: Any) -> int:
    """The shard of a PerseusJob."""
    return shard_of(job["metadata"]["uid"])
