"""When a sweep ends, what it measures on, what is kept of it, and when a profile has drifted. No clock, no I/O."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.profile_sweep import (
    A100,
    CLOCKS,
    RECIPE,
    SCHEDULE,
    SHAPE,
    STAGES,
    Job,
    feed,
    fresh,
    measured,
    run,
)

from perseus_operator.families.training.features.profile.drift import DRIFT_ITERATIONS, Drift
from perseus_operator.families.training.features.profile.reading import Reading, StageReading
from perseus_operator.families.training.features.profile.sweep import (
    MOST_FINER,
    RISES,
    Sweep,
    choose_clocks,
    common_clocks,
    csv_of,
    finer_clocks,
    from_json,
    to_json,
)
from perseus_operator.families.training.work.profile_aggregator import ProfileAggregator
from perseus_solver.model.profile import read_profile


def reading(clock: int, time_us: float, energy_mj: float) -> Reading:
    return Reading(clock, time_us, (StageReading(time_us, energy_mj, {}),))


@settings(deadline=None)
@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=12))
def test_it_ends_when_energy_has_risen_five_times_in_a_row_and_not_before(energies: list[float]) -> None:
    clocks = tuple(range(1000, 1000 - len(energies) - 3, -1))
    sweep = Sweep(clocks, "s", replace(RECIPE, most_slowdown=9.0))
    for clock, energy in zip(clocks, energies, strict=False):
        sweep = sweep.add(reading(clock, 1e6, energy))
    rises = [later > earlier for earlier, later in pairwise(energies)]
    risen = len(rises) >= RISES and all(rises[-RISES:])
    assert bool(sweep.finished) == risen


@given(st.floats(0.0, 3.0), st.integers(0, 2**32))
def test_no_iteration_is_slowed_beyond_the_bound(bound: float, seed: int) -> None:
    """Whatever part of the work depends on the clock."""
    rng = random.Random(seed)
    sweep = Sweep(CLOCKS, "s", replace(RECIPE, most_slowdown=bound))
    share, base_us = rng.random(), 1e6
    while not sweep.finished:
        clock = sweep.clocks_mhz[sweep.point]
        time_us = base_us * (1 - share + share * CLOCKS[0] / clock)
        assert time_us <= base_us * (1 + bound) * (1 + 1e-9)
        sweep = sweep.add(reading(clock, time_us, 1e6 - len(sweep.readings)))
    assert sweep.point == 0, "back at the highest clock"


def test_time_bounds_it_and_too_little_is_said_to_be() -> None:
    job, recipe = Job(), replace(RECIPE, most_us=4_000_000)
    sweep = run(job, fresh(recipe))
    assert "4 s of training" in sweep.finished
    assert 0 < len(sweep.readings) < 6
    assert run(Job(), fresh(replace(RECIPE, most_us=1))).failed
    assert not measured().failed


def test_time_passes_though_nothing_can_be_measured() -> None:
    job, sweep = Job(), fresh(replace(RECIPE, most_us=2_000_000))
    meter = ProfileAggregator(SCHEDULE, SHAPE, RECIPE.iterations)
    for _ in range(100):
        sweep = feed(meter, sweep, [replace(r, durations_us=()) for r in job.step(sweep)])
    assert sweep.failed


@given(st.lists(st.sets(st.integers(210, 2000), min_size=1), min_size=1, max_size=4), st.integers(2, 30))
def test_clocks_are_common_to_all_gpus_descend_and_hold_the_highest(sets: list[set[int]], most: int) -> None:
    chosen = choose_clocks(common_clocks(sets), most)
    common = set.intersection(*sets)
    assert set(chosen) <= common
    assert list(chosen) == sorted(chosen, reverse=True)
    assert len(chosen) == min(most, len(common)) or len(chosen) <= most
    if common:
        assert chosen[0] == max(common)
    assert choose_clocks(common_clocks([]), most) == ()


@given(st.sets(st.integers(210, 2000), min_size=3), st.integers(2, 30), st.data())
def test_finer_clocks_lie_between_the_best_one_and_its_neighbours(
    clocks: set[int], most: int, data: st.DataObject
) -> None:
    common = common_clocks([clocks])
    measured = choose_clocks(common, most)
    best = data.draw(st.sampled_from(measured))
    finer = finer_clocks(common, measured, best)
    assert len(finer) <= MOST_FINER
    assert not set(finer) & set(measured)
    place = measured.index(best)
    around = set(measured[max(place - 1, 0) : place + 2])
    assert all(min(around) < clock < max(around) for clock in finer)
    between = {clock for clock in common if min(around) < clock < max(around)} - set(measured)
    assert bool(finer) == bool(between)


def test_a_refined_sweep_measures_on_where_it_was_and_survives_a_restart() -> None:
    coarse = measured()
    finer = finer_clocks(common_clocks([A100.clocks_mhz]), [r.clock_mhz for r in coarse.readings], CLOCKS[2])
    refined = coarse.refined(finer)
    assert not refined.finished
    assert refined.clocks_mhz[refined.point] == finer[0]
    assert refined.digest != coarse.digest
    assert refined.fits(fresh())
    assert from_json(to_json(refined)) == refined
    whole = run(Job(), refined)
    assert [reading.clock_mhz for reading in whole.readings] == list(refined.clocks_mhz)
    assert whole.finished == "all clocks are measured"
    for table in read_profile(csv_of(whole), stages=STAGES).tables.values():
        assert set(finer) < set(table.frequency_mhz.tolist())


def test_what_is_kept_of_another_release_or_damaged_is_measured_again() -> None:
    text = to_json(measured())
    assert from_json(text) is not None
    for damaged in (
        text[:-5],
        text.replace('"format":1', '"format":2'),
        "{}",
        "[]",
        "null",
        text.replace("1410", "1409", 1),
    ):
        assert from_json(damaged) is None


def test_drift_counts_after_many_iterations_in_all_pipelines_alike() -> None:
    drift = Drift()
    for _ in range(DRIFT_ITERATIONS - 1):
        drift = drift.observe({0: (1.0, 1.2), 1: (1.01, 1.15)})
    assert not drift.persistent
    between = drift.observe({0: (1.0, 1.07), 1: (1.0, 1.07)})
    assert between.iterations == drift.iterations, "between the thresholds what was said last holds"
    assert drift.observe({0: (1.0, 1.2), 1: (1.0, 1.0)}).iterations == 0, "one pipeline is a straggler"
    assert drift.observe({0: (1.0, 1.2), 1: (1.0, 0.8)}).iterations == 0, "they do not agree"
    assert drift.observe({}) == drift, "nothing was told"
    told = drift.observe({0: (1.0, 1.2), 1: (1.01, 1.15)})
    assert told.persistent
    assert (told.stage, told.pace) == (1, 1.15)
    faster = Drift()
    for _ in range(DRIFT_ITERATIONS):
        faster = faster.observe({0: (0.7, 1.0)})
    assert faster.persistent, "a profile that is too slow wastes as much"


def test_drift_rests_after_a_remeasurement() -> None:
    drift = Drift(rest=10)
    for _ in range(10 + DRIFT_ITERATIONS - 1):
        drift = drift.observe({0: (1.5,)})
    assert not drift.persistent
    assert drift.observe({0: (1.5,)}).persistent
