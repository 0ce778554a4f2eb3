"""Laws of what a rank may write: no turn of its GPU's thread is long, nothing that is kept grows, and no time is
used that cannot be. Work is counted in lines of code (``tests.work``), not in seconds.

Times are equal, falling, shrinking, huge, at random, or all instructions at once; the memory may hold any bits at all.
A function that takes places as floats also gets NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.recording_node import plan_set_of
from tests.doubles.recording_trainer import schedule_of
from tests.work import lines_of, run_through

from perseus_agent.clocks import iteration_reports
from perseus_agent.clocks.backlog import Backlog
from perseus_agent.clocks.clock_line import _PART, ASKED_CLOCKS, ASKED_ROUNDS, ClockLine
from perseus_agent.clocks.iteration_pattern import SPREADS_KEPT, Pattern
from perseus_agent.clocks.iteration_reports import IterationReports
from perseus_agent.clocks.latency import EFFECTS_KEPT, Effect, LatencyMeter
from perseus_agent.clocks.lead import Lead
from perseus_agent.clocks.plans import JobPlans
from perseus_agent.clocks.rank_follower import _MARKS_KEPT, Finished, RankFollower
from perseus_agent.clocks.reckoning import OVERLAP, ClockReading, beside_plan_us, clock_during
from perseus_agent.clocks.stage_reports import combine
from perseus_agent.clocks.telemetry import (
    BATCH_EVENTS,
    BATCH_NUMBERS,
    MAX_NUMBERS,
    Event,
    RankProcess,
    TelemetryHub,
)
from perseus_agent.clocks.timetable import PERIOD_MIN_US, PLANS_KEPT, Timetable
from perseus_agent.devices.base import EnergyReading
from perseus_core.evidence import Evidence
from perseus_core.iteration import IterationReport
from perseus_core.latency import published_latency
from perseus_core.marks import MarkSource
from perseus_core.rank import RankId
from perseus_proto.channel import MAX_DURATION_US, SLOTS, ChannelReader, IterationRecord
from perseus_proto.channel_layout import (
    AHEAD_US,
    BEGIN,
    END,
    ENDED,
    FAULTS,
    POSITION,
    RECORD_SOURCE,
    SEQUENCE,
    SOURCE,
    TIMES,
    Faults,
    first_record,
    record_words,
)
from perseus_proto.hello import make_schedule
from perseus_proto.planset import decode_plan_set

TURN_LINES = 100_000
"""Lines that a turn may run: 20 ms on the slowest machine that runs these tests, with 0.2 µs for each."""
PART_LINES = 40_000
"""And one part of what can wait."""
COUNT = 1_500
"""Instructions of a schedule: enough to tell work that grows with their square from work that does not."""
HUGE = 2**63
LEAD = Lead(30_000, 10_000, 9_000, 4_500)
CLOCKS = (600, 900, 1200)
RANK = RankProcess("job", "pod", "GPU-0", RankId(0, 0), 1)

KINDS = ("equal", "falling", "shrinking", "growing", "huge", "random", "at once", "short", "honest")


@dataclass(frozen=True)
class Plan:
    clocks_mhz: tuple[int, ...]
    plan_id: str = "plan"
    point: int = 0


@dataclass(frozen=True)
class Run:
    iteration: int
    begins_us: tuple[int, ...]
    durations_us: tuple[int, ...]


def spans_of(kind: str, dice: random.Random, count: int, begin_us: int) -> tuple[list[int], list[int]]:
    """Begins and durations of instructions."""
    steps = {
        "equal": lambda k: (0, 0),
        "falling": lambda k: (-1_000, 10),
        "shrinking": lambda k: (2 * (count - k), count - k),
        "growing": lambda k: (2 * k, k),
        "huge": lambda k: (HUGE // count, HUGE // count),
        "random": lambda k: (dice.randrange(-(10**6), 10**6), dice.randrange(10**6)),
        "at once": lambda k: (0, 10**7),
        "short": lambda k: (dice.randrange(2), dice.randrange(2)),
        "honest": lambda k: (10_000 + dice.randrange(200), 9_000 + dice.randrange(200)),
    }[kind]
    begins, durations, now_us = [], [], begin_us
    for number in range(count):
        step_us, duration_us = steps(number)
        begins.append(now_us)
        durations.append(duration_us)
        now_us += step_us
    return begins, durations


def runs_of(kinds: list[str], seed: int, count: int = COUNT) -> Iterator[Run]:
    """Iterations, one after another as far as their times can be."""
    dice, now_us = random.Random(seed), 1_000_000
    for iteration, kind in enumerate(kinds):
        begins, durations = spans_of(kind, dice, count, now_us)
        yield Run(iteration, tuple(begins), tuple(durations))
        now_us = dice.choice((now_us, now_us + 1, now_us + PERIOD_MIN_US, max(begins[-1], 0) + durations[-1]))


hostile = given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=6), st.integers(0, 2**32))
few = settings(max_examples=6, deadline=None)


def mixed_plan(seed: int, count: int = COUNT) -> Plan:
    dice = random.Random(seed)
    return Plan(tuple(dice.choice(CLOCKS) for _ in range(count)))


@few
@hostile
def test_no_look_at_a_timetable_is_long_and_it_looks_again_later(kinds: list[str], seed: int) -> None:
    plan, dice = mixed_plan(seed), random.Random(seed)
    timetable = Timetable(COUNT, lambda _: plan)
    moments = (0, 10**6, 2 * 10**7, 10**9, 2**53)
    for run in runs_of(kinds, seed):
        assert lines_of(lambda run=run: timetable.add(run)) < TURN_LINES
        for _ in range(3):
            now_us, iteration = dice.choice(moments), dice.choice((run.iteration, run.iteration + 1, 2**32 - 1, 0))
            boundary = dice.choice((0, 1, COUNT, 2 * COUNT, 2**20))
            see = dice.choice((timetable.sight, timetable.bound))

            def look(see: Callable[[int, int, int], None] = see, *at: int) -> None:
                see(*at)
                if timetable.ready:
                    target = timetable.target(at[2], LEAD, dice.choice((None, *CLOCKS)))
                    assert target.look_us > at[2]
                    assert target.mhz is None or target.mhz in CLOCKS

            assert lines_of(lambda: look(see, iteration, boundary, now_us)) < TURN_LINES  # noqa: B023
    assert len(timetable._patterns) <= PLANS_KEPT
    assert all(len(pattern._spreads_us) <= SPREADS_KEPT for pattern in timetable._patterns.values())


@few
@hostile
def test_no_impossible_period_is_learnt(kinds: list[str], seed: int) -> None:
    plan = mixed_plan(seed, 3)
    timetable = Timetable(3, lambda _: plan)
    for run in runs_of(kinds, seed, 3):
        timetable.add(run)
    for pattern in timetable._patterns.values():
        assert all(PERIOD_MIN_US <= period_us <= MAX_DURATION_US for period_us in pattern._periods_us)
        assert all(0 <= offset_us <= MAX_DURATION_US for kept in pattern._kept for offset_us in kept)


class CountedLead:
    """Counts how often it is asked: once for each clock of a round."""

    def __init__(self, lead: Lead) -> None:
        self.median_us, self.worth_us, self.turn_us = lead.median_us, lead.worth_us, lead.turn_us
        self.lead = lead
        self.asked = 0

    def raise_us(self, mhz: int) -> int:
        self.asked += 1
        return self.lead.raise_us(mhz)

    def lower_us(self, mhz: int) -> int:
        self.asked += 1
        return self.lead.lower_us(mhz)


def test_the_clocks_to_ask_for_are_found_in_few_rounds_however_the_times_lie() -> None:
    """Dips each a little longer than the one before: every round finds one of them."""
    line, place_us, changes = ClockLine(), 0, 6_000
    line.add(-math.inf, 1200)
    for number in range(changes):
        line.add(place_us, (600, 1200)[number % 2])
        place_us += 1 + number // 2 if number % 2 == 0 else 100_000
    lead = CountedLead(Lead(0, 0, 2 * changes, 0))
    asked, _ = line.asked(lead, [])
    assert lead.asked <= 3 * (ASKED_CLOCKS + (ASKED_ROUNDS + 1) * changes)
    assert asked.highest_mhz(-math.inf, math.inf) == 1200
    for place in range(-10, 1_000):
        assert asked.highest_mhz(place, place) >= line.highest_mhz(place, place)


@few
@hostile
def test_each_step_of_a_layout_is_short(kinds: list[str], seed: int) -> None:
    pattern = Pattern()
    for run in runs_of(["short", *kinds], seed):
        spans = zip(run.begins_us, run.durations_us, strict=True)
        times = [time - run.begins_us[0] for begin, span in spans for time in (begin, begin + span)]
        if max(map(abs, times)) < HUGE:
            pattern.add(times)
    line = ClockLine()
    line.draw(pattern, mixed_plan(seed).clocks_mhz, 0, 600)
    steps, longest = line.asked_steps(LEAD, sorted(pattern.offsets_us)), 0
    ended = False

    def step() -> None:
        nonlocal ended
        ended = next(steps, None) is None

    while not ended:
        longest = max(longest, lines_of(step))
    assert longest < 20 * _PART


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.sampled_from(CLOCKS)), max_size=30), st.data())
def test_looks_at_a_line_end_whatever_the_places_are(changes: list[tuple[float, int]], data: st.DataObject) -> None:
    line, place = ClockLine(), st.floats(allow_nan=True)
    line.add(0, 900)
    for start_us, mhz in changes:
        line.add(start_us, mhz)
    first, last, width = data.draw(place), data.draw(place), data.draw(place)
    assert line.highest_mhz(first, last) in CLOCKS
    line.raise_us(first, 900)
    line.lower_us(first, 900, width, last)
    line.asked(LEAD, [])


@contextmanager
def channel_of(count: int) -> Iterator[tuple[ChannelReader, memoryview]]:
    """A rank's memory, to be written at will."""
    reader = ChannelReader.create(count)
    words = memoryview(reader._map).cast("Q")
    try:
        yield reader, words
    finally:
        words.release()
        reader.close()


