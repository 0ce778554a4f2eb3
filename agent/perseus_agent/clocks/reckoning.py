"""What an iteration's clocks were, after it: time below and above the plan, and the clock that was read meanwhile.

Pure: times are microseconds of one clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from typing import Final, NamedTuple

from perseus_agent.clocks.latency import Effect
from perseus_proto.channel import IterationRecord

OVERLAP: Final = 4
"""Instructions that run at once, beyond which nothing is counted: a rank may say that all do."""
_PART: Final = 2_048
"""Spans of one clock that are added up in one part."""


class ClockReading(NamedTuple):
    """The SM clock at some moment, and whether power limited it."""

    time_us: int
    mhz: int
    power_limited: bool


def beside_plan_us(
    record: IterationRecord, clocks_mhz: Sequence[int], effects: Sequence[Effect]
) -> Generator[None, None, tuple[int, int]]:
    """Computing time, µs, in which the clock in effect was below and above the planned one. In parts: a record may be
    long.

    Args:
        record: of the iteration; without times the answer is 0 and 0.
        clocks_mhz: the plan, one clock per instruction.
        effects: which clock was in effect from when on, ascending; None, the default clocks, is above all. Before the
            first nothing is known, and nothing is counted. Nor is it where many instructions run at the same time.
    """
    below_us = above_us = 0
    room = len(record.begins_us) + OVERLAP * len(effects)
    effects = list(effects)  # those of now, however long it takes
    times = [effect.time_us for effect in effects]
    for begin_us, span_us, planned_mhz in zip(record.begins_us, record.durations_us, clocks_mhz, strict=False):
        end_us = begin_us + span_us
        at = bisect_right(times, begin_us) - 1
        while at < len(times) and (at < 0 or times[at] < end_us):
            from_us = max(begin_us, times[at]) if at >= 0 else begin_us
            until_us = min(end_us, times[at + 1]) if at + 1 < len(times) else end_us
            if at >= 0:
                mhz = effects[at].mhz
                if mhz is None or mhz > planned_mhz:
                    above_us += until_us - from_us
                elif mhz < planned_mhz:
                    below_us += until_us - from_us
            at += 1
            room -= 1
            if room < 0:
                return 0, 0
            if room % _PART == 0:
                yield
    return below_us, above_us


def clock_during(record: IterationRecord, until_us: int, readings: Iterable[ClockReading]) -> tuple[int, bool]:
    """The median SM clock that was read during the iteration's instructions, MHz, 0 if it was not; and whether power
    limited it at any reading between the iteration's begin and ``until_us``."""
    clocks, limited = [], False
    for reading in readings:
        if record.begin_us <= reading.time_us < until_us:
            limited = limited or reading.power_limited
            index = bisect_right(record.begins_us, reading.time_us) - 1
            if index >= 0 and reading.time_us < record.begins_us[index] + record.durations_us[index]:
                clocks.append(reading.mhz)
    return (sorted(clocks)[len(clocks) // 2] if clocks else 0), limited
