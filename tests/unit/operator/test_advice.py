"""The advice of a pool of simulated engines: the same at any clock, in every mode, and none where nothing is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.doubles.engine_pool import OBJECTIVE, EnginePool

from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec, Scaling
from perseus_operator.families.serving.features.advice.arrivals import Arrivals
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.objects.formatting import per_minute

MEASURED_S = 240
FEW = {"replicas": 3, "running": lambda replica, second: 4 << ((second + replica) % 5)}


def advice_of(pool: EnginePool) -> dict[str, Any]:
    found: dict[str, Any] = pool.status()["advice"]
    return found


@pytest.fixture(scope="module")
def observed() -> EnginePool:
    """A pool whose clocks are never set."""
    pool = EnginePool(mode="Observe")
    pool.run(MEASURED_S)
    return pool


def test_a_pool_that_observes_is_advised_from_windows_at_one_clock(observed: EnginePool) -> None:
    assert observed.orders == 0 or set(observed.clocks) == {0}
    said = advice_of(observed)
    assert said["replicas"] >= 1
    assert said["requestsPerMinute"] == pytest.approx(60, abs=3), "a prompt each third second at each of three"
    assert said["expectedPerMinute"] == pytest.approx(75, abs=4)
    assert "at its highest clock" in said["why"]
    assert observed.family.report(observed.decide()).pool is not None
    assert observed.family.report(observed.decide()).pool.advised == said["replicas"]  # type: ignore[union-attr]


def test_slowed_replicas_change_neither_load_nor_what_a_replica_carries(observed: EnginePool) -> None:
    slowed = EnginePool(mode="Enforce")
    slowed.run(1_500, until=lambda: slowed.second > 60 and not slowed.decide().trying)
    slowed.run(4 * MEASURED_S)
    last = slowed.family.pool.requests.of_all()
    assert last.mean_mhz(1_980) < 1_800, "clocks are low"
    here, there = slowed.family.pool.adviser.capacity.point, observed.family.pool.adviser.capacity.point
    assert here is not None
    assert there is not None
    assert here.most_load == pytest.approx(there.most_load, rel=0.1)
    observed.run(1_500)
    assert advice_of(slowed)["requestsPerMinute"] == advice_of(observed)["requestsPerMinute"]
    assert advice_of(slowed)["replicas"] == advice_of(observed)["replicas"]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"objective": {}}, "It is not known what the requests were promised: spec.objective."),
        ({}, "Requests are counted for a minute first."),
    ],
)
def test_what_is_missing_is_said_and_no_number(spec: dict[str, Any], why: str) -> None:
    pool = EnginePool(mode="Observe", **spec)
    pool.run(5)
    assert advice_of(pool) == {"why": why}


def test_no_engine_no_advice() -> None:
    pool = EnginePool(mode="Observe", replicas=2)
    pool.silent = {"pod-0", "pod-1"}
    pool.pods(*pool._pods)
    pool.run(MEASURED_S)
    assert advice_of(pool) == {"why": "No engine of the pool says what it does."}


def test_who_wants_none_gets_none() -> None:
    pool = EnginePool(mode="Observe", scaling="Off")
    pool.run(MEASURED_S)
    assert "advice" not in pool.status()
    assert parse_spec(PoolSpec, {}).scaling is Scaling.ADVISE


def test_fewer_are_not_advised_while_a_pod_is_silent(observed: EnginePool) -> None:
    pool = EnginePool(mode="Observe")
    pool.run(MEASURED_S)
    before = advice_of(pool)["replicas"]
    pool.silent = {"pod-2"}
    pool.pods(*pool._pods)
    pool.running = lambda replica, second: 1
    pool.run(1_200)
    assert advice_of(pool)["replicas"] == before
    assert "1 pod" in advice_of(pool)["why"]


def test_a_later_operator_goes_on_with_what_is_stored(observed: EnginePool) -> None:
    pool = EnginePool(mode="Observe")
    pool.start({"advice": {"replicas": 7, "why": "Before.", "since": "2030-01-31T18:00:00Z"}})
    pool.run(30)
    said = advice_of(pool)
    assert (said["replicas"], said["since"]) == (7, "2030-01-31T18:00:00Z")
    pool.run(2_500)
    assert advice_of(pool)["replicas"] < 7


def test_limits_that_are_hard_need_more_replicas(observed: EnginePool) -> None:
    hard = EnginePool(mode="Observe", objective={**OBJECTIVE, "timePerOutputToken": {"limit": "18ms"}})
    hard.run(MEASURED_S)
    here, there = hard.family.pool.adviser.capacity.point, observed.family.pool.adviser.capacity.point
    assert there is not None
    assert here is None or here.most_load < there.most_load
    hard.edit(objective={"timePerOutputToken": {"limit": "1ms"}})
    hard.run(10)
    assert "replicas" not in advice_of(hard)
    assert "no load keeps the limits" in advice_of(hard)["why"]


def window(uid: str = "pod", waiting: int = 0, first_tokens: int = 0, requests: int = 0) -> EngineWindow:
    return EngineWindow(
        pod_uid=uid,
        pid=1,
        time_us=1_000_000,
        steps=10,
        steps_us=900_000,
        running=4.0,
        kv_share=0.1,
        prompt_steps=1,
        prompt_steps_us=90_000,
        prompt_tokens=100 * first_tokens,
        generated_tokens=40,
        waiting=waiting,
        requests=requests,
        first_tokens={3: first_tokens},
    )


def test_requests_that_wait_more_and_more_are_load_though_none_is_served() -> None:
    """A full pool shows what it can do, and not what is asked of it."""
    arrivals = Arrivals()
    for second in range(80):
        arrivals.window_seen(window(waiting=3 * second, first_tokens=2), 2, 1_000.0 + second)
    assert arrivals.per_s(1_080.0) == pytest.approx(5.0, rel=0.05)


def test_a_pod_that_comes_brings_no_load_and_one_that_goes_takes_none() -> None:
    arrivals = Arrivals()
    for second in range(80):
        arrivals.window_seen(window(first_tokens=2), 2, 1_000.0 + second)
        if second == 40:
            arrivals.window_seen(window("new", waiting=500), 0, 1_000.0 + second)
            arrivals.pods_observed({"pod"})
    assert arrivals.per_s(1_080.0) == pytest.approx(2.0, rel=0.05)


def test_a_load_that_ends_is_none_after_a_minute() -> None:
    arrivals = Arrivals()
    for second in range(80):
        arrivals.window_seen(window(first_tokens=2), 2, 1_000.0 + second)
    assert arrivals.per_s(1_160.0) == 0.0
    assert arrivals.kind is not None, "what requests have in common is remembered"
    assert replace(arrivals.kind, prompt_tokens=100.0) == arrivals.kind


def test_before_a_minute_has_passed_the_load_is_not_known() -> None:
    arrivals = Arrivals()
    assert arrivals.per_s(1_000.0) is None
    arrivals.window_seen(window(first_tokens=2), 2, 1_000.0)
    assert arrivals.per_s(1_050.0) is None
    assert arrivals.kind is None


@pytest.mark.parametrize(("per_s", "said"), [(1.1886, "71.3"), (19.87, "1,192"), (0.01, "0.6"), (5e4, "3,000,000")])
def test_rates_are_said_without_an_exponent(per_s: float, said: str) -> None:
    assert per_minute(per_s) == said
