"""Which replica of the operator serves which jobs: jobs belong to shards, and replicas hold shards.

A job's shard follows from its UID, for ever. Which replica holds a shard is written in the shard's Lease; that a
replica lives, in a Lease of its own, its seat, which it renews. Each replica decides alone, from what it reads there
and by its own clock: it takes shards that nobody alive holds, up to an even part, and frees what it holds beyond.
Nobody commands another, and the API server lets one writer of several win.

A replica that is cut off keeps its shards in mind and goes on: agents refuse it once another has taken them, since a
shard is always taken under a higher epoch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

SHARDS: Final = 32
"""A constant: if two replicas counted differently, both would serve the same job. One replica holds all of them."""
SEATS: Final = 16
"""Replicas at most. The Leases have fixed names, so that the right to write them is the right to write these."""
LEADING_SHARD: Final = 0
"""Who holds it also shares PowerBudgets and makes the jobs of EnergyClasses: one replica must."""
BEAT_S: Final = 0.5
"""How often a replica renews its seat and reads the Leases."""
DEAD_AFTER_S: Final = 3.0
"""A seat that is not renewed for so long is empty, and with it whatever its replica holds. With the beats of both
replicas it is noticed within four seconds."""
_UNREAD_S: Final = DEAD_AFTER_S / 2
"""Who could not read the Leases for so long knows nothing of the others, who could perhaps not renew theirs."""


@dataclass(frozen=True)
class Notes:
    """What a replica says of itself on its seat."""

    address: str = ""
    """host:port at which it answers others; empty: nowhere."""
    namespaces: str = ""
    """That it serves, separated by commas; empty: all."""


NO_NOTES: Final = Notes()


@dataclass(frozen=True)
class LeaseRecord:
    """A Lease as it was read; the fields that are not set there are empty."""

    name: str
    holder: str = ""
    epoch: int = 0
    """``spec.leaseTransitions``: of a shard, under which its holder commands."""
    renewed: str = ""
    """``spec.renewTime``, which is only compared with itself: no two clocks need to agree."""
    version: str = ""
    notes: Notes = NO_NOTES
    """Of a seat."""


_ABSENT: Final = LeaseRecord("")


def shard_of(job_uid: str) -> int:
    """The shard that a PerseusJob belongs to."""
    return zlib.crc32(job_uid.encode()) % SHARDS


def shard_lease(shard: int) -> str:
    """Name of the Lease that says who holds a shard."""
    return f"perseus-shard-{shard}"


def seat_lease(seat: int) -> str:
    """Name of the Lease by which one replica says that it lives."""
    return f"perseus-replica-{seat}"


def identity_of(replica: str, process: str) -> str:
    """How a process signs its Leases; ``replica`` is also the name of the process that follows it in its pod."""
    return f"{replica}_{process}"


@dataclass(frozen=True)
class Round:
    """What a replica is to write after it has read the Leases.

    Attributes:
        seat: to renew or to take; None: there is none for it.
        superseded: another process of its own name has taken its seat: it is to hold nothing more.
        held: shards that it holds, with the epoch of each.
        take: shards that it may try to take.
        free: shards that it is to give back, for others.
        clear: seats of the dead that it is to empty, as the one that leads: who has just started cannot tell for three
            seconds that they are dead, and would leave them their part of the shards.
    """

    seat: int | None
    superseded: bool = False
    held: Mapping[int, int] = field(default_factory=dict)
    take: tuple[int, ...] = ()
    free: tuple[int, ...] = ()
    clear: tuple[int, ...] = ()


class Membership:
    """What one replica knows of all replicas; in seconds of its own monotonic clock."""

    def __init__(self, identity: str, notes: Notes = NO_NOTES) -> None:
        self.identity = identity
        self.notes = notes
        self._seated = False
        self._read_s = -math.inf
        self._seats: dict[int, tuple[LeaseRecord, float]] = {}
        """Each seat that is taken, and since when it has been as it is."""
        self.others: tuple[str, ...] = ()
        """Addresses of the other replicas that live, as far as they have one."""
        self.strangers: tuple[str, ...] = ()
        """Who lives and serves other namespaces: jobs of the shards that they hold may be served by nobody."""

    def read(self, leases: Mapping[str, LeaseRecord], now_s: float) -> Round:
        """Take in all Leases as they are now, and decide.

        Args:
            leases: of seats and shards, by name; those that do not exist are left out.
            now_s: after they were read.
        """
        self._observe(leases, now_s)
        alive = self._alive(now_s)
        seated = [record for record, _ in self._seats.values() if record.holder in alive]
        self.others = tuple(record.notes.address for record in seated if record.notes.address)
        self.strangers = tuple(r.holder for r in seated if r.notes.namespaces != self.notes.namespaces)
        seat = self._seat(leases, alive)
        holders = {record.holder for record, _ in self._seats.values()}
        if self.identity in holders:
            self._seated = True
        elif self._seated and any(map(self._is_namesake, holders)):
            return Round(None, superseded=True)
        shards = {shard: leases.get(shard_lease(shard), _ABSENT) for shard in range(SHARDS)}
        held = {shard: record.epoch for shard, record in shards.items() if record.holder == self.identity}
        alive.add(self.identity)
        quota = math.ceil(SHARDS / len(alive))
        # Two that take at once begin at different shards, and so meet less often.
        first = SHARDS * sorted(alive).index(self.identity) // len(alive)
        unheld = [shard for shard, record in shards.items() if record.holder not in alive]
        unheld.sort(key=lambda shard: (shard - first) % SHARDS)
        beyond = sorted(held)[quota:]  # the leading shard stays as long as any
        take = tuple(unheld[: max(0, quota - len(held))])
        dead = (each for each, (record, _) in self._seats.items() if record.holder not in alive and each != seat)
        clear = tuple(dead) if LEADING_SHARD in held else ()
        return Round(seat, held=held, take=take, free=tuple(beyond), clear=clear)

    def _observe(self, leases: Mapping[str, LeaseRecord], now_s: float) -> None:
        if now_s - self._read_s > _UNREAD_S:
            self._seats.clear()  # everyone's time begins anew
        self._read_s = now_s
        seats: dict[int, tuple[LeaseRecord, float]] = {}
        for seat in range(SEATS):
            record = leases.get(seat_lease(seat))
            if record is None or not record.holder:
                continue
            before = self._seats.get(seat)
            same = before is not None and (before[0].holder, before[0].renewed) == (record.holder, record.renewed)
            seats[seat] = (record, before[1] if same and before is not None else now_s)
        self._seats = seats

    def _alive(self, now_s: float) -> set[str]:
        """Who has renewed a seat lately, other than this process and those that it follows in its pod."""
        fresh = {record.holder for record, since_s in self._seats.values() if now_s - since_s < DEAD_AFTER_S}
        return {holder for holder in fresh if holder != self.identity and not self._is_namesake(holder)}

    def _seat(self, leases: Mapping[str, LeaseRecord], alive: Collection[str]) -> int | None:
        """Its own seat, that of the process before it, or the first one that is empty."""
        holders = [leases.get(seat_lease(seat), _ABSENT).holder for seat in range(SEATS)]
        mine = (seat for seat, holder in enumerate(holders) if holder == self.identity)
        before = (seat for seat, holder in enumerate(holders) if self._is_namesake(holder))
        empty = (seat for seat, holder in enumerate(holders) if holder not in alive)
        return next(chain(mine, before, empty), None)

    def _is_namesake(self, holder: str) -> bool:
        """Whether a holder is another process of this replica's name: it has been there before."""
        return holder != self.identity and holder.rpartition("_")[0] == self.identity.rpartition("_")[0]
