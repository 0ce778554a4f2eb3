"""Shards over replicas: each is held by one, evenly; those of a dead one are held again within seconds; epochs rise."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import pytest
from tests.doubles.lease_store import LeaseConnection, LeaseServer

from perseus_operator.errors import KubeError
from perseus_operator.replicas.epochs import Epochs
from perseus_operator.replicas.shard import (
    BEAT_S,
    DEAD_AFTER_S,
    SEATS,
    SHARDS,
    LeaseRecord,
    Membership,
    Notes,
    identity_of,
    seat_lease,
    shard_lease,
    shard_of,
)
from perseus_operator.replicas.shards import Replica as ThisReplica
from perseus_operator.replicas.shards import Shards

FAILOVER_S: Final = 5.0
"""Within this time after a death another replica holds every shard."""


@dataclass
class Replica:
    """One process, and what its jobs would hear."""

    shards: Shards
    connection: LeaseConnection
    epochs: Epochs
    beats_s: float
    """When it beats next."""
    serves: set[int] = field(default_factory=set)
    alive: bool = True


class World:
    """Replicas whose beats are not in step, on one API server; time is virtual."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.server = LeaseServer()
        self.replicas: list[Replica] = []
        self.commanded: dict[int, int] = {}
        """The highest epoch under which each shard has been held, as its agents would have seen it."""

    async def start(self, name: str = "", *, loses_answers: float = 0.0) -> Replica:
        identity = identity_of(name or f"operator-{len(self.replicas)}", f"{len(self.replicas):08x}")
        connection = LeaseConnection(self.server, lambda: self.random.random() < loses_answers)
        epochs, serves = Epochs(connection, identity), set[int]()
        shards = Shards(
            ThisReplica(connection, identity, await connection.next_epoch()),
            epochs,
            monotonic_s=lambda: self.now_s,
            gained=lambda gained: self._gained(replica, gained),
            lost=serves.difference_update,
        )
        replica = Replica(shards, connection, epochs, self.now_s + self.random.uniform(0, BEAT_S), serves)
        self.replicas.append(replica)
        return replica

    def _gained(self, replica: Replica, shards: frozenset[int]) -> None:
        assert not replica.serves & shards, "a job is begun once"
        replica.serves |= shards
        for shard in shards:
            epoch = self.server.records[shard_lease(shard)].epoch
            assert epoch > self.commanded.get(shard, 0), "agents would refuse the new holder"
            self.commanded[shard] = epoch

    async def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while True:
            living = [replica for replica in self.replicas if replica.alive]
            replica = min(living, key=lambda replica: replica.beats_s)
            if replica.beats_s > until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, replica.beats_s)
            replica.beats_s = self.now_s + BEAT_S
            try:
                await replica.shards.beat()
            except KubeError:
                continue

    @property
    def served(self) -> Counter[int]:
        """By how many living replicas each shard is served."""
        return Counter(shard for replica in self.replicas if replica.alive for shard in replica.serves)

    def assert_each_once(self) -> None:
        assert self.served == Counter(range(SHARDS))

    def assert_even(self) -> None:
        self.assert_each_once()
        living = [replica for replica in self.replicas if replica.alive]
        assert max(len(replica.serves) for replica in living) == -(-SHARDS // len(living))


async def test_one_replica_serves_everything_after_its_first_beat() -> None:
    world = World()
    only = await world.start()
    await only.shards.beat()
    world.assert_even()
    assert only.shards.leads
    assert all(only.shards.holds(f"uid-{number}") for number in range(100))


@pytest.mark.parametrize("replicas", [2, 3, 5, SEATS])
async def test_replicas_that_join_get_an_even_part(replicas: int) -> None:
    world = World(replicas)
    for _ in range(replicas):
        await world.start()
        await world.run(world.random.uniform(0, 2))
    await world.run(5)
    world.assert_even()
    assert sum(replica.shards.leads for replica in world.replicas) == 1
    before = dict(world.server.records)
    await world.run(10)
    changed = {name for name, record in world.server.records.items() if record != before.get(name)}
    assert changed == {seat_lease(seat) for seat in range(replicas)}, "at rest only seats are renewed"


async def test_one_more_than_there_are_seats_waits_for_a_seat(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for _ in range(SEATS + 1):
        await world.start()
    await world.run(8)
    idle = [replica for replica in world.replicas if not replica.serves]
    assert len(idle) == 1
    assert caplog.text.count("as many as can be") == 1, "said once, not at each beat"
    gone = next(replica for replica in world.replicas if replica.serves)
    gone.alive = False
    await world.run(FAILOVER_S + 2)
    world.assert_even()
    assert idle[0].serves


@pytest.mark.parametrize("seed", range(20))
async def test_a_dead_replica_is_replaced_in_time_whenever_it_dies(seed: int) -> None:
    world = World(seed)
    for _ in range(3):
        await world.start()
    await world.run(5 + world.random.random())
    victim = world.random.choice(world.replicas)
    victim.alive = False
    await world.run(FAILOVER_S - BEAT_S)  # half a second is left for the writes themselves
    world.assert_even()


async def test_one_that_leaves_is_replaced_at_the_next_beat() -> None:
    world = World()
    first, second = await world.start(), await world.start()
    await world.run(5)
    await first.shards.leave()
    first.alive = False
    await world.run(2 * BEAT_S)
    assert second.serves == set(range(SHARDS))
    assert not any(lease.holder.startswith("operator-0_") for lease in world.server.records.values())


async def test_a_restarted_container_takes_its_place_at_once_and_its_old_process_rests() -> None:
    world = World()
    old = await world.start("operator-a")
    await world.run(2)
    new = await world.start("operator-a")
    await world.run(3 * BEAT_S)
    assert new.serves == set(range(SHARDS))
    await world.run(10)
    assert not old.serves
    assert new.serves == set(range(SHARDS)), "the old process does not take anything back"


@pytest.mark.parametrize("seed", range(20))
async def test_a_replica_that_starts_leaves_nothing_to_one_that_died_long_before(seed: int) -> None:
    world = World(seed)
    for _ in range(3):
        await world.start()
    await world.run(5)
    dead, old = world.random.sample(range(3), 2)
    world.replicas[dead].alive = False
    await world.run(FAILOVER_S + DEAD_AFTER_S)
    world.replicas[old].alive = False
    await world.start(f"operator-{old}")
    await world.run(3 * BEAT_S)
    world.assert_even()


async def test_a_cut_off_replica_keeps_its_jobs_in_mind_until_it_reads_that_they_are_anothers() -> None:
    world = World()
    cut, other = await world.start(), await world.start()
    await world.run(5)
    mine = set(cut.serves)
    cut.connection.answers = False
    await world.run(FAILOVER_S)
    assert cut.serves == mine, "agents refuse it where it is replaced, and obey it where it is not"
    assert other.serves == set(range(SHARDS))
    cut.connection.answers = True
    await world.run(5)
    world.assert_even()


async def test_an_outage_for_all_moves_no_shard() -> None:
    world = World()
    for _ in range(3):
        await world.start()
    await world.run(5)
    before = [set(replica.serves) for replica in world.replicas]
    for replica in world.replicas:
        replica.connection.answers = False
    await world.run(60)
    world.replicas[0].connection.answers = True  # the first that reads again finds nobody else's seat renewed
    await world.run(DEAD_AFTER_S - BEAT_S)
    for replica in world.replicas:
        replica.connection.answers = True
    await world.run(5)
    assert [set(replica.serves) for replica in world.replicas] == before


@pytest.mark.parametrize("seed", range(30))
async def test_after_any_faults_each_shard_is_held_once_and_epochs_have_only_risen(seed: int) -> None:
    """Replicas die, freeze, are cut off, leave, join and lose answers; ``World`` checks the epochs of each step."""
    world = World(seed)
    for _ in range(3):
        await world.start(loses_answers=0.1)
    for _ in range(25):
        living = [replica for replica in world.replicas if replica.alive]
        chosen = world.random.choice(living)
        fault = world.random.choice(["die", "freeze", "cut", "heal", "leave", "join", "delete"])
        if fault in ("die", "leave") and len(living) > 1:
            chosen.alive = False
            if fault == "leave" and chosen.connection.answers:
                await chosen.shards.leave()
        elif fault == "freeze":
            chosen.beats_s += world.random.uniform(0, 10)
        elif fault == "cut":
            chosen.connection.answers = False
        elif fault == "heal":
            chosen.connection.answers = True
        elif fault == "join" and len(living) < 6:
            await world.start(loses_answers=0.1)
        elif fault == "delete":
            world.server.records.pop(shard_lease(world.random.randrange(SHARDS)), None)
            world.commanded.clear()  # a Lease that is deleted takes its epoch with it: agents ask for a higher one
        await world.run(world.random.uniform(0, 4))
    for replica in world.replicas:
        replica.connection.answers = True
        replica.connection._lose_answer = lambda: False
    await world.run(30)
    world.assert_even()


async def test_the_part_of_jobs_follows_the_part_of_shards() -> None:
    jobs = Counter(shard_of(f"{number:08x}-7c1e-4f6e-9d8e-{number * 7919:012x}") for number in range(3200))
    assert set(jobs) == set(range(SHARDS))
    assert max(jobs.values()) < 1.5 * 100


def test_who_holds_a_shard_without_a_seat_is_dead() -> None:
    membership = Membership("operator-a_1")
    seat = LeaseRecord(seat_lease(0), "operator-a_1", renewed="1", version="1")
    orphan = LeaseRecord(shard_lease(3), "operator-b_1", epoch=9, version="2")
    decided = membership.read({seat.name: seat, orphan.name: orphan}, 0.0)
    assert 3 in decided.take


async def test_an_operator_of_other_namespaces_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = LeaseServer()
    connection = LeaseConnection(server)
    await connection.write(LeaseRecord(seat_lease(0)), "other_1", notes=Notes(namespaces="team-b"))
    replica = ThisReplica(connection, "own_1", 1, Notes(namespaces="team-a"))
    shards = Shards(
        replica, Epochs(connection, "own_1"), monotonic_s=lambda: 0.0, gained=lambda _: None, lost=lambda _: None
    )
    for _ in range(3):
        await shards.beat()
    assert [record.levelname for record in caplog.records if "other_1 serve other namespaces" in record.message] == [
        "ERROR"
    ]


async def test_replicas_know_where_the_others_answer() -> None:
    server = LeaseServer()
    connection = LeaseConnection(server)
    await connection.write(LeaseRecord(seat_lease(0)), "other_1", notes=Notes("10.0.0.7:9476"))
    await connection.write(LeaseRecord(seat_lease(1)), "silent_1")
    membership = Membership("own_1", Notes("10.0.0.8:9476"))
    membership.read(await connection.leases(), 0.0)
    assert membership.others == ("10.0.0.7:9476",)
    membership.read(await connection.leases(), 1.0)
    membership.read(await connection.leases(), 2.0)
    membership.read(await connection.leases(), DEAD_AFTER_S)
    assert membership.others == (), "who does not renew its seat answers nobody"