def write_record(words: memoryview, count: int, iteration: int, run: Run, dice: random.Random) -> None:
    """Close a record with times, or with nonsense in their place."""
    start = first_record(count) + iteration % SLOTS * record_words(count)
    ends = [begin + span for begin, span in zip(run.begins_us, run.durations_us, strict=True)]
    times = [time % 2**64 for pair in zip(run.begins_us, ends, strict=True) for time in pair]
    words[start + BEGIN], words[start + END] = min(run.begins_us) % 2**64, max(ends) % 2**64
    words[start + FAULTS], words[start + ENDED] = 0, count
    words[start + RECORD_SOURCE] = dice.choice((1, 2, 3, 4, 77))
    for place, time in enumerate(times + times[::2]):
        words[start + TIMES + place] = time
    words[start + SEQUENCE] = 2 * iteration + 2


@few
@hostile
def test_a_record_is_read_in_short_parts_and_what_is_complete_is_possible(kinds: list[str], seed: int) -> None:
    dice, now_us = random.Random(seed), 10**10
    with channel_of(COUNT) as (reader, words):
        for run in runs_of(kinds, seed):
            write_record(words, COUNT, run.iteration, run, dice)
            parts, records = reader.drain_parts(now_us), []

            def part(parts=parts, records=records) -> bool:  # type: ignore[no-untyped-def]
                try:
                    next(parts)
                except StopIteration as done:
                    records.append(done.value)
                return bool(records)

            while not records:
                assert lines_of(part) < PART_LINES
            [record] = records
            assert isinstance(record, IterationRecord)
            if not record.complete:
                assert record.begins_us == record.durations_us == record.leads_us == ()
                continue
            assert record.end_us <= now_us + AHEAD_US
            assert min(record.durations_us) >= 0
            for begin, span in zip(record.begins_us, record.durations_us, strict=True):
                assert record.begin_us <= begin <= begin + span <= record.end_us <= record.begin_us + MAX_DURATION_US


