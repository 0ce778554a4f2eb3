"""Iterations that are CUDA graphs: their replays are marked by nodes of the graph, in the order of the schedule and in
the right iteration, and timed by its events. What cannot be followed so is followed by what can be seen.

Driver, events and torch's graph are doubles; the driver's keeps the nodes, and writes them at each replay.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.client.test_gpu_events import CURRENT, IDLE, OFFSET_MS, Event, Gpu
from tests.unit.client.test_gpu_marks import LAST, NOT_SUPPORTED, SCHEDULE, Library, N

from perseus_client.framework import STEP, Attachment
from perseus_client.gpu_events import EventTimer
from perseus_client.gpu_marks import CudaDriver, GpuMarks
from perseus_client.graphs import capture
from perseus_client.marks import MOST_LOST, TimedMarks, make_marks
from perseus_client.session import LiveSession
from perseus_core.marks import MarkSource
from perseus_core.rank import RankId
from perseus_proto.channel import ChannelReader, ChannelWriter, IterationRecord


class GraphEvent(Event):
    """A node of the graph: it happens at each replay, and says only when it did last."""

    def record(self, stream: object = None, /) -> None:
        assert self.gpu.capturing
        assert stream is CURRENT

    def elapsed_time(self, end_event: Event) -> float:
        raise AssertionError("a graph's event is no base")


class Training:
    """A rank that captures its third iteration and replays it; the agent's view of it is ``reader``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library, self.gpu = Library(), Gpu()
        self.events: list[GraphEvent] = []
        self.gpu_marks = GpuMarks(CudaDriver(self.library, self.library.current_stream, 0))
        timer = EventTimer(
            N,
            self.gpu.make_event,  # type: ignore[arg-type]
            lambda: self.gpu.capturing,
            lambda: CURRENT,
            IDLE,
            make_graph_event=self._make_graph_event,  # type: ignore[arg-type]
        )
        timed = TimedMarks(make_marks(SCHEDULE, None), timer, self.gpu_marks, lambda: 1000 * self.gpu.host_us)
        nothing = SimpleNamespace(start=lambda: None, stop=lambda: None, abandon=lambda: None)
        self.connector: Any = nothing
        self.reader = self.connect()
        self.session = LiveSession(self.connector, timed)
        self.attachment = Attachment("theirs", {})
        self.attachment.active, self.attachment.session = True, self.session
        self.marked: list[str] = []
        training = self

        class CUDAGraph:
            """As torch's: what is captured runs when it is replayed, and not before."""

            def capture_begin(self) -> None:
                training.library.capturing = training.gpu.capturing = True
                training.library.nodes = []

            def capture_end(self) -> None:
                training.library.capturing = training.gpu.capturing = False
                self.nodes, self.events = training.library.nodes, training.events

            def replay(self) -> str:
                for event in self.events:
                    training.gpu.host_us += 10
                    event.at_ms = OFFSET_MS + training.gpu.host_us / 1000
                training.library.streams[0] += self.nodes
                return "replayed"

        self.CUDAGraph = CUDAGraph
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=self))  # type: ignore[arg-type]
        monkeypatch.setattr(self.attachment, "connect", self._connect_whole)
        monkeypatch.setenv("RANK", "7")

    def _make_graph_event(self) -> GraphEvent:
        self.events.append(GraphEvent(self.gpu))
        return self.events[-1]

    def connect(self) -> ChannelReader:
        """An agent that is new."""
        self.reader = ChannelReader.create(N)
        writer = ChannelWriter(os.dup(self.reader.memory_fd), os.dup(self.reader.event_fd), N)
        self.gpu_marks.prepare(writer)
        self.connector.writer = writer
        self.library.run()
        return self.reader

    def _connect_whole(self, rank: RankId, schedule: Any, joined: Any = ()) -> None:
        self.marked.append(f"connect {rank} {schedule}{joined or ''}")
        self.attachment.session = SimpleNamespace(  # type: ignore[assignment]
            step_begin=lambda: self.marked.append("["),
            step_end=lambda: self.marked.append("]"),
            instruction_begin=lambda *step: self.marked.append(str(step)),
            instruction_end=lambda: None,
            close=lambda: None,
        )

    def instructions(self, order: tuple[int, ...] = tuple(range(N))) -> None:
        """What an iteration marks, whether it runs or is captured."""
        for microbatch in order:
            self.session.instruction_begin("forward", microbatch)
            self.session.instruction_end()

    def eager(self) -> None:
        self.now()
        self.session.step_begin()
        self.instructions()
        self.session.step_end()

    def now(self) -> None:
        self.gpu.host_us = time.monotonic_ns() // 1000

    def graph(self, iteration: Callable[[], None] | None = None) -> Any:
        graph = self.CUDAGraph()
        self.events = []
        graph.capture_begin()
        capture(self.attachment, iteration or self.instructions)
        graph.capture_end()
        return graph

    def replay(self, graph: Any) -> None:
        self.now()
        assert graph.replay() == "replayed"

    def records(self) -> list[IterationRecord]:
        return list(iter(self.reader.drain_iteration, None))


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    training = Training(monkeypatch)
    yield training
    training.session.close()


