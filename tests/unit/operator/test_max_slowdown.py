"""A pool whose limits are relative to what its own requests take at default clocks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.engine_pool import OBJECTIVE, EnginePool, kv_share

from perseus_core.serving import DEFAULT_CLOCKS, FOLLOW_TABLE, TIME_EDGES_US, ServingLimits, place_of
from perseus_operator.api.conditions import Reason
from perseus_operator.families.serving.features.objective.baseline import REQUESTS, Baseline, BaselineTimes
from perseus_operator.nodes.engines import EngineWindow
from perseus_sim.serving.machine import Machine

LONG_S = 3_000
TOKEN = {"maxSlowdown": "40%"}


def window(place: int, requests: int, *, default: bool = True) -> EngineWindow:
    return EngineWindow(pod_uid="p", pid=1, time_us=10, default_us=10 * default, tokens={place: requests})


def test_before_there_is_a_baseline_no_clock_is_set_and_the_condition_counts() -> None:
    pool = EnginePool(objective=TOKEN)
    pool.run(20)
    assert pool.clocks == [0, 0, 0]
    said = pool.conditions()["ClocksApplied"]
    assert said.reason is Reason.MEASURING_BASELINE
    assert f"of {REQUESTS:,} requests" in said.message
    assert pool.conditions()["ObjectiveKept"].status is None
    assert "proposedLimits" not in pool.status()


@pytest.fixture(scope="module")
def explored() -> EnginePool:
    """A pool whose canary has tried what it may."""
    pool = EnginePool(objective=TOKEN)
    pool.run(LONG_S, until=lambda: pool.family.pool.trials.paused_until_s > 0)
    return pool


@pytest.fixture
def pool(explored: EnginePool) -> EnginePool:
    return deepcopy(explored)


def test_clocks_follow_the_load_within_a_share_of_the_baseline(pool: EnginePool) -> None:
    pool.run(30)
    assert pool.clocks == [FOLLOW_TABLE] * 3
    times, limits = pool.family.pool.baseline.times, pool.family.pool.limits
    assert times is not None
    assert limits is not None
    assert limits.attainment == 0.99
    assert times.per_token_s is not None
    assert limits.per_token_s == pytest.approx(1.4 * times.per_token_s)
    assert pool.status()["baseline"]["timePerOutputToken"].endswith("ms")
    table = pool.family.pool.model.table
    assert table is not None
    assert min(mhz for row in table.clocks_mhz for mhz in row if mhz) < pool.machine.clocks_mhz[-1]
    pool.run(60)
    assert pool.conditions()["ObjectiveKept"].status is True


def test_the_next_operator_goes_on_with_the_baseline() -> None:
    pool = EnginePool(objective=TOKEN)
    pool.run(LONG_S, until=lambda: pool.family.pool.baseline.times is not None)
    pool.step()
    times = pool.family.pool.baseline.times
    assert times is not None
    pool.start(pool.status())
    pool.step()
    restored = pool.family.pool.baseline.times
    assert restored is not None
    assert not restored.differs(times)


@given(st.integers(0, len(TIME_EDGES_US) - 1), st.floats(1e-4, 1.0))
def test_limits_are_the_baseline_and_its_share(place: int, slowdown: float) -> None:
    baseline = Baseline()
    baseline.window_seen(window(place, REQUESTS, default=False))
    assert baseline.limits(slowdown, first_token=True, per_token=True) is None, "at another clock it says nothing"
    baseline.window_seen(window(place, REQUESTS))
    base_s = TIME_EDGES_US[place] / 1e6
    limits = baseline.limits(slowdown, first_token=True, per_token=True)
    assert limits == ServingLimits(None, base_s * (1.0 + slowdown), 0.99)
    assert baseline.limits(slowdown, first_token=True, per_token=False) is None


@pytest.mark.parametrize(("later", "moves"), [(100, False), (101, False), (102, True), (98, True)])
def test_a_baseline_moves_with_the_load_but_not_by_one_edge(later: int, moves: bool) -> None:
    baseline = Baseline()
    baseline.window_seen(window(100, REQUESTS))
    before = baseline.times
    baseline.window_seen(window(later, REQUESTS))
    assert (baseline.times != before) is moves
    assert baseline.counted == 0


def test_a_time_that_no_request_has_is_another_baseline() -> None:
    assert BaselineTimes(None, 0.1).differs(BaselineTimes(0.2, 0.1))
    assert not BaselineTimes(None, 0.1).differs(BaselineTimes(None, 0.102))


def test_a_baseline_that_moves_moves_the_limits_and_tries_nothing_again(pool: EnginePool) -> None:
    pool.run(30)
    before, limits = pool.family.pool.trials.exploration, pool.family.pool.limits
    assert before is not None
    baseline = pool.family.pool.baseline
    assert baseline.times is not None
    assert baseline.times.per_token_s is not None
    baseline.times = BaselineTimes(baseline.times.first_token_s, 0.8 * baseline.times.per_token_s)
    pool.run(3)
    after, intent = pool.family.pool.trials.exploration, pool.decide().intent
    assert after is not None
    assert (after.place, after.misses) == (before.place, before.misses)
    assert after.limit_s == pytest.approx(0.8 * before.limit_s)
    assert intent is not None
    assert intent.orders is not None
    assert intent.orders.limits == pool.family.pool.limits != limits
    assert intent.orders.table is not None, "a table is made anew at once"


def test_prompts_may_take_the_share_longer_though_boosts_are_late() -> None:
    """Half of a limit is less than one prompt takes at any clock: a limit so tight has the wait before it in it."""
    pool = EnginePool(replicas=2, objective={"maxSlowdown": "20%"}, clocks={})
    pool.run(LONG_S, until=lambda: FOLLOW_TABLE in pool.clocks and not pool.decide().trying)
    pool.run(60)
    assert pool.status()["engine"]["lowestMegahertz"] < pool.machine.clocks_mhz[-1]
    assert pool.conditions()["ObjectiveKept"].status is True


def test_a_small_model_that_uses_little_memory_has_lower_clocks_within_a_fifth() -> None:
    """Its step at the upper edge of an eighth of the memory would take longer than a fifth more, at any clock."""
    small, busy = Machine("h100", "llama-3.1-8b", 1), (8, 10, 12, 20)
    pool = EnginePool(
        replicas=2,
        machine=small,
        running=lambda replica, second: busy[(second + replica) % 4],
        objective={"maxSlowdown": "20%"},
        clocks={"minimumMegahertz": 1_600},
    )
    pool.run(LONG_S, until=lambda: FOLLOW_TABLE in pool.clocks and not pool.decide().trying)
    table = pool.family.pool.model.table
    assert table is not None
    clocks = [table.clock_mhz(running, kv_share(small, running)) for running in busy]
    assert all(DEFAULT_CLOCKS < mhz < small.clocks_mhz[-1] for mhz in clocks), clocks


def test_one_clock_below_the_highest_makes_no_table_and_the_reason_says_when_the_next_is_tried() -> None:
    pool = EnginePool(objective=TOKEN)
    pool.run(LONG_S, until=lambda: pool.clock_of("pod-0") > 0)
    pool.run(5)
    late = place_of(1.01 * (pool.family.pool.trials.exploration or pytest.fail("nothing is tried")).limit_s)
    pool.lie = lambda window: replace(window, tokens={late: 2}) if window.clock_mhz else window
    pool.run(60, until=lambda: not pool.decide().trying)
    said = pool.conditions()["ProfileReady"]
    assert said.reason is Reason.PROFILING_FAILED
    assert "clocks: 2 of 3" in said.message
    assert "A limit was missed at 1,875 MHz, which is not tried again before 20" in said.message


def test_a_table_without_a_lower_clock_says_that_all_clocks_are_the_default_ones(pool: EnginePool) -> None:
    pool.run(30)
    model = pool.family.pool.model
    assert "default" not in pool.conditions()["ClocksApplied"].message
    assert model.table is not None
    model.table = model.table.under(0)
    none = tuple(tuple(DEFAULT_CLOCKS for _ in row) for row in model.table.clocks_mhz)
    model.table = replace(model.table, clocks_mhz=none)
    pool.run(3)
    said = pool.conditions()["ClocksApplied"]
    assert said.reason is Reason.TABLE_IN_FORCE
    assert "no lower clock keeps the limits at any load that was seen" in said.message


def test_of_a_page_no_slowdown_is_known_so_limits_are_proposed() -> None:
    """Its buckets are wider than any slowdown that one would ask for."""
    pool = EnginePool(objective=TOKEN)
    pool.engine = replace(pool.engine, pid=0)
    for node in pool.nodes:
        node.engines.by_process.clear()
    pool.pods(*pool._pods)
    pool.run(900)
    assert pool.clocks == [0, 0, 0]
    said = pool.conditions()["ClocksApplied"]
    assert said.reason is Reason.NO_LIMITS
    assert "metrics page of r-0" in said.message
    assert pool.status()["proposedLimits"].keys() == OBJECTIVE.keys()
    pool.edit(objective=OBJECTIVE)
    pool.run(100)
    assert any(pool.clocks), "whether limits are kept is known at the edges of its buckets"