def follower_of(reader: ChannelReader, plans: JobPlans) -> RankFollower:
    return RankFollower(RANK, make_schedule(schedule_of(reader.instructions)), reader, plans, machine_clock=True)


def plans_of(count: int, seed: int) -> JobPlans:
    clocks, plans = mixed_plan(seed, count).clocks_mhz, JobPlans()
    plan_set = decode_plan_set(plan_set_of([[list(clocks), [600] * count]]))
    plans.push(plan_set)
    plans.select(plan_set.plan_id, {0: 0}, 0, {})
    return plans


@few
@hostile
def test_no_turn_with_a_rank_is_long_and_nothing_that_is_kept_grows(kinds: list[str], seed: int) -> None:
    """The rank forges records, positions and sources; the thread looks, and does what can wait."""
    count, dice = 400, random.Random(seed)
    published: list[Event] = []
    reports = IterationReports(lambda _, event: published.append(event))
    for time_us in range(0, 10**6, 50_000):
        reports.meter.add(EnergyReading(time_us, time_us))
    reports.clocks.extend(ClockReading(time_us, 900, False) for time_us in range(1_000_000, 1_000_900))
    effects = [Effect(1_000_000 + number, CLOCKS[number % 3]) for number in range(EFFECTS_KEPT)]
    with channel_of(count) as (reader, words):
        follower = follower_of(reader, plans_of(count, seed))
        backlog = Backlog(reports)
        for run in runs_of(kinds * 4, seed, count):
            for ahead in range(dice.choice((1, SLOTS))):
                write_record(words, count, run.iteration + ahead, run, dice)
            words[SOURCE] = dice.choice((1, 2, 3, 4, 2**64 - 1))
            words[POSITION] = dice.choice(
                (run.iteration << 32 | dice.randrange(6) << 24 | dice.randrange(count), 2**64 - 1)
            )
            now_us = dice.choice((1_000_000, 10**9, 2**53))
            assert lines_of(lambda now_us=now_us: follower.look(0, now_us, LEAD)) < TURN_LINES
            for _ in range(12):
                parts: list[bool] = []

                def part(parts=parts) -> None:  # type: ignore[no-untyped-def]
                    finished, more = follower.collect_part(0)
                    reports.add(finished)
                    parts.append(
                        more | reports.publish_part(counter=dice.random() < 0.5, enforced=True, effects=effects)
                    )

                assert lines_of(part) < PART_LINES
            assert len(follower._marks) <= _MARKS_KEPT
            assert reports._instructions <= 2 * iteration_reports.UNFINISHED_INSTRUCTIONS
            assert len(reports._waiting) <= iteration_reports.MAX_UNFINISHED + 12
        assert lines_of(lambda: reports.add(follower.leave(0))) < TURN_LINES
        assert not backlog.pending
    for event in published:
        assert isinstance(event, IterationReport)
        assert 0 <= event.compute_span_us <= event.iteration_time_us <= MAX_DURATION_US
        assert event.evidence is None or (event.evidence.below_us or 0) >= 0 <= (event.evidence.above_us or 0)