def test_replays_are_marked_in_order_and_in_their_iteration(training: Training) -> None:
    """Eager iterations, the capture, which is none, replays, and an eager one again."""
    for _ in range(2):
        training.eager()
    training.library.run()
    graph = training.graph()
    assert training.reader.gpu_position() == (1, LAST), "what is captured does not run"
    for iteration in range(2, 6):
        training.replay(graph)
        seen = []
        while training.library.streams[0]:
            training.library.run(1)
            seen.append(training.reader.gpu_position())
        assert seen == [
            (iteration - 1, LAST),  # where the last replay had come to is forgotten first
            *((iteration, boundary) for boundary in range(LAST + 1)),
        ]
    training.eager()
    training.library.run(2)
    assert training.reader.gpu_position() == (6, 0)
    training.library.run()
    assert training.reader.gpu_position() == (6, LAST)
    assert training.reader.mark_source() is MarkSource.GPU


def test_replays_are_timed_by_the_events_of_the_graph(training: Training) -> None:
    graph = training.graph()
    records = []
    for _ in range(5):
        training.replay(graph)
        records += training.records()
    assert [record.iteration for record in records] == list(range(5))
    for record in records:
        assert (record.complete, record.source) == (True, MarkSource.GPU)
        assert record.durations_us == (10,) * N
        assert len(set(record.host_begins_us)) == 1, "the host launched all of them at once"
    assert not training.marked


def test_a_replay_that_is_not_over_when_the_next_is_launched_has_no_times(training: Training) -> None:
    graph = training.graph()
    training.replay(graph)
    assert len(training.records()) == 1
    training.gpu.finished_us = 0
    for _ in range(MOST_LOST + 1):
        training.replay(graph)
    assert not training.records()
    training.gpu.finished_us = 10**18
    training.replay(graph)
    assert [record.complete for record in training.records()] == [True, True], "the last, once it is over, and this one"
    assert not training.marked, "times have been read, so they will be again"


def test_a_host_that_is_always_ahead_leaves_whole_iterations(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    graph = training.graph()
    training.gpu.finished_us = 0
    for _ in range(MOST_LOST + 3):
        training.replay(graph)
    assert training.marked == [f"connect {RankId(7, 0, 0)} {[STEP]}", *["[", str(STEP), "]"] * 2]
    assert "before the times of its instructions can be read" in caplog.text


@pytest.mark.parametrize("order", [(0, 1), (1, 0, 2), ()])
def test_a_graph_without_a_mark_of_every_instruction_leaves_whole_iterations(
    training: Training, order: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    graph = training.graph(lambda: training.instructions(order))
    for _ in range(2):
        training.replay(graph)
    assert training.marked == [f"connect {RankId(7, 0, 0)} {[STEP]}", *["[", str(STEP), "]"] * 2]
    assert "no marks of every instruction" in caplog.text


def test_a_rank_that_falls_to_whole_iterations_keeps_its_place(training: Training) -> None:
    """Others of its pipeline may mark their instructions: a number of its own could be the place of one of them."""
    training.attachment.rank = RankId(1, 2, 3)
    training.replay(training.graph(lambda: training.instructions(())))
    assert training.marked[0] == f"connect {RankId(1, 2, 3)} {[STEP]}"


def test_after_another_agent_has_come_the_events_of_the_graph_remain(training: Training) -> None:
    """Its nodes write to the memory of the agent that was there when it was captured."""
    graph = training.graph()
    training.replay(graph)
    old = training.reader
    training.connect()
    for _ in range(2):
        training.replay(graph)
        training.library.run()
        assert training.reader.gpu_position() is None
    assert training.reader.mark_source() is MarkSource.EVENTS
    assert [(record.complete, record.source) for record in training.records()] == [(True, MarkSource.EVENTS)] * 2
    again = training.graph()
    training.replay(again)
    training.library.run()
    assert training.reader.gpu_position() == (3, LAST)
    old.close()


@pytest.mark.parametrize(
    "name", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch"]
)
def test_a_driver_that_cannot_write_from_a_graph_is_not_asked_to_in_training(training: Training, name: str) -> None:
    """A call that a capture refuses would end the capture, and training with it."""
    training.library.refuses[name] = NOT_SUPPORTED
    training.connect()
    graph = training.graph()
    assert not training.library.nodes
    for _ in range(2):
        training.replay(graph)
    assert [(record.complete, record.source) for record in training.records()] == [(True, MarkSource.EVENTS)] * 2


def test_without_events_in_graphs_iterations_are_whole(training: Training) -> None:
    """As with torch before 2.8."""
    training.session._marks._timer._make_graph_event = None  # type: ignore[attr-defined]
    training.replay(training.graph())
    assert training.marked[0].startswith("connect")


def test_a_graph_captured_without_an_agent_is_whole_iterations_when_one_comes(training: Training) -> None:
    training.connector.writer = None
    graph = training.graph()
    training.connect()
    training.replay(graph)
    assert training.marked[1:] == ["[", str(STEP), "]"]


def test_only_the_graph_that_was_captured_is_followed_and_none_is_kept(training: Training) -> None:
    original = training.CUDAGraph.capture_end
    graph = training.graph()
    assert training.CUDAGraph.capture_end is original
    other = training.CUDAGraph()
    other.capture_begin()
    other.capture_end()
    training.replay(other)
    assert not training.records()
    training.attachment.detach()
    training.replay(graph)
    assert not training.records()
    gone = weakref.ref(graph)
    gc.disable()
    try:
        del graph
        assert gone() is None, "its memory is freed when training drops it"
    finally:
        gc.enable()


def test_a_capture_that_fails_is_not_followed(training: Training) -> None:
    def fail() -> None:
        training.instructions((0,))
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        training.graph(fail)
    training.library.capturing = training.gpu.capturing = False
    training.eager()
    assert [record.complete for record in training.records()] == [True]
