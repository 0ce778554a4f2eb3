"""What a node counts of its engines: all of their time by what held their clocks, and how soon boosts were there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.agent.serving.test_instance import FOLLOW, GPUS, Bench

from perseus_agent.serving.boosts import BoostMeter
from perseus_agent.serving.totals import EngineTotals
from perseus_core.serving import DEFAULT_CLOCKS

TICK_US = 100_000


class Counted(Bench):
    """A bench whose GPUs say from when on a clock is in effect: a while after it was asked."""

    switch_us = 30_000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.effective_us: dict[str, int] = {}

    @property
    def totals(self) -> EngineTotals:
        return self.instance._totals

    def look(self, gpu: str = GPUS[0]) -> tuple[int, str]:
        choice = self.instance.look(gpu, self.applied[gpu], self.now_us, self.effective_us.get(gpu, 0))
        if choice.clock_mhz != self.applied[gpu]:
            self.applied[gpu] = choice.clock_mhz
            self.effective_us[gpu] = self.now_us + self.switch_us
        return choice.clock_mhz, choice.reason.value


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    made = Counted(monkeypatch)
    made.instance.order(FOLLOW)
    yield made
    made.reader.close()


def test_all_time_of_an_engine_is_counted_once_by_what_held_its_clock(bench: Counted) -> None:
    began_us = bench.now_us
    for waiting in (0, 0, 1, 0, 0, 0):
        bench.period(waiting=waiting)
    bench.pause(10)
    assert sum(bench.totals.held_us.values()) == bench.now_us - began_us
    assert bench.totals.held_us["Boost"] == TICK_US
    assert bench.totals.held_us["NoSample"] >= 6 * TICK_US
    assert bench.totals.samples == 6


def test_what_cannot_be_true_is_counted_and_so_is_the_time_that_it_costs(bench: Counted) -> None:
    bench.period()
    bench.period()
    assert bench.period(running=100_000) == (DEFAULT_CLOCKS, "ImpossibleSample")
    bench.pause(1)
    assert (bench.totals.samples, bench.totals.refused) == (2, 1)
    assert bench.totals.held_us["ImpossibleSample"] == TICK_US


def test_a_boost_is_timed_from_the_engines_word_until_the_last_gpu_has_the_clock(bench: Counted) -> None:
    bench.period()
    bench.period()
    assert bench.totals.boosts == 0, "a floor is no boost"
    bench.now_us += 20_000
    bench.step(waiting=1)
    bench.now_us += 5_000
    bench.look(GPUS[0])
    bench.now_us += 2_000
    bench.look(GPUS[1])
    assert bench.totals.boosts == 0
    bench.now_us += 90_000
    bench.look(GPUS[0])
    bench.look(GPUS[1])
    assert bench.totals.boosts == 1
    assert bench.totals.boost_us(0.5) == 5_000 + 2_000 + Counted.switch_us


def test_an_engine_that_claims_another_time_does_not_make_a_boost_look_slow(bench: Counted) -> None:
    bench.period()
    bench.period()
    bench.now_us, honest_us = bench.now_us - 29_000, bench.now_us
    bench.step(waiting=1)
    bench.now_us = honest_us + 20_000
    for _ in range(2):
        bench.look(GPUS[0])
        bench.look(GPUS[1])
    assert bench.totals.boost_us(0.99) == 20_000 + Counted.switch_us


def test_a_clock_that_is_replaced_before_it_is_in_effect_is_not_timed() -> None:
    meter = BoostMeter()
    meter.began(GPUS, 1200, 1_000)
    assert meter.seen(GPUS[0], 1200, 500) is None, "that was an earlier change to this clock"
    assert meter.seen(GPUS[0], 1200, 2_000) is None
    meter.replaced()
    assert meter.seen(GPUS[1], 1200, 2_000) is None


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=300))
def test_quantiles_are_times_that_were_seen_and_in_order(times_us: list[int]) -> None:
    totals = EngineTotals()
    for time_us in times_us:
        totals.boosted(time_us)
    median, late = totals.boost_us(0.5), totals.boost_us(0.99)
    assert median in times_us
    assert late in times_us
    assert median <= late
    assert sum(time_us < late for time_us in times_us) < len(times_us)