@few
@given(st.integers(0, 2**32))
def test_any_bits_in_the_memory_are_survived_in_short_turns(seed: int) -> None:
    count, dice = 64, random.Random(seed)
    with channel_of(count) as (reader, words):
        follower = follower_of(reader, plans_of(count, seed))
        for _ in range(12):
            for place in range(4, len(words)):
                words[place] = dice.choice((dice.getrandbits(64), dice.getrandbits(33), dice.getrandbits(3), 0))
            words[SOURCE] = dice.randrange(6)
            for slot in range(SLOTS):
                words[first_record(count) + slot * record_words(count)] = 2 * (4 * dice.randrange(4) + slot) + 2
            assert lines_of(lambda: follower.look(0, dice.getrandbits(50), LEAD)) < TURN_LINES
            assert lines_of(lambda: follower.collect_part(0, dice.getrandbits(50))) < PART_LINES
        assert lines_of(lambda: follower.leave(0)) < TURN_LINES


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32))
def test_time_beside_the_plan_costs_no_more_than_its_instructions_and_changes(
    count: int, changes: int, seed: int
) -> None:
    dice = random.Random(seed)
    begins = tuple(dice.randrange(1_000) for _ in range(count))
    spans = tuple(dice.randrange(HUGE) for _ in range(count))
    record = IterationRecord(0, 0, HUGE, begins, spans, True, Faults.NONE, source=MarkSource.GPU)
    effects = [Effect(10 * number, dice.choice((None, *CLOCKS))) for number in range(changes)]
    found: list[tuple[int, int]] = []
    lines = lines_of(lambda: found.append(run_through(beside_plan_us(record, [900] * count, effects))))
    assert lines <= 40 + 20 * (count + OVERLAP * changes)
    assert min(found[0]) >= 0
    assert lines_of(lambda: clock_during(record, HUGE, [ClockReading(n, 900, True) for n in range(changes)])) < 3_000


