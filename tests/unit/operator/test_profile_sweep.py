"""What is measured of a running job: laws of the sweep, of its meter, and of what they come to. No clock, no I/O."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.profile_sweep import (
    A100,
    CLOCKS,
    FORWARD_US,
    PIPELINES,
    RECIPE,
    SCHEDULE,
    SHAPE,
    STAGES,
    WEIGHTS,
    Job,
    feed,
    fresh,
    measured,
    power_w,
    run,
    slowdown,
)

from perseus_core.evidence import Evidence
from perseus_core.gpus import BACKWARD_RATIO
from perseus_core.instruction import InstructionKind
from perseus_core.iteration import IterationReport
from perseus_operator.families.training.features.profile.reading import Reading, StageReading
from perseus_operator.families.training.features.profile.sweep import (
    QUIET_US,
    Sweep,
    blocking_power,
    csv_of,
    from_json,
    to_json,
)
from perseus_operator.families.training.work.profile_aggregator import JobShape, ProfileAggregator
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule


@pytest.fixture(scope="module")
def calm() -> str:
    """What is measured so."""
    return csv_of(measured())


# ------------------------------------------------------------------------------------------------ what it comes to
def test_times_and_energies_are_those_of_the_gpus(calm: str) -> None:
    profile = read_profile(calm, stages=STAGES)
    for (stage, kind, _), table in profile.tables.items():
        ratio = 1.0 if kind is InstructionKind.FORWARD else BACKWARD_RATIO
        for clock, time_s, energy_j in zip(table.frequency_mhz, table.time_s, table.energy_j, strict=True):
            want_s = 1e-6 * FORWARD_US * WEIGHTS[stage] * ratio * slowdown(int(clock))
            assert time_s == pytest.approx(want_s, rel=1e-4)
            assert energy_j == pytest.approx(want_s * power_w(int(clock)), rel=1e-3)


def test_blocking_power_is_found_with_them() -> None:
    assert blocking_power(measured().readings).watts == pytest.approx(A100.blocking_power_w, rel=1e-3)
    assert blocking_power(run(Job(noise=0.05), fresh()).readings).watts == pytest.approx(
        A100.blocking_power_w, rel=0.05
    )


def test_the_clock_that_was_really_reached_is_stored_if_every_agent_reads_it() -> None:
    """A power limit of a clock of 1,200 MHz, on a GPU that says so."""

    def swept(clock_of: Callable[[int], int | None]) -> Sweep:
        job, sweep = Job(), fresh()
        meter = ProfileAggregator(SCHEDULE, SHAPE, sweep.recipe.iterations)
        while not sweep.finished:
            clock = clock_of(sweep.clocks_mhz[sweep.point])
            evidence = None if clock is None else Evidence(clock_mhz=clock)
            sweep = feed(meter, sweep, [replace(report, evidence=evidence) for report in job.step(sweep)])
        return sweep

    limited = swept(lambda clock: min(clock, 1200))
    header, *rows = csv_of(limited).splitlines()
    assert header.endswith(",energy,reached")
    for row in rows:
        requested, reached = int(row.split(",")[2]), int(row.split(",")[-1])
        assert reached == min(requested, 1200)
    assert from_json(to_json(limited)) == limited
    assert read_profile(csv_of(limited), stages=STAGES)
    unknown = swept(lambda clock: None)
    assert csv_of(unknown).splitlines()[0].endswith(",energy")
    partly = swept(lambda clock: clock if clock > 1200 else None)
    assert csv_of(partly).splitlines()[0].endswith(",energy"), "a column with gaps would be none"


def interpolated(sweep: Sweep, mixed: float, *, quiet_us: int) -> tuple[Reading, ...]:
    """As a slow counter shows it: waits got a share of the energy of computing; some of them are seen by themselves."""

    def seen(stage: StageReading) -> StageReading:
        means = {key: replace(mean, energy_mj=mean.energy_mj * (1 - mixed)) for key, mean in stage.means.items()}
        return replace(stage, means=means, quiet_us=quiet_us, quiet_mj=round(quiet_us * A100.blocking_power_w / 1e3))

    return tuple(replace(reading, stages=tuple(map(seen, reading.stages))) for reading in sweep.readings)


def test_power_measured_in_waits_counts_and_otherwise_an_upper_bound() -> None:
    enough_us = QUIET_US // (len(measured().readings) * STAGES) + 1
    seen = blocking_power(interpolated(measured(), 0.05, quiet_us=enough_us))
    assert seen.watts == pytest.approx(A100.blocking_power_w, rel=1e-3)
    assert f"draws {seen.watts:.1f} W" in str(seen)
    for quiet_us in (0, enough_us // 2):
        bound = blocking_power(interpolated(measured(), 0.05, quiet_us=quiet_us))
        assert not bound.measured
        assert bound.watts > 1.2 * A100.blocking_power_w
        assert f"at most {bound.watts:.1f} W" in str(bound)

    profile = read_profile(
        csv_of(replace(measured(), readings=interpolated(measured(), 0.05, quiet_us=enough_us))), stages=2
    )
    for (stage, kind, _), table in profile.tables.items():
        true = read_profile(csv_of(measured()), stages=2).tables[stage, kind, 0]
        assert table.energy_j == pytest.approx(true.energy_j, rel=2e-3), "which mends the energies, too"


def test_what_is_seen_of_waits_adds_up_over_ranks_and_iterations() -> None:
    job, sweep = Job(), fresh()
    meter = ProfileAggregator(SCHEDULE, SHAPE, sweep.recipe.iterations)
    while not sweep.readings:
        sweep = feed(meter, sweep, [replace(report, quiet_us=1000, quiet_mj=84) for report in job.step(sweep)])
    (reading,) = sweep.readings
    each = PIPELINES * RECIPE.iterations
    assert [(stage.quiet_us, stage.quiet_mj) for stage in reading.stages] == [(1000 * each, 84 * each)] * STAGES
    assert from_json(to_json(sweep)) == sweep
    older = to_json(sweep).replace(f'"quiet_us":{1000 * each},"quiet_mj":{84 * each},', "")
    kept = from_json(older)
    assert kept is not None, "an operator before this one kept none of it"
    assert kept.readings[0].stages[0].quiet_us == 0


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_energy_adds_up_however_badly_it_was_split(data: Any) -> None:
    """Σ n·e + P·waiting is the iteration's energy, though the counter mixed instructions with waiting."""
    sweep = measured()
    blur = data.draw(st.floats(0.05, 1.6))

    def blurred(stage: StageReading) -> StageReading:
        means = {key: replace(mean, energy_mj=mean.energy_mj * blur) for key, mean in stage.means.items()}
        return replace(stage, means=means)

    readings = tuple(replace(r, stages=tuple(map(blurred, r.stages))) for r in sweep.readings)
    profile = read_profile(csv_of(replace(sweep, readings=readings)), stages=STAGES)
    power_w = blocking_power(readings).watts
    for index, reading in enumerate(readings):
        for stage, own in enumerate(reading.stages):
            tables = [profile.tables[stage, kind, 0] for kind in (InstructionKind.FORWARD, InstructionKind.BACKWARD)]
            energies_j = [float(table.energy_j[index]) for table in tables]
            assert min(energies_j) > 0
            waiting_j = power_w * (own.time_us - own.computing_us) / 1e6
            assert 3 * sum(energies_j) + waiting_j == pytest.approx(own.energy_mj / 1e3, rel=1e-5)


