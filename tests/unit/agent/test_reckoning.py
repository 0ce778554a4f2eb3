"""What is reckoned of an iteration after it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.work import run_through

from perseus_agent.clocks.latency import Effect
from perseus_agent.clocks.reckoning import ClockReading, beside_plan_us, clock_during
from perseus_proto.channel import Faults, IterationRecord

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from((600, 900, 1200))), max_size=8)
EFFECTS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from((600, 900, 1200, None))), max_size=12)


def record_of(spans: list[tuple[int, int, int]]) -> IterationRecord:
    """Waits and durations in turn, from 100 on."""
    begins, now_us = [], 100
    for wait_us, duration_us, _ in spans:
        begins.append(now_us + wait_us)
        now_us += wait_us + duration_us
    durations = tuple(duration for _, duration, _ in spans)
    return IterationRecord(0, 100, now_us, tuple(begins), durations, True, Faults.NONE)


@given(SPANS, EFFECTS)
def test_time_beside_the_plan_is_what_counting_every_microsecond_gives(
    spans: list[tuple[int, int, int]], changes: list[tuple[int, int | None]]
) -> None:
    record, effects, now_us = record_of(spans), list[Effect](), 90
    for wait_us, mhz in changes:
        now_us += wait_us
        effects.append(Effect(now_us, mhz))
    below = above = 0
    for begin, duration, (_, _, planned) in zip(record.begins_us, record.durations_us, spans, strict=True):
        for time_us in range(begin, begin + duration):
            past = [effect for effect in effects if effect.time_us <= time_us]
            if past:
                mhz = past[-1].mhz
                above += mhz is None or mhz > planned
                below += mhz is not None and mhz < planned
    assert run_through(beside_plan_us(record, [mhz for *_, mhz in spans], effects)) == (below, above)


def test_the_median_clock_is_of_readings_within_instructions_and_power_of_all() -> None:
    record = record_of([(0, 100, 900), (100, 100, 1200)])
    readings = [ClockReading(time_us, time_us, False) for time_us in (50, 150, 160, 250, 350, 399, 450)]
    assert clock_during(record, 500, readings) == (350, False)
    assert clock_during(record, 500, [ClockReading(450, 1, True)]) == (0, True)
    assert clock_during(record, 440, [ClockReading(450, 1, True)]) == (0, False)
