"""The two ends of the memory that a rank and its agent share: ``ChannelWriter`` and ``ChannelReader``.

``perseus_proto.channel_layout`` says what is in it and why in this order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from array import array
from collections.abc import Generator
from typing import Final

from perseus_core.marks import MarkSource
from perseus_proto.channel_layout import (
    BEGIN,
    BOUNDARY_BITS,
    DEFAULT_CLOCKS,
    END,
    ENDED,
    FAULTS,
    GPU_MARK,
    GPU_MARK_BYTE,
    HOST_BEGIN,
    ITERATION_BITS,
    LAYOUT_VERSION,
    MAGIC,
    MAX_DURATION_US,
    MAX_ITERATION,
    MAX_LEAD_US,
    NO_GPU_MARK,
    POSITION,
    RECORD_SOURCE,
    SEQUENCE,
    SILENT_FROM,
    SLOTS,
    SOURCE,
    STEP_BEGIN,
    TIMES,
    WAKE,
    Faults,
    IterationRecord,
    Phase,
    Position,
    first_record,
    gpu_mark_value,
    memory_bytes,
    parse_record,
    record_words,
    source_of,
)
from perseus_proto.frames import ChannelError
from perseus_proto.hello import MAX_INSTRUCTIONS
from perseus_proto.sealed_memory import Bell, create_memory, map_memory

__all__ = [
    "GPU_MARK_BYTE",
    "MAX_DURATION_US",
    "MAX_ITERATION",
    "MAX_LEAD_US",
    "SLOTS",
    "ChannelReader",
    "ChannelWriter",
    "Faults",
    "IterationRecord",
    "Phase",
    "Position",
    "gpu_mark_value",
    "memory_bytes",
]

_PHASES: Final = tuple(Phase)


class ChannelWriter:
    """The rank's end. The caller sees to it that indices are within the schedule; nothing here blocks.

    In training every mark meets cold caches, so what ``begin`` and ``end`` touch is counted: two stores, one byte of
    the wake map, small integers, no call. Phases are spelt out there: an attribute of an enum costs as much as a mark.
    """

    __slots__ = (
        "_event_fd",
        "_gpu_mark",
        "_here",
        "_last",
        "_map",
        "_record",
        "_records",
        "_times",
        "_wake",
        "rings",
        "source",
        "words",
    )

    def __init__(self, memory_fd: int, event_fd: int, instructions: int) -> None:
        """Map the memory; takes over both descriptors, also when it raises.

        Raises:
            ChannelError: this memory has another layout, or the agent could shrink it while it is in use.
            OSError: it cannot be mapped.
        """
        try:
            # A number out of bounds has no memory of its size.
            self._map = map_memory(memory_fd, memory_bytes(max(1, min(instructions, MAX_INSTRUCTIONS))))
        except BaseException:
            os.close(event_fd)
            raise
        self._event_fd = event_fd
        view = memoryview(self._map)
        words = self.words = view.cast("Q")
        """The whole memory; ``perseus_client._marks`` writes to it in place of these methods."""
        if words[:4].tolist() != [MAGIC, LAYOUT_VERSION, instructions, SLOTS]:
            raise ChannelError("memory: its head is not that of this layout")
        self._wake = view[8 * WAKE : 8 * WAKE + instructions]
        # Within a step only the lower half of the position changes: phase and index, in an integer of one digit.
        self._here = view[8 * POSITION : 8 * POSITION + 4].cast("I")
        first, size = first_record(instructions), record_words(instructions)
        self._gpu_mark = view[GPU_MARK_BYTE : GPU_MARK_BYTE + 4].cast("I")
        self._records = tuple(words[first + slot * size : first + (slot + 1) * size] for slot in range(SLOTS))
        self._record = self._records[0]
        self._times = self._record[TIMES:]
        self._last = instructions - 1
        self.source = MarkSource.HOST
        """Whose time the marks are in, from the next step on."""
        self.rings = 0
        """How often the agent was woken."""

    def __del__(self) -> None:
        """Close the bell when the last thread inside a mark has let go of this object, and not before."""
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._event_fd)

    def step_begin(self, iteration: int, t_us: int) -> None:
        """Open the record of an iteration, and ring unless a look was announced."""
        words, record = self.words, self._records[iteration % SLOTS]
        words[SOURCE] = self.source
        record[SEQUENCE] = 2 * iteration + 1
        record[BEGIN] = words[STEP_BEGIN] = t_us
        record[END] = record[FAULTS] = record[ENDED] = 0
        self._record, self._times = record, record[TIMES:]
        words[POSITION] = (iteration << 32) + 0x1000000  # Phase.STEP_BEGUN << 24
        if not 0 < words[SILENT_FROM] <= t_us:
            self.ring()

    def begin(self, index: int, t_us: int) -> None:
        """Instruction ``index`` begins."""
        self._times[2 * index] = t_us
        self._here[0] = 0x2000000 + index  # Phase.BEGUN << 24

    def end(self, index: int, t_us: int) -> None:
        """Instruction ``index`` has ended: ring if the one after it wants another clock and no look was announced."""
        self._times[2 * index + 1] = t_us
        self._here[0] = 0x3000000 + index  # Phase.ENDED << 24
        self._record[ENDED] += 1
        # Counted from the end, so that the last is followed by the first.
        if self._wake[index - self._last] and not 0 < self.words[SILENT_FROM] <= t_us:
            self.ring()

    def step_end(self, iteration: int, t_us: int, faults: int = 0) -> None:
        """Close the record of the iteration that is open. No ring: the agent reads it when the next begins, and where
        that begins at another clock the end of the last instruction has rung.
        """
        self._here[0] = 0x4000000  # Phase.STEP_ENDED << 24
        # What comes without ``fill`` are the times of the host's own marks.
        source = MarkSource.SYNCHRONISED if self.source is MarkSource.SYNCHRONISED else MarkSource.HOST
        self._close(iteration, t_us, faults, source)

    def step_end_untimed(self) -> None:
        """End the step, but leave its record open for ``fill``: its times are not known yet."""
        self._here[0] = 0x4000000

    def fill(
        self, iteration: int, begin_us: int, end_us: int, times_us: list[int], faults: int = 0, *, at_once: bool = False
    ) -> None:
        """Close the record of a past iteration with the GPU's times, which came late.

        Args:
            iteration: one whose step has ended by ``step_end_untimed``.
            begin_us, end_us: when the GPU began and ended the step, µs.
            times_us: begin and end of each instruction in turn, µs; 2n of them.
            faults: of ``Faults``.
            at_once: the host launched all instructions when the step began, and marked none of them: a CUDA graph.
        """
        record = self._records[iteration % SLOTS]
        hosts = TIMES + len(times_us)
        if record[SEQUENCE] == 2 * iteration + 1 and len(times_us) == 2 * (self._last + 1):
            record[HOST_BEGIN] = record[BEGIN]
            record[hosts:] = array("Q", [record[BEGIN]]) * (self._last + 1) if at_once else record[TIMES:hosts:2]
            record[BEGIN] = begin_us
            record[TIMES:hosts] = memoryview(b"".join(time.to_bytes(8, "little") for time in times_us)).cast("Q")
            record[ENDED] = self._last + 1
            source = MarkSource.GPU if self.source is MarkSource.GPU else MarkSource.EVENTS
            self._close(iteration, end_us, faults, source)

    def change_source(self, source: MarkSource) -> None:
        """Say within a step that marks have another source than it began with."""
        self.source = source
        self.words[SOURCE] = source

    def gpu_mark(self, iteration: int, boundary: int) -> None:
        """Write the GPU's mark as the GPU would: for simulated GPUs. Arguments as in ``gpu_mark_value``."""
        self._gpu_mark[0] = gpu_mark_value(iteration, boundary)

    def ask_default_clocks(self, asked: bool) -> None:
        """Ask for the default clocks, or for the plan's again, and ring."""
        self.words[DEFAULT_CLOCKS] = asked
        self.ring()

    def deviate(self, faults: int) -> None:
        """The iteration does not follow the schedule: mark it so before its end, and ring, since the planned clocks do
        not fit it.
        """
        self._record[FAULTS] = faults
        self.ring()

    def ring(self) -> None:
        """Wake the agent. The eventfd never blocks: it is made so by the agent, and its counter is 64 bits wide."""
        os.eventfd_write(self._event_fd, 1)
        self.rings += 1

    def _close(self, iteration: int, t_us: int, faults: int, source: MarkSource) -> None:
        record = self._records[iteration % SLOTS]
        record[END] = t_us
        record[FAULTS] = faults
        record[RECORD_SOURCE] = source
        record[SEQUENCE] = 2 * iteration + 2


