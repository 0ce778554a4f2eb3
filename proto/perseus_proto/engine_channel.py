"""The memory that a serving engine and its agent share after the hello: what the engine has done, counted.

The agent creates it (``EngineReader.create``) and reads it ten times a second; the engine writes it after each step
(``EngineWriter.step``). Everything is a count since the memory was made, or the load as it is: a reader that comes late
loses nothing, and what happened between two readings is their difference.

    bytes 0-15     magic, layout version                            agent, once; checked once by the engine
    bytes 16-23    beats: another number says "still as it was"     engine, between steps
    bytes 64-195   the record: `EngineCounts`, 16 words, and the    engine, after each step
                     CRC-32 of those
    bytes 256-…    rows of counts of 32 bits, which wrap: first     engine, before the record
                     tokens and tokens over `TIME_EDGES_US`, and
                     requests that ended over `LENGTH_PLACES`

A reading of the record is whole if its CRC fits, in whatever order a processor lets stores be seen; the reader copies
it again a few times, and else says that it is torn. Each count of a row is an aligned word of its own, so it is never
torn. The bell rings when prompts begin to wait.

The reader trusts nothing: sizes are its own, and a value is any number. What cannot be true is decided by who uses it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from perseus_core.lengths import LENGTH_PLACES
from perseus_core.serving import TIME_EDGES_US
from perseus_proto.frames import ChannelError
from perseus_proto.sealed_memory import Bell, create_memory, map_memory

ENGINE_LAYOUT_VERSION: Final = 2
PLACES: Final = len(TIME_EDGES_US) + 1
"""Of a row of times: one below each edge, and one beyond the last."""
_MAGIC: Final = int.from_bytes(b"PRSUENGN", "little")
_HEAD: Final = struct.Struct("<QQ")
_BEATS: Final = 16
_RECORD: Final = 64
_ROWS: Final = 256
_COUNTS: Final = struct.Struct("<16Q")
_CHECK: Final = struct.Struct("<I")
_RECORD_BYTES: Final = _COUNTS.size + _CHECK.size
_ROW_BYTES: Final = 4 * PLACES
_LENGTHS_BYTES: Final = 4 * LENGTH_PLACES
ENGINE_MEMORY_BYTES: Final = _ROWS + 2 * _ROW_BYTES + _LENGTHS_BYTES
_TRIES: Final = 4
"""A record is written in a microsecond."""
_WORD: Final = 0xFFFFFFFFFFFFFFFF


class EngineCounts(NamedTuple):
    """The record. The load as it is after the last step; all else since the memory was made."""

    sequence: int
    """Another number after each step."""
    time_us: int
    """Of the engine's monotonic clock, at the end of the step."""
    waiting: int
    """Requests of which no token of the prompt was computed yet."""
    prefilling: int
    """Requests of which a part of the prompt was computed."""
    running: int
    """Requests that decode."""
    kv_share_ppm: int
    """Used share of the memory for keys and values."""
    preempted: int
    """Requests that gave that memory back."""
    steps: int
    """That computed no prompt."""
    steps_us: int
    prompt_steps: int
    """That computed tokens of prompts."""
    prompt_steps_us: int
    prompt_tokens: int
    """Computed; those of a cached prefix are not."""
    generated_tokens: int
    running_sum: int
    """Of ``running``, over all steps."""
    kv_share_ppm_sum: int
    requests: int
    """That ended."""


class EngineReading(NamedTuple):
    """What the memory held at one moment."""

    counts: EngineCounts
    beats: int
    first_tokens: bytes
    """Row of counts of 32 bits: of the requests that got their first token, by the time that took from the arrival."""
    tokens: bytes
    """The same of the requests that ended, by their mean time between tokens."""
    lengths: bytes
    """The same by their lengths, over the places of ``perseus_core.lengths``."""


NOTHING_YET: Final = EngineReading(
    EngineCounts(*[0] * 16), 0, bytes(_ROW_BYTES), bytes(_ROW_BYTES), bytes(_LENGTHS_BYTES)
)
"""Of new memory."""


