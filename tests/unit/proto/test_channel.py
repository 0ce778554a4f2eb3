"""The memory of a rank and its agent: what is marked is what is drained, and a hostile rank fools only itself."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_core.marks import MarkSource
from perseus_proto.channel import (
    MAX_ITERATION,
    SLOTS,
    ChannelReader,
    ChannelWriter,
    Faults,
    Phase,
    Position,
    gpu_mark_value,
    memory_bytes,
)
from perseus_proto.channel_layout import GRAPH_MARK_BYTE
from perseus_proto.frames import ChannelError

N = 5


@pytest.fixture
def reader() -> Iterator[ChannelReader]:
    reader = ChannelReader.create(N)
    yield reader
    reader.close()


def writer_of(reader: ChannelReader) -> ChannelWriter:
    return ChannelWriter(os.dup(reader.memory_fd), os.dup(reader.event_fd), reader.instructions)


def run_iteration(writer: ChannelWriter, iteration: int, start_us: int, durations_us: list[int]) -> int:
    """Mark a whole iteration with one microsecond between instructions; when it ended."""
    now_us = start_us
    writer.step_begin(iteration, now_us)
    for index, duration_us in enumerate(durations_us):
        writer.begin(index, now_us)
        now_us += duration_us
        writer.end(index, now_us)
        now_us += 1
    writer.step_end(iteration, now_us)
    return now_us


@given(st.lists(st.lists(st.integers(0, 2**29), min_size=N, max_size=N), min_size=1, max_size=9))
@settings(max_examples=50)
def test_what_is_marked_is_what_is_drained(iterations: list[list[int]]) -> None:
    reader = ChannelReader.create(N)
    writer = writer_of(reader)
    now_us = 0
    for iteration, durations_us in enumerate(iterations):
        start_us = now_us
        now_us = run_iteration(writer, iteration, now_us, durations_us)
        record = reader.drain_iteration()
        assert record is not None
        assert (record.iteration, record.begin_us, record.end_us) == (iteration, start_us, now_us)
        assert record.durations_us == tuple(durations_us)
        assert record.begins_us[0] == start_us
        assert record.complete
        assert reader.drain_iteration() is None
    assert reader.lost == 0
    reader.close()


def test_the_position_follows_every_mark(reader: ChannelReader) -> None:
    writer = writer_of(reader)
    assert reader.position() == Position(0, 0, Phase.NONE)
    writer.step_begin(7, 100)
    assert reader.position() == Position(7, 0, Phase.STEP_BEGUN)
    assert reader.step_begin_us() == 100
    assert reader.position().upcoming(N) == (7, 0)
    for index in range(N):
        writer.begin(index, 100)
        assert reader.position() == Position(7, index, Phase.BEGUN)
        assert reader.position().upcoming(N) == (7, index)
        writer.end(index, 101)
        assert reader.position() == Position(7, index, Phase.ENDED)
        assert reader.position().upcoming(N) == ((7, index + 1) if index + 1 < N else (8, 0))
    writer.step_end(7, 102)
    assert reader.position() == Position(7, 0, Phase.STEP_ENDED)
    assert reader.position().upcoming(N) == (8, 0)


@given(st.lists(st.booleans(), min_size=N, max_size=N).map(bytes))
@settings(max_examples=50)
def test_the_bell_rings_at_the_begin_of_a_step_and_where_the_map_says(wake: bytes) -> None:
    reader = ChannelReader.create(N)
    writer = writer_of(reader)
    reader.set_wake_map(wake)
    writer.step_begin(0, 0)
    assert reader.acknowledge()
    for index in range(N):
        writer.begin(index, 0)
        assert not reader.acknowledge()
        writer.end(index, 0)
        assert reader.acknowledge() is bool(wake[(index + 1) % N])  # after the last comes the first of the next step
    writer.step_end(0, 0)
    assert not reader.acknowledge()
    assert writer.rings == 1 + sum(wake)
    reader.close()


@given(st.integers(0, 20))
@settings(max_examples=21)
def test_marks_for_which_a_look_is_announced_do_not_ring(from_us: int) -> None:
    """Marks are made at 1, 2, 3 …; a deviation rings whenever it is."""
    reader = ChannelReader.create(N)
    writer = writer_of(reader)
    reader.set_wake_map(b"\x01" * N)
    reader.skip_rings_from(from_us)

    def rung_as_announced(t_us: int) -> bool:
        return reader.acknowledge() is not (0 < from_us <= t_us)

    writer.step_begin(0, 1)
    assert rung_as_announced(1)
    for index in range(N):
        writer.begin(index, 2 * index + 2)
        assert not reader.acknowledge()
        writer.end(index, 2 * index + 3)
        assert rung_as_announced(2 * index + 3)
        assert reader.position() == Position(0, index, Phase.ENDED)
    writer.step_end(0, 2 * N + 2)
    assert not reader.acknowledge()
    assert reader.position().phase is Phase.STEP_ENDED
    writer.step_begin(1, 2 * N + 3)
    reader.acknowledge()
    writer.deviate(Faults.OUT_OF_ORDER)
    assert reader.acknowledge()
    reader.close()


def test_a_map_of_another_length_is_refused(reader: ChannelReader) -> None:
    with pytest.raises(ValueError, match="wake: must have 5 bytes, has 4"):
        reader.set_wake_map(bytes(N - 1))


def test_an_agent_that_is_late_loses_the_oldest_and_counts_them(reader: ChannelReader) -> None:
    writer = writer_of(reader)
    run_iteration(writer, 0, 0, [1] * N)
    assert reader.drain_iteration() is not None
    for iteration in range(1, 11):
        run_iteration(writer, iteration, 1000 * iteration, [1] * N)
    drained = []
    while (record := reader.drain_iteration()) is not None:
        drained.append(record.iteration)
    assert drained == list(range(11 - SLOTS, 11))
    assert reader.lost == 10 - SLOTS


def test_an_iteration_that_runs_is_not_drained(reader: ChannelReader) -> None:
    writer = writer_of(reader)
    run_iteration(writer, 0, 0, [1] * N)
    writer.step_begin(1, 100)
    first = reader.drain_iteration()
    assert first is not None
    assert first.iteration == 0
    assert reader.drain_iteration() is None


def test_times_that_come_late_are_filled_in_behind_the_running_iteration(reader: ChannelReader) -> None:
    writer = writer_of(reader)
    for iteration in range(2):
        writer.step_begin(iteration, 100 * iteration)
        for index in range(N):
            writer.begin(index, 0)
            writer.end(index, 0)
        writer.step_end_untimed()
    assert reader.drain_iteration() is None
    times_us = [10 + time for time in range(2 * N)]
    writer.fill(0, 7, 50, times_us)
    writer.fill(17, 7, 50, times_us)  # never was
    writer.fill(1, 7, 50, times_us[:-1])
    record = reader.drain_iteration()
    assert record is not None
    assert (record.iteration, record.complete, record.durations_us) == (0, True, (1,) * N)
    assert (record.begin_us, record.end_us, record.begins_us) == (7, 50, tuple(times_us[::2]))
    assert reader.drain_iteration() is None


@given(st.lists(st.tuples(st.integers(0, 2**30), st.integers(0, 2**30)), min_size=N, max_size=N))
@settings(max_examples=50)
def test_the_lead_of_every_instruction_is_what_the_gpu_was_later(leads_us: list[tuple[int, int]]) -> None:
    """Host marks lie at their index; begin and end on the GPU come late by any two numbers."""
    reader = ChannelReader.create(N)
    writer = writer_of(reader)
    writer.source = MarkSource.EVENTS
    for iteration in range(SLOTS + 1):  # what a slot held before does not show
        writer.step_begin(iteration, 0)
        for index in range(N):
            writer.begin(index, index + iteration)
            writer.end(index, index + iteration)
        writer.step_end_untimed()
        times_us = [
            time
            for index, (lead, duration) in enumerate(leads_us)
            for time in (index + iteration + lead, index + iteration + lead + duration)
        ]
        writer.fill(iteration, 0, 2**32 - 1, times_us)
        record = reader.drain_iteration()
        assert record is not None
        assert record.complete
        assert record.source is MarkSource.EVENTS
        assert record.leads_us == tuple(lead for lead, _ in leads_us)
        assert record.host_begins_us == tuple(range(iteration, iteration + N))
    reader.close()


@pytest.mark.parametrize("source", MarkSource)
def test_marks_that_the_host_timed_have_no_lead_or_none_is_known(reader: ChannelReader, source: MarkSource) -> None:
    """What is closed without times of the GPU is the host's, whatever the rank hoped for."""
    writer = writer_of(reader)
    writer.source = source
    run_iteration(writer, 0, 0, [1] * N)
    assert reader.mark_source() is source
    record = reader.drain_iteration()
    assert record is not None
    assert record.host_begins_us == record.begins_us
    assert record.leads_us == ((0,) * N if source is MarkSource.SYNCHRONISED else ())
    assert record.source is (MarkSource.SYNCHRONISED if source is MarkSource.SYNCHRONISED else MarkSource.HOST)


