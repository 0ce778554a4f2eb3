"""The position of a rank in its schedule, updated by every mark: what the training thread pays for.

Three classes have one interface: ``PyMarks``; the compiled ``_marks.Marks``, which ``make_marks`` prefers where the
installation could build it; and ``TimedMarks`` around either, where the GPU gives the times. Steps and failures are
handled by ``perseus_client.session``.

Between two marks training empties the caches, so a mark costs what it touches: use few calls, attributes and objects,
and measure (``make bench ONLY=client``).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Final, Protocol

from perseus_client.gpu_events import EventTimer, GraphEvents
from perseus_client.gpu_marks import GpuMarks
from perseus_core.instruction import Instruction
from perseus_core.marks import MarkSource
from perseus_proto.channel import ChannelReader, ChannelWriter, Faults

try:
    from perseus_client import _marks
except ImportError:  # built for another machine, or not at all
    _marks = None  # type: ignore[assignment]

log = logging.getLogger("perseus_client")
_OUT_OF_ORDER: Final = int(Faults.OUT_OF_ORDER)
_UNTIMED: Final = int(Faults.UNTIMED)
_UNKNOWN: Final = int(Faults.UNKNOWN_INSTRUCTION)
MOST_LOST: Final = 16
"""Replays from the first on whose times could not be read: then the host is ahead of the GPU as a rule."""


class Marks(Protocol):
    """The marks of one rank. ``begin`` and ``end`` return faults, of ``Faults``: 0 where the schedule is followed, and
    where no step is open."""

    @property
    def next(self) -> int:
        """Position in the schedule after the instruction that began last; 0 where none has begun in this step."""

    @property
    def ended(self) -> int:
        """Position of the instruction that ended last."""

    def open(self, writer: ChannelWriter, iteration: int, /) -> None:
        """A step begins, and marks go to this writer's memory."""

    def finish(self, faults: int, /) -> None:
        """The step has ended, with these faults; ``close``."""

    def close(self) -> None:
        """Write no more marks, and release the writer."""

    def begin(self, kind: str | int, microbatch: int, chunk: int = 0, /) -> int:
        """An instruction begins."""

    def end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0, /) -> int:
        """An instruction has ended; without arguments the one that began last."""


def make_marks(schedule: tuple[Instruction, ...], clock_us: Callable[[], int] | None) -> Marks:
    """Make the marks of a schedule. ``clock_us`` None: the node's monotonic clock, which the agent reads too, and the
    only one that compiled marks know."""
    # An instruction is looked up by what the caller passes: the kind's number, or its name, which is interned.
    names = [(sys.intern(kind.name.lower()), microbatch, chunk) for kind, microbatch, chunk in schedule]
    index: dict[tuple[str | int, int, int], int] = {}
    for position, (kind, microbatch, chunk) in enumerate(schedule):
        index[kind, microbatch, chunk] = index[names[position]] = position
    if _marks is None or clock_us is not None:
        return PyMarks(index, time.monotonic_ns if clock_us is None else lambda: 1000 * clock_us())
    return _marks.Marks(names, index)


