"""Times from GPU events: never waited for, on the host's clock, in the right iteration. The GPU here is a double."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from perseus_client import marks as choice
from perseus_client.gpu_events import MAX_PENDING, EventTimer, LateRecord
from perseus_proto.channel import ChannelReader, ChannelWriter, Faults
from perseus_proto.hello import make_schedule

N = 3
OFFSET_MS = 5_000.0
"""The GPU's time when the host's is zero."""


IDLE = object()
CURRENT = object()


class Gpu:
    """A stream that runs ``lag_us`` behind what the host launches, one without work, and the host's clock."""

    def __init__(self) -> None:
        self.host_us = 1_000_000
        self.lag_us = 0
        self.one_queue = False  # the stream without work waits for the other
        self.rate = 1.0  # of the GPU's clock
        self.finished_us = 10**12  # all that was launched before this host time has run
        self.capturing = False
        self.made = 0

    def make_event(self) -> Event:
        self.made += 1
        return Event(self)

    def run_iteration(self, timer: EventTimer, iteration: int, instructions: int = N, duration_us: int = 100) -> None:
        timer.step_begin(iteration, self.host_us)
        for index in range(instructions):
            timer.begin(index)
            self.host_us += duration_us
            timer.end(index)
            self.host_us += 10
        timer.step_end(Faults.NONE)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at_ms: float | None = None
        self.recorded_us = 0

    def record(self, stream: object = None, /) -> None:
        assert not self.gpu.capturing, "recorded while a graph is captured"
        assert stream in (CURRENT, IDLE)
        lag_us = self.gpu.lag_us if stream is CURRENT or self.gpu.one_queue else 0
        self.recorded_us = self.gpu.host_us
        self.at_ms = OFFSET_MS + self.gpu.rate * (self.gpu.host_us + lag_us) / 1000

    def query(self) -> bool:
        return self.recorded_us <= self.gpu.finished_us

    def elapsed_time(self, end_event: Event) -> float:
        assert self.query(), "torch raises if an event is not complete"
        assert end_event.query(), "torch raises if an event is not complete"
        assert self.at_ms is not None
        assert end_event.at_ms is not None
        return end_event.at_ms - self.at_ms


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def timer(gpu: Gpu) -> Iterator[EventTimer]:
    return EventTimer(N, gpu.make_event, lambda: gpu.capturing, lambda: CURRENT, IDLE)  # type: ignore[return-value]


def collect(timer: EventTimer, gpu: Gpu) -> list[LateRecord]:
    return list(timer.collect(gpu.host_us))


def durations(record: LateRecord) -> list[int]:
    return [end - begin for begin, end in zip(record.times_us[::2], record.times_us[1::2], strict=True)]


def test_an_iteration_that_has_run_is_timed_on_the_hosts_clock(gpu: Gpu, timer: EventTimer) -> None:
    gpu.run_iteration(timer, 4)
    (record,) = collect(timer, gpu)
    assert record.iteration == 4
    assert record.times_us == [1_000_000, 1_000_100, 1_000_110, 1_000_210, 1_000_220, 1_000_320]
    assert (record.begin_us, record.end_us) == (1_000_000, 1_000_330)
    assert record.faults is Faults.NONE


def test_what_has_not_run_is_not_asked_for_its_times(gpu: Gpu, timer: EventTimer) -> None:
    gpu.run_iteration(timer, 0)
    gpu.finished_us = gpu.host_us - 1
    assert collect(timer, gpu) == []
    gpu.run_iteration(timer, 1)
    assert collect(timer, gpu) == []
    gpu.finished_us = gpu.host_us
    assert [record.iteration for record in collect(timer, gpu)] == [0, 1]


def test_work_that_waits_its_turn_on_the_gpu_is_placed_when_it_ran(gpu: Gpu, timer: EventTimer) -> None:
    """The host runs ahead by 5 ms all the time: it must show as time, not vanish."""
    gpu.lag_us = 5_000
    for iteration in range(3):
        begin_us = gpu.host_us
        gpu.run_iteration(timer, iteration)
        gpu.host_us += 50_000
        (record,) = collect(timer, gpu)
        assert record.times_us[0] == begin_us + 5_000
        assert durations(record) == [100] * N