@given(st.integers(0, 2**32 - 1), st.integers(0, 4095), st.integers(0, 2 * N + 1))
def test_the_gpus_mark_says_where_it_is_however_far_it_is_behind(host: int, behind: int, boundary: int) -> None:
    reader = ChannelReader.create(N)
    writer = writer_of(reader)
    writer.source = MarkSource.GPU
    assert reader.gpu_position() is None
    writer.step_begin(host, 0)
    assert reader.gpu_position() is None  # nothing has been marked yet
    writer.gpu_mark(host - behind, boundary)
    assert reader.gpu_position() == ((host - behind, boundary) if host >= behind else None)
    assert 0 <= gpu_mark_value(host, boundary) < 2**32 - 1
    for source in (MarkSource.HOST, MarkSource.EVENTS):
        writer.source = source
        writer.step_begin(host, 0)
        assert reader.gpu_position() is None
    reader.close()


@given(st.integers(0, 2 * N + 1), st.integers(0, 2**32 - 1))
def test_in_a_graph_the_further_of_both_marks_says_where_the_gpu_is(stream: int, node: int) -> None:
    """A number that is no boundary says nothing, and a node never says the iteration."""
    reader = ChannelReader.create(N)
    writer = writer_of(reader)
    writer.source = MarkSource.GPU
    writer.step_begin(5, 0)
    writer.gpu_mark(4, stream)
    writer.words.cast("B").cast("I")[GRAPH_MARK_BYTE // 4] = node
    assert reader.gpu_position() == (4, max(stream, node) if node <= 2 * N + 1 else stream)
    reader.close()


def test_a_host_that_waits_for_the_gpu_says_where_the_gpu_is(reader: ChannelReader) -> None:
    writer = writer_of(reader)
    writer.source = MarkSource.SYNCHRONISED
    seen = []

    def look() -> None:
        seen.append(reader.gpu_position())

    look()
    writer.step_begin(3, 0)
    look()
    for index in range(N):
        writer.begin(index, 0)
        look()
        writer.end(index, 0)
        look()
    writer.step_end(3, 0)
    look()
    assert seen == [None, *((3, boundary) for boundary in range(2 * N + 2))]


@pytest.mark.parametrize(
    ("ended", "faults"),
    [(N, Faults.OUT_OF_ORDER), (N, Faults.ABANDONED), (N, Faults.UNTIMED), (N - 1, Faults.NONE), (0, Faults.NONE)],
)
def test_an_iteration_that_left_its_schedule_is_incomplete(reader: ChannelReader, ended: int, faults: Faults) -> None:
    writer = writer_of(reader)
    writer.step_begin(0, 0)
    for index in range(ended):
        writer.begin(index, 1)
        writer.end(index, 1)
    writer.step_end(0, 2, faults)
    record = reader.drain_iteration()
    assert record is not None
    assert (record.complete, record.durations_us, record.begins_us) == (False, (), ())
    assert record.faults == faults


@pytest.mark.parametrize("times_us", [(5, 4), (0, 2**40), (2**64 - 1, 2**64 - 1)])
def test_times_that_cannot_be_are_incomplete(reader: ChannelReader, times_us: tuple[int, int]) -> None:
    writer = writer_of(reader)
    writer.step_begin(0, 1)
    for index in range(N):
        writer.begin(index, times_us[0])
        writer.end(index, times_us[1])
    writer.step_end(0, 100)
    record = reader.drain_iteration()
    assert record is not None
    assert not record.complete


def test_the_rank_can_neither_shrink_nor_grow_nor_seal_the_memory(reader: ChannelReader) -> None:
    for size in (0, 8, 2 * memory_bytes(N)):
        with pytest.raises(PermissionError):
            os.ftruncate(reader.memory_fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(reader.memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_rank_that_makes_the_bell_blocking_does_not_block_the_agent(reader: ChannelReader) -> None:
    flags = fcntl.fcntl(reader.event_fd, fcntl.F_GETFL)
    fcntl.fcntl(reader.event_fd, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    assert not reader.acknowledge()  # a blocking read would hang here until the test's time is up


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_of_another_layout_is_refused_and_nothing_leaks(reader: ChannelReader) -> None:
    before = open_descriptors()
    with pytest.raises(ChannelError, match="size"):
        ChannelWriter(os.dup(reader.memory_fd), os.dup(reader.event_fd), N + 64)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, memory_bytes(N))
    with pytest.raises(ChannelError, match="sealed"):
        ChannelWriter(unsealed, os.dup(reader.event_fd), N)
    with mmap.mmap(reader.memory_fd, memory_bytes(N)) as memory:
        memory[0] ^= 1
    with pytest.raises(ChannelError, match="head"):
        writer_of(reader)
    assert open_descriptors() == before


def test_a_closed_reader_and_a_dropped_writer_leave_no_descriptor_open() -> None:
    before = open_descriptors()
    reader = ChannelReader.create(N)
    writer = writer_of(reader)
    assert open_descriptors() > before
    del writer
    reader.close()
    reader.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("instructions", [0, -1, 65_537])
def test_a_number_of_instructions_out_of_bounds_is_refused(instructions: int) -> None:
    with pytest.raises(ChannelError, match="schedule: must have 1 to 65536 instructions"):
        ChannelReader.create(instructions)


def test_whatever_a_rank_writes_the_reader_answers_and_believes_only_the_plausible(reader: ChannelReader) -> None:
    """Noise, and good memory with a few words replaced by the values that break things."""
    generator = random.Random(20260102)
    size = memory_bytes(N)
    evil = [0, 1, 2, 3, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 2, 2**64 - 1]
    complete = 0
    with mmap.mmap(reader.memory_fd, size) as memory:
        good = None
        for round_number in range(20_000):
            if good is not None and round_number % 4:
                memory[:] = good
                for _ in range(generator.randint(0, 3)):
                    word = 8 * generator.randrange(size // 8)
                    memory[word : word + 8] = generator.choice(evil).to_bytes(8, "little")
            else:
                memory[:] = generator.randbytes(size)
            if good is None:
                fresh = ChannelReader.create(N)
                run_iteration(writer_of(fresh), 3, 1000, [10] * N)
                good = os.pread(fresh.memory_fd, size, 0)
                fresh.close()
            reader._next = None  # as if just created: every iteration number is welcome
            position = reader.position()
            assert position.index < N
            assert position.upcoming(N)[1] < N
            assert reader.step_begin_us() >= 0
            assert reader.mark_source() in MarkSource
            gpu = reader.gpu_position()
            assert gpu is None or (0 <= gpu[0] <= position.iteration and 0 <= gpu[1] <= 2 * N + 1)
            for _ in range(SLOTS + 1):
                record = reader.drain_iteration()
                if record is None:
                    break
                assert record.iteration <= MAX_ITERATION
                if record.complete:
                    complete += 1
                    assert len(record.durations_us) == len(record.begins_us) == len(record.host_begins_us) == N
                    assert all(abs(lead) < 2**31 for lead in record.leads_us)
                    assert 0 <= min(record.durations_us) <= max(record.durations_us) < 2**32
                    assert record.begin_us <= min(record.begins_us)
            else:
                pytest.fail("drain_iteration does not come to an end")
            assert reader.lost < 2**40 * (round_number + 1)
    assert complete > 1000


def test_a_record_that_is_overwritten_while_it_is_copied_is_not_drained(reader: ChannelReader) -> None:
    writer = writer_of(reader)
    run_iteration(writer, 0, 0, [1] * N)

    class Racing:
        """The shared words; the rank laps the reader just after a record was copied."""

        words = reader._words

        def __getitem__(self, key: int | slice) -> object:
            found = self.words[key]
            if isinstance(key, slice):
                copy = found.tobytes()
                run_iteration(writer, SLOTS, 1000, [2] * N)
                return types.SimpleNamespace(tobytes=lambda: copy)
            return found

    reader._words = Racing()  # type: ignore[assignment]
    assert reader.drain_iteration() is None
    reader._words = Racing.words
    record = reader.drain_iteration()
    assert record is not None
    assert (record.iteration, record.durations_us) == (SLOTS, (2,) * N)


RACING_WRITER = """
import sys
from perseus_proto.channel import ChannelWriter, MarkSource
writer = ChannelWriter(int(sys.argv[1]), int(sys.argv[2]), 64)
writer.source = MarkSource(int(sys.argv[3]))
for iteration in range(3000):
    start = 1000 * iteration
    writer.step_begin(iteration, start)
    writer.gpu_mark(iteration, 0)
    for index in range(64):
        writer.begin(index, start + index)
        writer.gpu_mark(iteration, 2 * index + 1)
        writer.end(index, start + index)
        writer.gpu_mark(iteration, 2 * index + 2)
    if writer.source is MarkSource.GPU:
        writer.step_end_untimed()
        times = [start + 200 + 2 * index + end for index in range(64) for end in (0, 1)]
        writer.fill(iteration, start + 200, start + 400, times)
    else:
        writer.step_end(iteration, start + 200)
    writer.gpu_mark(iteration, 129)
"""


@pytest.mark.parametrize("source", [MarkSource.SYNCHRONISED, MarkSource.GPU])
def test_a_reader_that_races_the_writer_never_sees_two_iterations_mixed(source: MarkSource) -> None:
    """Another process writes at full speed; the host's times of iteration i lie in [1000·i, 1000·i + n], the GPU's in
    [1000·i + 200, 1000·i + 200 + 2n]; and the GPU only goes forward."""
    reader = ChannelReader.create(64)
    child = subprocess.Popen(
        [sys.executable, "-c", RACING_WRITER, str(reader.memory_fd), str(reader.event_fd), str(int(source))],
        pass_fds=(reader.memory_fd, reader.event_fd),
    )
    drained = 0
    last = -1
    gpu = (0, 0)
    deadline_s = time.monotonic() + 90
    while last < 2999 and time.monotonic() < deadline_s:
        position = reader.gpu_position()
        if position is not None:
            assert position >= gpu
            gpu = position
        record = reader.drain_iteration()
        if record is None:
            continue
        assert record.iteration > last
        last = record.iteration
        assert record.complete
        assert record.source is source
        assert record.host_begins_us == tuple(range(1000 * last, 1000 * last + 64))
        if source is MarkSource.GPU:
            assert record.begins_us == tuple(range(1000 * last + 200, 1000 * last + 328, 2))
        drained += 1
    assert child.wait(90) == 0
    assert last == 2999
    assert drained >= SLOTS
    assert reader.gpu_position() == (2999, 129)
    reader.close()
