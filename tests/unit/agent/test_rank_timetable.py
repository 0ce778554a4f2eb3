"""Following a rank whose marks are of the machine's clock: by timetable, or one clock an iteration. Real shared memory,
virtual time, no device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.doubles.recording_gpu import CLOCKS_MHZ, RecordingGpu
from tests.doubles.recording_node import plan_set_of
from tests.doubles.recording_trainer import schedule_of

from perseus_agent.clocks.idle import IDLE_LOSS, MARK_LOOK_US, IdleWatch
from perseus_agent.clocks.lead import Lead
from perseus_agent.clocks.plans import JobPlans
from perseus_agent.clocks.rank_follower import Finished, RankFollower
from perseus_agent.clocks.telemetry import RankProcess
from perseus_core.marks import ClockControl, MarkSource
from perseus_core.rank import RankId
from perseus_proto.channel import ChannelReader, ChannelWriter, Faults
from perseus_proto.hello import make_schedule
from perseus_proto.planset import decode_plan_set

COUNT = 4
POINT_0 = [1200, 900, 900, 1200]
POINT_1 = [600, 600, 600, 600]
POINT_2 = [600, 900, 600, 900]
PLANS = decode_plan_set(plan_set_of([[POINT_0, POINT_1, POINT_2]]))
RANK = RankProcess("job", "pod", "GPU-0", RankId(0, 0), 1)
LEAD = Lead(2_000, 1_000)
SPAN_US = 10_000
LATE_US = 3_000
"""The GPU is behind its host by so much, where the host does not wait."""


class Flight:
    """A rank with its GPU, and a follower that looks when it is rung and when it wants to."""

    def __init__(self, source: MarkSource, *, idle: bool = False) -> None:
        self.source, self.gpu = source, RecordingGpu("GPU-0", working=False)
        self.plans = JobPlans()
        self.plans.push(PLANS)
        self.plans.select(PLANS.plan_id, {0: 0}, 0, {})
        self.channel = ChannelReader.create(COUNT)
        self.rank = ChannelWriter(os.dup(self.channel.memory_fd), os.dup(self.channel.event_fd), COUNT)
        self.rank.source = source
        self.follower = RankFollower(
            RANK,
            make_schedule(schedule_of(COUNT)),
            self.channel,
            self.plans,
            machine_clock=True,
            idle=IdleWatch(self.gpu, IDLE_LOSS) if idle else None,
        )
        self.now_us = 1_000_000
        self.asked: list[tuple[int, int | None]] = []
        self.finished: list[Finished] = []
        self.iteration = 0
        self._filled = 0
        self._begins: dict[int, int] = {}

    @property
    def late(self) -> bool:
        return self.source in (MarkSource.EVENTS, MarkSource.GPU)

    def look(self) -> None:
        mhz = self.gpu.locked_mhz = self.follower.look(0, self.now_us, LEAD)
        if not self.asked or self.asked[-1][1] != mhz:
            self.asked.append((self.now_us, mhz))
        if self.follower.due:
            self.finished += self.follower.collect(0)

    def until(self, time_us: int) -> None:
        """Let time pass; the follower looks when it is rung, and when it wants to."""
        if self.channel.acknowledge():
            self.look()
        while 0 < self.follower.next_look_us <= time_us:
            self.now_us = max(self.now_us, self.follower.next_look_us)
            self.look()
        self.now_us = time_us

    def iterate(self, times: int = 1, stall_us: int = 0) -> None:
        """Iterations of equal instructions. The GPU stands still for a while before the last instruction."""
        for _ in range(times):
            number, begin_us = self.iteration, self.now_us
            lag_us = LATE_US if self.late else 0
            events = []  # (when, what)
            for index in range(COUNT):
                at_us = begin_us + index * SPAN_US + (stall_us if index == COUNT - 1 else 0)
                events.append((at_us, self.rank.begin, index, at_us))
                events.append((at_us + SPAN_US, self.rank.end, index, at_us + SPAN_US))
                if self.source is MarkSource.GPU:
                    events.append((at_us + lag_us, self.rank.gpu_mark, number, 2 * index + 1))
                    events.append((at_us + lag_us + SPAN_US - 1, self.rank.gpu_mark, number, 2 * index + 2))
            self.rank.step_begin(number, begin_us)
            if self.late and number and self._filled < number:
                self._fill(number - 1)
            for at_us, mark, first, second in sorted(events, key=lambda event: event[0]):
                self.until(at_us)
                mark(first, second)
            end_us = begin_us + COUNT * SPAN_US + stall_us
            self._begins[number] = begin_us
            self._stall_us = stall_us
            if self.late:
                self.rank.step_end_untimed()
            else:
                self.rank.step_end(number, end_us)
            self.until(end_us + 5_000)
            self.iteration += 1

    def _fill(self, number: int) -> None:
        begin_us = self._begins[number] + LATE_US
        begins = [begin_us + index * SPAN_US + (self._stall_us if index == COUNT - 1 else 0) for index in range(COUNT)]
        times = [time for at_us in begins for time in (at_us, at_us + SPAN_US - 1)]
        self.rank.fill(number, begin_us, times[-1], times)
        self._filled = number + 1

    def since(self, time_us: int) -> list[int | None]:
        return [mhz for at_us, mhz in self.asked if at_us >= time_us]

    def select(self, point: int, from_iteration: int = 0) -> None:
        self.plans.select(PLANS.plan_id, {0: point}, from_iteration, {0: self.follower.iteration})
        self.follower.selection_changed()


@pytest.fixture
def source() -> MarkSource:
    return MarkSource.SYNCHRONISED


@pytest.fixture
def flight(source: MarkSource) -> Iterator[Flight]:
    flight = Flight(source)
    yield flight
    flight.channel.close()


TIMED = pytest.mark.parametrize("source", [MarkSource.SYNCHRONISED, MarkSource.EVENTS, MarkSource.GPU])
LATE = pytest.mark.parametrize("source", [MarkSource.EVENTS, MarkSource.GPU])


@pytest.mark.parametrize("source", [MarkSource.HOST])
def test_marks_of_the_host_hold_the_highest_clock_and_ring_at_begins_only(flight: Flight) -> None:
    flight.iterate(8)
    assert flight.asked == [(flight.asked[0][0], 1200)]
    assert flight.rank.rings == 8
    assert {one.control for one in flight.finished} == {ClockControl.HELD}
    flight.select(2, from_iteration=10)
    begun_us = flight.now_us
    flight.iterate(3)
    assert flight.since(begun_us) == [900]
    assert flight.asked[-1][0] >= begun_us + 2 * (COUNT * SPAN_US)


def test_a_rank_that_waits_for_its_gpu_is_followed_from_mark_to_mark_until_its_times_are_known(flight: Flight) -> None:
    flight.iterate(2)
    assert [mhz for _, mhz in flight.asked][:3] == [1200, 900, 1200]
    assert flight.finished[0].control is ClockControl.MARKS
    flight.iterate(4)
    assert flight.finished[-1].control is ClockControl.TIMETABLE


@LATE
def test_a_plan_of_one_clock_has_no_moment_to_choose(flight: Flight) -> None:
    flight.select(1, from_iteration=2)
    flight.iterate(9)
    assert flight.finished[0].control is ClockControl.HELD
    assert flight.finished[-1].control is ClockControl.TIMETABLE
    assert flight.asked[-1][1] == 600


@LATE
def test_before_its_times_are_known_a_rank_that_runs_ahead_keeps_the_highest_clock(flight: Flight) -> None:
    flight.iterate(2)
    assert [mhz for _, mhz in flight.asked] == [1200]
    flight.iterate(5)
    assert flight.finished[0].control is ClockControl.HELD
    assert flight.finished[-1].control is ClockControl.TIMETABLE


@TIMED
def test_the_timetable_asks_ahead_of_the_gpu_and_needs_no_rings(flight: Flight) -> None:
    flight.iterate(8)
    rings, begin_us = flight.rank.rings, flight.now_us
    flight.iterate()
    assert flight.rank.rings == rings
    lag_us = LATE_US if flight.late else 0
    [(lowered_us, low), (raised_us, high)] = [
        (at, mhz) for at, mhz in flight.asked if begin_us < at < begin_us + 45_000
    ]
    assert (low, high) == (900, 1200)
    ended_us, begins_us = begin_us + lag_us + SPAN_US, begin_us + lag_us + 3 * SPAN_US
    # Early by the latency; later where it lowers and earlier where it raises.
    assert ended_us - LEAD.median_us <= lowered_us <= ended_us + LEAD.deviation_us
    assert raised_us == pytest.approx(begins_us - LEAD.median_us - LEAD.deviation_us, abs=600)


@pytest.mark.parametrize("source", [MarkSource.SYNCHRONISED, MarkSource.GPU])
def test_a_gpu_that_stands_still_keeps_the_clock_that_comes_next(flight: Flight) -> None:
    flight.iterate(8)
    begin_us = flight.now_us
    flight.iterate(stall_us=300_000)
    assert flight.since(begin_us + SPAN_US + LATE_US) == [1200]


@TIMED
def test_a_deviation_means_default_clocks_at_once_and_the_next_iteration_is_followed_again(flight: Flight) -> None:
    flight.iterate(8)
    flight.rank.step_begin(8, flight.now_us)
    flight.until(flight.now_us + 1_000)
    flight.rank.deviate(Faults.UNKNOWN_INSTRUCTION)
    flight.until(flight.now_us + 100)
    assert flight.asked[-1][1] is None
    flight.rank.step_end(8, flight.now_us, Faults.UNKNOWN_INSTRUCTION)
    flight.iteration = flight._filled = 9
    flight.iterate(3)
    assert flight.asked[-1][1] is not None


@TIMED
def test_another_plan_takes_effect_at_its_boundary(flight: Flight) -> None:
    flight.iterate(8)
    flight.select(1, from_iteration=10)
    flight.iterate(1)
    assert flight.asked[-1][1] in POINT_0
    flight.iterate(6)
    assert flight.asked[-1][1] == 600
    assert flight.follower.next_look_us == 0  # one clock: nothing to look for
    rings = flight.rank.rings
    flight.iterate(2)
    assert flight.rank.rings == rings + 2


@TIMED
def test_without_a_plan_the_default_clocks_are_wanted_and_only_begins_ring(flight: Flight) -> None:
    flight.follower._plans = JobPlans()
    flight.iterate(4)
    assert [mhz for _, mhz in flight.asked] == [None]
    assert flight.rank.rings == 4
    assert {one.control for one in flight.finished} == {None}


@TIMED
def test_windows_of_iterations_adjoin_in_gpu_time_and_leads_are_known(flight: Flight) -> None:
    flight.iterate(8)
    windows = [(one.record.begin_us, one.next_begin_us) for one in flight.finished]
    assert len(windows) >= 4
    assert [end for _, end in windows[:-1]] == [begin for begin, _ in windows[1:]]
    lead_us = LATE_US if flight.late else 0
    assert {lead for one in flight.finished for lead in one.record.leads_us} == {lead_us}


@TIMED
def test_nonsense_in_the_memory_is_survived(flight: Flight) -> None:
    flight.iterate(8)
    words = memoryview(flight.rank._map).cast("Q")
    for value in (2**64 - 1, 0, 1 << 63, 5 << 24, (9 << 32) | (1 << 24), (3 << 32) | (3 << 24) | 3, 0xFFFFFF):
        for place in range(4, len(words)):
            words[place] = value
        words[5] = flight.source
        wanted = flight.follower.look(0, flight.now_us, LEAD)
        flight.follower.collect(0)
        assert wanted in (None, *POINT_0)
    words.release()


@pytest.mark.parametrize("source", list(MarkSource))
def test_a_long_wait_between_iterations_is_at_the_least_clock(source: MarkSource) -> None:
    flight = Flight(source, idle=True)
    flight.iterate(6)
    assert flight.asked[-1][1] != CLOCKS_MHZ[0]
    flight.until(flight.now_us + 60_000_000)
    assert flight.asked[-1][1] == CLOCKS_MHZ[0]
    begin_us = flight.now_us
    flight.iterate()
    back_us = next(at_us for at_us, mhz in flight.asked if at_us >= begin_us and mhz != CLOCKS_MHZ[0])
    assert back_us - begin_us <= MARK_LOOK_US
    flight.channel.close()