def test_chunks_are_measured_apart() -> None:
    schedule = build_schedule("interleaved-1f1b", stages=2, microbatches=2, chunks=2)
    meter = ProfileAggregator(schedule, JobShape(1, 2, 1), 1)
    meter.begin(0, 0)
    reading = None
    for iteration in range(2):
        for stage in range(2):
            kinds = schedule.of_stage(stage)
            times = [1000 * (1 + chunk) for _, _, chunk in kinds]
            report = IterationReport(
                0, stage, 0, iteration, 20_000, 20_000, 1_000, 0, times, [10] * len(kinds), iteration + 1
            )
            reading = meter.observe(report, 1000) or reading
    assert reading is not None
    text = csv_of(replace(fresh(), clocks_mhz=(1000,), readings=(reading,)))
    assert text.startswith("stage,instruction,frequency,time,energy,chunk\n")
    profile = read_profile(text, stages=2)
    assert [float(profile.tables[0, InstructionKind.FORWARD, chunk].time_s[0]) for chunk in (0, 1)] == [0.001, 0.002]


# --------------------------------------------------------------------------------------------- whatever happens
def interleavings(reports: list[list[IterationReport]], rng: random.Random) -> list[IterationReport]:
    """Any order in which every rank's own reports keep theirs."""
    streams: dict[tuple[int, int], Iterator[IterationReport]] = {}
    for key in {(r.dp, r.stage) for step in reports for r in step}:
        streams[key] = iter([r for step in reports for r in step if (r.dp, r.stage) == key])
    found = []
    while streams:
        key = rng.choice(sorted(streams))
        report = next(streams[key], None)
        if report is None:
            del streams[key]
        else:
            found.append(report)
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_order_of_reports_among_ranks_does_not_matter(seed: int) -> None:
    rng, job, sweep = random.Random(seed), Job(noise=0.05), fresh()
    steps = [job.step(sweep) for _ in range(8)]
    meters = [ProfileAggregator(SCHEDULE, SHAPE, RECIPE.iterations) for _ in range(2)]
    told = [report for step in steps for report in step]
    plain, mixed = feed(meters[0], sweep, told), feed(meters[1], sweep, interleavings(steps, rng))
    assert plain.readings[:1] == mixed.readings[:1] != ()


