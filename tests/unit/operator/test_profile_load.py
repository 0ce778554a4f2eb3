"""A profile measured on steps whose time depends on their data: what the sweep does, knows, and says."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import fmean

import pytest

from perseus_core.iteration import IterationReport
from perseus_operator.families.training.features.profile.reading import LINE, levelled
from perseus_operator.families.training.features.profile.sweep import (
    Recipe,
    Sweep,
    choose_clocks,
    common_clocks,
    csv_of,
    from_json,
    to_json,
)
from perseus_operator.families.training.work.profile_aggregator import JobShape, ProfileAggregator
from perseus_sim.gpus.model import MODELS
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule
from perseus_solver.significance import LONGEST

GPU = MODELS["a100"]
STEP_US = 1_000_000
CLOCKS = choose_clocks([clock for clock in common_clocks([GPU.clocks_mhz]) if 900 <= clock <= 1320], 15)
"""Below the power limit, where the simulated GPU reaches every clock that is set."""
RECIPE = Recipe(iterations=5, most_slowdown=1.0, most_us=10**12)
SEEDS = range(6)


class Steps:
    """Ranks whose steps vary: ``common`` by what all of them share, ``own`` each by itself, and ``drift`` in a
    thousand steps; standard deviations of logarithms."""

    def __init__(self, ranks: int, *, common: float = 0.0, own: float = 0.0, drift: float = 0.0, seed: int = 1) -> None:
        self.shape = JobShape(ranks, 1, 1)
        self.iteration = 0
        self._load, self._drift = (common, own), drift
        self._random = random.Random(seed)

    def reports(self, clock_mhz: int, point: int) -> list[IterationReport]:
        """One iteration."""
        common, own = self._load
        level = self._random.gauss(0.0, common) + self._drift * self.iteration / 1000
        times_us = [
            STEP_US * GPU.slowdown(clock_mhz) * math.exp(level + self._random.gauss(0.0, own))
            for _ in range(self.shape.pipelines)
        ]
        reports = []
        for rank, time_us in enumerate(times_us):
            energy_mj = round(1e-3 * time_us * GPU.power_w(clock_mhz))
            took_us = round(time_us)
            reports.append(
                IterationReport(
                    rank, 0, 0, self.iteration, took_us, took_us, energy_mj, point, [took_us], [energy_mj], 1
                )
            )
        self.iteration += 1
        return reports


def measured(job: Steps, recipe: Recipe = RECIPE, clocks: tuple[int, ...] = CLOCKS) -> Sweep:
    """The sweep when it is finished, as the profiler makes it."""
    meter = ProfileAggregator(build_schedule("Steps", stages=1, microbatches=1), job.shape, recipe.iterations)
    sweep = Sweep(clocks, "steps", recipe)
    while not sweep.finished:
        meter.begin(sweep.point, sweep.measured)
        clock = sweep.clocks_mhz[sweep.point]
        for report in job.reports(clock, sweep.point):
            reading = meter.observe(report, clock)
            sweep = replace(sweep, spent_us=round(meter.spent_us))
            sweep = sweep.add(reading) if reading else sweep
    return sweep


@cache
def varying(seed: int, common: float = 0.0, own: float = 0.15, ranks: int = 2) -> Sweep:
    return measured(Steps(ranks, common=common, own=own, seed=seed))


def errors(sweep: Sweep) -> list[float]:
    """By how much the profile's slowdown of each clock is wrong, as a share of the time at the highest clock."""
    rows = sorted((float(line.split(",")[2]), float(line.split(",")[3])) for line in csv_of(sweep).split()[1:])
    slowest = rows[-1][1]
    return [time / slowest - GPU.slowdown(round(clock)) / GPU.slowdown(CLOCKS[0]) for clock, time in rows]


@pytest.mark.parametrize("own", [0.0, 0.002, 0.01])
def test_steady_steps_are_measured_once_and_taken_as_measured(own: float) -> None:
    sweep = measured(Steps(4, own=own))
    assert sweep.repeated == 0
    assert not sweep.certainty.varies
    assert str(sweep.certainty) == ""
    times = [1e-6 * reading.stages[0].computing_us for reading in sweep.readings]
    rows = [float(line.split(",")[3]) for line in csv_of(sweep).split()[1:]]
    assert rows == pytest.approx(times, abs=1e-6)


def test_varying_steps_are_measured_again_in_rounds_until_they_are_known_or_it_is_not_worth_it() -> None:
    for seed in SEEDS:
        sweep = varying(seed)
        assert sweep.repeated
        assert sweep.repeated % (2 * len(CLOCKS)) == len(CLOCKS), "as often upwards as downwards"
        assert sweep.certainty.line <= LINE or sweep.certainty.fewest >= LONGEST
        assert len({reading.iterations for reading in sweep.readings}) == 1


