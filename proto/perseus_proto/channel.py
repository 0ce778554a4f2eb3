"""The memory that a rank and its agent share after the hello: positions, timings and the wake map.

The agent creates it (``ChannelReader.create``), sealed so that the rank can neither shrink it (which would kill the
agent with SIGBUS) nor grow it, and sends it with an eventfd, the bell. The rank writes through ``ChannelWriter``: an
aligned store of the time and one of the position per mark, and a ring only at the begin of a step and where the wake
map says that the next instruction wants another clock; and not even there if the agent has announced that it will look
by itself.

    words 0-3    magic, layout version, instructions n, slots       written once by the agent, checked once by the rank
    word  4      silent from: marks made from this time on, µs,     agent; 0: every mark of the map needs its ring
                   need no ring, since a look follows them
    word  5      mark source: whose time the marks are in           rank, when a step begins
    word  8      position: iteration, phase, index in one word      rank: one store, of the whole or of its lower
                   half, so it is never torn
    word  9      begin of the current step, µs                      rank
    word  16     GPU mark, in its lower half: where the GPU is       the GPU, by a stream memory write, or the rank
    word  24…    wake map, one byte per instruction                 agent
    then         SLOTS records of one iteration each                rank
                   sequence, begin µs, end µs, faults, ended, source, host's begin µs, 1 spare,
                   then n × (begin µs, end µs), then n × host's begin µs

Every word has one writer. The GPU mark has a cache line of its own: a store of the GPU takes a line out of the caches
of the processor, and the rank's marks must not pay for that. It is one number of 32 bits: the iteration modulo 4,096 in
the upper 12, the boundary passed last in the lower 20. Boundary 0 is the begin of the step, 2k + 1 and 2k + 2 are begin
and end of instruction k, 2n + 1 is the end of the step. It holds no time: the agent knows when it looked.

A mark stores the host's time. Where the GPU's times come later, ``fill`` keeps what the host marked in the last part of
the record and stores the GPU's in its place, so both are there and the marks cost nothing more.

A record is guarded by its sequence: 2·iteration + 1 while it is filled, 2·iteration + 2 when it is closed; the reader
copies it and looks at the sequence again. Ordering: on x86 stores are seen in order. On ARM the eventfd is the barrier,
as write() and read() on it take one lock; without a ring a record may look closed some nanoseconds before its last
words arrive, and then reads as incomplete, since these were reset when it was opened.
Setting the map and passing an instruction may race by nanoseconds: the agent therefore reads the position after it has
set the map, and the cost of losing that race is one instruction at its old clock.

The word ``silent from`` makes the same race. The rank stores its position and then loads the word; the agent stores the
word and then loads the position. Were both seen in that order everywhere, one of them would see the other. Neither x86
nor ARM guarantees it without a full barrier on either side; compiled marks have theirs, Python has none. So a mark can
slip through in one case: the agent takes a word back that the rank had loaded, and looks before one of the two stores
has left its store buffer. The agent therefore looks again after it has taken a word back, microseconds later, when
store buffers have long drained; and should even that be too early, the loss is bounded again: the next mark of the map
rings or has its look, and until then one instruction runs at its old clock. While a word is set, a look follows it
without fail, by the agent's own timer.

The reader trusts nothing: sizes are its own, values are checked, and a record with impossible times is reported as
incomplete.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final

from perseus_proto.hello import MAX_INSTRUCTIONS, ChannelError

LAYOUT_VERSION: Final = 2
SLOTS: Final = 4
"""Iterations stored for the agent: one being filled, two that wait for GPU events, one being drained."""
MAX_ITERATION: Final = 2**32 - 1
MAX_DURATION_US: Final = 2**32 - 1
MAX_LEAD_US: Final = 2**31 - 1
GPU_MARK_BYTE: Final = 8 * 16
"""Where in the memory the GPU writes its mark, 32 bits; within its first page."""

_MAGIC: Final = int.from_bytes(b"PERSEUS1", "little")
_SILENT_FROM: Final = 4  # beside words that never change: a store here must not take the rank's own line from its cache
_SOURCE: Final = 5
_POSITION: Final = 8
_STEP_BEGIN: Final = 9
_GPU_MARK: Final = GPU_MARK_BYTE // 8
_WAKE: Final = 24
_SEQUENCE, _BEGIN, _END, _FAULTS, _ENDED, _RECORD_SOURCE, _HOST_BEGIN, _TIMES = 0, 1, 2, 3, 4, 5, 6, 8
_ITERATION_BITS: Final = 0xFFF
_BOUNDARY_BITS: Final = 20
_NO_GPU_MARK: Final = 2**32 - 1  # of a boundary that no schedule has
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL: Final = 0x8  # Linux 6.3; hardened nodes demand it


class Phase(IntEnum):
    """What a rank did last."""

    NONE = 0
    """No step has begun."""
    STEP_BEGUN = 1
    BEGUN = 2
    """An instruction has begun."""
    ENDED = 3
    """An instruction has ended."""
    STEP_ENDED = 4


class MarkSource(IntEnum):
    """Whose time the marks of a rank are in; numbers as in ``perseus.v1alpha1.MarkSource``."""

    HOST = 1
    """The host's, when it launches: they say nothing about the GPU."""
    SYNCHRONISED = 2
    """The host's, and it waits for the GPU before each."""
    EVENTS = 3
    """The GPU's, read from its events an iteration later."""
    GPU = 4
    """The GPU's: it writes its mark as it passes, and events give exact times later."""


