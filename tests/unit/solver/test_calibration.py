"""Calibration of synthetic runs with known delays: what it finds, what it refuses, and how a problem uses it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.made_up_runs import (
    GAP_S,
    MESSAGE_S,
    MICROBATCHES,
    OVERHEAD_S,
    PROFILE,
    SCHEDULE,
    STAGES,
    durations,
    run,
    truth_s,
)

from perseus_solver.calibration import Calibration, Trace, calibrate, calibrate_against_rivals, predict_s
from perseus_solver.calibration.estimate import replay_s
from perseus_solver.errors import InvalidCalibration, InvalidProblem, InvalidTrace
from perseus_solver.frontier import solve_frontier
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import Schedule, build_schedule


@pytest.fixture(scope="module")
def calibrated() -> Calibration:
    return calibrate(run())


def test_exact_runs_are_predicted_exactly_and_the_truth_lies_in_the_intervals(calibrated: Calibration) -> None:
    assert calibrated.explains
    assert calibrated.quality.plans_fitted == 19  # of 60, rounded down from 19.8
    assert calibrated.quality.heldout_mape_percent is not None
    assert calibrated.quality.heldout_mape_percent < 0.02
    assert calibrated.quality.replay_mape_percent > 5
    assert calibrated.parameters is not None
    widened = 5e-4  # the run is noiseless, so intervals are as narrow as the search stops
    found = calibrated.parameters
    for estimate, true_s in (
        (found.overhead, OVERHEAD_S),
        *((edge.estimate, MESSAGE_S[edge.from_stage, edge.to_stage]) for edge in found.edges),
        *((gap.estimate, GAP_S[gap.from_stage]) for gap in found.gaps),
    ):
        assert estimate.low_s <= estimate.value_s <= estimate.high_s
        assert estimate.low_s - widened <= true_s <= estimate.high_s + widened


def test_unseen_plans_of_another_kind_are_predicted(calibrated: Calibration) -> None:
    plan, duration_s = durations(5, 1, 0.0, seed=99)
    unseen = Trace(SCHEDULE, plan, duration_s, truth_s(duration_s))
    assert predict_s(calibrated, unseen) == pytest.approx(unseen.iteration_time_s, rel=1e-3)


def test_outliers_do_not_move_the_fit() -> None:
    honest = run()
    disturbed = honest.iteration_time_s.copy()
    disturbed[::10] *= 1.4  # a checkpoint, an evaluation
    found = calibrate(dataclasses.replace(honest, iteration_time_s=disturbed))
    assert found.quality.heldout_median_percent is not None
    assert found.quality.heldout_median_percent < 0.05
    assert predict_s(found, honest) == pytest.approx(honest.iteration_time_s, rel=2e-3)


def test_noise_is_measured() -> None:
    quiet, loud = (calibrate(run(scatter=scatter)) for scatter in (0.005, 0.02))
    assert len(quiet.noise) == 2 * STAGES
    for one, other in zip(quiet.noise, loud.noise, strict=True):
        assert one.instruction_low_percent <= one.instruction_percent <= one.instruction_high_percent
        assert one.instruction_percent == pytest.approx(0.5, rel=0.4)
        assert other.instruction_percent == pytest.approx(2.0, rel=0.4)
        assert one.iteration_percent < one.instruction_percent
    assert quiet.stage_noise is not None
    assert loud.stage_noise is not None
    assert max(quiet.stage_noise) < min(loud.stage_noise)
    assert quiet.allowance < loud.allowance < 0.1


def test_plans_that_ran_once_show_no_noise() -> None:
    found = calibrate(run(each=1))
    assert found.noise == ()
    assert found.stage_noise is None
    assert found.thresholds is None
    assert Calibration.from_json(found.to_json()) == found


def test_a_run_that_the_graph_does_not_explain_gets_no_parameters() -> None:
    honest = run()
    random = np.random.default_rng(1)
    wild = dataclasses.replace(honest, iteration_time_s=honest.iteration_time_s * random.uniform(1, 2, 120))
    found = calibrate(wild)
    assert not found.explains
    assert found.parameters is None
    assert found.quality.heldout_mape_percent is not None
    assert found.quality.heldout_mape_percent > 5
    assert "within" in found.reason
    with pytest.raises(InvalidCalibration, match="does not explain the run"):
        predict_s(found, honest)
    assert Calibration.from_json(found.to_json()) == found


def test_iterations_shorter_than_their_own_computations_are_not_explained() -> None:
    honest = run()
    found = calibrate(dataclasses.replace(honest, iteration_time_s=replay_s(honest) * 0.9))
    assert not found.explains


@pytest.mark.parametrize("name", ["GPipe", "1f1b", "ZBH1", "Interleaved1F1B", "DualPipe"])
def test_every_schedule_can_be_calibrated(name: str) -> None:
    chunks = 2 if name == "Interleaved1F1B" else None
    schedule = build_schedule(name, stages=4, microbatches=8, chunks=chunks)
    plan, duration_s = durations(12, 2, 0.01, schedule=schedule)
    flat = Trace(schedule, plan, duration_s, np.ones(24))
    time_s = replay_s(flat) + OVERHEAD_S
    found = calibrate(dataclasses.replace(flat, iteration_time_s=time_s))
    assert found.explains
    assert found.quality.heldout_max_percent == pytest.approx(0, abs=0.2)


def test_one_stage_has_no_messages() -> None:
    schedule = build_schedule("1f1b", stages=1, microbatches=4)
    plan, duration_s = durations(12, 2, 0.01, schedule=schedule)
    found = calibrate(Trace(schedule, plan, duration_s, duration_s.sum(axis=1) + OVERHEAD_S))
    assert found.parameters is not None
    assert found.parameters.edges == ()
    assert found.quality.heldout_mape_percent == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize(
    ("plans", "each", "fraction", "rule"),
    [
        (4, 9, 0.33, "too few plans: 4"),
        (1, 9, 0.5, "too few plans: 1"),
        (9, 1, 0.33, "too few iterations: 4 to fit"),
        (9, 3, 0.0, "train_fraction"),
        (9, 3, 1.0, "train_fraction"),
        (9, 3, float("nan"), "train_fraction"),
    ],
)
def test_too_few_plans_or_iterations_are_refused(plans: int, each: int, fraction: float, rule: str) -> None:
    with pytest.raises(InvalidTrace, match=rule):
        calibrate(run(plans, each), train_fraction=fraction)


def test_more_plans_are_fitted_where_some_were_replaced_soon() -> None:
    """A third would be the two plans of a single iteration each."""
    whole = run(7, 4)
    ran = [k for k, plan in enumerate(whole.plan) if plan not in (1, 5) or k == 0 or whole.plan[k - 1] != plan]
    found = calibrate(whole.select(np.isin(np.arange(len(whole.plan)), ran)), train_fraction=0.33)
    assert found.explains
    assert found.quality.plans_fitted == 3, "no more than half"
    assert found.quality.iterations_fitted >= 6


def test_all_iterations_may_be_fitted_when_nothing_is_to_be_proved() -> None:
    found = calibrate(run(4, 3), train_fraction=None)
    assert found.explains
    assert found.quality.iterations_fitted == 12
    assert found.quality.heldout_mape_percent is None
    assert Calibration.from_json(found.to_json()) == found


# ---------------------------------------------------------------------------------------------- what a problem does


def test_a_problem_has_real_times_and_counts_the_overhead_once(calibrated: Calibration) -> None:
    profile = read_profile(PROFILE)
    bare = Simulator(build_problem(profile, SCHEDULE, blocking_power_w=50))
    real = Simulator(build_problem(profile, SCHEDULE, blocking_power_w=50, calibration=calibrated))
    random = np.random.default_rng(2)
    choice = random.integers(0, 3, size=(6, SCHEDULE.instructions))
    duration_s = bare.duration_s(choice)
    assert real.run(choice).iteration_time_s == pytest.approx(truth_s(duration_s), rel=1e-3)
    # Every stage draws blocking power in all the time that calibration adds.
    more_s = real.run(choice).iteration_time_s - bare.run(choice).iteration_time_s
    more_j = real.run(choice).energy_j - bare.run(choice).energy_j
    assert more_j == pytest.approx(50 * STAGES * more_s)


def test_the_frontier_is_in_real_time(calibrated: Calibration) -> None:
    problem = build_problem(read_profile(PROFILE), SCHEDULE, blocking_power_w=50, calibration=calibrated)
    frontier = solve_frontier(problem, points=8)
    simulator = Simulator(problem)
    for point in frontier:
        choice = simulator.choice_of(point.frequencies_mhz)
        assert point.iteration_time_s == pytest.approx(float(truth_s(simulator.duration_s(choice)[None])[0]), rel=2e-3)


def test_a_calibration_is_for_its_own_pipeline(calibrated: Calibration) -> None:
    profile = read_profile(PROFILE)
    longer = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES + 1)
    with pytest.raises(InvalidCalibration, match="of microbatches 8, but the problem has microbatches 9"):
        build_problem(profile, longer, blocking_power_w=50, calibration=calibrated)
    other = build_schedule("GPipe", stages=STAGES, microbatches=MICROBATCHES)
    with pytest.raises(InvalidCalibration, match="schedule 1F1B"):
        build_problem(profile, other, blocking_power_w=50, calibration=calibrated)
    with pytest.raises(InvalidProblem, match="must not be given with a calibration"):
        build_problem(profile, SCHEDULE, blocking_power_w=50, overhead_s=0.1, calibration=calibrated)


# ----------------------------------------------------------------------------------------------------------- the JSON


def test_json_has_the_main_figures_and_is_read_back(calibrated: Calibration) -> None:
    text = calibrated.to_json()
    document = json.loads(text)
    assert {"overhead_s", "edge_delay_s", "heldout_mape_percent", "heldout_max_percent", "verdict"} <= set(document)
    assert document["verdict"] == "explains"
    assert len(document["edge_delay_s"]) == 2 * (STAGES - 1)
    assert Calibration.from_json(text) == calibrated
    assert Calibration.from_json(text.encode()) == calibrated


def _delete(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.pop(key)


def _set(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (_set("version", value=2), "of version 2"),
        (_set("version", value=True), "version must be a whole number"),
        (_set("verdict", value="perhaps"), "verdict must be"),
        (_delete("stages"), "stages must be"),
        (_set("stages", value=0), "stages must be at least 1"),
        (_set("overhead_s", value=-1), "overhead_s must be a finite number"),
        (_set("overhead_s", value=None), "overhead_s must be"),
        (_set("allowance", value="1"), "allowance must be"),
        (_set("edge_delay_s", value={}), "edge_delay_s must be a list"),
        (_set("edge_delay_s", 0, value=7), r"edge_delay_s\[0\] must be an object"),
        (
            _set("edge_delay_s", 0, "from_stage", value=3),
            r"edge_delay_s\[0\].from_stage must be at least 0 and at most 2",
        ),
        (_set("edge_delay_s", 0, "to_stage", value=0), "between two different stages"),
        (_set("edge_delay_s", 1, "from_stage", value=0), "different stages|each pair"),
        (_set("edge_delay_s", 0, "value_s", value=True), r"edge_delay_s\[0\].value_s"),
        (_set("stage_gap_s", 0, "to_stage", value=1), "within one stage"),
        (_set("stage_gap_s", 1, "crossed", value="no"), r"stage_gap_s\[1\].crossed"),
        (_set("stage_noise", value=[0.1]), "stage_noise must have 3 entries"),
        (_set("noise", 0, "kind", value="loading"), r"noise\[0\].kind"),
        (_set("quality", "fitted_mape_percent", value=None), "quality.fitted_mape_percent"),
    ],
)
def test_damaged_json_is_refused_by_name(
    calibrated: Calibration, damage: Callable[[dict[str, Any]], None], rule: str
) -> None:
    document = json.loads(calibrated.to_json())
    damage(document)
    with pytest.raises(InvalidCalibration, match=rule):
        Calibration.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{", "NaN", "[" * 100_000, '{"version": NaN}', "{" * 5])
def test_text_that_is_no_calibration_is_refused(text: str) -> None:
    with pytest.raises(InvalidCalibration):
        Calibration.from_json(text)


@pytest.mark.parametrize(("ran", "named"), [("1F1B", "GPipe"), ("GPipe", "1F1B")])
def test_a_schedule_that_the_run_contradicts_is_refused(ran: str, named: str) -> None:
    schedule, other = (build_schedule(name, stages=STAGES, microbatches=12) for name in (ran, named))
    plan, duration_s = durations(24, 2, 0.003, seed=3, schedule=schedule)
    time_s = truth_s(duration_s, schedule, 0.009)
    assert calibrate_against_rivals(Trace(schedule, plan, duration_s, time_s), train_fraction=0.34).explains
    place = {key: k for k, key in enumerate(keys_of(schedule))}
    columns = [place[key] for key in keys_of(other)]
    wrong = calibrate_against_rivals(Trace(other, plan, duration_s[:, columns], time_s), train_fraction=0.34)
    assert not wrong.explains
    assert wrong.parameters is None
    assert Calibration.from_json(wrong.to_json()).reason == wrong.reason


def keys_of(schedule: Schedule) -> list[tuple[int, str, int, int]]:
    return [(stage, *step) for stage in range(schedule.stages) for step in schedule.of_stage(stage)]
