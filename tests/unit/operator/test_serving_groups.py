"""Replicas over several nodes: one clock for all GPUs of a group, that carries its load, or the default clocks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.doubles.engine_pool import RENEWED_S, WORKER_SHARE, EnginePool, group_of

from perseus_core.serving import FOLLOW_TABLE
from perseus_operator.api.conditions import Reason
from perseus_operator.families.serving.features.comparison.switchback import BLOCK_S, block_at, switched_back
from perseus_operator.families.serving.features.groups.energy import MOST_WAITING, Arrived, Energies
from perseus_operator.jobs.pools.figures import PoolCounts
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.nodes.node import EnergyReadings, Node
from perseus_operator.objects.values import Pod

LONG_S = 1_500
WORKERS = 2
FEW_CLOCKS = {"clocks": {"minimumMegahertz": 1_600}}


@pytest.fixture(scope="module")
def in_force() -> EnginePool:
    pool = EnginePool(replicas=2, workers=WORKERS, running=lambda _, second: 4 << (second % 4), **FEW_CLOCKS)
    pool.run(LONG_S, until=lambda: pool.second > 60 and not pool.decide().trying)
    pool.run(30)
    return pool


@pytest.fixture
def pool(in_force: EnginePool) -> EnginePool:
    """Two groups of four nodes each at one clock."""
    return deepcopy(in_force)


def clocks(pool: EnginePool) -> list[list[int]]:
    """Of each group: the leader's, and the workers'."""
    return [[pool.clock_of(f"pod-{n}"), *pool.workers_of(f"pod-{n}")] for n in range(2)]


def test_all_gpus_of_all_groups_are_at_one_clock_in_the_end(pool: EnginePool) -> None:
    [[mhz, *workers], other] = clocks(pool)
    assert workers == [mhz] * WORKERS
    assert other == [mhz, *workers]
    assert 0 < mhz < 0.9 * pool.machine.clocks_mhz[-1], "it saves something"
    said = pool.conditions()
    assert said["Ready"].status is True, said["Ready"].message
    assert said["SignalsReady"].message == "2 replicas report."
    assert "2 replicas over nodes hold the clock" in said["ClocksApplied"].message
    assert pool.status()["attainment"]["timePerOutputToken"] == "100.00%"


def test_a_leader_is_never_below_its_workers_and_only_a_canary_is_tried() -> None:
    pool = EnginePool(replicas=2, workers=WORKERS)
    lowest = 0
    for _ in range(120):
        pool.step()
        for leader, *workers in clocks(pool):
            assert not leader or workers == [leader] * WORKERS, "before all have confirmed the leader is at its default"
        assert pool.family.pool.model.table is not None or not any(clocks(pool)[1])
        lowest = clocks(pool)[0][0] or lowest
    assert lowest, "the canary's group was tried lower"


def test_a_group_goes_up_with_a_greater_load(pool: EnginePool) -> None:
    before = clocks(pool)[0][0]
    pool.running = lambda _, second: 300
    pool.run(3)
    after = clocks(pool)[0][0]
    assert after == 0 or after > before
    assert clocks(pool)[0] == [after] * (1 + WORKERS)


def test_windows_in_which_the_gpus_differ_say_nothing(pool: EnginePool) -> None:
    family = pool.family.pool
    count = family.model.count
    for node in pool.nodes:
        if "-w" in node.name:
            node.lease_lost()
    for number, node in enumerate(node for node in pool.nodes if node.engines.by_process):
        [engine] = node.engines.by_process.values()
        pool.family.window_reported(node, pool.window(number, node, engine))
    assert family.model.count == count


@pytest.mark.parametrize("what", ["silent", "gone"])
def test_without_its_leader_a_group_is_at_default_clocks(pool: EnginePool, what: str) -> None:
    [node] = [node for node in pool.nodes if node.name == "node-0"]
    [engine] = node.engines.by_process.values()
    if what == "gone":
        pool.family.engine_left(node, engine)
        pool.run(1)
    else:
        node.engines.by_process.clear()  # so that no window comes
        pool.decide()
        node.engines.by_process[engine.process] = engine
        report = pool.family.window_reported
        pool.family.window_reported = lambda at, window: None if at is node else report(at, window)  # type: ignore[method-assign]
        pool.run(6)
    first, second = clocks(pool)
    assert first == [0] * (1 + WORKERS)
    assert min(second) > 0, "the other group stays"


def test_when_the_agent_of_a_worker_is_lost_the_whole_group_is_at_default_clocks(pool: EnginePool) -> None:
    lost = next(node for node in pool.nodes if node.name == "node-0-w2")
    lost.lease_lost()
    lost.address = None
    pool.run(2)
    first, second = clocks(pool)
    assert first == [0] * (1 + WORKERS)
    assert min(second) > 0
    lost.address = "10.0.0.1:1"
    pool.run(8)
    assert clocks(pool)[0] == second


def test_a_gpu_that_cannot_be_locked_keeps_its_group_at_default_clocks_and_is_named() -> None:
    pool = EnginePool(replicas=1, workers=WORKERS)
    pool.undrivable = {"node-0-w1"}
    pool.run(LONG_S, until=lambda: bool(pool.family.pool.groups.faults))
    pool.run(2)
    assert [pool.clock_of("pod-0"), *pool.workers_of("pod-0")] == [0] * (1 + WORKERS)
    said = pool.conditions()["SignalsReady"]
    assert (said.status, said.reason) == (False, Reason.ENGINE_UNKNOWN)
    assert "r-0-w1, GPU GPU-node-0-w1-0: the driver refuses" in said.message
    pool.undrivable.clear()
    pool.run(120)
    assert pool.conditions()["SignalsReady"].status is True, "it is tried again"


def test_groups_that_cannot_have_one_clock_are_refused_by_name() -> None:
    pool = EnginePool(replicas=1, workers=WORKERS)
    leader, *workers = group_of(0, WORKERS)
    pool.pods(leader, *workers[:-1])
    pool.run(2)
    said = pool.conditions()["SignalsReady"]
    assert said.reason is Reason.ENGINE_UNKNOWN
    assert "r-0: 2 of the 3 pods of its group are labelled and have a node" in said.message
    pool.pods(leader, *workers[:-1], replace(workers[-1], node=leader.node))
    pool.run(2)
    assert "r-0-w2 of its group is on node node-0 with r-0" in pool.conditions()["SignalsReady"].message
    pool.pods(leader, *workers)
    pool.run(2)
    assert pool.conditions()["SignalsReady"].status is True


def test_workers_whose_engines_speak_are_replicas_of_their_own() -> None:
    pool = EnginePool(replicas=1, workers=1)
    pool.silent.clear()
    pool.pods(*group_of(0, 1))
    pool.run(LONG_S, until=lambda: pool.clocks == [FOLLOW_TABLE] * 2)
    assert pool.clocks == [FOLLOW_TABLE] * 2


# ------------------------------------------------------------------------------------------------------------- energy

PLENTY = 1 + WORKERS * WORKER_SHARE
"""What a group uses, of what its leader's GPUs do."""
BACK = [False, True, False]
"""In which of three blocks a replica is switched back for a comparison."""


