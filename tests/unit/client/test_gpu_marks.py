"""Marks that the GPU writes: in the order of the stream, never into a graph of less than an iteration, and never at the
cost of training. The driver here is a double, of compiled functions as the real one's."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.client.test_gpu_events import CURRENT, IDLE, Gpu

from perseus_client import gpu_marks
from perseus_client import marks as choice
from perseus_client.gpu_events import EventTimer
from perseus_client.gpu_marks import PROBE, SKIPPED, CudaDriver, DriverError, GpuMarks
from perseus_client.marks import TimedMarks, make_marks
from perseus_core.marks import MarkSource
from perseus_proto.channel import GPU_MARK_BYTE, ChannelReader, ChannelWriter, Faults, gpu_mark_value
from perseus_proto.channel_layout import GRAPH_MARK_BYTE
from perseus_proto.hello import make_schedule

N = 3
LAST = 2 * N + 1
SCHEDULE = make_schedule([("forward", microbatch, 0) for microbatch in range(N)])
NOT_SUPPORTED, INVALID_VALUE, UNSAFE_IN_CAPTURE, IMPLICIT = 801, 1, 900, 906
CONTEXT, OTHER_CONTEXT = 0xC0, 0xC1
DISTANCE = 1 << 40
"""Between an address of the host and the GPU's of the same memory."""


