"""What the planner makes of iterations that ranks made up: numbers that are equal, fall, shrink or are as large as they
may be. Nothing ends it, what it keeps is bounded, and what cannot be known is unknown."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perseus_core.evidence import Evidence
from perseus_core.gpus import curves_of
from perseus_core.iteration import IterationReport
from perseus_operator.api.job import Straggler, StragglerMode
from perseus_operator.clients.agents.validation import MAX_ITERATION, MAX_TIME_US, is_valid_report
from perseus_operator.errors import InvalidProfile
from perseus_operator.families.training.features.bound.guard import (
    Bound,
    Guard,
    baseline_wanted,
    exceeding,
    judge,
    least_excess,
    scatter_of,
)
from perseus_operator.families.training.features.profile.estimate import distance, estimate
from perseus_operator.families.training.features.profile.sweep import (
    Recipe,
    Sweep,
    blocking_power,
    csv_of,
    from_json,
    to_json,
)
from perseus_operator.families.training.features.stragglers.detector import MAX_SLOWDOWN, StragglerDetector
from perseus_operator.families.training.work.profile_aggregator import JobShape, ProfileAggregator
from perseus_operator.families.training.work.profiler import parse_profile
from perseus_operator.nodes.iterations import KEPT, History, JobIteration, summarise
from perseus_solver.schedules import build_schedule

SPEC = Straggler(mode=StragglerMode.AUTOMATIC, slowdown_threshold="5%", recovery_threshold="2%", confirm_iterations=2)
PIPELINES, STAGES, MICROBATCHES = 2, 2, 2
SCHEDULE = build_schedule("1F1B", stages=STAGES, microbatches=MICROBATCHES)
WORDS = 2 * MICROBATCHES
NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 2**31, MAX_ITERATION - 1]) | st.integers(0, 9)
"""Of iterations: they repeat, fall, and leap."""
TIMES = st.sampled_from([1, 2, 1_000_000, MAX_TIME_US]) | st.integers(1, MAX_TIME_US)
DURATIONS = st.sampled_from([1, 2, 1_000_000, 2**32 - 1]) | st.integers(1, 2**32 - 1)
ENERGIES = st.sampled_from([0, 1, 2**32 - 1]) | st.integers(0, 2**32 - 1)
CLOCKS = (1410, 1200, 900)
POINTS = st.none() | st.sampled_from([0, 0, 0, 1, 2**32 - 1])


@st.composite
def iterations(draw: st.DrawFn) -> list[IterationReport]:
    """The reports of both pipelines, as far as they are believed."""
    found = []
    for number in draw(st.lists(NUMBERS, max_size=12) | st.just(list(range(12)))):
        point = draw(POINTS)
        for dp in range(PIPELINES):
            time_us = draw(TIMES)
            span_us = draw(st.sampled_from([1, time_us]) | TIMES)
            found.append(IterationReport(dp, 0, 0, number, time_us, span_us, draw(st.none() | ENERGIES), point))
    return [report for report in found if is_valid_report(report)]


def seen(reports: list[IterationReport]) -> list[JobIteration]:
    history = History(PIPELINES, 1)
    done = [iteration for report in reports if (iteration := history.add(report)) is not None]
    assert len(history.recent) <= KEPT
    return done


LEAP = [
    IterationReport(dp, 0, 0, number, time_us, 1, None, 0)
    for number, time_us in enumerate([1, MAX_TIME_US, MAX_TIME_US, MAX_TIME_US])
    for dp in range(PIPELINES)
]
"""From a microsecond to a week: of one change it is not known how seldom it is."""


@given(iterations(), st.floats(1.0, MAX_TIME_US), st.sampled_from([math.inf, 1.0, 64.0]))
@example(LEAP, 1.0, math.inf)
def test_a_plan_is_withdrawn_or_not_whatever_times_are_reported(
    reports: list[IterationReport], bound_us: float, reference: float
) -> None:
    done, bound = seen(reports), Bound(bound_us, iterations=reference)
    scatter = scatter_of(done)
    assert scatter >= 0
    excess = least_excess(scatter, bound, confirm=2)
    assert excess is None or excess > 0
    assert exceeding(done, bound, scatter=scatter, confirm=2) == [] or scatter < math.inf
    guard = judge(Guard(), done, bound=bound, scatter=scatter, confirm=2, furthest=9, now_s=1.0, wall_s=1.0)
    assert guard.measured_us <= MAX_TIME_US
    assert 20 <= baseline_wanted(20, done) <= 1_000
    measured = summarise(done)
    assert measured is None or 1 <= measured.time_us <= MAX_TIME_US


@given(iterations(), st.sets(st.integers(0, 1)))
@example(LEAP, set())
def test_stragglers_have_a_slowdown_within_its_bounds_whatever_spans_are_reported(
    reports: list[IterationReport], evident: set[int]
) -> None:
    detector = StragglerDetector()
    for iteration in seen(reports):
        detector.observe(iteration, dict.fromkeys(range(PIPELINES), 1_000), SPEC, slowed_pipelines=evident)
        assert all(1 < slowdown <= MAX_SLOWDOWN for slowdown in detector.slowdowns.values())
        assert detector.spread.margin >= 1
        assert all(0 < factor < math.inf for factor in detector.spread.factors.values())
        least = detector.least_slowdown
        assert least is None or least > 1


@st.composite
def sweeps(draw: st.DrawFn) -> Sweep:
    """What has been measured at some clocks, of ranks that follow their schedule and nothing else."""
    sweep = Sweep(CLOCKS, "digest", Recipe(draw(st.integers(1, 3)), 1e9, 10**15))
    meter, number = ProfileAggregator(SCHEDULE, JobShape(1, STAGES, 1), sweep.recipe.iterations), 0
    for _ in range(40):
        if sweep.finished:
            break
        meter.begin(sweep.point, sweep.measured)
        number = draw(st.sampled_from([number + 1] * 9 + [0, number, 2**40]))
        for stage in range(STAGES):
            durations = array("I", draw(st.lists(DURATIONS, min_size=WORDS, max_size=WORDS)))
            energies = array("I", draw(st.lists(ENERGIES, min_size=WORDS, max_size=WORDS)))
            time_us, energy_mj = draw(TIMES), draw(ENERGIES)
            report = IterationReport(0, stage, 0, number, time_us, 1, energy_mj, sweep.point, durations, energies, 1)
            quiet = {"quiet_us": draw(st.sampled_from([0, time_us])), "quiet_mj": draw(st.sampled_from([0, energy_mj]))}
            clock_mhz = draw(st.sampled_from([None, 1, sweep.clocks_mhz[sweep.point], 2**32 - 1]))
            report = replace(report, **quiet, evidence=Evidence(clock_mhz=clock_mhz))
            if is_valid_report(report):
                reading = meter.observe(report, sweep.clocks_mhz[sweep.point])
                if reading is not None:
                    sweep = sweep.add(reading)
                    break
    return sweep


@settings(max_examples=50)
@given(sweeps())
def test_a_sweep_makes_a_profile_or_a_refusal_whatever_ranks_report(sweep: Sweep) -> None:
    if not sweep.readings:
        return
    assert from_json(to_json(sweep)) is not None, "what is stored is read again"
    assert 0 <= blocking_power(sweep.readings).watts < math.inf
    known = sweep.certainty
    assert known.scatter >= 0
    assert known.line >= 0, "infinite of one clock"
    curves = curves_of("NVIDIA A100-SXM4-80GB")
    assert curves is not None
    for csv in (csv_of(sweep), estimate(sweep.readings[0], curves).csv):
        assert "nan" not in csv
        assert "inf" not in csv
        try:
            parse_profile(csv.encode(), STAGES)
        except InvalidProfile:
            continue
    times_us = {(n, *key): {1410: 1.0} for n, stage in enumerate(sweep.readings[0].stages) for key in stage.means}
    apart = distance(sweep.readings[0], times_us)
    assert apart is None or 0 <= apart < math.inf


@pytest.mark.parametrize("field", ["iteration_time_us", "clock_mhz", "time_us", "energy_mj"])
def test_a_stored_sweep_of_numbers_that_cannot_be_is_measured_anew(field: str) -> None:
    stage = {"time_us": 7.0, "energy_mj": 8.0, "means": [["forward", 0, 1, 7.0, 8.0]]}
    reading = {"clock_mhz": 1410, "iteration_time_us": 9.0, "stages": [stage]}
    recipe = {"iterations": 1, "most_slowdown": 1.0, "most_us": 9}
    sweep = {"clocks_mhz": [1410], "schedule": "s", "recipe": recipe, "readings": [reading], "format": 1}
    assert from_json(json.dumps(sweep)) is not None
    for number in ("NaN", "Infinity", "-1", "1e999", '"1"', "null", "[]", "true", "1" * 400):
        written = json.dumps(sweep).replace(f'"{field}": {({**stage, **reading})[field]}', f'"{field}": {number}')
        assert written != json.dumps(sweep)
        assert from_json(written) is None, number