class Counts:
    """Metrics that hold what windows were counted."""

    def __init__(self) -> None:
        self.pools = self
        self.windows: list[PoolCounts] = []

    def count(self, _: object, counts: PoolCounts) -> None:
        self.windows.append(counts)


def leaders_windows(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> list[EngineWindow]:
    """What the leaders do from now on, with the energy of their own GPUs."""
    seen: list[EngineWindow] = []
    window = pool.window

    def kept(*about: Any) -> EngineWindow:
        seen.append(window(*about))
        return seen[-1]

    monkeypatch.setattr(pool, "window", kept)
    return seen


def test_joules_are_those_of_all_gpus_of_a_group(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts()
    monkeypatch.setattr(pool.family._services, "metrics", counts)
    leaders = leaders_windows(pool, monkeypatch)
    pool.running = lambda *_: 64
    pool.run(100)
    measured = [one.energy_mj for one in counts.windows if one.energy_mj is not None]
    assert len(measured) >= 2 * (100 - RENEWED_S) - 40
    mean_mj, own_mj = sum(measured) / len(measured), sum(one.energy_mj or 0 for one in leaders) / len(leaders)
    assert mean_mj == pytest.approx(PLENTY * own_mj, rel=0.1)
    assert all(one.generated_tokens for one in counts.windows), "tokens are counted with their joules"


def test_where_a_worker_has_no_counter_a_group_has_no_joules(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.uncounted = {"node-0-w2"}
    pool.run(60)
    counts = Counts()
    monkeypatch.setattr(pool.family._services, "metrics", counts)
    pool.run(200)
    assert any(one.energy_mj for one in counts.windows), "the other group's are known"
    unknown = sum(one.energy_mj is None for one in counts.windows)
    assert unknown >= 200 - MOST_WAITING, "never half a group's, once it has waited"
    blocks = pool.family.pool.switchback._blocks
    assert all(block.torn or not block.tokens for block in blocks.get("pod-0", ()))


def test_savings_of_groups_are_of_all_gpus(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.running = lambda *_: 64
    first = block_at(pool.wall_s) + 1
    backs = [switched_back("uid", block, ("pod-0", "pod-1")) for block in range(first, first + 1_000)]
    place = next(place for place in range(1, 999) if [one == "pod-0" for one in backs[place - 1 : place + 2]] == BACK)
    pool.second += int((first + place - 1) * BLOCK_S - pool.wall_s)
    leaders = leaders_windows(pool, monkeypatch)
    pool.run(4 * int(BLOCK_S), until=lambda: bool(pool.family.pool.switchback.comparisons))
    one = pool.family.pool.switchback.comparisons[-1]
    by_law = [window for window in leaders if window.pod_uid == "pod-0" and window.clock_mhz]
    own_mj = sum(window.energy_mj or 0 for window in by_law) / sum(window.generated_tokens for window in by_law)
    assert one.law_mj / one.law_tokens == pytest.approx(PLENTY * own_mj, rel=0.02)
    assert one.law_mj / one.law_tokens < 0.9 * one.default_mj / one.default_tokens


def test_a_counter_that_falls_or_leaps_leaves_the_joules_between_unknown() -> None:
    nodes = {"n": Node("n", None, frozenset())}
    worker = Pod("w", "ns", "w", "n", "pool", {})
    replica: Any = SimpleNamespace(workers=(worker,))
    energies = Energies()
    for at_s, used_mj in ((0.0, 500_000), (10.0, 900_000), (20.0, 100_000), (30.0, 500_000), (40.0, 10**15)):
        nodes["n"].energies = EnergyReadings(at_s, {"w": used_mj})
        energies.looked([replica], nodes)
        for second in range(9):
            window = EngineWindow(pod_uid="p", pid=1, time_us=1_000_000, energy_mj=7)
            energies.arrived(Arrived(window, (worker,), at_s - 9 + second, 0.0, None))
        known = [one.window.energy_mj for one in energies.known("p")]
        assert set(known) == ({40_007} if at_s in (10.0, 30.0) else {None})
    assert len(known) == 9
