"""One engine and the clock of its GPUs, in virtual time: the memory is real, and so is the law."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.clocks.reckoning import ClockReading
from perseus_agent.clocks.telemetry import EngineSummary, Event, ServingEngine
from perseus_agent.devices.base import EnergyReading
from perseus_agent.devices.energy import EnergyMeter
from perseus_agent.servers.event_messages import event_message
from perseus_agent.serving.instance import EngineInstance
from perseus_core.serving import (
    DEFAULT_CLOCKS,
    FOLLOW_TABLE,
    ClockReason,
    ClockTable,
    EngineOrders,
    ServingLimits,
    place_of,
)
from perseus_proto import engine_channel
from perseus_proto.engine_channel import ENGINE_MEMORY_BYTES, EngineReader, EngineWriter
from perseus_proto.engine_hello import EngineHello

GPUS = ("GPU-a", "GPU-b")
ENGINE = ServingEngine("job", "pod", 1, EngineHello("vllm", "1", "llama", "tp 2"), GPUS)
TABLE = ClockTable((16, 64), (1.0,), ((900,), (1200,)), (900, 1050, 1200))
LIMITS = ServingLimits(1.0, 0.05)
FOLLOW = EngineOrders(LIMITS, TABLE, {"pod": FOLLOW_TABLE})


class Bench:
    """An instance, its engine, and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.now_us = 10_000_000
        self.reader = EngineReader.create()
        self.writer = EngineWriter(os.dup(self.reader.memory_fd), os.dup(self.reader.event_fd))
        self.published: list[EngineSummary] = []
        self.instance = EngineInstance(ENGINE, self.reader, 1980, self.publish, self.now_us)
        self.applied = dict.fromkeys(GPUS, DEFAULT_CLOCKS)
        self.resting_mhz = DEFAULT_CLOCKS
        """Of the lease."""
        if monkeypatch is not None:
            monkeypatch.setattr(engine_channel.time, "monotonic_ns", lambda: self.now_us * 1000)

    def publish(self, job_uid: str, event: Event) -> None:
        assert job_uid == "job"
        assert isinstance(event, EngineSummary)
        self.published.append(event)

    def step(self, running: int = 8, waiting: int = 0, **named: Any) -> None:
        self.writer.step(waiting, 0, running, 200_000, **{"step_us": 20_000, "generated_tokens": running, **named})

    def look(self, gpu: str = GPUS[0]) -> tuple[int, str]:
        choice = self.instance.look(gpu, self.applied[gpu], self.now_us, resting_mhz=self.resting_mhz)
        self.applied[gpu] = choice.clock_mhz or self.resting_mhz  # written at once
        return choice.clock_mhz, choice.reason.value

    def period(self, **load: Any) -> tuple[int, str]:
        """A step, a period, and a look of each GPU; returns what both are told."""
        self.now_us += 70_000
        self.step(**load)
        self.now_us += 30_000
        first, second = self.look(GPUS[0]), self.look(GPUS[1])
        assert first == second
        return first

    def pause(self, periods: int) -> tuple[int, str]:
        for _ in range(periods):
            self.now_us += 100_000
            last = self.look()
        return last


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.reader.close()


def test_without_orders_the_clocks_are_the_default_ones(bench: Bench) -> None:
    assert bench.period() == (DEFAULT_CLOCKS, "Ordered")
    bench.instance.order(FOLLOW)
    assert bench.period() == (900, "Floor")
    bench.instance.order(None)
    assert bench.look() == (DEFAULT_CLOCKS, "Ordered")


