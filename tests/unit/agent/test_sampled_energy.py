"""An energy counter made of samples of power: nothing twice, nothing made up, however often and by whatever clock."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.devices.energy import EnergyMeter
from perseus_agent.devices.sampled_energy import MAX_GAP_US, MAX_STEP_US, STALE_US, Sample, SampledEnergy, usable

WALL_US = 1_795_363_409_844_243
BUFFER = 12
"""Samples that the driver keeps here."""

steps = st.lists(st.tuples(st.integers(1_000, MAX_STEP_US), st.integers(0, 700_000)), min_size=1, max_size=60)


def trace_of(steps: list[tuple[int, int]], begin_us: int = WALL_US) -> list[Sample]:
    """Samples by steps of time and their power."""
    trace, now_us = [(begin_us, 0)], begin_us
    for step_us, power_mw in steps:
        now_us += step_us
        trace.append((now_us, power_mw))
    return trace


@given(steps, st.lists(st.integers(0, BUFFER), max_size=20))
def test_however_often_it_is_read_the_counter_is_the_integral_of_power(
    steps: list[tuple[int, int]], reads: list[int]
) -> None:
    """Sometimes nothing is new."""
    trace = trace_of(steps)
    counter, told, end = SampledEnergy(), [], 0
    for new in (*reads, *[BUFFER] * len(trace)):
        end += new
        told += counter.take(trace[max(0, min(end, len(trace)) - BUFFER) : end], -WALL_US)
    first = next(new for new in (*reads, BUFFER) if new)
    counted = trace[min(first, len(trace)) - 1 :]  # what was there before is not told: an agent may have been before us
    assert [reading.time_us for reading in told] == [time_us - WALL_US for time_us, _ in counted]
    spent_nj = sum(power * (now - before) for (before, _), (now, power) in pairwise(counted))
    assert told[0].energy_mj == 0
    assert told[-1].energy_mj == spent_nj // 1_000_000
    assert counter.restarts == 1


@given(steps, steps, st.integers(MAX_GAP_US + 1, 10**9))
def test_over_samples_that_were_missed_nothing_is_known(
    before: list[tuple[int, int]], after: list[tuple[int, int]], gap_us: int
) -> None:
    first = trace_of(before)
    second = trace_of(after, first[-1][0] + gap_us)
    counter, meter = SampledEnergy(), EnergyMeter()
    readings = counter.take(first[:1], 0) + counter.take(first, 0) + counter.take(second, 0)
    assert counter.restarts == 2
    assert readings[len(first)].energy_mj == 0
    for reading in readings:
        meter.add(reading)
    if readings[len(first) - 1].energy_mj:
        assert meter.at([readings[0].time_us, readings[-1].time_us]) is None
    spent_mj = readings[len(first) - 1].energy_mj + readings[-1].energy_mj
    assert meter.total_mj == spent_mj


@pytest.mark.parametrize("step_us", [3_600_000_000, -3_600_000_000, 60_000, -60_000])
def test_a_wall_clock_that_is_set_moves_no_energy_and_no_moment(step_us: int) -> None:
    """One sample each 20 ms, read after every fifth; the clock is set between two of them."""
    counter, meter, buffer = SampledEnergy(), EnergyMeter(), []
    for number in range(200):
        monotonic_us = 20_000 * number
        wall_us = WALL_US + monotonic_us + (step_us if number >= 103 else 0)
        buffer = [*buffer, (wall_us, 500_000)][-120:]
        if number % 5 == 4:
            for reading in counter.take(buffer, monotonic_us - wall_us):
                assert reading.time_us % 20_000 == 0
                assert monotonic_us - 120 * 20_000 < reading.time_us <= monotonic_us
                meter.add(reading)
    spent_mj = 500 * 199 * 20
    assert spent_mj - 500 * 220 <= meter.total_mj <= spent_mj  # what was sampled about then is lost, no more
    assert meter.at([160 * 20_000, 180 * 20_000]) is not None


def test_only_samples_that_are_dense_and_of_today_are_used() -> None:
    trace = trace_of([(20_000, 1)] * 5)
    now_us = trace[-1][0]
    assert usable(trace, now_us)
    assert usable(trace, now_us + STALE_US)
    assert not usable(trace, now_us + STALE_US + 1)
    assert not usable(trace, now_us - 1_000_000)  # stamped by another clock
    assert not usable(trace_of([(MAX_STEP_US + 1, 1)] * 5), WALL_US + 5 * (MAX_STEP_US + 1))
    assert not usable([(now_us, 1)] * 5, now_us)
    assert not usable(trace[:1], WALL_US)
    assert not usable([], now_us)