class EngineWriter:
    """The engine's end. Nothing here blocks; one thread calls ``step``, and one, which may be another, ``beat``."""

    __slots__ = ("_beats", "_event_fd", "_first_tokens", "_lengths", "_map", "_prompts", "_sums", "_tokens")

    def __init__(self, memory_fd: int, event_fd: int) -> None:
        """Map the memory; takes over both descriptors, also when it raises.

        Raises:
            ChannelError: this memory has another layout, or the agent could shrink it while it is in use.
            OSError: it cannot be mapped.
        """
        try:
            self._map = map_memory(memory_fd, ENGINE_MEMORY_BYTES)
            if _HEAD.unpack_from(self._map) != (_MAGIC, ENGINE_LAYOUT_VERSION):
                raise ChannelError("memory: its head is not that of this layout")
        except BaseException:
            os.close(event_fd)
            raise
        self._event_fd = event_fd
        rows = memoryview(self._map)[_ROWS:].cast("I")
        self._first_tokens, self._tokens, self._lengths = rows[:PLACES], rows[PLACES : 2 * PLACES], rows[2 * PLACES :]
        self._beats = memoryview(self._map)[_BEATS : _BEATS + 8].cast("Q")
        self._sums = [0] * (_COUNTS.size // 8)
        self._prompts = False

    def __del__(self) -> None:
        """Close the bell when the last thread inside a step has let go of this object, and not before."""
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._event_fd)

    def count_times(
        self, first_token_places: Sequence[int], token_places: Sequence[int], length_places: Sequence[int] = ()
    ) -> None:
        """Count requests that got their first token, and requests that ended, by the places of their times, and those
        that ended by the places of their lengths; before the ``step`` in which they did.
        """
        for row, places in (
            (self._first_tokens, first_token_places),
            (self._tokens, token_places),
            (self._lengths, length_places),
        ):
            for place in places:
                row[place] = row[place] + 1 & 0xFFFFFFFF

    def step(
        self,
        waiting: int,
        prefilling: int,
        running: int,
        kv_share_ppm: int,
        *,
        step_us: int | None,
        computes_prompt: bool = False,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
        preempted: int = 0,
        requests: int = 0,
    ) -> None:
        """Write the load after a step, and add what the step did.

        Args:
            waiting, prefilling, running, kv_share_ppm: as in ``EngineCounts``.
            step_us: how long it took; None: not known, as after a pause. Then it is not counted as a step.
            computes_prompt: it computed tokens of prompts.
            prompt_tokens, generated_tokens, preempted, requests: that it adds.
        """
        sums = self._sums
        sums[0] += 1
        sums[1] = time.monotonic_ns() // 1000
        sums[2], sums[3], sums[4], sums[5] = waiting, prefilling, running, kv_share_ppm
        sums[6] += preempted
        if step_us is not None:
            place = 9 if computes_prompt else 7
            sums[place] += 1
            sums[place + 1] += step_us
            sums[13] += running
            sums[14] += kv_share_ppm
        sums[11] += prompt_tokens
        sums[12] += generated_tokens
        sums[15] += requests
        counts = _COUNTS.pack(*sums)
        self._map[_RECORD : _RECORD + _RECORD_BYTES] = counts + _CHECK.pack(zlib.crc32(counts))
        prompts = waiting + prefilling > 0
        if prompts and not self._prompts:
            os.eventfd_write(self._event_fd, 1)  # made by the agent such that it does not block
        self._prompts = prompts

    def beat(self) -> None:
        """Say that the load is still that of the last step."""
        self._beats[0] = self._beats[0] + 1 & _WORD


class EngineReader:
    """The agent's end, used by one thread at a time."""

    def __init__(self, memory_fd: int, event_fd: int) -> None:
        """Use ``create``."""
        self.memory_fd = memory_fd
        """To be sent to the engine."""
        self.event_fd = event_fd
        """To be sent to the engine, and to be waited on."""
        self._map = mmap.mmap(memory_fd, ENGINE_MEMORY_BYTES)
        self._bell = Bell(event_fd)

    @classmethod
    def create(cls) -> EngineReader:
        """New memory and a new bell.

        Raises:
            OSError: no memory or no descriptors are left.
        """
        memory_fd, event_fd = create_memory(ENGINE_MEMORY_BYTES)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, memory_fd)
            undo.callback(os.close, event_fd)
            reader = cls(memory_fd, event_fd)
            undo.pop_all()
        _HEAD.pack_into(reader._map, 0, _MAGIC, ENGINE_LAYOUT_VERSION)
        counts = bytes(_COUNTS.size)
        reader._map[_RECORD : _RECORD + _RECORD_BYTES] = counts + _CHECK.pack(zlib.crc32(counts))
        return reader

    def close(self) -> None:
        """Release memory and bell. Idempotent."""
        if not self._map.closed:
            self._map.close()
            os.close(self.memory_fd)
            os.close(self.event_fd)

    def acknowledge(self) -> bool:
        """Reset the bell; False if nobody rang. Never blocks."""
        return self._bell.acknowledge()

    def read(self) -> EngineReading | None:
        """What the memory holds now; None: the record is torn. Any bytes are read, whatever the engine wrote."""
        for _ in range(_TRIES):
            record = self._map[_RECORD : _RECORD + _RECORD_BYTES]
            counts = record[: _COUNTS.size]
            if _CHECK.unpack_from(record, _COUNTS.size)[0] == zlib.crc32(counts):
                break
        else:
            return None
        rows = self._map[_ROWS:]
        (beats,) = struct.unpack_from("<Q", self._map, _BEATS)
        first_tokens, tokens = rows[:_ROW_BYTES], rows[_ROW_BYTES : 2 * _ROW_BYTES]
        return EngineReading(EngineCounts(*_COUNTS.unpack(counts)), beats, first_tokens, tokens, rows[2 * _ROW_BYTES :])


def counted_between(before: bytes, after: bytes) -> list[tuple[int, int]]:
    """Which places of a row were counted at between two readings, ascending, and how often."""
    if before == after:
        return []
    pairs = zip(memoryview(before).cast("I"), memoryview(after).cast("I"), strict=True)
    return [(place, new - old & 0xFFFFFFFF) for place, (old, new) in enumerate(pairs) if new != old]