def test_an_iteration_whose_energy_one_rank_does_not_know_counts_nowhere() -> None:
    """Its instructions have their means all the same: what the iteration took would be too low by a whole GPU."""
    job, sweep = Job(), fresh()
    meter = ProfileAggregator(SCHEDULE, SHAPE, RECIPE.iterations)
    meter.begin(sweep.point)
    for _ in range(4 * RECIPE.iterations):
        first, *others = job.step(sweep)
        for one in (replace(first, energy_mj=None), *others):
            assert meter.observe(one, sweep.clocks_mhz[0]) is None
    assert meter.counted == 0
    assert meter.rejection == "the GPU of dp 0, stage 0 has no energy counter"


def test_instructions_that_run_at_the_same_time_are_not_measured() -> None:
    """Source: ``OVERLAP_F_B`` of pytorch/pytorch pull request 159591, run by a custom function on two threads."""
    job, sweep = Job(), fresh()
    meter = ProfileAggregator(SCHEDULE, SHAPE, RECIPE.iterations)
    meter.begin(sweep.point)
    first, *_ = job.step(sweep)
    overlapped = replace(first, instruction_energies_mj=array("I"), energy_iterations=0)
    assert meter.observe(overlapped, sweep.clocks_mhz[0]) is None
    assert meter.rejection.startswith("instructions of dp 0, stage 0 run at the same time")


event = st.sampled_from(["step", "step", "step", "step", "operator", "pods", "lease", "lost", "deviate", "counter"])


