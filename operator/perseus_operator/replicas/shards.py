"""Holds shards for this replica: renews its seat, takes and frees shards, and says which it has got and lost.

``shard`` decides. Everything here is one task that never waits for a job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from perseus_operator.errors import KubeConflict, KubeError
from perseus_operator.replicas.epochs import Epochs, EpochStore
from perseus_operator.replicas.shard import (
    BEAT_S,
    LEADING_SHARD,
    NO_NOTES,
    SEATS,
    LeaseRecord,
    Membership,
    Notes,
    Round,
    seat_lease,
    shard_lease,
    shard_of,
)

logger = logging.getLogger(__name__)


class LeaseStore(EpochStore, Protocol):
    """What is needed of the API server."""

    async def leases(self) -> dict[str, LeaseRecord]:
        """Read all Leases of seats and shards, by name. Raises KubeError."""
        ...


@dataclass(frozen=True)
class Replica:
    """This process among the replicas of the operator."""

    leases: LeaseStore
    identity: str
    """By which it signs Leases."""
    epoch: int
    """Drawn at its start."""
    notes: Notes = NO_NOTES
    """What it says of itself to other replicas."""


class Shards:
    """The shards of this replica."""

    def __init__(
        self,
        replica: Replica,
        epochs: Epochs,
        *,
        monotonic_s: Callable[[], float],
        gained: Callable[[frozenset[int]], None],
        lost: Callable[[frozenset[int]], None],
    ) -> None:
        """Hold nothing yet.

        Args:
            replica: this process.
            epochs: of this process.
            monotonic_s: the time.
            gained: called with shards that this replica serves from now on.
            lost: called with shards that another one serves, or will.
        """
        self._store = replica.leases
        self._identity = replica.identity
        self._notes = replica.notes
        self._epoch = replica.epoch
        """Under which shards are taken next."""
        self._epochs = epochs
        self._monotonic_s = monotonic_s
        self._gained = gained
        self._lost = lost
        self._membership = Membership(replica.identity, replica.notes)
        self._held: set[int] = set()
        self._superseded = False
        self._warned = ""
        """What is wrong for now, as the log has said it."""

    @property
    def leads(self) -> bool:
        """Whether this replica shares budgets and makes the jobs of classes."""
        return LEADING_SHARD in self._held

    @property
    def others(self) -> tuple[str, ...]:
        """Addresses of the other replicas that live."""
        return self._membership.others

    def holds(self, job_uid: str) -> bool:
        """Whether this replica serves a job."""
        return shard_of(job_uid) in self._held

    async def run(self) -> None:
        """Beat until cancelled. While the API server does not answer, what is held stays held."""
        answers = True
        while True:
            begun_s = self._monotonic_s()
            try:
                await self.beat()
                answers = True
            except KubeError as error:
                if answers:
                    logger.warning("Leases of replicas and shards: %s", error)
                answers = False
            except Exception:  # one unforeseen answer must not end this for the life of the operator
                logger.exception("Leases of replicas and shards: unexpected error; trying again")
            await asyncio.sleep(max(0.0, begun_s + BEAT_S - self._monotonic_s()))

    async def beat(self) -> None:
        """Renew the seat, read all Leases, and take or free shards.

        Raises:
            KubeError: no answer; what was held stays held.
        """
        if self._superseded:
            return
        leases = await self._store.leases()
        decided = self._membership.read(leases, self._monotonic_s())
        self._compare(decided)
        self._warn(decided)
        if decided.superseded:
            logger.warning("another process has taken the place of %s: this one serves no more jobs", self._identity)
            self._superseded = True
            return
        if decided.seat is None:
            return
        name = seat_lease(decided.seat)
        try:
            await self._store.write(leases.get(name, LeaseRecord(name)), self._identity, notes=self._notes)
        except KubeConflict:
            return  # the next beat finds another
        await self._write_all([leases[seat_lease(seat)] for seat in decided.clear], "")
        await self._free(leases, decided.free)
        await self._take(leases, decided.take)

    def _warn(self, decided: Round) -> None:
        """Say what only a person can change; once, for as long as it is so."""
        warning = ""
        if self._membership.strangers:
            warning = (
                f"{', '.join(self._membership.strangers)} serve other namespaces than this operator, though their"
                " agents are in the same one: they are no replicas of it. Jobs of the shards that they hold are served"
                " by nobody; give each its own agents"
            )
        elif decided.seat is None and not decided.superseded:
            warning = f"there are {SEATS} replicas, as many as can be: this one serves no jobs"
        if warning and warning != self._warned:
            logger.error(warning)
        self._warned = warning

    async def leave(self) -> None:
        """Give back everything, so that others take it at once. Nothing that agents hold changes."""
        try:
            leases = await self._store.leases()
        except KubeError as error:
            logger.warning("shards not given back, others take them in a few seconds: %s", error)
            return
        await self._write_all([lease for lease in leases.values() if lease.holder == self._identity], "")

    def _compare(self, decided: Round) -> None:
        """Take in what the Leases say of this replica: others have written, or an answer to it was lost."""
        lost = frozenset(self._held - decided.held.keys())
        if lost:
            logger.warning("%d shards were taken by another replica: %s", len(lost), sorted(lost))
            self._drop(lost)
        unknown = decided.held.keys() - self._held
        self._hold({shard: decided.held[shard] for shard in unknown})

    async def _free(self, leases: Mapping[str, LeaseRecord], shards: tuple[int, ...]) -> None:
        """Stop serving first, then let others take over."""
        self._drop(frozenset(shards) & self._held)
        if shards:
            logger.info("%d shards for other replicas: %s", len(shards), shards)
        await self._write_all([leases[shard_lease(shard)] for shard in shards], "")

    async def _take(self, leases: Mapping[str, LeaseRecord], shards: tuple[int, ...]) -> None:
        wanted = [leases.get(shard_lease(shard), LeaseRecord(shard_lease(shard))) for shard in shards]
        highest = max((lease.epoch for lease in wanted), default=0)
        if highest >= self._epoch:
            self._epoch = await self._store.next_epoch(highest + 1)
        written = await self._write_all(wanted, self._identity, self._epoch)
        self._hold({shard: self._epoch for shard in shards if shard_lease(shard) in written})

    async def _write_all(self, wanted: Iterable[LeaseRecord], holder: str, epoch: int = 0) -> set[str]:
        """Write Leases of shards; the names of those that were written: others may have been faster.

        ``epoch`` 0: each keeps its own.
        """
        wanted = list(wanted)
        writes = (self._store.write(lease, holder, epoch or lease.epoch) for lease in wanted)
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        for lease, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, KubeConflict):
                logger.warning("Lease %s: not written: %s", lease.name, outcome)
        return {outcome.name for outcome in outcomes if isinstance(outcome, LeaseRecord)}

    def _hold(self, epochs: Mapping[int, int]) -> None:
        for shard, epoch in epochs.items():
            self._epochs.hold(shard, epoch)
        self._held |= epochs.keys()
        if epochs:
            logger.info("%d shards taken, under epoch %d", len(epochs), max(epochs.values()))
            self._gained(frozenset(epochs))

    def _drop(self, shards: frozenset[int]) -> None:
        self._held -= shards
        if shards:
            self._lost(shards)