class Library:
    """libcuda, as unpleasant as it is: streams run when ``run`` says so."""

    def __init__(self) -> None:
        self.context: int | None = CONTEXT
        self.capturing = False
        """The current stream of the training thread; calls of others are unsafe then, unless they said "relaxed"."""
        self.relaxed = False
        self.refuses: dict[str, int] = {}
        self.registered: dict[int, int] = {}
        self.flags: set[int] = set()
        self.stream = 0
        self.streams: dict[int, list[tuple[int, int]]] = {0: []}
        """Of each stream: the writes that wait."""
        self.idle: set[int] = set()
        self.nodes: list[tuple[int, int]] = []
        """Of the graph that training captures: the writes, in their order."""
        self.captures: dict[int, list[tuple[int, int]]] = {}
        """Of each stream that is captured apart from training."""
        self.graphs: dict[int, list[tuple[int, int]]] = {}
        """Those that are not destroyed, and what was instantiated of them."""
        self.calls: list[str] = []
        out, handle, number = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint
        self._add("cuCtxGetCurrent", self._get_context, out)
        self._add("cuCtxSetCurrent", lambda _: 0, handle)
        self._add("cuThreadExchangeStreamCaptureMode", self._relax, out)
        self._add("cuMemHostRegister_v2", self._register, handle, ctypes.c_size_t, number)
        self._add("cuMemHostGetDevicePointer_v2", self._device_pointer, out, handle, number)
        self._add("cuStreamCreate", self._create, out, number)
        self._add("cuStreamDestroy_v2", lambda _: 0, handle)
        self._add("cuStreamIsCapturing", self._is_capturing, handle, out)
        self._add("cuStreamWriteValue32_v2", self._write, handle, ctypes.c_uint64, ctypes.c_uint32, number)
        self._add("cuStreamBeginCapture_v2", self._begin_capture, handle, ctypes.c_int)
        self._add("cuStreamEndCapture", self._end_capture, handle, out)
        self._add("cuGraphGetNodes", self._count_nodes, handle, out, out)
        self._add("cuGraphInstantiateWithFlags", self._instantiate, out, handle, ctypes.c_ulonglong)
        self._add("cuGraphLaunch", self._launch, handle, handle)
        self._add("cuGraphExecDestroy", self._destroy, handle)
        self._add("cuGraphDestroy", self._destroy, handle)

    @property
    def cuStreamWriteValue32(self) -> object:
        raise AssertionError("the bare symbol is another function, which drivers have switched off")

    def current_stream(self, device: int) -> int:
        assert device == 0
        return self.stream

    def run(self, count: int = 10**9) -> None:
        """The GPU runs so many writes of every stream."""
        for writes in self.streams.values():
            for pointer, value in writes[:count]:
                ctypes.c_uint32.from_address(pointer - DISTANCE).value = value
            del writes[:count]

    def _add(self, name: str, function: Callable[..., int], *arguments: type) -> None:
        def called(*given: Any) -> int:
            self.calls.append(name)
            return self.refuses.get(name) or function(*given)

        setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(called))

    def _get_context(self, out: int) -> int:
        ctypes.c_void_p.from_address(out).value = self.context
        return 0

    def _relax(self, mode: int) -> int:
        self.relaxed = ctypes.c_int.from_address(mode).value == 2
        return 0

    def _register(self, address: int, length: int, flags: int) -> int:
        if self.capturing and not self.relaxed:
            return UNSAFE_IN_CAPTURE
        if flags != 3 or address % 4096 or address in self.registered:
            return INVALID_VALUE
        self.registered[address] = length
        return 0

    def _device_pointer(self, out: int, address: int, _: int) -> int:
        if address not in self.registered:
            return INVALID_VALUE
        ctypes.c_uint64.from_address(out).value = address + DISTANCE
        return 0

    def _create(self, out: int, flags: int) -> int:
        assert flags == 1, "a stream that waits for the default stream, or makes it wait"
        handle = 100 + len(self.streams)
        self.streams[handle] = []
        self.idle.add(handle)
        ctypes.c_void_p.from_address(out).value = handle
        return 0

    def _begin_capture(self, stream: int | None, mode: int) -> int:
        assert mode == 2, "calls of other threads would fail while this stream is captured"
        if stream not in self.idle or stream in self.captures:
            return INVALID_VALUE
        self.captures[stream] = []
        return 0

    def _end_capture(self, stream: int | None, out: int) -> int:
        if stream not in self.captures:
            return INVALID_VALUE
        self.graphs[1000 + len(self.calls)] = self.captures.pop(stream)
        ctypes.c_void_p.from_address(out).value = list(self.graphs)[-1]
        return 0

    def _count_nodes(self, graph: int | None, nodes: int | None, out: int) -> int:
        assert nodes is None
        ctypes.c_size_t.from_address(out).value = len(self.graphs[graph or 0])
        return 0

    def _instantiate(self, out: int, graph: int | None, flags: int) -> int:
        assert flags == 0
        self.graphs[1000 + len(self.calls)] = self.graphs[graph or 0]
        ctypes.c_void_p.from_address(out).value = list(self.graphs)[-1]
        return 0

    def _launch(self, launched: int | None, stream: int | None) -> int:
        if launched not in self.graphs or stream not in self.idle or stream in self.captures:
            return INVALID_VALUE
        self.streams[stream] += self.graphs[launched]
        return 0

    def _destroy(self, graph: int | None) -> int:
        return INVALID_VALUE if self.graphs.pop(graph or 0, None) is None else 0

    def _is_capturing(self, stream: int | None, out: int) -> int:
        if self.capturing and not stream and self.stream:
            return IMPLICIT  # the legacy stream, while another is captured
        ctypes.c_int.from_address(out).value = int(self.capturing and (stream or 0) == self.stream)
        return 0

    def _write(self, stream: int | None, pointer: int, value: int, flags: int) -> int:
        handle = stream or 0
        assert flags == 0
        if not any(a <= pointer - DISTANCE < a + length for a, length in self.registered.items()):
            return INVALID_VALUE
        into = self.captures.get(handle, self.streams[handle])
        if self.capturing and handle == self.stream:
            assert pointer % 8 == GRAPH_MARK_BYTE % 8, "an iteration's number became a part of a graph"
            into = self.nodes
        into.append((pointer, value))
        return 0


