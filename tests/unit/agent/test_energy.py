"""Energy by interpolation of a counter that ticks: sums telescope, nothing decreases, nothing is made up."""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_agent.devices.base import EnergyReading
from perseus_agent.devices.energy import MAX_EDGES, STALE_US, EnergyMeter, InstructionEnergies


def meter_of(*readings: tuple[int, int]) -> EnergyMeter:
    meter = EnergyMeter()
    for time_us, energy_mj in readings:
        meter.add(EnergyReading(time_us, energy_mj))
    return meter


def ticking(power_w: float, tick_us: int, sample_us: int, until_us: int) -> EnergyMeter:
    """A GPU of constant power whose counter moves once a tick, read once a sample."""
    return meter_of(*((t, int(power_w * (t // tick_us * tick_us) / 1000)) for t in range(0, until_us, sample_us)))


def test_between_edges_the_counter_is_a_straight_line() -> None:
    meter = meter_of((0, 1000), (100, 1000), (200, 1400), (400, 1600))
    assert meter.at([0, 100, 200, 300, 400]) == [1000, 1200, 1400, 1500, 1600]


def test_a_moment_outside_of_what_is_known_has_no_answer() -> None:
    meter = meter_of((100, 1000), (200, 1400))
    assert meter.at([50, 150]) is None
    assert meter.at([150, 201]) is None
    assert EnergyMeter().at([1]) is None
    assert meter.at([]) is None


def test_a_moment_is_covered_once_the_counter_has_moved_behind_it() -> None:
    meter = meter_of((0, 10), (100, 20), (150, 20))
    assert meter.covers(100)
    assert not meter.covers(120)
    meter.add(EnergyReading(200, 30))
    assert meter.covers(120)


def test_a_counter_that_has_stopped_is_not_waited_for() -> None:
    meter = meter_of((0, 10), (100, 20), (101 + STALE_US, 20))
    assert meter.covers(101)
    assert meter.at([50, 101]) == [15, 20]


@pytest.mark.parametrize("tick_us", [10_000, 20_000, 100_000])
def test_an_iteration_of_constant_power_is_right_within_one_sample(tick_us: int) -> None:
    meter = ticking(300, tick_us, 5_000, 4_000_000)
    levels = meter.at([1_013_000, 3_457_000])
    assert levels is not None
    assert levels[1] - levels[0] == pytest.approx(300 * 2_444_000 / 1000, abs=2 * 300 * 5_000 / 1000)


@given(
    st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 20_000)), min_size=3, max_size=60),
    st.lists(st.floats(0, 1), min_size=2, max_size=30),
)
def test_the_parts_of_any_partition_add_up_and_none_is_negative(
    steps: list[tuple[int, int]], fractions: list[float]
) -> None:
    times = list(itertools.accumulate(step for step, _ in steps))
    levels = list(itertools.accumulate(rise for _, rise in steps))
    meter = meter_of(*zip(times, levels, strict=True))
    edge_us = max(t for t in times if meter.covers(t))
    moments = sorted(times[0] + int(f * (edge_us - times[0])) for f in fractions)
    answers = meter.at(moments)
    assert answers is not None
    parts = [after - before for before, after in itertools.pairwise(answers)]
    assert min(parts) >= -1e-6
    assert sum(parts) == pytest.approx(answers[-1] - answers[0])
    assert levels[0] <= answers[0]
    assert answers[-1] <= levels[-1]


# ---------------------------------------------------------------------------------------------------------------- waits

BLOCKING_W, COMPUTING_W = 84.0, 330.0


class Trace:
    """A GPU that computes and waits by turns; its counter moves once a tick, and is read every so often, never on
    time."""

    def __init__(self, waits_us: list[int], *, work_us: int, tick_us: int, lag_us: int, dice: random.Random) -> None:
        self.waits: list[tuple[int, int]] = []
        self._moments, self._levels_uj = [0], [0.0]
        for wait_us in waits_us:
            self._spend(work_us, COMPUTING_W)
            self.waits.append((self._moments[-1], self._moments[-1] + wait_us))
            self._spend(wait_us, BLOCKING_W)
        self._spend(2_000_000, COMPUTING_W)
        self.meter, phase, now = EnergyMeter(), dice.randrange(tick_us), 0
        while now < self._moments[-1]:
            ticked = (now - phase) // tick_us * tick_us + phase
            self.meter.add(EnergyReading(now, int(self._level_uj(ticked - lag_us) / 1000)))
            now += round(50_000 * dice.uniform(0.9, 1.6))

    def _spend(self, time_us: int, power_w: float) -> None:
        self._moments.append(self._moments[-1] + time_us)
        self._levels_uj.append(self._levels_uj[-1] + power_w * time_us)

    def _level_uj(self, time_us: int) -> float:
        place = bisect_right(self._moments, max(0, time_us)) - 1
        if place + 1 == len(self._moments):
            return self._levels_uj[-1]
        span = self._moments[place + 1] - self._moments[place]
        share = (max(0, time_us) - self._moments[place]) / span
        return self._levels_uj[place] + share * (self._levels_uj[place + 1] - self._levels_uj[place])

    def quiet_w(self) -> tuple[float, float]:
        """Power of the waits as seen by themselves, and how much of them (µs)."""
        span_us, energy_mj = self.meter.quiet(self.waits, 0, self._moments[-1])
        return (1000 * energy_mj / span_us if span_us else math.nan), span_us

    def interpolated_w(self) -> float:
        levels = self.meter.at([moment for wait in self.waits for moment in wait])
        assert levels is not None
        spent = sum(levels[i + 1] - levels[i] for i in range(0, len(levels), 2))
        return 1000 * spent / sum(end - begin for begin, end in self.waits)


@settings(max_examples=25)
@given(
    st.sampled_from([20_000, 50_000, 100_000, 106_000]),
    st.integers(0, 30_000),
    st.integers(20_000, 200_000),
    st.lists(st.integers(1_000, 800_000), min_size=4, max_size=12),
    st.integers(0, 2**32),
)
def test_power_of_waits_is_right_however_seldom_and_late_the_counter_moves(
    tick_us: int, lag_us: int, work_us: int, waits_us: list[int], seed: int
) -> None:
    dice = random.Random(seed)
    trace = Trace(waits_us * 30, work_us=work_us, tick_us=tick_us, lag_us=lag_us, dice=dice)
    power_w, span_us = trace.quiet_w()
    if span_us >= 2_000_000:  # as much as the operator wants
        assert power_w == pytest.approx(BLOCKING_W, rel=0.1)
    assert span_us <= sum(waits_us) * 30


def test_interpolation_mixes_computing_into_waits() -> None:
    """Why waits are looked at by themselves: bubbles of a pipeline of eight stages, 50 ms a forward."""
    waits_us = [350_000, 20_000, 20_000, 60_000, 300_000]
    trace = Trace(waits_us * 40, work_us=90_000, tick_us=100_000, lag_us=0, dice=random.Random(1))
    assert trace.interpolated_w() > 1.25 * BLOCKING_W
    power_w, span_us = trace.quiet_w()
    assert span_us > 4_000_000
    assert power_w == pytest.approx(BLOCKING_W, rel=0.03)


def test_a_wait_within_which_the_counter_did_not_move_twice_says_nothing() -> None:
    meter = meter_of((0, 0), (100_000, 30), (200_000, 40), (300_000, 48), (400_000, 56))
    assert meter.quiet([(0, 199_999)], 0, 400_000) == (0, 0)
    assert meter.quiet([(90_000, 399_999)], 0, 400_000) == (0, 0), "the first move has a part in what came before"
    assert meter.quiet([(90_000, 400_000)], 0, 400_000) == (100_000, 8)
    assert meter.quiet([], 0, 400_000) == meter.quiet([(0, 400_000)], 0, 99_999) == (0, 0)


def test_the_total_never_decreases_over_a_driver_reload_and_nothing_is_counted_twice() -> None:
    meter = EnergyMeter()
    totals = []
    for time_us, energy_mj in [(1, 5000), (2, 6000), (3, 100), (4, 300), (5, 50), (6, 60)]:
        meter.add(EnergyReading(time_us, energy_mj))
        totals.append(meter.total_mj)
    assert totals == [5000, 6000, 6100, 6300, 6350, 6360]


def test_a_span_over_a_driver_reload_has_no_energy() -> None:
    meter = meter_of((0, 5000), (10, 6000), (20, 100), (30, 200))
    assert meter.at([5, 25]) is None
    assert meter.at([20, 25]) == [6100, 6150]


def test_readings_out_of_order_are_ignored() -> None:
    meter = meter_of((10, 100), (20, 200), (15, 900), (30, 300))
    assert meter.at([10, 20, 30]) == [100, 200, 300]


def test_a_day_of_readings_takes_bounded_memory() -> None:
    meter = EnergyMeter()
    for number in range(100_000):
        meter.add(EnergyReading(number, number))
    assert len(meter._times_us) <= 2 * MAX_EDGES
    oldest = 100_000 - MAX_EDGES
    assert meter.at([oldest, 99_500]) == [oldest, 99_500]


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=5, max_size=5), min_size=1, max_size=20))
def test_mean_energies_add_up_to_the_mean_of_the_sums(iterations: list[list[float]]) -> None:
    energies = InstructionEnergies()
    for spent in iterations:
        energies.add("plan", spent)
    mean = sum(map(sum, iterations)) / len(iterations)
    assert sum(energies.means_mj("plan")) == pytest.approx(mean, abs=1)


def test_means_begin_anew_with_another_plan() -> None:
    energies = InstructionEnergies()
    energies.add("one", [10, 10])
    energies.add("two", [30, 50])
    assert energies.means_mj("two") == (30, 50)
    assert energies.means_mj("one") == ()
    assert energies.iterations == 1
