"""The numbers under which this replica commands: one for each shard that it holds, and higher ones for jobs that need
them.

An agent refuses an epoch below the highest that it has seen for the job. If the Lease of the job's shard no longer
names this replica, another one has taken the shard and commands. If it does, what the agent has seen was drawn from a
counter that was lost since: with its namespace, or because etcd was restored from a backup. Then the counter is raised
above what the agent has seen, and that job goes on under the new number. Other jobs keep theirs, so nothing that an
agent says about one job concerns another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final, Protocol

from perseus_operator.errors import KubeConflict
from perseus_operator.replicas.shard import NO_NOTES, LeaseRecord, Notes, shard_of

MAX_LOST: Final = 1_000_000
"""An epoch is drawn when a shard is taken: no counter was ahead by more when it was lost. An agent that names a higher
one is not believed."""
MAX_RAISES: Final = 16
"""For one job: more than there are different operators that its agents can have seen last. An agent that asks for ever
higher numbers stops its own job, and uses up no more than this of them."""


class EpochStore(Protocol):
    """What is needed of the API server."""

    async def next_epoch(self, least: int = 1) -> int:
        """Draw an epoch above all that were drawn before, and not below ``least``. Raises KubeError."""
        ...

    async def shard(self, shard: int) -> LeaseRecord:
        """Read the Lease of a shard. Raises KubeError."""
        ...

    async def write(self, lease: LeaseRecord, holder: str, epoch: int = 0, notes: Notes = NO_NOTES) -> LeaseRecord:
        """Write a Lease. Raises KubeConflict if it is no longer as it was read."""
        ...


@dataclass
class _Held:
    first: int
    """The epoch under which the shard was taken."""
    drawn: int
    """The highest that was drawn for it since."""


class Epochs:
    """The epochs of one replica; those of a shard stay known once it is lost, for calls that are under way."""

    def __init__(self, store: EpochStore, identity: str) -> None:
        """``identity``: by which this replica holds Leases."""
        self._store = store
        self._identity = identity
        self._shards: dict[int, _Held] = {}
        self._raises: Counter[str] = Counter()
        # One question at a time: what is drawn for one agent must not look to the next like another replica's.
        self._asking = asyncio.Lock()

    def hold(self, shard: int, epoch: int) -> None:
        """Command the jobs of a shard under this epoch from now on."""
        self._shards[shard] = _Held(epoch, epoch)

    def of(self, job_uid: str) -> int:
        """The epoch under which a job is commanded, unless its agents have seen a higher one; 0: its shard was never
        held.
        """
        held = self._shards.get(shard_of(job_uid))
        return 0 if held is None else held.first

    def drawn(self, job_uid: str) -> int:
        """The highest epoch of the job's shard that this replica has drawn."""
        held = self._shards.get(shard_of(job_uid))
        return 0 if held is None else held.drawn

    async def newest(self, job_uid: str) -> int:
        """Read under which epoch the job's shard is held, by whomever. Raises KubeError."""
        return (await self._store.shard(shard_of(job_uid))).epoch

    async def above(self, seen: int | None, job_uid: str) -> int | None:
        """An epoch for a job above one that an agent has seen.

        Args:
            seen: by the agent; None: it does not say.
            job_uid: of the PerseusJob.

        Returns:
            The epoch; None: another replica commands, or the agent cannot be believed.

        Raises:
            KubeError: the API server did not answer; try again.
        """
        async with self._asking:
            return await self._above(seen, job_uid)

    async def _above(self, seen: int | None, job_uid: str) -> int | None:
        shard = shard_of(job_uid)
        held = self._shards.get(shard)
        if held is None or seen is None or self._raises[job_uid] >= MAX_RAISES or seen > held.drawn + MAX_LOST:
            return None
        lease = await self._store.shard(shard)
        if lease.holder != self._identity:
            return None
        if seen >= held.drawn:
            drawn = await self._store.next_epoch(seen + 1)
            try:
                await self._store.write(lease, self._identity, drawn)
            except KubeConflict:
                return None
            held.drawn = drawn
        self._raises[job_uid] += 1
        return held.drawn

    def forget(self, job_uid: str) -> None:
        """The job does not exist any more, or is another replica's."""
        del self._raises[job_uid]