def test_where_streams_share_a_queue_the_smallest_lag_of_late_places_iterations(gpu: Gpu, timer: EventTimer) -> None:
    gpu.one_queue = True
    lags_us = [5_000, 0, 5_000, 7_000]
    placed_us = []
    for iteration, gpu.lag_us in enumerate(lags_us):
        begin_us = gpu.host_us
        gpu.run_iteration(timer, iteration)
        gpu.host_us += 50_000
        (record,) = collect(timer, gpu)
        placed_us.append(record.times_us[0] - begin_us)
    assert placed_us == [0, 0, 5_000, 7_000]


@pytest.mark.parametrize("drift", [22e-6, -22e-6])
@pytest.mark.parametrize("one_queue", [False, True])
def test_clocks_that_drift_apart_do_not_displace_iterations(
    gpu: Gpu, timer: EventTimer, drift: float, one_queue: bool
) -> None:
    """Hours of steps of 1 s, half of it behind the host; a step that logs its loss waits for the GPU. The clocks end
    0.4 s apart."""
    gpu.rate, gpu.one_queue = 1 + drift, one_queue
    iteration_us = 1_000_000
    for iteration in range(20_000):
        gpu.lag_us = 0 if iteration % 10 == 0 else iteration_us // 2
        begin_us = gpu.host_us
        gpu.run_iteration(timer, iteration)
        gpu.host_us = begin_us + iteration_us
        (record,) = collect(timer, gpu)
        assert abs(record.times_us[0] - begin_us - gpu.lag_us) <= 0.0015 * iteration_us


def test_an_iteration_with_a_missing_instruction_has_no_times(gpu: Gpu, timer: EventTimer) -> None:
    gpu.run_iteration(timer, 0, instructions=N - 1)
    (record,) = collect(timer, gpu)
    assert record.faults is Faults.UNTIMED


def test_nothing_is_recorded_while_a_graph_is_captured(gpu: Gpu, timer: EventTimer) -> None:
    gpu.capturing = True
    gpu.run_iteration(timer, 0)
    assert (collect(timer, gpu), gpu.made) == ([], 0)


def test_a_gpu_that_is_far_behind_costs_bounded_memory_and_the_oldest_iterations(gpu: Gpu, timer: EventTimer) -> None:
    gpu.finished_us = 0
    for iteration in range(50):
        gpu.run_iteration(timer, iteration)
        assert collect(timer, gpu) == []
    gpu.finished_us = 10**12
    assert [record.iteration for record in collect(timer, gpu)] == list(range(50 - MAX_PENDING, 50))


def test_events_are_used_again(gpu: Gpu, timer: EventTimer) -> None:
    for iteration in range(50):
        gpu.run_iteration(timer, iteration)
        collect(timer, gpu)
    assert gpu.made <= 2 * (2 * N + 3)


@pytest.mark.parametrize("compiled", [True, False])
def test_late_times_arrive_at_the_agent(
    gpu: Gpu, timer: EventTimer, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(choice, "_marks", None)
    gpu.host_us = time.monotonic_ns() // 1000
    schedule = make_schedule([("forward", microbatch, 0) for microbatch in range(N)])
    marks = choice.TimedMarks(choice.make_marks(schedule, None), timer)
    reader = ChannelReader.create(N)
    writer = ChannelWriter(os.dup(reader.memory_fd), os.dup(reader.event_fd), N)
    for iteration in range(2):
        marks.open(writer, iteration)
        for microbatch in range(N):
            assert marks.begin("forward", microbatch) == 0
            gpu.host_us += 100
            assert (marks.end() if microbatch else marks.end("forward", microbatch)) == 0
        marks.finish(0)
        record = reader.drain_iteration()
        assert record is not None
        assert record.complete
        assert record.durations_us == (100,) * N
    made = gpu.made
    assert marks.begin("forward", 0) == marks.end() == 0  # no step is open: nothing is recorded
    assert gpu.made == made
    marks.open(writer, 2)
    assert marks.begin("sideways", 0) == Faults.UNKNOWN_INSTRUCTION
    assert marks.end() == Faults.OUT_OF_ORDER
    marks.finish(Faults.UNKNOWN_INSTRUCTION)
    assert (record := reader.drain_iteration()) is not None
    assert not record.complete
    reader.close()


def test_an_iteration_that_is_complete_at_the_last_moment_is_collected(gpu: Gpu, timer: EventTimer) -> None:
    gpu.finished_us = 0
    for iteration in range(MAX_PENDING):
        gpu.run_iteration(timer, iteration)
        assert collect(timer, gpu) == []
    gpu.run_iteration(timer, MAX_PENDING)
    gpu.finished_us = 10**12
    assert [record.iteration for record in collect(timer, gpu)] == list(range(MAX_PENDING + 1))
