"""Replicas over several nodes: one clock for all GPUs of a group, that carries its load, or the default clocks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from tests.doubles.engine_pool import EnginePool, group_of

from perseus_core.serving import FOLLOW_TABLE
from perseus_operator.api.conditions import Reason

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
