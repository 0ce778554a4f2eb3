"""Replicas, their controllers and the driver's calls: what is asked and in force when, and that all is served."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.switching import DriverLock
from perseus_sim.serving import fleet
from perseus_sim.serving.engine import Engine
from perseus_sim.serving.fleet import Asked, Run, Setting, run
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.requests import Request

MACHINE = Machine("h100", "llama-3.1-70b", 4)
DRIVER = MODELS["h100"].driver
REQUESTS = st.lists(
    st.tuples(st.sampled_from((0.0, 0.02, 0.5, 3.0)), st.integers(1, 3000), st.integers(1, 200)),
    min_size=1,
    max_size=25,
)


class Script:
    """Asks for what a list says, then for its last."""

    def __init__(self, period_s: float, asked: Sequence[Asked]) -> None:
        self.period_s = period_s
        self._asked = list(asked)
        self.looks = 0

    def decide(self, now_s: float, engine: Engine) -> Asked:
        self.looks += 1
        return self._asked.pop(0) if len(self._asked) > 1 else self._asked[0]


def arrivals(drawn: Sequence[tuple[float, int, int]]) -> list[Request]:
    found, at_s = [], 0.0
    for gap_s, prompt, output in drawn:
        at_s += gap_s
        found.append(Request(at_s, prompt, output))
    return found


CLOCKS = st.lists(st.builds(Asked, st.sampled_from((0, 1095, 1500)), st.booleans()), min_size=1, max_size=8)


@given(drawn=REQUESTS, replicas=st.integers(1, 5), clocks=CLOCKS, seed=st.integers(0, 3))
def test_a_fleet_serves_every_request_once_and_the_same_with_the_same_seed(
    drawn: list[tuple[float, int, int]], replicas: int, clocks: list[Asked], seed: int
) -> None:
    wanted = arrivals(drawn)

    def once() -> Run:
        return run(Setting(MACHINE, DRIVER, replicas, seed), wanted, lambda _: Script(0.05, clocks), tail_s=1.0)

    first, again = once(), once()
    assert sorted(id(one.request) for one in first.served) == sorted(map(id, wanted))
    assert all(one.request.arrival_s < one.first_token_s <= one.end_s for one in first.served), "also after the tail"
    assert 0 < first.busy_share <= 1 + 1e-9
    idle_w = MACHINE.costs(1095).idle_w
    limit_w = 4 * MACHINE.curves.power_limit_w
    assert idle_w <= first.joules / first.seconds / replicas <= limit_w
    assert (first.joules, first.calls_per_s) == (again.joules, again.calls_per_s)
    assert [(one.first_token_s, one.end_s) for one in first.served] == [
        (one.first_token_s, one.end_s) for one in again.served
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Begin and end of every driver call, in their order."""
    held: list[tuple[float, float]] = []
    acquire = DriverLock.acquire

    def recorded(lock: DriverLock, now_s: float, hold_s: float) -> float:
        begin_s = acquire(lock, now_s, hold_s)
        held.append((begin_s, begin_s + hold_s))
        return begin_s

    monkeypatch.setattr(DriverLock, "acquire", recorded)
    return held


def test_a_node_makes_one_call_at_a_time(calls: list[tuple[float, float]]) -> None:
    asked = [Asked(mhz, mhz == 0) for mhz in (1095, 0, 1500, 0, 1095, 0)]
    run(Setting(MACHINE, DRIVER, 2), [Request(0.0, 100, 50)], lambda _: Script(0.004, asked), tail_s=1.0)
    assert len(calls) > 8, "each clock is set on all GPUs of a replica"
    assert all(end_s <= begin_s for (_, end_s), (begin_s, _) in pairwise(calls))


def test_a_clock_is_asked_only_when_it_changes(calls: list[tuple[float, float]]) -> None:
    run(Setting(MACHINE, DRIVER, 2), [Request(0.0, 100, 50)], lambda _: Script(0.01, [Asked(1095)]), tail_s=5.0)
    assert len(calls) == 8


def queue(*asked: tuple[int, Asked], gpus: int = 2) -> list[tuple[int, int, int]]:
    """The calls of a node after its replicas asked, in their order: replica, GPU, clock."""
    found = fleet._Queue(DRIVER)
    for replica, one in asked:
        found.ask(replica, gpus, one)
    return list(iter(found.next, None))


def test_urgent_calls_overtake() -> None:
    assert queue((0, Asked(1095)), (1, Asked(0, urgent=True))) == [(1, 0, 0), (1, 1, 0), (0, 0, 1095), (0, 1, 1095)]


def test_a_newer_clock_replaces_one_that_waits() -> None:
    assert queue((0, Asked(1095)), (1, Asked(1500)), (0, Asked(1305))) == [
        (1, 0, 1500),
        (1, 1, 1500),
        (0, 0, 1305),
        (0, 1, 1305),
    ]


def test_calls_that_become_urgent_overtake_without_being_asked_twice() -> None:
    found = fleet._Queue(DRIVER)
    found.ask(0, 2, Asked(1095))
    found.ask(1, 2, Asked(1500))
    assert found.next() == (0, 0, 1095)
    found.hurry(1, 2)
    assert list(iter(found.next, None)) == [(1, 0, 1500), (1, 1, 1500), (0, 1, 1095)]


@given(order=st.permutations(range(4)), low=st.sampled_from((600, 1095)), high=st.sampled_from((1500, 1980)))
def test_the_slowest_gpu_of_a_replica_sets_its_pace(order: list[int], low: int, high: int) -> None:
    """Raised GPU by GPU, a replica is as slow as before until the last has its clock; lowered, as slow as the first."""
    found = fleet._Fleet(Setting(MACHINE, DRIVER, 1), lambda _: Script(math.inf, [Asked(0)]))
    paces: list[tuple[int, int]] = []
    found._engines[0].set_clocks = lambda slowest, fastest: paces.append((slowest, fastest))  # type: ignore[method-assign]
    for clock in (low, high):
        for gpu in order:
            found._effect(0.0, gpu, clock)
    assert paces == [(low, 1980)] * 3 + [(low, low)] + [(low, high)] * 3 + [(high, high)]


def test_a_later_call_is_never_in_force_before_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the earlier one is an outlier that takes ten times as long."""
    effects: dict[int, list[int]] = {}
    original: Callable[..., None] = fleet._Fleet._effect

    def recorded(found: fleet._Fleet, now_s: float, gpu: int, clock_mhz: int) -> None:
        effects.setdefault(gpu, []).append(clock_mhz)
        original(found, now_s, gpu, clock_mhz)

    monkeypatch.setattr(fleet._Fleet, "_effect", recorded)
    wild = replace(DRIVER, outlier_probability=0.5, outlier_factor=50.0)
    asked = [Asked(mhz) for mhz in (1095, 0, 1500, 1305, 0, 1200)]
    run(Setting(MACHINE, wild, 1), [Request(0.0, 10, 10)], lambda _: Script(0.2, asked), tail_s=30.0)
    assert all(found[-1] == 1200 for found in effects.values())
    assert len(effects) == 4