def summary(iteration: int, numbers: int, tp: int = 0) -> IterationReport:
    return IterationReport(0, 0, tp, iteration, 1, 1, None, 0, (1,) * numbers, evidence=Evidence(MarkSource.GPU))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=40), st.integers(1, 30))
def test_what_a_reader_is_kept_and_sent_is_bounded_in_numbers(sizes: list[int], capacity: int) -> None:
    hub = TelemetryHub(capacity)
    reader = hub.watch("job")
    for iteration, size in enumerate(sizes):
        hub.publish("job", summary(iteration, size))
        assert len(reader._events) <= capacity
        stored = sum(event.numbers for event in reader._events if isinstance(event, IterationReport))
        assert stored == reader._numbers
        assert stored <= MAX_NUMBERS or len(reader._events) == 1
    seen = 0
    while reader._events:
        taken = reader.take(0)
        assert taken is not None
        events = [event for event in taken[1] if isinstance(event, IterationReport)]
        assert 1 <= len(events) <= BATCH_EVENTS
        assert sum(event.numbers for event in events[:-1]) <= BATCH_NUMBERS
        seen += len(events)
    assert seen + reader.dropped == len(sizes)


@pytest.mark.parametrize("same", [True, False])
def test_reports_are_combined_with_little_work(same: bool) -> None:
    events = [summary(0 if same else number, 50, tp=number) for number in range(BATCH_EVENTS)]
    found: list[list[Event]] = []
    assert lines_of(lambda: found.append(combine(events))) < TURN_LINES
    assert len(found[0]) == (1 if same else BATCH_EVENTS)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, HUGE), st.integers(-10, 10**6), st.sampled_from((None, *CLOCKS)))), st.booleans()
)
def test_the_meter_of_changes_keeps_and_does_little_however_often_clocks_change(
    writes: list[tuple[int, int, int | None]], held: bool
) -> None:
    meter = LatencyMeter(published_latency("H100"), 0)
    meter.every, before = True, None
    for began_us, took_us, mhz in writes:
        wrote = {"wanted_us": began_us - took_us, "began_us": began_us, "ended_us": began_us + took_us}
        assert lines_of(lambda: meter.wrote(before, mhz, **wrote, tolerance_mhz=15)) < TURN_LINES  # noqa: B023
        if meter.read_us:
            meter.read(mhz or 0, meter.read_us, meter.read_us + 10, held=held)
        before = mhz
    assert len(meter.effects) <= EFFECTS_KEPT


def test_a_finished_iteration_that_all_instructions_share_is_reported_in_short_parts() -> None:
    """Its energy, its clocks and its waits, with a long record of the clock."""
    reports = IterationReports(lambda *_: None)
    for time_us in range(0, 40_000_000, 2_000):
        reports.meter.add(EnergyReading(time_us, time_us))
    count = 20_000
    record = IterationRecord(0, 0, 30_000_000, (0,) * count, (30_000_000,) * count, True, Faults.NONE)
    effects = [Effect(1_000 * number, CLOCKS[number % 3]) for number in range(EFFECTS_KEPT)]
    plans = plans_of(4, 0)
    with channel_of(4):
        reports.add([Finished(RANK, record, 30_000_000, plans.follow(0, 0, 0), 0, machine_clock=True)])
        more: list[bool] = [True]
        while more[-1]:
            lines = lines_of(lambda: more.append(reports.publish_part(counter=False, enforced=True, effects=effects)))
            assert lines < PART_LINES


def test_the_memory_of_a_rank_does_not_depend_on_what_it_asks_for() -> None:
    """Spreads are remembered by pairs of boundaries, of which a rank chooses one with each mark."""
    pattern, count = Pattern(), 300
    for _ in range(3):
        pattern.add(list(range(2 * count)))
    for since in range(2 * count - 1):
        for until in range(since, 2 * count, 7):
            pattern.spread_us(since, until)
    assert len(pattern._spreads_us) <= SPREADS_KEPT
