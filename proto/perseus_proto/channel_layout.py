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
    word  6      default clocks: not 0 while the rank measures      rank, between steps; rings
                   something else than training on its GPU
    word  8      position: iteration, phase, index in one word      rank: one store, of the whole or of its lower
                   half, so it is never torn
    word  9      begin of the current step, µs                      rank
    word  16     GPU mark, in its lower half: where the GPU is       the GPU, by a stream memory write, or the rank
                 graph mark, in its upper half: where it is in an    the GPU, by nodes of the graph
                   iteration that is one CUDA graph; 0: in none
    word  24…    wake map, one byte per instruction                 agent
    then         SLOTS records of one iteration each                rank
                   sequence, begin µs, end µs, faults, ended, source, host's begin µs, 1 spare,
                   then n × (begin µs, end µs), then n × host's begin µs

Every word has one writer. The GPU mark has a cache line of its own: a store of the GPU takes a line out of the caches
of the processor, and the rank's marks must not pay for that. It is one number of 32 bits: the iteration modulo 4,096 in
the upper 12, the boundary passed last in the lower 20. Boundary 0 is the begin of the step, 2k + 1 and 2k + 2 are begin
and end of instruction k, 2n + 1 is the end of the step. It holds no time: the agent knows when it looked.

A node of a CUDA graph writes the same number at every replay, so it cannot say the iteration. It writes the boundary
alone, as the graph mark. Before a replay the stream sets that to 0 and then writes the GPU mark of the step's begin,
after it the GPU mark of the step's end. So the further of both boundaries is where the GPU is.

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

from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from operator import le, sub
from typing import Final

from perseus_core.marks import MarkSource

LAYOUT_VERSION: Final = 2
SLOTS: Final = 4
"""Iterations stored for the agent: one being filled, two that wait for GPU events, one being drained."""
MAX_ITERATION: Final = 2**32 - 1
MAX_DURATION_US: Final = 2**32 - 1
MAX_LEAD_US: Final = 2**31 - 1
AHEAD_US: Final = 1_000_000
"""By how much times may be ahead of the reader's clock: those of a GPU are translated to the host's."""
_PART: Final = 4_096
"""Instructions of a record that are read at once: in 2 ms, of which other threads cannot run for 0.3."""
GPU_MARK_BYTE: Final = 8 * 16
"""Where in the memory the GPU writes its mark, 32 bits; within its first page."""
GRAPH_MARK_BYTE: Final = GPU_MARK_BYTE + 4
"""Where a node of a CUDA graph writes the boundary that it marks, 32 bits."""

MAGIC: Final = int.from_bytes(b"PERSEUS1", "little")
SILENT_FROM: Final = 4  # beside words that never change: a store here must not take the rank's own line from its cache
SOURCE: Final = 5
DEFAULT_CLOCKS: Final = 6
POSITION: Final = 8
STEP_BEGIN: Final = 9
GPU_MARK: Final = GPU_MARK_BYTE // 8
WAKE: Final = 24
SEQUENCE, BEGIN, END, FAULTS, ENDED, RECORD_SOURCE, HOST_BEGIN, TIMES = 0, 1, 2, 3, 4, 5, 6, 8
ITERATION_BITS: Final = 0xFFF
BOUNDARY_BITS: Final = 20
NO_GPU_MARK: Final = 2**32 - 1  # of a boundary that no schedule has


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
    """When it ended; its begin, if what was written cannot be."""
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
    return (iteration & ITERATION_BITS) << BOUNDARY_BITS | boundary


def record_words(instructions: int) -> int:
    """Words of one record."""
    return TIMES + 3 * instructions


def first_record(instructions: int) -> int:
    """Word at which the records begin: behind the wake map, rounded up to a cache line."""
    return WAKE + (instructions + 63) // 64 * 8


def memory_bytes(instructions: int) -> int:
    """Size of the shared memory for a schedule of so many instructions."""
    return 8 * (first_record(instructions) + SLOTS * record_words(instructions))


def parse_record(
    iteration: int, words: array[int], now_us: int | None = None
) -> Generator[None, None, IterationRecord]:
    """What a closed record says; incomplete if its times are impossible. In parts: there may be many instructions.

    Args:
        iteration: of its sequence.
        words: the whole record, any numbers of 64 bits.
        now_us: now, by the clock that its times are of: it cannot have ended much later. None: not known.
    """
    instructions = (len(words) - TIMES) // 3
    begin_us, end_us = words[BEGIN], words[END]
    source = source_of(words[RECORD_SOURCE])
    late = source in (MarkSource.EVENTS, MarkSource.GPU)
    faults = Faults(words[FAULTS] & sum(Faults))
    possible = begin_us <= end_us <= begin_us + MAX_DURATION_US and (now_us is None or end_us <= now_us + AHEAD_US)
    complete = possible and not faults and words[ENDED] == instructions
    begins_us, durations_us, host_begins_us = list[int](), list[int](), list[int]()
    hosts = TIMES + 2 * instructions
    for first in range(0, instructions if complete else 0, _PART):
        last = min(first + _PART, instructions)
        begins = words[TIMES + 2 * first : TIMES + 2 * last : 2].tolist()
        ends = words[TIMES + 1 + 2 * first : TIMES + 2 * last : 2].tolist()
        host_begins = words[hosts + first : hosts + last].tolist() if late else begins
        if not _possible(begin_us, end_us, begins, ends, host_begins):
            complete = False
            break
        begins_us += begins
        durations_us += map(sub, ends, begins)
        host_begins_us += host_begins
        yield
    return IterationRecord(
        iteration=iteration,
        begin_us=begin_us,
        end_us=end_us if possible else begin_us,
        begins_us=tuple(begins_us) if complete else (),
        durations_us=tuple(durations_us) if complete else (),
        complete=complete,
        faults=faults,
        host_begin_us=words[HOST_BEGIN] if late else begin_us,
        host_begins_us=tuple(host_begins_us) if complete else (),
        source=source,
    )


def _possible(
    begin_us: int, end_us: int, begins_us: Sequence[int], ends_us: Sequence[int], host_begins_us: Sequence[int]
) -> bool:
    """Whether instructions ran within a step, and the host was not absurdly far from them."""
    leads_us = list(map(sub, begins_us, host_begins_us))
    return (
        begin_us <= min(begins_us)
        and max(ends_us) <= end_us
        and all(map(le, begins_us, ends_us))
        and min(leads_us) >= -MAX_LEAD_US
        and max(leads_us) <= MAX_LEAD_US
    )


_SOURCES: Final = {int(source): source for source in MarkSource}
"""Looked up, as the enum's own search is slow and the agent makes one at each look."""


def source_of(number: int) -> MarkSource:
    """The source that a word of the memory says; HOST, of which nothing follows, if it says none."""
    return _SOURCES.get(number, MarkSource.HOST)
