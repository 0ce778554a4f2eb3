"""Laws of the replay, and of calibration and straggler detection on real training runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.detector_replay import DetectorReplay

from perseus_solver.calibration import Calibration, Trace, calibrate, read_trace
from perseus_solver.calibration.replay import Replay
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.frontier import Planner, solve_deadline
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import Schedule, build_schedule
from perseus_solver.stragglers import Thresholds

pytestmark = pytest.mark.usefixtures("short_search")

# Held-out mean absolute error in per cent, with less than a third of the plans used for fitting.
LIMIT_PERCENT = {
    "gpt3-1.3b_a100_pp4_mb128": 0.05,
    "bert-1.3b_a100_pp4_mb32": 0.2,
    "wide-resnet-1.5b_a40_pp8_mb48": 0.4,
}
each_run = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("wide-resnet")) for name in LIMIT_PERCENT],
)
FACTORS = (1.05, 1.1, 1.2, 1.5)


@cache
def measured(folder: Path, name: str) -> tuple[Trace, Calibration]:
    stem = folder / "traces" / name
    trace = read_trace(Path(f"{stem}.instructions.csv.gz"), Path(f"{stem}.iterations.csv"), "1f1b")
    return trace, calibrate(trace)


@each_run
def test_real_iterations_are_predicted(sosp24: Path, name: str) -> None:
    trace, found = measured(sosp24, name)
    assert found.explains
    assert 3 * found.quality.plans_fitted <= np.unique(trace.plan).size
    assert found.quality.heldout_mape_percent is not None
    assert found.quality.heldout_mape_percent <= LIMIT_PERCENT[name]
    assert found.quality.replay_mape_percent > 1.3


@each_run
def test_real_iterations_raise_no_alarm_and_hide_no_straggler(sosp24: Path, name: str) -> None:
    trace, found = measured(sosp24, name)
    assert found.thresholds is not None
    assert found.least_slowdowns is not None
    replayed = DetectorReplay(trace, found.thresholds)
    assert replayed.iterations == trace.plan.size
    assert replayed.false_alarms() == 0
    least = max(found.least_slowdowns)
    assert least < min(FACTORS)
    for factor in (least, *FACTORS):
        outcome = replayed.slow_down(factor)
        assert outcome.found == outcome.onsets > 200
        assert outcome.slowdown_error < 0.02


@each_run
def test_without_a_calibration_neither_where_scatter_is_measured_on_the_run(sosp24: Path, name: str) -> None:
    trace, _ = measured(sosp24, name)
    stages = trace.schedule.stages
    replayed = DetectorReplay(trace, Thresholds((1.05,) * stages, (1.02,) * stages), learns=True)
    assert replayed.false_alarms() == 0
    for factor, share in ((1.1, 0.99), (1.2, 1.0)):  # after three healthy iterations, little is known of scatter
        outcome = replayed.slow_down(factor)
        assert outcome.found >= share * outcome.onsets > 200
        assert outcome.slowdown_error < 0.02


# ------------------------------------------------------------------------------------------------------------ replay


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, np.random.Generator]:
    name = draw(st.sampled_from(["1f1b", "GPipe", "ZBH1", "Interleaved1F1B", "DualPipe", "EarlyRecompute1F1B"]))
    stages = 2 * draw(st.integers(1, 3))
    microbatches = stages * draw(st.integers(2, 4))
    chunks = 2 if name == "Interleaved1F1B" else None
    schedule = build_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    return schedule, np.random.default_rng(draw(st.integers(0, 2**32 - 1)))


@settings(max_examples=40, deadline=None)
@given(runs())
def test_replay_is_the_simulator_and_crossings_are_its_gradient(run: tuple[Schedule, np.random.Generator]) -> None:
    schedule, random = run
    replay = Replay(schedule)
    duration_s = random.uniform(0.05, 0.2, size=(4, schedule.instructions))
    delay_s = random.uniform(0, 0.02, size=replay.parameters)
    time_s, crossed = replay.crossings(duration_s, delay_s)
    assert replay.time_s(duration_s, delay_s) == pytest.approx(time_s)

    before, after = schedule.edges()
    stage = schedule.stage
    of_pair = dict(zip(replay.pairs, delay_s, strict=False))
    gap_s = delay_s[len(replay.pairs) :]
    edge_s = [
        gap_s[a] if a == b else of_pair[a, b]
        for a, b in zip(stage[before].tolist(), stage[after].tolist(), strict=True)
    ]
    problem = Problem(
        schedule=schedule,
        options=(),
        option_of=np.zeros(schedule.instructions, dtype=np.int32),
        edge_from=before,
        edge_to=after,
        edge_delay_s=np.array(edge_s),
        stage_offset=schedule.stage_offset,
        blocking_power_w=0.0,
    )
    end_s = _ends(problem, duration_s)
    assert time_s == pytest.approx(end_s.max(axis=1))

    # Linear along the critical path, and no path is longer than the makespan.
    other_s = random.uniform(0, 0.02, size=replay.parameters)
    assert (replay.time_s(duration_s, other_s) >= time_s + crossed @ (other_s - delay_s) - 1e-9).all()
    near = 1e-9
    for j in range(replay.parameters):
        moved = delay_s.copy()
        moved[j] += near
        assert replay.time_s(duration_s, moved) == pytest.approx(time_s + near * crossed[:, j], abs=1e-13, rel=0)


def _ends(problem: Problem, duration_s: np.ndarray) -> np.ndarray:
    """Longest paths by relaxing every edge until nothing changes."""
    end = duration_s.copy()
    while True:
        ready = end[:, problem.edge_from] + problem.edge_delay_s
        start = np.zeros_like(end)
        np.maximum.at(start.T, problem.edge_to, ready.T)
        later = start + duration_s
        if np.allclose(later, end, rtol=0, atol=1e-15):
            return end
        end = later


# ------------------------------------------------------------------------------------------------- the slowdown bound

STAGES, MICROBATCHES, BLOCKING_W, BOUND = 4, 12, 60.0, 1.05
PROFILE = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{stage},{what},{clock},"
    f"{work * weight * (0.3 + 0.7 * 1400 / clock):.6f},{work * weight * (40 + 260 * (clock / 1400) ** 2.2):.6f}\n"
    for stage, weight in enumerate((1.0, 1.1, 0.95, 1.15))
    for what, work in (("forward", 0.05), ("backward", 0.1))
    for clock in range(1400, 700, -25)
)


def test_a_bound_holds_with_calibration_and_not_without() -> None:
    random = np.random.default_rng(5)
    profile = read_profile(PROFILE)
    schedule = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
    bare = build_problem(profile, schedule, blocking_power_w=BLOCKING_W)
    planned = Simulator(bare)
    truth = Simulator(build_problem(profile, schedule, blocking_power_w=BLOCKING_W, delay_s=0.006, overhead_s=0.1))

    def run(choice: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray]:
        """Measured times and durations: a per cent of scatter, and now and then a much slower instruction."""
        scatter = random.normal(1, 0.01, size=(iterations, schedule.instructions))
        scatter += random.random(scatter.shape) ** 200 * 0.3
        duration_s = truth.duration_s(choice) * scatter
        time_s = truth.end_s(duration_s).max(axis=1) + truth.problem.overhead_s
        return time_s * random.normal(1, 0.001, size=iterations), duration_s

    limit_s = BOUND * float(np.median(run(all_maximum(bare), 50)[0]))
    planner = Planner(bare)
    plans = [planned.choice_of(point.frequencies_mhz) for point in planner.frontier(10)]
    seen = [run(plan, 12) for plan in plans]
    fitted = calibrate(
        Trace(
            schedule,
            np.repeat(np.arange(len(plans), dtype=np.int32), 12),
            np.concatenate([duration_s for _, duration_s in seen]),
            np.concatenate([time_s for time_s, _ in seen]),
        ),
        train_fraction=None,
        planned_s=np.repeat([planned.duration_s(plan) for plan in plans], 12, axis=0),
    )
    real = build_problem(profile, schedule, blocking_power_w=BLOCKING_W, calibration=fitted)
    held = {}
    for name, point in (
        ("with", solve_deadline(real, fitted.deadline_s(limit_s))),
        ("without", planner.plan(limit_s)),
    ):
        time_s, _ = run(planned.choice_of(point.frequencies_mhz), 1000)
        held[name] = float(np.mean(time_s <= limit_s))
    assert held["with"] >= 0.99
    assert held["without"] < 0.5
    assert fitted.deadline_s(limit_s) > 0.96 * limit_s  # the bound is used, not evaded