@settings(max_examples=60, deadline=None)
@given(st.lists(event, max_size=60), st.integers(0, 2**32))
def test_restarts_and_gaps_change_nothing(calm: str, events: list[str], seed: int) -> None:
    rng, job, sweep = random.Random(seed), Job(), fresh()
    meter = ProfileAggregator(SCHEDULE, SHAPE, RECIPE.iterations)
    for happens in events:
        if sweep.finished:
            break
        if happens == "operator":  # what was kept is all that is left
            kept = from_json(to_json(sweep))
            assert kept == sweep
            sweep, meter = kept, ProfileAggregator(SCHEDULE, SHAPE, RECIPE.iterations)
        elif happens == "pods":
            job.restart()
        elif happens == "lease":  # at default clocks for a while
            reports = [replace(report, point=None) for report in job.step(sweep)]
            job._energies.clear()
            sweep = feed(meter, sweep, reports)
        elif happens == "lost":
            reports = job.step(sweep)
            sweep = feed(meter, sweep, rng.sample(reports, len(reports) - 1))
        elif happens == "deviate":
            reports = [replace(r, durations_us=()) for r in job.step(sweep)]
            sweep = feed(meter, sweep, reports)
            assert "does not follow its schedule" in meter.rejection
        elif happens == "counter":
            silent = {"energy_mj": None, "instruction_energies_mj": (), "energy_iterations": 0}
            reports = [replace(r, **silent) for r in job.step(sweep)]
            sweep = feed(meter, sweep, reports)
            assert "no energy counter" in meter.rejection
        else:
            sweep = feed(meter, sweep, job.step(sweep))
    done = run(job, sweep)
    ours, theirs = read_profile(csv_of(done)), read_profile(calm)
    assert ours.tables.keys() == theirs.tables.keys()
    for key, table in ours.tables.items():
        assert np.array_equal(table.frequency_mhz, theirs.tables[key].frequency_mhz)
        assert table.time_s == pytest.approx(theirs.tables[key].time_s, rel=1e-6)
        # The agent's means are whole millijoules, so what is told apart from them is off by some.
        assert table.energy_j == pytest.approx(theirs.tables[key].energy_j, rel=0.005)


def test_the_first_iteration_of_a_clock_never_counts() -> None:
    job, sweep = Job(), fresh()
    meter = ProfileAggregator(SCHEDULE, SHAPE, RECIPE.iterations)
    slow = [replace(r, durations_us=[10 * us for us in r.durations_us]) for r in job.step(sweep)]
    sweep = feed(meter, sweep, slow)
    for _ in range(RECIPE.iterations):
        assert not sweep.readings
        sweep = feed(meter, sweep, job.step(sweep))
    assert sweep.readings == measured().readings[:1]


def test_new_processes_whose_count_goes_on_by_chance_are_no_neighbours_of_the_old() -> None:
    job, sweep, meter = Job(), fresh(), ProfileAggregator(SCHEDULE, SHAPE, RECIPE.iterations)
    for _ in range(2):
        sweep = feed(meter, sweep, job.step(sweep))
    assert meter.counted == 1
    job.restart()
    for _ in range(2):  # at default clocks, until the clock is selected again
        sweep = feed(meter, sweep, [replace(report, point=None) for report in job.step(sweep)])
    job._energies.clear()
    sweep = feed(meter, sweep, job.step(sweep))
    assert meter.counted == 1, "iteration 2 follows no iteration 1 of its own at this clock"
    sweep = feed(meter, sweep, job.step(sweep))
    assert len(sweep.readings) == 1


def test_a_slow_pipeline_of_several_does_not_count() -> None:
    shape = JobShape(3, STAGES, 1)
    meter, sweep = ProfileAggregator(SCHEDULE, shape, 2), fresh()
    meter.begin(0, 0)
    job, reading = Job(), None
    for _ in range(3):
        for report in job.step(sweep, [(p, s) for p in range(3) for s in range(STAGES)]):
            slow = 3 if report.dp == 1 else 1
            told = replace(report, durations_us=[slow * us for us in report.durations_us])
            reading = meter.observe(told, CLOCKS[0]) or reading
    assert reading is not None
    assert reading.stages[0].means["forward", 0].time_us == pytest.approx(FORWARD_US, rel=1e-4)
