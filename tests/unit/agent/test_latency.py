"""The meter of clock changes, in virtual time."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.clocks.call_queue import Waits
from perseus_agent.clocks.latency import ENOUGH, KEPT, READ_STEPS, TRANSITIONS_KEPT, LatencyMeter
from perseus_agent.clocks.plans import StagePlan
from perseus_core.hardware import Hardware
from perseus_core.latency import SwitchLatency
from perseus_core.units import s_from_us
from perseus_proto.planset import StageSchedule
from perseus_solver.rehearsal.control import Leads

PUBLISHED = SwitchLatency.of_seconds(0.030, 0.100, 0.0045, True, "assumed")
CALL_US = 1_000


class Clock:
    """A GPU that takes its time to change its clock, and a program that measures it."""

    def __init__(self) -> None:
        self.now_us = 1_000_000
        self.meter = LatencyMeter(PUBLISHED, 0)
        self.meter.every = True
        self.mhz: int | None = None
        self.reads = 0

    def change(self, mhz: int | None, latency_us: int, wait_us: int = 0) -> None:
        """Write a clock, and read as often as the meter wants."""
        before, self.mhz = self.mhz, mhz
        wanted_us, began_us = self.now_us, self.now_us + wait_us
        self.now_us = began_us + CALL_US
        self.meter.wrote(before, mhz, wanted_us=wanted_us, began_us=began_us, ended_us=self.now_us, tolerance_mhz=15)
        while self.meter.read_us:
            assert self.meter.read_us >= self.now_us
            self.now_us = self.meter.read_us
            read = mhz if self.now_us >= began_us + latency_us else before
            self.meter.read(read or 1980, self.now_us, self.now_us + 10)
            self.now_us += 10
            self.reads += 1
        self.now_us = max(self.now_us, began_us + latency_us) + 10_000


def test_until_enough_is_measured_the_published_latency_holds() -> None:
    clock = Clock()
    clock.change(1200, 5_000)
    for number in range(ENOUGH - 2):
        clock.change((900, 1200)[number % 2], 5_000)
    assert clock.meter.switch is PUBLISHED
    assert not clock.meter.enough
    clock.change(600, 5_000)
    clock.change(900, 5_000)
    assert clock.meter.enough
    assert clock.meter.switch.source.startswith("measured on this GPU")
    assert clock.meter.switch.shared_lock


@given(st.integers(CALL_US + 100, 150_000))
def test_the_measured_latency_is_the_real_one_to_a_step_of_reading(latency_us: int) -> None:
    clock = Clock()
    for number in range(ENOUGH + 2):
        clock.change((900, 1200)[number % 2], latency_us)
    assert latency_us <= 1e6 * clock.meter.switch.p50_s <= latency_us * (1 + 2 / READ_STEPS) + 250
    assert clock.meter.switch.p50_s <= clock.meter.switch.p99_s
    assert clock.reads / clock.meter.measured < 150


@given(st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 100_000)), min_size=1, max_size=60))
def test_whatever_is_measured_the_figures_make_sense(changes: list[tuple[int, int]]) -> None:
    clock = Clock()
    for number, (latency_us, wait_us) in enumerate(changes):
        clock.change((900, 1200, None)[number % 3], latency_us, wait_us)
    meter = clock.meter
    assert 0 < meter.switch.p50_s <= meter.switch.p99_s
    assert meter.switch.call_s <= meter.switch.p50_s
    assert meter.lead.median_us > 0 <= meter.lead.deviation_us
    assert meter.calls.p50_us <= meter.calls.p99_us
    times = [effect.time_us for effect in meter.effects]
    assert times == sorted(set(times))


def test_the_wait_for_a_turn_is_a_part_of_the_lead() -> None:
    alone, queued = Clock(), Clock()
    for number in range(KEPT):
        alone.change((900, 1200)[number % 2], 5_000)
        queued.change((900, 1200)[number % 2], 5_000, wait_us=20_000 + 10_000 * (number % 3))
    assert queued.meter.switch.p50_s == alone.meter.switch.p50_s
    assert queued.meter.lead.median_us == alone.meter.lead.median_us + 30_000
    assert queued.meter.lead.deviation_us > alone.meter.lead.deviation_us


def test_a_gpu_whose_first_waits_were_long_is_not_held_by_them() -> None:
    """It asks for nothing while it expects to wait so long; what the others of its node wait tells it otherwise."""
    waits = Waits()
    unlucky, other = (LatencyMeter(PUBLISHED, 0, waits) for _ in range(2))
    for wait_us in (0, 31_500, 31_500):
        unlucky.wrote(900, 1200, wanted_us=0, began_us=wait_us, ended_us=wait_us + CALL_US, tolerance_mhz=15)
    before = unlucky.lead
    for number in range(KEPT):
        began_us = number * 100_000 + number % 2 * CALL_US
        other.wrote(
            900, 1200, wanted_us=number * 100_000, began_us=began_us, ended_us=began_us + CALL_US, tolerance_mhz=15
        )
    assert before.median_us == 61_500
    assert unlucky.lead.median_us <= 30_000 + CALL_US
    assert unlucky.lead.deviation_us == other.lead.deviation_us <= before.deviation_us


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_agent_asks_as_early_as_the_rehearsal_expects_of_it(gpus: int) -> None:
    """Turns of a lock come one call after another, in any order; a difference is what plans are late by."""
    latency = SwitchLatency.of_seconds(
        p50_s=0.0054, p99_s=0.014, call_s=s_from_us(CALL_US), shared_lock=True, source="published"
    )
    random, meter, now_us = Random(1), LatencyMeter(latency, 0), 0
    for _ in range(KEPT):
        began_us = now_us
        for _ in range(gpus):
            ended_us = began_us + round(CALL_US * math.exp(latency.sigma * random.gauss(0.0, 1.0)))
            meter.wrote(
                900, 1200, wanted_us=now_us, began_us=began_us, ended_us=ended_us, tolerance_mhz=15
            )  # never read: the published latency holds
            began_us = ended_us
        now_us += 1_000_000
    expected, lead = Leads.of(Hardware("A100", latency, gpus_per_lock=gpus), [1200]), meter.lead
    assert lead.raise_us(1200) == pytest.approx(1e6 * expected.raise_s[0], rel=0.08)
    assert lead.lower_us(1200) == pytest.approx(1e6 * expected.lower_s[0], abs=CALL_US / 2)
    assert lead.worth_us == pytest.approx(1e6 * expected.worth_s, rel=0.25)


def learn(clock: Clock, latencies_us: dict[int, int], changes: int) -> None:
    random = Random(2)
    for number in range(changes):
        mhz = list(latencies_us)[number % len(latencies_us)]
        clock.change(mhz, round(latencies_us[mhz] * math.exp(0.2 * random.gauss(0.0, 1.0))))


def test_a_clock_that_is_slow_to_come_is_asked_for_earlier() -> None:
    clock = Clock()
    learn(clock, {900: 10_000, 1200: 40_000}, 4 * ENOUGH)
    lead = clock.meter.lead
    usual_us = lead.raise_us(1050)
    assert lead.raise_us(900) < usual_us < lead.raise_us(1200)
    assert lead.raise_us(900) == pytest.approx(10_000 * math.exp(0.2), rel=0.35)
    assert lead.raise_us(1200) == pytest.approx(40_000 * math.exp(0.2), rel=0.35)
    assert lead.lower_us(1200) - lead.lower_us(900) == pytest.approx(30_000, rel=0.5)


def test_what_was_sent_with_a_plan_holds_until_it_is_measured() -> None:
    clock = Clock()
    sent = {mhz: SwitchLatency.of_seconds(0.050, 0.060, 0.0, False, "sent with the plan") for mhz in (900, 1200)}
    plan = StagePlan("plan", 0, StageSchedule(0, (1, 2), (0, 0), (0, 0)), (900, 1200), b"\x01\x01", sent)
    clock.meter.follow(plan)
    clock.meter.every = True
    assert clock.meter.lead.raise_us(900) == clock.meter.lead.raise_us(1200)
    assert 50_000 < clock.meter.lead.raise_us(900) < 60_000
    learn(clock, {900: 10_000, 1200: 50_000}, 4 * ENOUGH)
    assert clock.meter.lead.raise_us(900) < 20_000
    assert clock.meter.lead.raise_us(1200) == pytest.approx(54_000, rel=0.1)


@pytest.mark.parametrize(
    ("before", "after", "readings", "measured_us"),
    [
        (900, 1500, ((900, False), (1335, True)), 2_010),  # the limit shows that the new clock is in effect
        (1500, 900, ((1335, True), (900, False)), 2_010),  # or that it is not yet
        (1400, 1500, ((1335, True), (1500, False)), None),  # below both it shows nothing
        (1500, 1335, ((1335, True), (1335, False)), None),
        (None, 1400, ((1335, True), (1400, False)), None),
    ],
)
def test_what_power_holds_says_how_long_a_change_takes_only_between_its_clocks(
    before: int | None, after: int, readings: tuple[tuple[int, bool], ...], measured_us: int | None
) -> None:
    meter = LatencyMeter(PUBLISHED, 0)
    meter.every = True
    meter.wrote(before, after, wanted_us=0, began_us=0, ended_us=10, tolerance_mhz=7)
    for number, (mhz, held) in enumerate(readings, 1):
        meter.read(mhz, 1_000 * number, 1_000 * number + 10, held=held)
    medians_us = {(one.from_mhz, one.to_mhz): one.p50_us for one in meter.transitions()}
    assert medians_us.get((before or 0, after)) == measured_us


def test_a_change_that_waited_for_a_slow_one_says_nothing_of_its_clock() -> None:
    meter = LatencyMeter(PUBLISHED, 0)
    meter.every = True
    meter.wrote(900, 1200, wanted_us=0, began_us=0, ended_us=10, tolerance_mhz=0)
    meter.wrote(1200, 1050, wanted_us=20, began_us=20, ended_us=30, tolerance_mhz=0)
    meter.read(900, 40, 50)  # neither change is in effect
    meter.read(1200, 30_000, 30_010)  # the first is, from now on
    meter.read(1050, 60_000, 60_010)
    assert meter.measured == 1
    assert meter.transitions() == ()


def test_a_clock_that_is_never_reached_is_not_measured_and_the_reading_ends() -> None:
    clock = Clock()
    clock.change(1200, 5_000)
    before = clock.meter.measured
    clock.change(1980, 10_000_000)
    assert clock.meter.measured == before
    assert clock.meter.read_us == 0


def test_a_clock_that_the_power_limit_holds_back_makes_no_change_seem_slow() -> None:
    """Half of the changes are to a clock that the GPU never reaches; the others take 5 ms."""
    clock = Clock()
    for number in range(2 * KEPT):
        clock.change((1200, 900, 1980, 900)[number % 4], 10_000_000 if number % 4 == 2 else 5_000)
    assert clock.meter.enough
    assert clock.meter.switch.p50_s == pytest.approx(0.005, rel=0.2)
    assert clock.meter.switch.p99_s == pytest.approx(0.005, rel=0.2)


@pytest.mark.parametrize("mhz", [None, 1215])
def test_a_change_that_cannot_be_seen_is_not_read(mhz: int | None) -> None:
    clock = Clock()
    clock.change(1200, 5_000)
    reads = clock.reads
    clock.change(mhz, 5_000)
    assert clock.reads == reads


def test_another_write_ends_the_measurement_of_the_one_before() -> None:
    meter = LatencyMeter(PUBLISHED, 0)
    meter.every = True
    meter.wrote(900, 1200, wanted_us=0, began_us=0, ended_us=10, tolerance_mhz=0)
    meter.read(900, 20, 30)
    meter.wrote(1200, 600, wanted_us=40, began_us=40, ended_us=50, tolerance_mhz=0)
    meter.read(1200, 60, 70)
    meter.read(600, 80, 90)
    assert [(one.from_mhz, one.to_mhz) for one in meter.transitions()] == [(1200, 600)]
    assert meter.effects[-1].time_us == 90


@pytest.mark.parametrize("apart_us", [12_000, 25_000, 60_000, 400_000])
def test_a_plan_that_changes_clocks_often_shows_no_shorter_latencies(apart_us: int) -> None:
    """Slow changes are overtaken by the next write before they are seen, and one that seems to be in effect at once may
    be one whose clock before never was: of what is left, the quick ones, the median would be half as long.
    """
    random = Random(1)
    meter, now_us, mhz = LatencyMeter(PUBLISHED, 0), 0, 900
    meter.every = True
    effects = [(0, mhz)]
    for _ in range(1_500):
        now_us += round(apart_us * random.uniform(0.5, 1.5))
        before, mhz = mhz, random.choice([clock for clock in (900, 1050, 1200) if clock != mhz])
        latency_us = round(30_000 * math.exp(0.5 * random.gauss(0.0, 1.0)))
        effects.append((max(now_us + latency_us, effects[-1][0]), mhz))  # in the order of the calls
        meter.wrote(before, mhz, wanted_us=now_us, began_us=now_us, ended_us=now_us + CALL_US, tolerance_mhz=15)
        until_us = now_us + round(apart_us * 0.4)
        while 0 < meter.read_us < until_us:
            now_us = meter.read_us
            meter.read(max(e for e in effects[-60:] if e[0] <= now_us)[1], now_us, now_us)
    assert meter.switch.p50_s == pytest.approx(0.030, rel=0.25)
    assert meter.switch.p99_s > 0.065


def test_beyond_sweeps_little_time_is_spent_on_reading() -> None:
    meter = LatencyMeter(PUBLISHED, 0)
    now_us, spent_us = 0, 0
    for number in range(1_000):
        now_us += 20_000
        mhz = (900, 1200)[number % 2]
        meter.wrote(2100 - mhz, mhz, wanted_us=now_us, began_us=now_us, ended_us=now_us + 100, tolerance_mhz=0)
        while meter.read_us:
            now_us = meter.read_us
            meter.read(mhz if number % 7 else 0, now_us, now_us + 1_000)
            now_us, spent_us = now_us + 1_000, spent_us + 1_000
    assert meter.measured
    assert spent_us < 0.02 * now_us


def test_transitions_are_bounded_and_the_most_frequent_stay() -> None:
    meter = LatencyMeter(PUBLISHED, 0)
    meter.every = True
    for number in range(3 * TRANSITIONS_KEPT):
        for before, after in ((900, 1200), (1200, 1300 + number)):
            meter.wrote(before, after, wanted_us=0, began_us=0, ended_us=10, tolerance_mhz=0)
            meter.read(after, 20, 30)
    transitions = meter.transitions()
    assert len(transitions) <= TRANSITIONS_KEPT
    first = transitions[0]
    assert (first.from_mhz, first.to_mhz, first.changes) == (900, 1200, 3 * TRANSITIONS_KEPT)
