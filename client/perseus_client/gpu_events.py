"""When instructions really ran on the GPU: CUDA events around them, read an iteration later, never waited for.

The host launches kernels long before they run, so the host's clock does not show when they ran. The training thread
records events on the current stream; ``collect`` reads those of past iterations that are complete, and converts them to
the host's clock. The only module of the client that uses torch's CUDA interface.

An iteration that is captured into a CUDA graph gets events of its own, as nodes of the graph. Every replay records the
same ones anew. So they must be read between two replays, and are lost where the host launches the next one before the
GPU has ended this one.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from perseus_proto.channel import SLOTS, Faults

log = logging.getLogger("perseus_client")

MAX_PENDING: Final = SLOTS - 1
"""Iterations that may wait for their events; the shared memory holds no more."""
WINDOW: Final = 64
"""Iterations whose lags are compared. Clocks that drift apart by 22 µs a second (an H100: docs/clocks-take-time.md) do
so by 0.14 % of an iteration in that time."""


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self, stream: object = None, /) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Event, /) -> float: ...


@dataclass(frozen=True)
class LateRecord:
    """An iteration whose events have answered."""

    iteration: int
    begin_us: int
    """When the GPU began the step: not before it had ended the one before."""
    end_us: int
    times_us: list[int]
    """Begin and end of each instruction in turn, on the host's clock; zeros if the iteration did not call every one."""
    faults: int
    replayed: bool = False
    """Whether the iteration was a replay of a graph."""


@dataclass
class GraphEvents:
    """The events of an iteration that is a CUDA graph."""

    marks: list[Event]
    """Begin and end of each instruction in turn."""
    lost: int = 0
    """Replays whose times were overwritten before they could be read, until the first that was read."""
    read: bool = False
    """Whether the times of a replay have ever been read."""


@dataclass
class _Pending:
    iteration: int
    begin_us: int
    anchor: Event
    """On the stream that has no work: happens at ``begin_us``, however far the GPU is behind."""
    base: Event
    marks: list[Event | None]
    last: Event
    """The base until the step ends."""
    faults: int = 0
    replayed: GraphEvents | None = None
    """Whose marks these are, if the iteration is a replay."""