@pytest.fixture(params=["compiled", "python"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    if request.param == "python":
        monkeypatch.setattr(gpu_marks, "_marks", None)
        monkeypatch.setattr(choice, "_marks", None)
    elif choice._marks is None:
        pytest.skip("marks were not compiled when this was installed")
    return Library()


class Rank:
    """A rank whose marks the GPU writes, and the agent's view of it."""

    def __init__(self, library: Library, instructions: int = N) -> None:
        self.library = library
        self.gpu = Gpu()
        self.marks = GpuMarks(CudaDriver(library, library.current_stream, 0))
        timer = EventTimer(
            instructions,
            self.gpu.make_event,  # type: ignore[arg-type]
            lambda: library.capturing,
            lambda: CURRENT,
            IDLE,
        )
        self.timed = TimedMarks(make_marks(SCHEDULE, None), timer, self.marks, lambda: 1000 * self.gpu.host_us)
        self.iteration = -1
        self.reader, self.writer = self.connect()

    def connect(self) -> tuple[ChannelReader, ChannelWriter]:
        reader = ChannelReader.create(N)
        writer = ChannelWriter(os.dup(reader.memory_fd), os.dup(reader.event_fd), N)
        self.marks.prepare(writer)
        self.reader, self.writer = reader, writer
        return reader, writer

    def open(self) -> None:
        self.gpu.host_us = time.monotonic_ns() // 1000
        self.iteration += 1
        self.timed.open(self.writer, self.iteration)

    def step(self, before: Callable[[int], None] = lambda _: None) -> None:
        """``before`` is called with each boundary before it is marked."""
        before(0)
        self.open()
        for microbatch in range(N):
            before(2 * microbatch + 1)
            assert self.timed.begin("forward", microbatch) == 0
            before(2 * microbatch + 2)
            assert self.timed.end() == 0
        before(LAST)
        self.timed.finish(0)


@pytest.fixture
def rank(library: Library) -> Iterator[Rank]:
    rank = Rank(library)
    library.run()
    yield rank
    rank.timed.close()
    rank.reader.close()


def test_the_agent_sees_each_boundary_when_the_gpu_passes_it_and_not_before(rank: Rank) -> None:
    for iteration in range(3):
        rank.step()
        for boundary in range(LAST + 1):
            before = (iteration - 1, LAST) if iteration else None
            assert rank.reader.gpu_position() == ((iteration, boundary - 1) if boundary else before)
            rank.library.run(1)
        assert rank.reader.gpu_position() == (iteration, LAST)
        record = rank.reader.drain_iteration()
        assert record is not None
        assert record.source is MarkSource.GPU
        assert record.complete


@given(st.lists(st.integers(0, 4), max_size=40))
@settings(max_examples=50, deadline=None)
def test_the_gpu_never_goes_back_nor_overtakes_the_host(runs: list[int]) -> None:
    library = Library()
    rank = Rank(library)
    library.run()
    seen = [(-1, 0)]
    plan = iter(runs)

    def look(boundary: int) -> None:
        library.run(next(plan, 1))
        position = rank.reader.gpu_position()
        if position is not None:
            assert seen[-1] <= position
            assert position < (rank.iteration + (boundary == 0), boundary)
            seen.append(position)

    for _ in range(3):
        rank.step(look)
    rank.timed.close()
    rank.reader.close()


def test_until_the_gpu_has_been_seen_to_write_its_events_are_the_source(library: Library) -> None:
    """A registration that succeeds proves nothing."""
    rank = Rank(library)
    rank.step()
    assert rank.reader.mark_source() is MarkSource.EVENTS
    assert rank.reader.gpu_position() is None
    page = next(iter(library.registered)) + DISTANCE
    assert [writes for writes in library.streams.values() if writes] == [
        [(page + byte, PROBE)] for byte in (GPU_MARK_BYTE, GRAPH_MARK_BYTE)
    ]
    assert not library.graphs, "the graph that was tried out is still there"
    library.run()
    rank.step()
    assert rank.reader.mark_source() is MarkSource.GPU


@pytest.mark.parametrize(
    "name",
    ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuStreamCreate", "cuStreamWriteValue32_v2"],
)
def test_a_driver_that_refuses_leaves_events_and_says_so_once(
    library: Library, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    library.refuses[name] = NOT_SUPPORTED
    rank = Rank(library)
    for _ in range(3):
        rank.connect()
        rank.step()
        record = rank.reader.drain_iteration()
        assert record is not None
        assert (record.source, record.complete) == (MarkSource.EVENTS, True)
    assert len(caplog.messages) == 1
    assert f"{name} answers 801" in caplog.text


@pytest.mark.parametrize("at", range(LAST + 1))
def test_a_write_that_fails_while_training_leaves_events_from_that_mark_on(
    rank: Rank, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(boundary: int) -> None:
        if boundary == at:
            rank.library.refuses["cuStreamWriteValue32_v2"] = 700

    rank.step(fail)
    assert rank.reader.mark_source() is MarkSource.EVENTS
    assert rank.reader.gpu_position() is None
    writes = rank.library.calls.count("cuStreamWriteValue32_v2")
    rank.step()
    assert rank.library.calls.count("cuStreamWriteValue32_v2") == writes
    assert [message for message in caplog.messages if "answers 700" in message] == caplog.messages
    drained = 0
    while (record := rank.reader.drain_iteration()) is not None:
        assert record.complete
        drained += 1
    assert drained == 2


@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 3), (1, LAST - 1)])
def test_marks_inside_a_captured_graph_are_neither_written_nor_guessed(rank: Rank, first: int, last: int) -> None:
    """A capture within a step: marks before and after it stand, and the record says that it has no times."""

    def capture(boundary: int) -> None:
        rank.library.capturing = rank.gpu.capturing = first <= boundary <= last

    rank.step(capture)
    assert not rank.library.nodes
    rank.library.run()
    assert rank.reader.gpu_position() == (0, LAST)
    record = rank.reader.drain_iteration()
    assert record is not None
    assert (record.complete, record.faults) == (False, Faults.UNTIMED)
    rank.step()
    assert (record := rank.reader.drain_iteration()) is not None
    assert record.complete


@pytest.mark.parametrize("only", [[0], [LAST], range(LAST + 1)])
def test_a_step_whose_begin_or_end_is_captured_is_said_to_be_untimed(
    rank: Rank, only: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def capture(boundary: int) -> None:
        rank.library.capturing = rank.gpu.capturing = boundary in only

    for _ in range(2):
        rank.step(capture)
        record = rank.reader.drain_iteration()
        assert record is not None
        assert (record.complete, record.faults) == (False, Faults.UNTIMED)
    assert caplog.text.count("is not timed") == 1
    rank.library.capturing = rank.gpu.capturing = False
    rank.step()
    rank.library.run()
    assert rank.reader.gpu_position() == (2, LAST)


def test_an_agent_that_comes_while_a_graph_is_captured_is_taken(library: Library) -> None:
    library.capturing = True
    rank = Rank(library)
    library.run()
    library.capturing = False
    rank.step()
    assert rank.reader.mark_source() is MarkSource.GPU


def test_marks_go_to_the_stream_that_is_current_when_they_are_made(rank: Rank) -> None:
    rank.library.streams |= {7: [], 8: []}

    def switch(boundary: int) -> None:
        rank.library.stream = 7 + boundary % 2

    rank.step(switch)
    values = {stream: [value for _, value in rank.library.streams[stream]] for stream in (7, 8)}
    assert values == {7 + odd: [gpu_mark_value(0, k) for k in range(odd, LAST + 1, 2)] for odd in (0, 1)}


def test_a_mark_made_while_another_gpu_is_current_is_left_out(rank: Rank) -> None:
    rank.library.context = OTHER_CONTEXT
    rank.step()
    rank.library.context = None
    rank.step()
    assert not any(rank.library.streams.values())
    rank.library.context = CONTEXT
    rank.step()
    rank.library.run()
    assert rank.reader.gpu_position() == (2, LAST)


def test_writes_that_wait_when_the_agent_goes_meet_memory_that_is_still_there(rank: Rank) -> None:
    """Else the GPU would stop with an illegal address, and training with it."""
    library = rank.library
    rank.step()
    old = rank.reader
    waiting = list(library.streams[0])
    assert waiting
    del rank.writer
    rank.connect()
    old.close()
    for pointer, _ in waiting:
        assert any(a <= pointer - DISTANCE < a + length for a, length in library.registered.items())
    library.run()  # a segmentation fault if the old memory were unmapped
    rank.step()
    library.run()
    assert rank.reader.gpu_position() == (1, LAST)
    assert len(library.registered) == 2
    rank.timed.close()
    rank.reader.close()


def test_a_driver_without_the_function_or_a_thread_without_context_is_said() -> None:
    for name in ("cuStreamWriteValue32_v2", "cuStreamIsCapturing"):
        library = Library()
        setattr(library, name, None)
        with pytest.raises(DriverError, match=f"no {name}"):
            CudaDriver(library, library.current_stream, 0)
    library = Library()
    library.context = None
    with pytest.raises(DriverError, match="no CUDA context"):
        CudaDriver(library, library.current_stream, 0)


def test_without_a_driver_nothing_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", object())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: cannot open")))
    assert gpu_marks.open_gpu_marks() is None
    assert "libcuda.so.1: cannot open" in caplog.text


def test_a_mark_that_is_skipped_is_no_error(library: Library) -> None:
    driver = CudaDriver(library, library.current_stream, 0)
    page = ctypes.create_string_buffer(3 * 4096)
    address = ctypes.addressof(page) // 4096 * 4096 + 4096
    write = driver.writer(driver.register(address, 4096))
    assert write(5) == 0
    library.capturing = True
    assert write(6) == SKIPPED
    library.capturing = False
    library.refuses["cuStreamIsCapturing"] = 906  # the default stream, while another is captured
    assert write(7) == SKIPPED
    library.run()
    assert ctypes.c_uint32.from_address(address).value == 5