@pytest.mark.parametrize(("common", "own", "ranks"), [(0.0, 0.15, 2), (0.3, 0.0, 4), (0.1, 0.3, 4)])
def test_slowdowns_are_known_as_well_as_is_said(common: float, own: float, ranks: int) -> None:
    """For 95 % of all profiles; the estimate of the scatter is an upper one."""
    outside = 0
    for seed in SEEDS:
        sweep = varying(seed, common, own, ranks)
        outside += abs(errors(sweep)[0]) > sweep.certainty.line * GPU.slowdown(CLOCKS[-1])
    assert outside <= 1


def test_clocks_that_load_hides_are_not_chosen_for_their_luck() -> None:
    """Near the highest clock a step of the clock changes less than load does: one by one, some clocks seem faster than
    faster ones. On the line no one does, and the error is a fraction of that of single clocks."""
    alone, together = [], []
    for seed in SEEDS:
        sweep = varying(seed)
        times = [reading.stages[0].computing_us for reading in levelled(sweep.readings)]
        assert times == sorted(times)
        raw = [reading.stages[0].computing_us for reading in sweep.readings]
        truth = [GPU.slowdown(clock) / GPU.slowdown(CLOCKS[0]) for clock in CLOCKS]
        alone += [abs(time / raw[0] - true) for time, true in zip(raw, truth, strict=True)][1:5]
        together += [abs(time / times[0] - true) for time, true in zip(times, truth, strict=True)][1:5]
    assert fmean(together) < 0.25 * fmean(alone)


def test_the_power_at_a_clock_is_known_in_spite_of_load() -> None:
    sweep = varying(1, 0.3, 0.3, 4)
    profile = read_profile(csv_of(sweep), stages=1)
    assert profile is not None
    for line in csv_of(sweep).split()[1:]:
        _, _, clock, time_s, energy_j = map(str, line.split(","))
        assert float(energy_j) / float(time_s) == pytest.approx(GPU.power_w(int(clock)), rel=1e-3)


def test_drift_falls_on_all_clocks_alike() -> None:
    """Steps become a third longer while they vary: measured once from the highest clock down, the lowest would seem
    slower by what had drifted meanwhile."""
    found = [errors(measured(Steps(4, own=0.2, drift=0.3, seed=seed)))[0] for seed in SEEDS]
    assert abs(fmean(found)) < 0.02


def test_the_time_that_measuring_may_take_ends_it_and_what_is_not_known_is_said() -> None:
    limit = replace(RECIPE, most_us=150 * STEP_US)
    sweep = measured(Steps(2, common=0.3), limit)
    assert "limit" in sweep.finished
    assert sweep.certainty.line > LINE
    assert "Steps vary by " in str(sweep.certainty)
    assert f"±{sweep.certainty.line:.1%}" in str(sweep.certainty)


def test_a_restarted_operator_goes_on_with_the_round() -> None:
    sweep = replace(varying(1), recipe=replace(RECIPE, most_us=1))
    assert from_json(to_json(sweep)) is not None
    restored = from_json(to_json(sweep))
    assert restored is not None
    assert (restored.repeated, restored.ended, restored.round) == (sweep.repeated, sweep.ended, sweep.round)
    assert restored.certainty.scatter == pytest.approx(sweep.certainty.scatter, rel=1e-3)


def test_a_clock_with_no_effect_or_all_of_it_stays_within_what_is_possible() -> None:
    """No line rises with the clock, and none falls faster than the clock's period."""
    readings = varying(1).readings
    for exponent in (-0.5, 3.0):
        bent = tuple(
            replace(
                reading,
                stages=tuple(
                    stage.scaled((CLOCKS[0] / reading.clock_mhz) ** exponent / GPU.slowdown(reading.clock_mhz))
                    for stage in reading.stages
                ),
            )
            for reading in readings
        )
        times = [reading.stages[0].computing_us for reading in levelled(bent)]
        work = [time * clock for time, clock in zip(times, CLOCKS, strict=True)]
        assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(times))
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(work))


def test_of_single_iterations_no_scatter_is_claimed() -> None:
    sweep = measured(Steps(2, own=0.3), replace(RECIPE, iterations=1))
    assert sweep.repeated == 0
    assert sweep.certainty.scatter == 0.0
    assert not sweep.certainty.varies


def test_more_clocks_after_some_rounds_are_measured_next() -> None:
    refined = varying(1).refined((1305,))
    assert not refined.finished
    assert refined.clocks_mhz[refined.point] == 1305
