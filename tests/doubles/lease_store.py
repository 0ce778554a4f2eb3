"""The Leases of an API server, in memory: of several writers one wins, and an answer may be lost after the write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from perseus_operator.errors import KubeConflict, KubeUnavailable
from perseus_operator.replicas.shard import NO_NOTES, LeaseRecord, Notes, shard_lease

COUNTER = "perseus-epoch"


class LeaseServer:
    """What every replica reads and writes."""

    def __init__(self) -> None:
        self.records: dict[str, LeaseRecord] = {}
        self.writes = 0

    @property
    def counter(self) -> int:
        """The last epoch drawn; 0: none."""
        return self.records[COUNTER].epoch if COUNTER in self.records else 0

    @counter.setter
    def counter(self, epoch: int) -> None:
        self.put(LeaseRecord(COUNTER, epoch=epoch))

    def put(self, record: LeaseRecord) -> LeaseRecord:
        """Write whatever is there."""
        self.writes += 1
        self.records[record.name] = replace(record, version=str(self.writes), renewed=str(self.writes))
        return self.records[record.name]


class LeaseConnection:
    """One replica's way to them: ``lose_answer`` says of each write whether its answer is lost."""

    def __init__(self, server: LeaseServer, lose_answer: Callable[[], bool] = lambda: False) -> None:
        self.server = server
        self.answers = True
        """Whether requests reach the server at all."""
        self._lose_answer = lose_answer

    async def leases(self) -> dict[str, LeaseRecord]:
        await self._reach()
        return {name: record for name, record in self.server.records.items() if name != COUNTER}

    async def shard(self, shard: int) -> LeaseRecord:
        await self._reach()
        return self.server.records.get(shard_lease(shard), LeaseRecord(shard_lease(shard)))

    async def next_epoch(self, least: int = 1) -> int:
        await self._reach()
        self.server.counter = max(least, self.server.counter + 1)
        return self.server.counter

    async def write(self, known: LeaseRecord, holder: str, epoch: int = 0, notes: Notes = NO_NOTES) -> LeaseRecord:
        await self._reach()
        present = self.server.records.get(known.name)
        if (present.version if present else "") != known.version:
            raise KubeConflict(f"{known.name}: the object has been modified")
        written = self.server.put(LeaseRecord(known.name, holder, epoch, notes=notes))
        if self._lose_answer():
            raise KubeUnavailable("the answer was lost")
        return written

    async def _reach(self) -> None:
        await asyncio.sleep(0)  # others run while the API server answers
        if not self.answers:
            raise KubeUnavailable("503")
