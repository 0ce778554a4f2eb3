"""A pool of simulated replicas under the operator's family: from nothing known to clocks that follow the load."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.engine_pool import OBJECTIVE, EnginePool, distinct

from perseus_core.serving import FOLLOW_TABLE, PageAddress, place_of
from perseus_operator.api.conditions import Reason
from perseus_operator.families.serving.features.objective.requests import Block, RequestTimes
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.objects.values import Pod
from perseus_sim.serving.machine import Step

LONG_S = 1_500


def explored(pool: EnginePool) -> None:
    """Run until the canary has tried all that it may."""
    pool.run(LONG_S, until=lambda: pool.second > 60 and not pool.decide().trying)


@pytest.fixture(scope="module")
def in_force() -> EnginePool:
    pool = EnginePool()
    explored(pool)
    pool.run(30)
    return pool


@pytest.fixture
def pool(in_force: EnginePool) -> EnginePool:
    """Three replicas that follow a table."""
    return deepcopy(in_force)


def test_all_replicas_follow_a_table_in_the_end(pool: EnginePool) -> None:
    assert pool.clocks == [FOLLOW_TABLE] * 3
    said = pool.conditions()
    assert said["Ready"].status is True, said["Ready"].message
    assert said["ProfileReady"].reason is Reason.PROFILE_FITTED
    assert said["ClocksApplied"].reason is Reason.TABLE_IN_FORCE
    assert said["SignalsReady"].reason is Reason.SIGNALS_SEEN
    found = pool.family.pool.model.table
    assert found is not None
    clocks = {mhz for row in found.clocks_mhz for mhz in row if mhz}
    assert min(clocks) < 0.7 * pool.machine.clocks_mhz[-1], "it saves something"
    status = pool.status()
    assert status["replicaCount"] == 3
    assert [each["pod"] for each in status["replicas"]] == ["r-0", "r-1", "r-2"]
    assert status["engine"]["lowestMegahertz"] == min(clocks)
    assert status["attainment"]["timePerOutputToken"] == "100.00%"
    assert "canary" not in status


def test_until_a_table_is_there_the_canary_alone_leaves_the_default_clocks() -> None:
    pool = EnginePool()
    canary, others = [], set()
    while pool.family.pool.model.table is None and pool.second < LONG_S:
        pool.step()
        canary.append(pool.clock_of("pod-0"))
        others |= {pool.clock_of("pod-1"), pool.clock_of("pod-2")}
    assert others <= {0, FOLLOW_TABLE}
    tried = distinct(canary)
    assert tried[0] == 0
    assert tried[1:] == sorted(tried[1:], reverse=True), "downwards, one step after another"
    assert len(tried) >= 3
    assert pool.conditions()["ProfileReady"].reason in (Reason.PROFILING, Reason.PROFILE_FITTED)


def test_decisions_are_pure(pool: EnginePool) -> None:
    assert pool.decide() == pool.decide()


def test_a_miss_raises_the_canary_and_bars_its_clock() -> None:
    pool = EnginePool()
    pool.run(LONG_S, until=lambda: pool.clock_of("pod-0") not in (0, FOLLOW_TABLE) and pool.clock_of("pod-0") < 1_600)
    low = pool.clock_of("pod-0")
    pool.run(3)
    at_default_s = pool.machine.seconds(pool.machine.costs(pool.machine.clocks_mhz[-1]), Step(4, 4_000, 0, 0.0, 0))
    pool.slower = 0.0505 / at_default_s * (low / pool.machine.clocks_mhz[-1]) ** 0.2
    pool.run(20, until=lambda: pool.clock_of("pod-0") > low or pool.clock_of("pod-0") <= 0)
    assert pool.clock_of("pod-0") > low or pool.clock_of("pod-0") == 0
    [missed] = pool.status()["engine"]["missedClocks"]
    assert missed["clockMegahertz"] == low
    assert missed["misses"] == 1


def test_after_a_restart_no_clock_is_tried_that_has_missed_lately() -> None:
    pool = EnginePool()
    pool.run(60)
    fingerprint = pool.status()["engine"]["fingerprint"]
    barred = {"clockMegahertz": 1_875, "misses": 3, "notBefore": "2040-01-01T00:00:00Z"}
    engine = {"fingerprint": fingerprint, "engine": "vllm", "model": "m", "windows": 9, "missedClocks": [barred]}
    pool.start({"engine": engine})
    tried = set()
    for _ in range(300):
        pool.step()
        tried.add(pool.clock_of("pod-0"))
    assert tried == {0}
    [missed] = pool.status()["engine"]["missedClocks"]
    assert missed == barred, "and the next operator knows it, too"
    pool.start({"engine": {**engine, "fingerprint": "of another engine"}})
    pool.run(300, until=lambda: pool.clock_of("pod-0") != 0)
    assert pool.clock_of("pod-0") == 1_875


def test_after_a_restart_orders_are_sent_again_and_clocks_are_default_until_it_knows(pool: EnginePool) -> None:
    assert pool.clocks == [FOLLOW_TABLE] * 3
    pool.start(pool.status())
    pool.step()
    assert pool.clocks == [0, 0, 0]
    pool.run(LONG_S, until=lambda: pool.clocks == [FOLLOW_TABLE] * 3)
    assert pool.clocks == [FOLLOW_TABLE] * 3


@pytest.mark.parametrize("mode", ["Observe", "Recommend"])
def test_other_modes_set_no_clocks_and_take_back_what_was_set(pool: EnginePool, mode: str) -> None:
    pool.edit(mode=mode)
    pool.run(5)
    assert pool.clocks == [0, 0, 0]
    assert pool.conditions()["ClocksApplied"].status is False
    assert pool.conditions()["Ready"].status is True


def test_a_canary_is_one_replica(pool: EnginePool) -> None:
    pool.edit(mode="Canary")
    pool.run(5)
    assert pool.clocks == [FOLLOW_TABLE, 0, 0]
    assert pool.conditions()["ClocksApplied"].reason is Reason.CANARY


def test_without_limits_limits_are_proposed() -> None:
    pool = EnginePool(objective={})
    pool.run(120)
    assert pool.clocks == [0, 0, 0]
    said = pool.conditions()
    assert said["ClocksApplied"].reason is Reason.NO_LIMITS
    assert said["Ready"].status is True
    proposed = pool.status()["proposedLimits"]
    assert proposed["timePerOutputToken"].endswith("ms")
    pool.edit(objective={name: {"limit": limit} for name, limit in proposed.items()})
    pool.step()
    assert pool.conditions()["ObjectiveKept"].status is True, "what is proposed is kept"


def test_an_engine_that_no_model_explains_runs_at_default_clocks() -> None:
    pool = EnginePool()
    pool.strange = True
    explored(pool)
    pool.run(5)
    assert pool.family.pool.model.table is None
    assert pool.clocks == [0, 0, 0]
    said = pool.conditions()["ProfileReady"]
    assert (said.status, said.reason) in (
        (False, Reason.MODEL_DOES_NOT_EXPLAIN),
        (False, Reason.PROFILING_FAILED),
    )


def test_without_energy_there_is_no_table() -> None:
    pool = EnginePool()
    pool.measures_energy = False
    explored(pool)
    pool.run(5)
    assert pool.clocks == [0, 0, 0]
    said = pool.conditions()["ProfileReady"]
    assert said.reason is Reason.PROFILING_FAILED
    assert "no energy of the GPUs was measured" in said.message


def test_another_version_of_the_engine_is_measured_anew(pool: EnginePool) -> None:
    pool.engine = replace(pool.engine, version="0.12.0")
    pool.pods(*[Pod(f"new-{n}", "ns", f"n-{n}", f"node-{n}", "pool", {}) for n in range(2)])
    pool.step()
    assert pool.family.pool.model.table is None
    assert pool.clocks == [0, 0]
    pool.run(60, until=lambda: pool.clocks[0] > 0)
    assert pool.clocks[0] > 0, "a canary is tried again"


def test_during_a_rollout_those_of_the_fewer_run_at_default_clocks(pool: EnginePool) -> None:
    pool.engine = replace(pool.engine, version="0.12.0")
    old = [Pod(f"pod-{n}", "ns", f"r-{n}", f"node-{n}", "pool", {}) for n in range(2)]
    pool.pods(*old, Pod("new", "ns", "new", "node-2", "pool", {}))
    for each in pool.nodes[:2]:  # the old ones are what they were
        for engine in list(each.engines.by_process.values()):
            each.engines.joined(replace(engine, version="0.11.0"))
    pool.run(3)
    assert pool.clocks == [FOLLOW_TABLE, FOLLOW_TABLE, 0]
    assert pool.conditions()["SignalsReady"].reason is Reason.ENGINES_DIFFER


def test_a_pod_without_an_engine_is_named_and_runs_at_default_clocks(pool: EnginePool) -> None:
    pool.silent = {"pod-2"}
    pool.pods(*pool._pods)
    pool.run(3)
    assert pool.clocks == [FOLLOW_TABLE, FOLLOW_TABLE, 0]
    said = pool.conditions()["SignalsReady"]
    assert (said.status, said.reason) == (False, Reason.NO_SIGNAL)
    assert "r-2" in said.message


def test_other_programs_that_limit_gpus_are_named_and_left_alone(pool: EnginePool) -> None:
    assert pool.conditions()["ForeignControl"].status is False
    pool.pods(*(replace(pod, power_limit="350") for pod in pool._pods[:2]), pool._pods[2])
    pool.run(3)
    said = pool.conditions()
    assert (said["ForeignControl"].status, said["ForeignControl"].reason) == (True, Reason.FOREIGN_POWER_LIMIT)
    assert "2 pods" in said["ForeignControl"].message
    assert "r-0" in said["ForeignControl"].message
    assert "350 W" in said["ForeignControl"].message
    assert pool.clocks == [FOLLOW_TABLE] * 3, "clocks follow the load below the limit"
    assert said["Ready"].status is True
    pool.nodes[1].gpu_slowed("GPU-node-1-0", "FOREIGN_WRITE", "reads 900 MHz")
    said = pool.conditions()
    assert said["ForeignControl"].reason is Reason.FOREIGN_CLOCK
    assert "GPU-node-1-0 on node-1" in said["ForeignControl"].message
    pool.nodes[1].gpu_recovered("GPU-node-1-0", "FOREIGN_WRITE")
    assert pool.conditions()["ForeignControl"].reason is Reason.FOREIGN_POWER_LIMIT


@pytest.mark.parametrize(("role", "time"), [("Prefill", "timeToFirstToken"), ("Decode", "timePerOutputToken")])
def test_an_engine_of_one_role_is_proposed_the_limit_of_its_own_time(role: str, time: str) -> None:
    pool = EnginePool(replicas=1, objective={}, role=role)
    pool.run(120)
    assert list(pool.status()["proposedLimits"]) == [time]


def test_where_prompts_are_computed_elsewhere_none_raises_a_clock() -> None:
    pool = EnginePool(objective={"timePerOutputToken": {"limit": "50ms"}}, role="Decode")
    explored(pool)
    table = pool.family.pool.model.table
    assert table is not None
    assert table.boosted_mhz(1) == table.boosted_mhz(16) == min(mhz for row in table.clocks_mhz for mhz in row if mhz)


def test_pages_of_engines_are_read_in_every_mode_and_the_reason_why_not_is_said() -> None:
    pool = EnginePool(replicas=1, mode="Observe", engine={"port": 9_000})
    pool.silent = {"pod-0"}
    pool.pods(replace(pool._pods[0], address="10.0.0.7"))
    pool.run(3)
    [node] = pool.nodes
    assert node.engines.ordered is not None
    assert node.engines.ordered.pages == {"pod-0": PageAddress("10.0.0.7", 9_000, "/metrics")}
    node.engines.lease_granted(node.engines.orders_id, {"pod-0": "the page has no metrics of an engine"})
    said = pool.conditions()["SignalsReady"]
    assert said.reason is Reason.NO_SIGNAL
    assert "r-0: the page has no metrics of an engine" in said.message


def test_of_an_engine_that_says_no_flags_the_pod_template_counts() -> None:
    pool = EnginePool(replicas=2)
    pool.engine = replace(pool.engine, flags=(), parallelism="")

    def fingerprint(*hashes: str) -> str:
        pods = [replace(pod, labels={"pod-template-hash": one}) for pod, one in zip(pool._pods, hashes, strict=True)]
        pool.pods(*pods)
        pool.step()
        return pool.family.pool.signals.fingerprint

    first = fingerprint("1a", "1a")
    assert fingerprint("1a", "2b") == first, "while as many are as before"
    assert pool.conditions()["SignalsReady"].reason is Reason.ENGINES_DIFFER
    assert fingerprint("2b", "2b") != first


def test_an_engine_that_says_too_little_is_refused_by_name() -> None:
    pool = EnginePool(replicas=1)
    pool.engine = replace(pool.engine, model="")
    pool.pods(*pool._pods)
    pool.run(3)
    said = pool.conditions()["SignalsReady"]
    assert said.reason is Reason.ENGINE_UNKNOWN
    assert "r-0: model must have 1 to" in said.message


def test_other_limits_make_another_table_of_the_same_windows(pool: EnginePool) -> None:
    before = pool.family.pool.model.table
    windows = pool.family.pool.model.count
    pool.edit(objective={**OBJECTIVE, "timePerOutputToken": {"limit": "30ms"}})
    pool.run(2)
    after = pool.family.pool.model.table
    assert pool.family.pool.model.count >= windows
    assert before is not None
    assert after is not None
    pairs = zip(
        (m for row in before.clocks_mhz for m in row), (m for row in after.clocks_mhz for m in row), strict=True
    )
    assert all((new or 10**4) >= (old or 10**4) for old, new in pairs), "a tighter limit takes no lower clock"


def test_a_missed_objective_is_said() -> None:
    pool = EnginePool(replicas=1, mode="Observe")
    pool.lie = lambda window: replace(window, tokens={place_of(0.2): 2})  # prompts of others came between
    pool.run(200)
    said = pool.conditions()["ObjectiveKept"]
    assert (said.status, said.reason) == (False, Reason.OBJECTIVE_MISSED)
    assert pool.conditions()["Ready"].status is False
    pool.slower = 4.0
    pool.run(5)
    assert pool.conditions()["ObjectiveKept"].reason is Reason.OVERLOADED, "no step is in time, at any clock"


def test_the_minimum_clock_holds() -> None:
    pool = EnginePool(replicas=1, clocks={"minimumMegahertz": 1_400})
    held = set()
    for _ in range(LONG_S):
        if pool.second > 60 and not pool.decide().trying:
            break
        pool.step()
        held.add(pool.clock_of("pod-0"))
    pool.step()
    assert all(mhz in (0, FOLLOW_TABLE) or mhz >= 1_400 for mhz in held)
    table = pool.family.pool.model.table
    assert table is None or all(not mhz or mhz >= 1_400 for row in table.clocks_mhz for mhz in row)


@given(st.lists(st.integers(0, 5), max_size=80))
def test_what_a_replica_did_lately_is_the_sum_of_its_latest_windows(places: list[int]) -> None:
    times, seen = RequestTimes(), list[EngineWindow]()
    for place in [place for place in places for _ in range(20)]:
        window = EngineWindow(pod_uid="p", pid=1, time_us=10, default_us=place, tokens={place: 1}, held_us={"Floor": 9})
        seen.append(window)
        times.window_seen("p", window)
    lately = times.of_pod("p")
    counted = seen[len(seen) - lately.windows :]
    assert lately.windows >= min(len(seen), 540), "nine minutes or so at least"
    assert lately.tokens == Counter(place for window in counted for place in window.tokens)
    assert lately.default_us == sum(window.default_us for window in counted)
    assert times.of_all() == lately
    times.pods_observed(())
    assert times.of_all() == Block()