class Faults(IntFlag):
    """Why a record does not follow the schedule."""

    NONE = 0
    OUT_OF_ORDER = 1
    UNKNOWN_INSTRUCTION = 2
    ABANDONED = 4
    """The next step began before this one ended."""
    UNTIMED = 8
    """The GPU's events did not answer in time."""


@dataclass(frozen=True)
class Position:
    """Where a rank is."""

    iteration: int
    index: int
    """Of the instruction in the schedule; 0 where the phase is not of an instruction."""
    phase: Phase

    def upcoming(self, instructions: int) -> tuple[int, int]:
        """(iteration, index) of the instruction that runs, or of the one that is next to run."""
        if self.phase is Phase.STEP_ENDED or (self.phase is Phase.ENDED and self.index + 1 >= instructions):
            return self.iteration + 1, 0
        return self.iteration, self.index + (self.phase is Phase.ENDED)


@dataclass(frozen=True)
class IterationRecord:
    """What a rank did in one iteration."""

    iteration: int
    begin_us: int
    """When the step began: on the GPU, if the source is EVENTS or GPU."""
    end_us: int
    begins_us: tuple[int, ...]
    """Per instruction in schedule order; empty unless complete."""
    durations_us: tuple[int, ...]
    complete: bool
    """Every instruction ran once, in order, with possible times."""
    faults: Faults
    host_begin_us: int = 0
    """When the host began the step."""
    host_begins_us: tuple[int, ...] = ()
    """When the host marked each instruction's begin; empty unless complete."""
    source: MarkSource = MarkSource.HOST
    """Whose time the other fields are in."""

    @property
    def leads_us(self) -> tuple[int, ...]:
        """By how much the host was ahead: the begin of each instruction minus the host's mark of it. Slightly below 0
        where the clocks of host and GPU differ; empty unless complete, and where only the host's time is known.
        """
        if self.source is MarkSource.HOST:
            return ()
        return tuple(begin - host for begin, host in zip(self.begins_us, self.host_begins_us, strict=True))


def gpu_mark_value(iteration: int, boundary: int) -> int:
    """What the GPU writes to ``GPU_MARK_BYTE`` when it passes a boundary of an iteration.

    Args:
        iteration: as in ``ChannelWriter.step_begin``.
        boundary: 0 is the begin of the step, 2k + 1 and 2k + 2 are begin and end of instruction k, 2n + 1 is the end of
            the step.
    """
    return (iteration & _ITERATION_BITS) << _BOUNDARY_BITS | boundary


def _record_words(instructions: int) -> int:
    return _TIMES + 3 * instructions


def _first_record(instructions: int) -> int:
    """Word at which the records begin: behind the wake map, rounded up to a cache line."""
    return _WAKE + (instructions + 63) // 64 * 8