class EventTimer:
    """Events of one rank. The training thread calls; nothing here waits for the GPU."""

    def __init__(
        self,
        instructions: int,
        make_event: Callable[[], Event],
        capturing: Callable[[], bool],
        current_stream: Callable[[], object],
        idle_stream: object,
        *,
        make_graph_event: Callable[[], Event] | None = None,
    ) -> None:
        """Make a timer whose events are all of one device.

        Args:
            instructions: of the schedule.
            make_event: makes an event that has not been recorded.
            capturing: whether the current stream is being captured into a CUDA graph.
            current_stream: the current stream of the device.
            idle_stream: one of the device that nothing else uses.
            make_graph_event: makes an event that becomes a node of the graph that is captured; None: there is none.
        """
        self._instructions = instructions
        self.last_boundary = 2 * instructions + 1
        """The end of a step, as in ``gpu_mark_value``."""
        self._make_event = make_event
        self._capturing = capturing
        self._current_stream = current_stream
        self._idle_stream = idle_stream
        self._make_graph_event = make_graph_event
        self._captured: list[Event | None] | None = None
        """The marks of the iteration that is captured, so far."""
        self._pool: list[Event] = []
        self._pending: deque[_Pending] = deque()
        self._open: _Pending | None = None
        self._anchor: Event | None = None
        self._end_us = 0
        self._dropped = 0
        self._anchor_us = 0.0  # on the GPU's clock, from the first
        self._offsets_us: deque[float] = deque(maxlen=WINDOW)

    def capture_begin(self) -> None:
        """An iteration is captured from here on: its marks become events of the graph."""
        self._open = None
        self._captured = [None] * (2 * self._instructions)

    def capture_end(self) -> GraphEvents | None:
        """It has been captured. None: not every instruction has its events."""
        captured, self._captured = self._captured, None
        marks = [mark for mark in captured or () if mark is not None]
        return GraphEvents(marks) if len(marks) == 2 * self._instructions else None

    def step_begin(self, iteration: int, now_us: int, replayed: GraphEvents | None = None) -> None:
        """Record where the iteration begins; ``replayed``: its marks, if it is a replay of these."""
        self._open = None
        if replayed is not None:
            self._lose(replayed)
        # While a CUDA graph is captured nothing may be recorded: the event would become a part of the graph.
        if not self._capturing():
            anchor = self._record(self._idle_stream)
            base = self._record(self._current_stream())
            marks: list[Event | None] = [None] * (2 * self._instructions)
            if replayed is not None:
                marks[:] = replayed.marks
            self._open = _Pending(iteration, now_us, anchor, base, marks, base, replayed=replayed)

    def begin(self, index: int) -> None:
        """Record on the current stream that an instruction begins."""
        self._mark(2 * index)

    def end(self, index: int) -> None:
        """Record on the current stream that an instruction ends."""
        self._mark(2 * index + 1)

    def step_end(self, faults: int) -> bool:
        """The iteration has been launched; it may run for a long time yet. False: it can not be timed, since a CUDA
        graph was captured when it began or is now."""
        pending, self._open = self._open, None
        if pending is None or self._capturing():
            return False
        pending.last = self._record(self._current_stream())
        pending.faults = faults
        self._pending.append(pending)
        return True

    def collect(self, now_us: int) -> Iterator[LateRecord]:
        """Past iterations that are complete. The oldest is dropped if the GPU is too far behind. Not to be called while
        a graph is captured."""
        while self._pending and self._pending[0].last.query() and self._pending[0].anchor.query():
            pending = self._pending.popleft()
            yield self._read(pending, now_us)
            self._recycle(pending)
        while len(self._pending) > MAX_PENDING:
            if not self._dropped:
                log.warning(
                    "perseus_client: the GPU is more than %d iterations behind the host: not timed", MAX_PENDING
                )
            self._dropped += 1
            self._drop(self._pending.popleft())

    def _read(self, pending: _Pending, now_us: int) -> LateRecord:
        begin_us = self._place(pending, now_us)
        last_us = 1000 * pending.base.elapsed_time(pending.last)
        offsets_us = self._offsets_of(pending, last_us)
        if offsets_us:
            times_us = [round(begin_us + offset_us) for offset_us in offsets_us]
        else:
            times_us = [0] * len(pending.marks)
            pending.faults |= Faults.UNTIMED
        end_us = round(begin_us + last_us)
        self._end_us = end_us
        replayed = pending.replayed is not None
        return LateRecord(pending.iteration, round(begin_us), end_us, times_us, pending.faults, replayed)

    def _offsets_of(self, pending: _Pending, last_us: float) -> list[float]:
        """When each mark happened, counted from the base; empty unless all of them did in this iteration."""
        marks = [mark for mark in pending.marks if mark is not None]
        if len(marks) < len(pending.marks):
            return []
        if pending.replayed is None:
            return [1000 * pending.base.elapsed_time(mark) for mark in marks]
        try:
            offsets_us = [1000 * pending.base.elapsed_time(mark) for mark in marks]
        except RuntimeError:  # this graph has not been replayed
            return []
        if round(min(offsets_us)) < 0 or round(max(offsets_us)) > round(last_us):  # nor in this iteration
            return []
        pending.replayed.read = True
        return offsets_us

    def _lose(self, replayed: GraphEvents) -> None:
        """Give up the replays that have not been read: the next one records their events anew."""
        kept = [pending for pending in self._pending if pending.replayed is not replayed]
        for pending in self._pending:
            if pending.replayed is replayed:
                self._drop(pending)
                replayed.lost += not replayed.read
        self._pending = deque(kept)

    def _drop(self, pending: _Pending) -> None:
        """Forget an iteration whose times were not read."""
        self._pool.append(pending.anchor)
        self._recycle(pending)

    def _place(self, pending: _Pending, now_us: int) -> float:
        """When the base event happened, on the host's clock.

        The GPU reaches the anchor right after the host has recorded it: 5 µs on an H100. Where its streams share a
        queue (CUDA_DEVICE_MAX_CONNECTIONS=1) only when all work before it is done; so the smallest lag of many
        iterations counts. Not of all: the clocks of GPU and host drift apart.
        """
        if self._anchor is not None:
            self._anchor_us += 1000 * self._anchor.elapsed_time(pending.anchor)
            self._pool.append(self._anchor)
        self._anchor = pending.anchor
        self._offsets_us.append(pending.begin_us - self._anchor_us)
        begin_us = self._anchor_us + max(self._offsets_us) + 1000 * pending.anchor.elapsed_time(pending.base)
        return max(min(begin_us, now_us), self._end_us)

    def _mark(self, place: int) -> None:
        if self._captured is not None:
            if self._make_graph_event is not None and self._capturing():
                event = self._captured[place] = self._make_graph_event()
                event.record(self._current_stream())
        elif self._open is not None and self._open.replayed is None and not self._capturing():
            self._open.marks[place] = self._record(self._current_stream())

    def _record(self, stream: object) -> Event:
        event = self._pool.pop() if self._pool else self._make_event()
        event.record(stream)
        return event

    def _recycle(self, pending: _Pending) -> None:
        """All but the anchor, from which the next is measured, and the events that belong to a graph."""
        marks = pending.marks if pending.replayed is None else ()
        self._pool.extend(mark for mark in (pending.base, *marks, pending.last) if mark is not None)


def open_timer(instructions: int) -> EventTimer:
    """A timer on torch's current device.

    Raises:
        ImportError: there is no torch.
        RuntimeError: it has no CUDA.
    """
    cuda = importlib.import_module("torch").cuda
    if not cuda.is_available():
        raise RuntimeError("timing: torch sees no CUDA device")
    device = cuda.current_device()
    try:
        cuda.Event(enable_timing=True, external=True)
        make_graph_event = functools.partial(cuda.Event, enable_timing=True, external=True)
    except TypeError:  # torch before 2.8
        make_graph_event = None
    return EventTimer(
        instructions,
        lambda: cuda.Event(enable_timing=True),
        cuda.is_current_stream_capturing,
        lambda: cuda.current_stream(device),
        cuda.Stream(),
        make_graph_event=make_graph_event,
    )
