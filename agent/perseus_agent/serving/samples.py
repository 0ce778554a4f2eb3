"""What an engine's memory says, as samples of the law: differences of two readings, none of which is trusted.

An engine that goes backwards, jumps beyond any engine's reach, or tears its record again and again gets a sample that
is not possible, for which the law asks for the default clocks. Nothing that it can write raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import sub
from typing import Final

from perseus_core.serving import MOST_SHARES, TIME_EDGES_US, EngineSample, ServingLimits
from perseus_proto.engine_channel import EngineCounts, EngineReader, EngineReading, counted_between

_TORN: Final = 3
"""Readings in a row whose record was torn: by an engine that is stopped within a store of a microsecond, or lies."""
_MOST_BETWEEN: Final = 1 << 40
"""What a count may grow between two readings: in microseconds, twelve days."""
_BEYOND: Final = 1e9
"""Stands for the share of a time beyond the last edge: neither kept nor missed for a clock's sake."""
_IMPOSSIBLE: Final = EngineSample(math.nan, 0, 0, 0, 0.0)
_LOAD: Final = ("sequence", "waiting", "prefilling", "running", "kv_share_ppm")
_GROWING: Final = tuple(place for place, name in enumerate(EngineCounts._fields) if name not in _LOAD)

Counted = Sequence[tuple[int, int]]
"""Places of a row, ascending, and how many were counted at each."""


class Samples:
    """The readings of one engine's memory, oldest to newest."""

    def __init__(self, reader: EngineReader, reading: EngineReading) -> None:
        """``reading``: the first, from which differences begin."""
        self.reading = reading
        """The latest that was whole and possible."""
        self.first_tokens: Counted = ()
        """Requests that got their first token between the latest two readings."""
        self.tokens: Counted = ()
        """Requests that ended between them."""
        self.lengths: Counted = ()
        """The same by the places of their lengths."""
        self._reader = reader
        self._torn = 0

    def take(self, limits: ServingLimits) -> EngineSample | None:
        """Read the memory. Returns None where the engine has said nothing since the last reading.

        Args:
            limits: of which the times of requests are shares.
        """
        self.first_tokens = self.tokens = self.lengths = ()
        reading = self._reader.read()
        if reading is None:
            self._torn += 1
            return _IMPOSSIBLE if self._torn >= _TORN else None
        self._torn = 0
        before, self.reading = self.reading, reading
        silent = reading.beats == before.beats and reading.counts == before.counts
        if silent or not reading.counts.sequence:  # it has made no step yet: its weights may still be loaded
            return None
        if not _grows(before.counts, reading.counts):
            return _IMPOSSIBLE
        self.first_tokens = counted_between(before.first_tokens, reading.first_tokens)
        self.tokens = counted_between(before.tokens, reading.tokens)
        self.lengths = counted_between(before.lengths, reading.lengths)
        counts = reading.counts
        return EngineSample(
            time_s=counts.time_us / 1e6,
            waiting=counts.waiting,
            prefilling=counts.prefilling,
            running=counts.running,
            kv_share=counts.kv_share_ppm / 1e6,
            preempted=counts.preempted,
            first_tokens=shares_of(self.first_tokens, limits.first_token_s),
            tokens=shares_of(self.tokens, limits.per_token_s),
        )


def shares_of(counted: Counted, limit_s: float | None) -> tuple[float, ...]:
    """Times over their limit, each as its place's upper edge, the longest first: at most `MOST_SHARES`."""
    shares: list[float] = []
    if limit_s is None:
        return ()
    for place, count in reversed(counted):
        share = TIME_EDGES_US[place] / 1e6 / limit_s if place < len(TIME_EDGES_US) else _BEYOND
        shares += [share] * min(count, MOST_SHARES - len(shares))
        if len(shares) == MOST_SHARES:
            break
    return tuple(shares)


def _grows(before: EngineCounts, after: EngineCounts) -> bool:
    """Whether each count that only grows has grown, and no further than it can."""
    grown = tuple(map(sub, after, before))
    return all(0 <= grown[place] <= _MOST_BETWEEN for place in _GROWING)