class ChannelReader:
    """The agent's end. One reader per rank, used by one thread at a time."""

    def __init__(self, memory_fd: int, event_fd: int, instructions: int) -> None:
        """Use ``create``."""
        self.memory_fd = memory_fd
        """To be sent to the rank."""
        self.event_fd = event_fd
        """To be sent to the rank, and to be waited on; ``acknowledge`` after it becomes readable."""
        self.instructions = instructions
        self.lost = 0
        """Iterations that were overwritten before they were drained."""
        self._map = mmap.mmap(memory_fd, memory_bytes(instructions))
        self._words = memoryview(self._map).cast("Q")
        self._first = first_record(instructions)
        self._size = record_words(instructions)
        self._next: int | None = None
        self._bell = Bell(event_fd)

    @classmethod
    def create(cls, instructions: int) -> ChannelReader:
        """New memory and a new bell for a schedule of so many instructions.

        Raises:
            ChannelError: the number is out of bounds.
            OSError: no memory or no descriptors are left.
        """
        if not 1 <= instructions <= MAX_INSTRUCTIONS:
            raise ChannelError(f"schedule: must have 1 to {MAX_INSTRUCTIONS} instructions, has {instructions}")
        memory_fd, event_fd = create_memory(memory_bytes(instructions))
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, memory_fd)
            undo.callback(os.close, event_fd)
            reader = cls(memory_fd, event_fd, instructions)
            undo.pop_all()
        for word, value in enumerate((MAGIC, LAYOUT_VERSION, instructions, SLOTS)):
            reader._words[word] = value
        reader._words[GPU_MARK] = NO_GPU_MARK
        return reader

    def close(self) -> None:
        """Release memory and bell. Idempotent."""
        if not self._map.closed:
            self._words.release()
            self._map.close()
            os.close(self.memory_fd)
            os.close(self.event_fd)

    def acknowledge(self) -> bool:
        """Reset the bell; False if nobody rang. Never blocks."""
        return self._bell.acknowledge()

    def position(self) -> Position:
        """Where the rank is. Invalid memory reads as NONE."""
        word: int = self._words[POSITION]
        phase, index = word >> 24 & 0xFF, word & 0xFFFFFF
        if phase > Phase.STEP_ENDED or index >= self.instructions:
            return Position(0, 0, Phase.NONE)
        return Position(word >> 32, index, _PHASES[phase])

    def mark_source(self) -> MarkSource:
        """Whose time the marks of the current step are in. Invalid memory reads as HOST, of which nothing follows."""
        return source_of(self._words[SOURCE])

    def asks_default_clocks(self) -> bool:
        """Whether the rank asks for the default clocks, whatever is planned."""
        return bool(self._words[DEFAULT_CLOCKS])

    def gpu_position(self) -> tuple[int, int] | None:
        """Where the GPU is: (iteration, boundary passed last), as in ``gpu_mark_value``. None where the marks do not
        say it, nothing has been marked yet, or the memory is invalid.
        """
        in_graph, mark = divmod(self._words[GPU_MARK], 2**32)  # before the host's position, which is ahead of it
        source, position = self.mark_source(), self.position()
        last = 2 * self.instructions + 1
        if position.phase is Phase.NONE:
            return None
        if source is MarkSource.SYNCHRONISED:
            begun = 2 * position.index + 1
            return position.iteration, {Phase.STEP_BEGUN: 0, Phase.BEGUN: begun, Phase.ENDED: begun + 1}.get(
                position.phase, last
            )
        # The GPU is at most 4,095 iterations behind the host, and never ahead of it.
        iteration = position.iteration - ((position.iteration - (mark >> BOUNDARY_BITS)) & ITERATION_BITS)
        boundary = mark & (1 << BOUNDARY_BITS) - 1
        if source is not MarkSource.GPU or iteration < 0 or boundary > last:
            return None
        return iteration, max(boundary, in_graph) if in_graph <= last else boundary

    def ended(self, iteration: int) -> int:
        """The instruction of this iteration that has ended and is followed by none yet; −1 if the rank is anywhere else
        or has said that it deviates. The agent calls this at most rings, so it is written for speed.
        """
        words = self._words
        index: int = words[POSITION] - (iteration << 32 | 0x3000000)  # Phase.ENDED << 24
        if 0 <= index < self.instructions and not words[self._first + iteration % SLOTS * self._size + FAULTS]:
            return index
        return -1

    def skip_rings_from(self, from_us: int) -> None:
        """Announce that marks made at ``from_us`` or later need no ring; 0: they do.

        After an announcement the caller must look soon after that time in any case; after taking one back, it must
        read ``passed``.
        """
        self._words[SILENT_FROM] = from_us

    def step_begin_us(self) -> int:
        """When the current step began, as the rank wrote it: any 64-bit number, so check it before use."""
        begin_us: int = self._words[STEP_BEGIN]
        return begin_us

    def deviates(self, iteration: int) -> bool:
        """Whether the rank has marked this iteration, still running, as not following the schedule."""
        record = self._first + iteration % SLOTS * self._size
        return bool(self._words[record + SEQUENCE] == 2 * iteration + 1 and self._words[record + FAULTS])

    def set_wake_map(self, wake: bytes) -> None:
        """Publish which instructions want another clock than the one before them; afterwards look at ``position``.

        Raises:
            ValueError: not one byte per instruction.
        """
        if len(wake) != self.instructions:
            raise ValueError(f"wake: must have {self.instructions} bytes, has {len(wake)}")
        self._map[8 * WAKE : 8 * WAKE + self.instructions] = wake

    def drain_iteration(self) -> IterationRecord | None:
        """The oldest closed iteration not yet drained, or None. Call until None after each ring."""
        parts = self.drain_parts()
        while True:
            try:
                next(parts)
            except StopIteration as done:
                record: IterationRecord | None = done.value
                return record

    def drain_parts(self, now_us: int | None = None) -> Generator[None, None, IterationRecord | None]:
        """As ``drain_iteration``, in parts, each of which takes milliseconds at most: a record may be long, and a rank
        may close one after another for ever. What the memory holds is copied in the first part.

        Args:
            now_us: now, by the rank's clock; None: not known. A record that ended later is incomplete.
        """
        closed = sorted(
            sequence // 2 - 1 for sequence in map(self._sequence, range(SLOTS)) if sequence and sequence % 2 == 0
        )
        for iteration in closed:
            if iteration > MAX_ITERATION or (self._next is not None and iteration < self._next):
                continue
            words = self._copy(iteration)
            if words is None:  # overwritten while it was copied
                continue
            if self._next is not None:
                self.lost += min(iteration - self._next, MAX_ITERATION)
            self._next = iteration + 1
            return (yield from parse_record(iteration, words, now_us))
        return None

    def _sequence(self, slot: int) -> int:
        sequence: int = self._words[first_record(self.instructions) + slot * record_words(self.instructions)]
        return sequence

    def _copy(self, iteration: int) -> array[int] | None:
        size = record_words(self.instructions)
        start = first_record(self.instructions) + iteration % SLOTS * size
        # Copied as bytes: numbers are made one by one where they are read, and other threads may run in between.
        words = array("Q", self._words[start : start + size].tobytes())
        return words if words[SEQUENCE] == 2 * iteration + 2 == self._words[start] else None