def memory_bytes(instructions: int) -> int:
    """Size of the shared memory for a schedule of so many instructions."""
    return 8 * (_first_record(instructions) + SLOTS * _record_words(instructions))


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
            size = memory_bytes(instructions)
            if not 1 <= instructions <= MAX_INSTRUCTIONS or os.fstat(memory_fd).st_size != size:
                raise ChannelError("memory: its size is not that of the schedule")
            if fcntl.fcntl(memory_fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ChannelError("memory: must be sealed against shrinking")
            self._map = mmap.mmap(memory_fd, size)
        except BaseException:
            os.close(event_fd)
            raise
        finally:
            os.close(memory_fd)
        self._event_fd = event_fd
        view = memoryview(self._map)
        words = self.words = view.cast("Q")
        """The whole memory; ``perseus_client._marks`` writes to it in place of these methods."""
        if words[:4].tolist() != [_MAGIC, LAYOUT_VERSION, instructions, SLOTS]:
            raise ChannelError("memory: its head is not that of this layout")
        self._wake = view[8 * _WAKE : 8 * _WAKE + instructions]
        # Within a step only the lower half of the position changes: phase and index, in an integer of one digit.
        self._here = view[8 * _POSITION : 8 * _POSITION + 4].cast("I")
        first, size = _first_record(instructions), _record_words(instructions)
        self._gpu_mark = view[GPU_MARK_BYTE : GPU_MARK_BYTE + 4].cast("I")
        self._records = tuple(words[first + slot * size : first + (slot + 1) * size] for slot in range(SLOTS))
        self._record = self._records[0]
        self._times = self._record[_TIMES:]
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
        words[_SOURCE] = self.source
        record[_SEQUENCE] = 2 * iteration + 1
        record[_BEGIN] = words[_STEP_BEGIN] = t_us
        record[_END] = record[_FAULTS] = record[_ENDED] = 0
        self._record, self._times = record, record[_TIMES:]
        words[_POSITION] = (iteration << 32) + 0x1000000  # Phase.STEP_BEGUN << 24
        if not 0 < words[_SILENT_FROM] <= t_us:
            self.ring()

    def begin(self, index: int, t_us: int) -> None:
        """Instruction ``index`` begins."""
        self._times[2 * index] = t_us
        self._here[0] = 0x2000000 + index  # Phase.BEGUN << 24

    def end(self, index: int, t_us: int) -> None:
        """Instruction ``index`` has ended: ring if the one after it wants another clock and no look was announced."""
        self._times[2 * index + 1] = t_us
        self._here[0] = 0x3000000 + index  # Phase.ENDED << 24
        self._record[_ENDED] += 1
        # Counted from the end, so that the last is followed by the first.
        if self._wake[index - self._last] and not 0 < self.words[_SILENT_FROM] <= t_us:
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

    def fill(self, iteration: int, begin_us: int, end_us: int, times_us: list[int], faults: int = 0) -> None:
        """Close the record of a past iteration with the GPU's times, which came late.

        Args:
            iteration: one whose step has ended by ``step_end_untimed``.
            begin_us, end_us: when the GPU began and ended the step, µs.
            times_us: begin and end of each instruction in turn, µs; 2n of them.
            faults: of ``Faults``.
        """
        record = self._records[iteration % SLOTS]
        hosts = _TIMES + len(times_us)
        if record[_SEQUENCE] == 2 * iteration + 1 and len(times_us) == 2 * (self._last + 1):
            record[_HOST_BEGIN] = record[_BEGIN]
            record[hosts:] = record[_TIMES:hosts:2]
            record[_BEGIN] = begin_us
            record[_TIMES:hosts] = memoryview(b"".join(time.to_bytes(8, "little") for time in times_us)).cast("Q")
            record[_ENDED] = self._last + 1
            source = MarkSource.GPU if self.source is MarkSource.GPU else MarkSource.EVENTS
            self._close(iteration, end_us, faults, source)

    def change_source(self, source: MarkSource) -> None:
        """Say within a step that marks have another source than it began with."""
        self.source = source
        self.words[_SOURCE] = source

    def gpu_mark(self, iteration: int, boundary: int) -> None:
        """Write the GPU's mark as the GPU would: for simulated GPUs. Arguments as in ``gpu_mark_value``."""
        self._gpu_mark[0] = gpu_mark_value(iteration, boundary)

    def deviate(self, faults: int) -> None:
        """The iteration does not follow the schedule: mark it so before its end, and ring, since the planned clocks do
        not fit it.
        """
        self._record[_FAULTS] = faults
        self.ring()

    def ring(self) -> None:
        """Wake the agent. The eventfd never blocks: it is made so by the agent, and its counter is 64 bits wide."""
        os.eventfd_write(self._event_fd, 1)
        self.rings += 1

    def _close(self, iteration: int, t_us: int, faults: int, source: MarkSource) -> None:
        record = self._records[iteration % SLOTS]
        record[_END] = t_us
        record[_FAULTS] = faults
        record[_RECORD_SOURCE] = source
        record[_SEQUENCE] = 2 * iteration + 2


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
        self._first = _first_record(instructions)
        self._size = _record_words(instructions)
        self._next: int | None = None
        self._count = bytearray(8)

    @classmethod
    def create(cls, instructions: int) -> ChannelReader:
        """New memory and a new bell for a schedule of so many instructions.

        Raises:
            ChannelError: the number is out of bounds.
            OSError: no memory or no descriptors are left.
        """
        if not 1 <= instructions <= MAX_INSTRUCTIONS:
            raise ChannelError(f"schedule: must have 1 to {MAX_INSTRUCTIONS} instructions, has {instructions}")
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        with contextlib.ExitStack() as undo:
            try:
                memory_fd = os.memfd_create("perseus", flags | _MFD_NOEXEC_SEAL)
            except OSError:  # an older kernel
                memory_fd = os.memfd_create("perseus", flags)
            undo.callback(os.close, memory_fd)
            os.ftruncate(memory_fd, memory_bytes(instructions))
            fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, _SEALS)
            event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, event_fd)
            reader = cls(memory_fd, event_fd, instructions)
            undo.pop_all()
        for word, value in enumerate((_MAGIC, LAYOUT_VERSION, instructions, SLOTS)):
            reader._words[word] = value
        reader._words[_GPU_MARK] = _NO_GPU_MARK
        return reader

    def close(self) -> None:
        """Release memory and bell. Idempotent."""
        if not self._map.closed:
            self._words.release()
            self._map.close()
            os.close(self.memory_fd)
            os.close(self.event_fd)

    def acknowledge(self) -> bool:
        """Reset the bell; False if nobody rang. Never blocks, even if the rank clears O_NONBLOCK on the eventfd."""
        try:
            return os.preadv(self.event_fd, [self._count], -1, os.RWF_NOWAIT) == 8
        except BlockingIOError:
            return False

    def position(self) -> Position:
        """Where the rank is. Invalid memory reads as NONE."""
        word: int = self._words[_POSITION]
        phase, index = word >> 24 & 0xFF, word & 0xFFFFFF
        if phase > Phase.STEP_ENDED or index >= self.instructions:
            return Position(0, 0, Phase.NONE)
        return Position(word >> 32, index, Phase(phase))

    def mark_source(self) -> MarkSource:
        """Whose time the marks of the current step are in. Invalid memory reads as HOST, of which nothing follows."""
        return _source(self._words[_SOURCE])

    def gpu_position(self) -> tuple[int, int] | None:
        """Where the GPU is: (iteration, boundary passed last), as in ``gpu_mark_value``. None where the marks do not
        say it, nothing has been marked yet, or the memory is invalid.
        """
        mark: int = self._words[_GPU_MARK] & 0xFFFFFFFF  # before the host's position, which is ahead of it
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
        iteration = position.iteration - ((position.iteration - (mark >> _BOUNDARY_BITS)) & _ITERATION_BITS)
        boundary = mark & (1 << _BOUNDARY_BITS) - 1
        if source is not MarkSource.GPU or iteration < 0 or boundary > last:
            return None
        return iteration, boundary

    def ended(self, iteration: int) -> int:
        """The instruction of this iteration that has ended and is followed by none yet; −1 if the rank is anywhere else
        or has said that it deviates. The agent calls this at most rings, so it is written for speed.
        """
        words = self._words
        index: int = words[_POSITION] - (iteration << 32 | 0x3000000)  # Phase.ENDED << 24
        if 0 <= index < self.instructions and not words[self._first + iteration % SLOTS * self._size + _FAULTS]:
            return index
        return -1

    def passed(self) -> tuple[int, int]:
        """(iteration, instructions of it that have ended); one more than there are once the step has ended. Invalid
        memory reads as an iteration or a number that was not waited for.
        """
        word: int = self._words[_POSITION]
        phase, index = word >> 24 & 0xFF, word & 0xFFFFFF
        if phase >= Phase.STEP_ENDED:
            return word >> 32, self.instructions + 1
        return word >> 32, index + (phase == Phase.ENDED)

    def ended_us(self, iteration: int, index: int) -> int:
        """When an instruction of the current iteration ended, as the rank wrote it: check it like ``step_begin_us``."""
        end_us: int = self._words[self._first + iteration % SLOTS * self._size + _TIMES + 2 * index + 1]
        return end_us

    def skip_rings_from(self, from_us: int) -> None:
        """Announce that marks made at ``from_us`` or later need no ring; 0: they do.

        After an announcement the caller must look soon after that time in any case; after taking one back, it must
        read ``passed``.
        """
        self._words[_SILENT_FROM] = from_us

    def step_begin_us(self) -> int:
        """When the current step began, as the rank wrote it: any 64-bit number, so check it before use."""
        begin_us: int = self._words[_STEP_BEGIN]
        return begin_us

    def deviates(self, iteration: int) -> bool:
        """Whether the rank has marked this iteration, still running, as not following the schedule."""
        record = self._first + iteration % SLOTS * self._size
        return bool(self._words[record + _SEQUENCE] == 2 * iteration + 1 and self._words[record + _FAULTS])

    def set_wake_map(self, wake: bytes) -> None:
        """Publish which instructions want another clock than the one before them; afterwards look at ``position``.

        Raises:
            ValueError: not one byte per instruction.
        """
        if len(wake) != self.instructions:
            raise ValueError(f"wake: must have {self.instructions} bytes, has {len(wake)}")
        self._map[8 * _WAKE : 8 * _WAKE + self.instructions] = wake

    def drain_iteration(self) -> IterationRecord | None:
        """The oldest closed iteration not yet drained, or None. Call until None after each ring."""
        closed = sorted(
            sequence // 2 - 1 for sequence in map(self._sequence, range(SLOTS)) if sequence and sequence % 2 == 0
        )
        for iteration in closed:
            if iteration > MAX_ITERATION or (self._next is not None and iteration < self._next):
                continue
            record = self._read(iteration)
            if record is None:  # overwritten while it was copied
                continue
            if self._next is not None:
                self.lost += min(iteration - self._next, MAX_ITERATION)
            self._next = iteration + 1
            return record
        return None

    def _sequence(self, slot: int) -> int:
        sequence: int = self._words[_first_record(self.instructions) + slot * _record_words(self.instructions)]
        return sequence

    def _read(self, iteration: int) -> IterationRecord | None:
        size = _record_words(self.instructions)
        start = _first_record(self.instructions) + iteration % SLOTS * size
        words: list[int] = self._words[start : start + size].tolist()
        if words[_SEQUENCE] != 2 * iteration + 2 or self._words[start] != words[_SEQUENCE]:
            return None
        begin_us, end_us = words[_BEGIN], words[_END]
        hosts = _TIMES + 2 * self.instructions
        begins_us, ends_us = words[_TIMES:hosts:2], words[_TIMES + 1 : hosts : 2]
        source = _source(words[_RECORD_SOURCE])
        late = source in (MarkSource.EVENTS, MarkSource.GPU)
        host_begin_us, host_begins_us = (words[_HOST_BEGIN], words[hosts:]) if late else (begin_us, begins_us)
        faults = Faults(words[_FAULTS] & sum(Faults))
        valid = begin_us <= end_us <= begin_us + MAX_DURATION_US and all(
            begin_us <= begin <= end <= end_us and -MAX_LEAD_US <= begin - host <= MAX_LEAD_US
            for begin, end, host in zip(begins_us, ends_us, host_begins_us, strict=True)
        )
        complete = valid and not faults and words[_ENDED] == self.instructions
        return IterationRecord(
            iteration=iteration,
            begin_us=begin_us,
            end_us=end_us,
            begins_us=tuple(begins_us) if complete else (),
            durations_us=tuple(end - begin for begin, end in zip(begins_us, ends_us, strict=True)) if complete else (),
            complete=complete,
            faults=faults,
            host_begin_us=host_begin_us,
            host_begins_us=tuple(host_begins_us) if complete else (),
            source=source,
        )


def _source(number: int) -> MarkSource:
    return MarkSource(number) if MarkSource.HOST <= number <= MarkSource.GPU else MarkSource.HOST