class PyMarks:
    """``Marks`` in Python."""

    __slots__ = ("_clock_ns", "_index", "_iteration", "_writer", "ended", "next")

    def __init__(self, index: dict[tuple[str | int, int, int], int], clock_ns: Callable[[], int]) -> None:
        self._index = index
        self._clock_ns = clock_ns
        self._writer: ChannelWriter | None = None
        self._iteration = self.next = self.ended = 0

    def open(self, writer: ChannelWriter, iteration: int, /) -> None:
        self._writer, self._iteration, self.next = writer, iteration, 0
        writer.step_begin(iteration, self._clock_ns() // 1000)

    def finish(self, faults: int, /) -> None:
        if self._writer is not None:
            self._writer.step_end(self._iteration, self._clock_ns() // 1000, faults)
        self._writer = None

    def close(self) -> None:
        self._writer = None

    def begin(self, kind: str | int, microbatch: int, chunk: int = 0, /) -> int:
        writer = self._writer
        if writer is None:
            return 0
        index = self._index.get((kind, microbatch, chunk))
        if index is None:
            return _UNKNOWN
        faults = 0 if index == self.next else _OUT_OF_ORDER
        self.next = index + 1
        writer.begin(index, self._clock_ns() // 1000)
        return faults

    def end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0, /) -> int:
        writer = self._writer
        if writer is None:
            return 0
        index = self.next - 1 if kind is None else self._index.get((kind, microbatch, chunk))
        if index is None:
            return _UNKNOWN
        if not 0 <= index < self.next:
            return _OUT_OF_ORDER
        self.ended = index
        writer.end(index, self._clock_ns() // 1000)
        return 0


class Captured:
    """An iteration that was captured into a CUDA graph, and whose replays are followed.

    Replays run no Python: their marks are nodes of the graph, which write to the memory of the agent of that time, and
    their times are those of the graph's events.
    """

    __slots__ = ("_marks", "events", "words")

    def __init__(self, marks: TimedMarks, events: GraphEvents, words: memoryview[int] | None) -> None:
        """``words``: the memory to which the nodes write; None: none do."""
        self._marks = marks
        self.events = events
        self.words = words

    @property
    def timed(self) -> bool:
        """Whether its times can be read, as far as is known."""
        return self.events.lost < MOST_LOST

    def open(self, writer: ChannelWriter, iteration: int) -> None:
        """A replay begins, as ``Marks.open``."""
        self._marks.open(writer, iteration, self)


class TimedMarks:
    """Marks in the GPU's time: the GPU writes as it passes them, where it can, and its events fill the record later."""

    __slots__ = (
        "_clock_ns",
        "_flawed",
        "_gpu",
        "_logged",
        "_marks",
        "_nodes_in",
        "_replayed",
        "_scratch",
        "_timer",
        "_writer",
    )

    def __init__(
        self,
        marks: Marks,
        timer: EventTimer,
        gpu: GpuMarks | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``gpu`` None: events only."""
        self._marks = marks
        self._timer = timer
        self._gpu = gpu
        self._clock_ns = clock_ns
        self._writer: ChannelWriter | None = None
        self._logged = False
        self._replayed: Captured | None = None
        """What is replayed in the step that is open."""
        self._scratch: ChannelWriter | None = None
        """Memory that nobody reads, for the marks of an iteration that is captured and does not run."""
        self._flawed = 0
        """Faults of marks since a capture began."""
        self._nodes_in: memoryview[int] | None = None
        """The memory to which the nodes of the graph write that is captured."""

    @property
    def next(self) -> int:
        return self._marks.next if self._replayed is None else self._timer.last_boundary // 2

    @property
    def ended(self) -> int:
        return self._marks.ended

    def capture_begin(self, writer: ChannelWriter) -> None:
        """An iteration is captured from here on. Its marks become nodes of the graph, which write to this writer's
        memory when it is replayed."""
        if self._scratch is None:
            self._scratch = _scratch_writer(self._timer.last_boundary // 2)
        words = writer.words if self._gpu is not None and self._gpu.open_graph(writer) else None
        self._marks.open(self._scratch, 0)
        self._timer.capture_begin()
        self._flawed, self._nodes_in = 0, words
        self._writer = self._scratch

    def capture_end(self) -> Captured | None:
        """It has been captured. None: not every instruction of the schedule was marked, in its order."""
        if self._writer is None or self._writer is not self._scratch:
            return None
        words, self._nodes_in = self._nodes_in, None
        if words is not None and self._gpu is not None and not self._gpu.close_graph():
            words = None
        events = self._timer.capture_end()
        flawed = self._flawed
        self.close()
        return None if events is None or flawed else Captured(self, events, words)

    def open(self, writer: ChannelWriter, iteration: int, replayed: Captured | None = None, /) -> None:
        gpu = self._gpu
        if replayed is not None:
            self._collect(writer)  # before their events are recorded anew
        if gpu is not None:
            gpu.open(writer, iteration)  # before the step says whose time it is in
            if replayed is not None and replayed.words is not writer.words and writer.source is MarkSource.GPU:
                gpu.close()
                writer.source = MarkSource.EVENTS
        self._marks.open(writer, iteration)
        # Afterwards: a record whose first instruction began before the step is rejected.
        self._replayed = replayed
        events = None if replayed is None else replayed.events
        self._timer.step_begin(iteration, self._clock_ns() // 1000, events)
        if gpu is not None:
            gpu.mark(0)
        self._writer = writer

    def finish(self, faults: int, /) -> None:
        writer = self._writer
        if writer is None:
            self._marks.close()
            return
        if not self._timer.step_end(faults):
            self._say_captured()
            self._marks.finish(faults | _UNTIMED)
            self.close()
            return
        writer.step_end_untimed()
        if self._gpu is not None:
            self._gpu.mark(self._timer.last_boundary)
        self.close()
        self._collect(writer)

    def _collect(self, writer: ChannelWriter) -> None:
        """Fill the records of past iterations whose times are known by now."""
        for late in self._timer.collect(self._clock_ns() // 1000):
            times = late.begin_us, late.end_us, late.times_us
            writer.fill(late.iteration, *times, late.faults, at_once=late.replayed)

    def close(self) -> None:
        self._writer = self._replayed = None
        if self._gpu is not None:
            self._gpu.close()
        self._marks.close()

    def begin(self, kind: str | int, microbatch: int, chunk: int = 0, /) -> int:
        if self._writer is None:
            return 0
        faults = self._marks.begin(kind, microbatch, chunk)
        self._flawed |= faults
        if not faults & _UNKNOWN:
            index = self._marks.next - 1
            if self._gpu is not None:  # outside of what the events time
                self._gpu.mark(2 * index + 1)
            self._timer.begin(index)
        return faults

    def end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0, /) -> int:
        if self._writer is None:
            return 0
        faults = self._marks.end(kind, microbatch, chunk)
        self._flawed |= faults
        if not faults:
            index = self._marks.ended
            self._timer.end(index)
            if self._gpu is not None:
                self._gpu.mark(2 * index + 2)
        return faults

    def _say_captured(self) -> None:
        if not self._logged:
            self._logged = True
            log.info(
                "perseus_client: a step that begins or ends while a CUDA graph is captured is not timed: its marks "
                "would become a part of the graph"
            )


def _scratch_writer(instructions: int) -> ChannelWriter:
    """A writer whose memory nobody reads."""
    reader = ChannelReader.create(instructions)
    try:
        return ChannelWriter(os.dup(reader.memory_fd), os.dup(reader.event_fd), instructions)
    finally:
        reader.close()