def test_all_gpus_are_told_the_same_though_the_engine_says_something_new_in_between(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    bench.period()
    bench.now_us += 100_000
    bench.step(running=8)
    assert bench.look(GPUS[0]) == (900, "Floor")
    bench.step(running=40)
    assert bench.look(GPUS[1]) == (900, "Floor")
    bench.now_us += 100_000
    assert bench.look(GPUS[1]) == bench.look(GPUS[0]) == (1200, "Floor")


def test_a_ring_is_looked_at_within_the_period_by_whoever_wakes_first(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    bench.period()
    bench.now_us += 1_000
    bench.step(waiting=1)
    assert bench.look(GPUS[1]) == (DEFAULT_CLOCKS, "Boost")
    assert bench.look(GPUS[0]) == (DEFAULT_CLOCKS, "Boost")


def test_a_look_is_due_a_period_after_the_last_decision(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    bench.period()
    assert bench.instance.next_us == bench.now_us + 100_000
    bench.now_us += 1_000
    bench.step(waiting=1)
    bench.look()
    assert bench.instance.next_us == bench.now_us + 100_000


def test_engines_without_prompts_are_looked_at_together(bench: Bench) -> None:
    """At the same moments as all others of the node, again from the end of a boost on, which none of it cuts short."""
    bench.instance.order(FOLLOW)
    bench.now_us += 130_000
    bench.step()
    assert bench.look() == (900, "Floor")
    assert bench.instance.next_us == 10_200_000
    bench.now_us += 40_000
    bench.step(waiting=1)
    reasons, looks_us = [bench.look()[1]], [bench.now_us]
    while reasons[-1] != "Floor":
        bench.now_us = bench.instance.next_us + 1
        bench.step()
        reasons.append(bench.look()[1])
        looks_us.append(bench.now_us)
    assert reasons == ["Boost", "Floor"]
    assert looks_us == [10_170_000, 10_270_001]
    assert bench.instance.next_us == 10_300_000


def test_a_clock_that_is_not_written_counts_as_one_that_is_not_in_force(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    for _ in range(50):
        bench.now_us += 100_000
        bench.step()
        for gpu in GPUS:
            bench.instance.look(gpu, DEFAULT_CLOCKS, bench.now_us)
            bench.instance.measure(gpu, EnergyMeter(), [], bench.now_us)
    assert [window.default_us for window in bench.published[1:]] == [1_000_000] * (len(bench.published) - 1)


def test_an_engine_that_says_nothing_is_silent_after_three_periods_and_a_half(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    bench.period()
    assert bench.pause(3) == (900, "Floor")
    assert bench.pause(1) == (DEFAULT_CLOCKS, "NoSample")
    assert bench.period() == (900, "Floor")


def test_a_beat_repeats_the_load(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    bench.period()
    for _ in range(20):
        bench.writer.beat()
        assert bench.pause(1) == (900, "Floor")


def test_an_engine_that_has_made_no_step_is_silent_whatever_it_beats(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    for _ in range(10):
        bench.writer.beat()
        assert bench.pause(1) == (DEFAULT_CLOCKS, "NoSample")


def test_one_clock_is_held_while_the_engine_speaks(bench: Bench) -> None:
    bench.instance.order(EngineOrders(LIMITS, None, {"pod": 600}))
    assert bench.period(waiting=9) == (600, "Ordered")
    assert bench.pause(4) == (DEFAULT_CLOCKS, "NoSample")
    assert bench.period(running=100_000) == (DEFAULT_CLOCKS, "ImpossibleSample")
    assert bench.period() == (600, "Ordered")


@pytest.mark.parametrize("clock_mhz", [FOLLOW_TABLE, 900])
def test_a_count_that_goes_backwards_is_not_believed_and_the_next_is(bench: Bench, clock_mhz: int) -> None:
    bench.instance.order(EngineOrders(LIMITS, TABLE, {"pod": clock_mhz}))
    bench.period()
    assert bench.period()[0] == 900
    bench.writer._sums[12] = 0
    assert bench.period() == (DEFAULT_CLOCKS, "ImpossibleSample")
    assert bench.period()[0] == 900


def test_a_record_that_stays_torn_is_not_believed(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    bench.period()
    with mmap.mmap(bench.reader.memory_fd, ENGINE_MEMORY_BYTES) as memory:
        memory[70] ^= 1
    assert bench.pause(2) == (900, "Floor")
    assert bench.pause(1) == (DEFAULT_CLOCKS, "ImpossibleSample")


def test_a_miss_raises_the_clock_and_a_new_table_does_not_forget_it(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    bench.period()
    bench.writer.count_times([], [place_of(0.053)] * 3)  # beyond the limit: the default clocks would have kept it
    assert bench.period() == (1050, "Trim")
    bench.instance.order(EngineOrders(LIMITS, TABLE, {"pod": FOLLOW_TABLE, "other": 0}))
    assert bench.period() == (1050, "Trim")
    bench.instance.order(EngineOrders(ServingLimits(1.0, 0.06), TABLE, {"pod": FOLLOW_TABLE}))
    assert bench.period() == (900, "Floor"), "of other limits nothing was missed"


# ---------------------------------------------------------------------------------------------------------- windows


def measured(bench: Bench, seconds: float, **load: Any) -> None:
    """Periods in which the meters of both GPUs count 100 W, and readings say what is locked."""
    meters = {gpu: EnergyMeter() for gpu in GPUS}
    readings: list[ClockReading] = []
    for _ in range(round(seconds * 10)):
        for gpu in GPUS:
            meters[gpu].add(EnergyReading(bench.now_us, bench.now_us // 10))
        readings.append(ClockReading(bench.now_us, bench.applied[GPUS[0]] or 1980, False))
        bench.period(**load)
        for gpu in GPUS:
            bench.instance.measure(gpu, meters[gpu], readings, bench.now_us)


def test_windows_of_one_clock_have_their_time_steps_and_energy(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    measured(bench, 4.5)
    assert [window.number for window in bench.published] == [0, 1, 2, 3]
    window = bench.published[2]
    assert (window.time_us, window.clock_mhz, window.changed) == (1_000_000, 900, False)
    assert (window.default_us, window.mhz_us, window.held_us) == (0, 900 * 1_000_000, {"Floor": 1_000_000})
    assert (window.steps, window.steps_us, window.generated_tokens) == (10, 200_000, 80)
    assert (window.running_milli, window.kv_share_ppm) == (8_000, 200_000)
    assert (window.energy_mj, window.median_clock_mhz) == (200_000, 900)


def test_a_window_in_which_the_clock_changed_says_so_and_how_long_each_was_in_force(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    measured(bench, 1.5)
    before = len(bench.published)
    bench.instance.order(None)
    measured(bench, 0.4)
    bench.instance.order(FOLLOW)
    measured(bench, 3.0)
    changed = [window for window in bench.published[before:] if window.changed]
    assert changed
    for window in changed:
        assert 0 < window.default_us < window.time_us
        assert window.mhz_us == 900 * (window.time_us - window.default_us)
        assert sum(window.held_us.values()) == window.time_us


def test_times_of_requests_are_counted_in_the_window_in_which_they_were_read(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    bench.writer.count_times([3, 3, 5], [7], [40, 41, 40])
    measured(bench, 0.5, requests=1)
    bench.writer.count_times([3], [])
    measured(bench, 3.0)
    assert bench.published[0].first_tokens == ((3, 3), (5, 1))
    assert bench.published[0].tokens == ((7, 1),)
    assert bench.published[0].lengths == ((40, 2), (41, 1))
    assert bench.published[1].first_tokens == bench.published[1].lengths == ()


def test_a_gpu_without_a_counter_delays_the_window_but_does_not_lose_it(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    for _ in range(60):
        bench.period()
        for gpu in GPUS:
            bench.instance.measure(gpu, EnergyMeter(), [], bench.now_us)
    assert len(bench.published) >= 2
    assert {window.energy_mj for window in bench.published} == {None}


def test_an_engine_whose_gpus_measure_nothing_holds_few_windows(bench: Bench) -> None:
    bench.instance.order(FOLLOW)
    for _ in range(300):
        bench.period()
    assert 15 <= len(bench.published) <= 30
    assert [window.number for window in bench.published] == list(range(len(bench.published)))


# ------------------------------------------------------------------------------------------------------ hostile memory


@given(
    st.lists(
        st.one_of(
            st.binary(min_size=200, max_size=2_500).map(lambda some: some.ljust(ENGINE_MEMORY_BYTES, some[-1:])),
            st.lists(st.integers(0, 2**64 - 1), min_size=16, max_size=16),
            st.lists(st.integers(0, 2**34), min_size=16, max_size=16),
        ),
        max_size=12,
    ),
    st.sampled_from([FOLLOW_TABLE, 1050, DEFAULT_CLOCKS]),
)
def test_whatever_the_memory_holds_nothing_raises_and_no_clock_is_asked_that_is_not_ordered(
    memories: list[bytes | list[int]], clock_mhz: int
) -> None:
    bench = Bench()
    bench.instance.order(EngineOrders(LIMITS, TABLE, {"pod": clock_mhz}))
    allowed = {FOLLOW_TABLE: {DEFAULT_CLOCKS, 900, 1050, 1200}}.get(clock_mhz, {DEFAULT_CLOCKS, clock_mhz})
    with mmap.mmap(bench.reader.memory_fd, ENGINE_MEMORY_BYTES) as memory:
        for content in memories:
            if isinstance(content, bytes):
                memory[:] = content
            else:
                bench.writer._sums[:] = content
                bench.writer._sums[0] = min(content[0], 2**64 - 2)
                bench.writer._sums[6:] = [min(value, 2**63) for value in content[6:]]
                bench.writer.step(*[value % 2**40 for value in content[2:6]], step_us=content[8] % 2**40)
            measured_mhz, reason = bench.pause(1)
            assert measured_mhz in allowed
            assert ClockReason(reason) is not None
            for gpu in GPUS:
                bench.instance.measure(gpu, EnergyMeter(), [], bench.now_us)
    for _ in range(45):  # until no window waits for its energy any more
        bench.pause(1)
        for gpu in GPUS:
            bench.instance.measure(gpu, EnergyMeter(), [], bench.now_us)
    for window in bench.published:
        assert event_message(window).window.number == window.number
    bench.reader.close()


# ------------------------------------------------------------------------------------------------------- a ceiling


def under_a_ceiling(bench: Bench) -> None:
    bench.instance.order(EngineOrders(LIMITS, TABLE.under(1050), {"pod": FOLLOW_TABLE}))
    bench.resting_mhz = 1050


def test_under_a_ceiling_windows_are_of_its_clock_and_not_of_the_default_ones(bench: Bench) -> None:
    under_a_ceiling(bench)
    measured(bench, 3.0)
    measured(bench, 4.0, running=40)
    assert bench.look() == (DEFAULT_CLOCKS, "BeyondTable")
    settled = [window for window in bench.published[1:] if not window.changed]
    assert [window.clock_mhz for window in settled[:1] + settled[-1:]] == [900, 1050]
    assert all(window.default_us == 0 for window in bench.published[1:])


@pytest.mark.parametrize(("resting_mhz", "expected"), [(DEFAULT_CLOCKS, "Trim"), (1050, "Floor")])
def test_a_miss_that_the_ceiling_would_have_missed_too_does_not_count(
    bench: Bench, resting_mhz: int, expected: str
) -> None:
    under_a_ceiling(bench)
    bench.resting_mhz = resting_mhz
    bench.period()
    bench.writer.count_times([], [place_of(0.07)] * 3)  # 1.4 times the limit: at 1980 instead of 900 MHz it was kept
    assert bench.period()[1] == expected
