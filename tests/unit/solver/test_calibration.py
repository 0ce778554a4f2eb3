"""Calibration on made-up runs whose truth is known: what it finds, what it refuses, and what a problem does with it."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from perseus_solver import cli
from perseus_solver.calibration import Calibration, Recorder, Trace, calibrate, predict_s, read_trace
from perseus_solver.calibration.estimate import replay_s
from perseus_solver.errors import InvalidCalibration, InvalidProblem, InvalidSchedule, InvalidTrace
from perseus_solver.frontier import solve_frontier
from perseus_solver.problem import build_problem
from perseus_solver.profile import read_profile
from perseus_solver.schedules import Schedule, build_schedule
from perseus_solver.simulate import Simulator
from perseus_solver.vocabulary import Kind

STAGES, MICROBATCHES = 3, 8
OVERHEAD_S = 0.120
MESSAGE_S = {(0, 1): 0.009, (1, 0): 0.009, (1, 2): 0.009, (2, 1): 0.009}
GAP_S = (0.001, 0.001, 0.004)
SCHEDULE = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
PROFILE = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{stage},{what},{clock},{work * 1400 / clock:.6f},{work * clock / 5:.6f}\n"
    for stage in range(STAGES)
    for what, work in (("forward", 0.05), ("backward", 0.1))
    for clock in (1400, 1200, 1000)
)


def durations(
    plans: int, each: int, scatter: float, seed: int = 0, schedule: Schedule = SCHEDULE
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Plans that slow stages down in different ways, so that critical paths differ."""
    random = np.random.default_rng(seed)
    work = np.where(schedule.kind == Kind.FORWARD, 0.05, 0.10)
    pace = random.uniform(1.0, 1.3, size=(plans, schedule.stages))
    plan = np.repeat(np.arange(plans, dtype=np.int32), each)
    clean = work * pace[:, schedule.stage][plan]
    return plan, clean * random.normal(1, scatter, size=clean.shape)


def truth_s(
    duration_s: npt.NDArray[np.float64], schedule: Schedule = SCHEDULE, message_s: float | None = None
) -> npt.NDArray[np.float64]:
    """Iteration times by a naive walk over the schedule, which shares nothing with the replay."""
    before, after = schedule.edges()
    stage = schedule.stage
    waits: dict[int, list[tuple[int, float]]] = {i: [] for i in range(schedule.instructions)}
    for a, b in zip(before.tolist(), after.tolist(), strict=True):
        pair = (int(stage[a]), int(stage[b]))
        message = MESSAGE_S[pair] if message_s is None and pair in MESSAGE_S else message_s or 0.0
        waits[b].append((a, GAP_S[pair[0]] if pair[0] == pair[1] else message))
    times = []
    for row in duration_s:
        end: dict[int, float] = {}

        def finish(i: int, row: npt.NDArray[np.float64] = row, end: dict[int, float] = end) -> float:
            if i not in end:
                end[i] = max((finish(a) + delay for a, delay in waits[i]), default=0.0) + float(row[i])
            return end[i]

        times.append(max(finish(i) for i in range(schedule.instructions)) + OVERHEAD_S)
    return np.array(times)


def run(plans: int = 60, each: int = 2, scatter: float = 0.01) -> Trace:
    plan, duration_s = durations(plans, each, scatter)
    return Trace(SCHEDULE, plan, duration_s, truth_s(duration_s))


@pytest.fixture(scope="module")
def learnt() -> Calibration:
    return calibrate(run())


def test_exact_runs_are_predicted_exactly_and_the_truth_lies_in_the_intervals(learnt: Calibration) -> None:
    assert learnt.explains
    assert learnt.quality.plans_fitted == 19  # of 60, rounded down from 19.8
    assert learnt.quality.heldout_mape_percent is not None
    assert learnt.quality.heldout_mape_percent < 0.02
    assert learnt.quality.replay_mape_percent > 5
    assert learnt.parameters is not None
    widened = 5e-4  # the run is noiseless, so intervals are as narrow as the search stops
    found = learnt.parameters
    for estimate, true_s in (
        (found.overhead, OVERHEAD_S),
        *((edge.estimate, MESSAGE_S[edge.from_stage, edge.to_stage]) for edge in found.edges),
        *((gap.estimate, GAP_S[gap.from_stage]) for gap in found.gaps),
    ):
        assert estimate.low_s <= estimate.value_s <= estimate.high_s
        assert estimate.low_s - widened <= true_s <= estimate.high_s + widened


def test_unseen_plans_of_another_kind_are_predicted(learnt: Calibration) -> None:
    plan, duration_s = durations(5, 1, 0.0, seed=99)
    unseen = Trace(SCHEDULE, plan, duration_s, truth_s(duration_s))
    assert predict_s(learnt, unseen) == pytest.approx(unseen.iteration_time_s, rel=1e-3)


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


def test_plans_that_ran_once_tell_no_noise() -> None:
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


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "dualpipe"])
def test_every_schedule_can_be_calibrated(name: str) -> None:
    chunks = 2 if name == "interleaved-1f1b" else None
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
        (9, 1, 0.33, "too few iterations: 2 to fit"),
        (9, 3, 0.0, "train_fraction"),
        (9, 3, 1.0, "train_fraction"),
        (9, 3, float("nan"), "train_fraction"),
    ],
)
def test_too_little_to_learn_from_is_refused(plans: int, each: int, fraction: float, rule: str) -> None:
    with pytest.raises(InvalidTrace, match=rule):
        calibrate(run(plans, each), train_fraction=fraction)


def test_all_iterations_may_be_fitted_when_nothing_is_to_be_proved() -> None:
    found = calibrate(run(4, 3), train_fraction=None)
    assert found.explains
    assert found.quality.iterations_fitted == 12
    assert found.quality.heldout_mape_percent is None
    assert Calibration.from_json(found.to_json()) == found


# ---------------------------------------------------------------------------------------------- what a problem does


def test_a_problem_has_real_times_and_counts_the_overhead_once(learnt: Calibration) -> None:
    profile = read_profile(PROFILE)
    bare = Simulator(build_problem(profile, SCHEDULE, blocking_power_w=50))
    real = Simulator(build_problem(profile, SCHEDULE, blocking_power_w=50, calibration=learnt))
    random = np.random.default_rng(2)
    choice = random.integers(0, 3, size=(6, SCHEDULE.instructions))
    duration_s = bare.duration_s(choice)
    assert real.run(choice).iteration_time_s == pytest.approx(truth_s(duration_s), rel=1e-3)
    # Every stage draws blocking power in all the time that calibration adds.
    more_s = real.run(choice).iteration_time_s - bare.run(choice).iteration_time_s
    more_j = real.run(choice).energy_j - bare.run(choice).energy_j
    assert more_j == pytest.approx(50 * STAGES * more_s)


def test_the_frontier_is_in_real_time(learnt: Calibration) -> None:
    problem = build_problem(read_profile(PROFILE), SCHEDULE, blocking_power_w=50, calibration=learnt)
    frontier = solve_frontier(problem, points=8)
    simulator = Simulator(problem)
    for point in frontier:
        choice = simulator.choice_of(point.frequencies_mhz)
        assert point.iteration_time_s == pytest.approx(float(truth_s(simulator.duration_s(choice)[None])[0]), rel=2e-3)


def test_a_calibration_is_for_its_own_pipeline(learnt: Calibration) -> None:
    profile = read_profile(PROFILE)
    longer = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES + 1)
    with pytest.raises(InvalidCalibration, match="made with microbatches 8, the problem has microbatches 9"):
        build_problem(profile, longer, blocking_power_w=50, calibration=learnt)
    other = build_schedule("gpipe", stages=STAGES, microbatches=MICROBATCHES)
    with pytest.raises(InvalidCalibration, match="schedule 1f1b"):
        build_problem(profile, other, blocking_power_w=50, calibration=learnt)
    with pytest.raises(InvalidProblem, match="must not be given with a calibration"):
        build_problem(profile, SCHEDULE, blocking_power_w=50, overhead_s=0.1, calibration=learnt)


# ----------------------------------------------------------------------------------------------------------- the JSON


def test_json_has_the_main_figures_and_survives_the_way(learnt: Calibration) -> None:
    text = learnt.to_json()
    document = json.loads(text)
    assert {"overhead_s", "edge_delay_s", "heldout_mape_percent", "heldout_max_percent", "verdict"} <= set(document)
    assert document["verdict"] == "explains"
    assert len(document["edge_delay_s"]) == 2 * (STAGES - 1)
    assert Calibration.from_json(text) == learnt
    assert Calibration.from_json(text.encode()) == learnt


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
    learnt: Calibration, damage: Callable[[dict[str, Any]], None], rule: str
) -> None:
    document = json.loads(learnt.to_json())
    damage(document)
    with pytest.raises(InvalidCalibration, match=rule):
        Calibration.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{", "NaN", "[" * 100_000, '{"version": NaN}', "{" * 5])
def test_what_is_no_calibration_is_refused(text: str) -> None:
    with pytest.raises(InvalidCalibration):
        Calibration.from_json(text)


# ---------------------------------------------------------------------------------------------------------- the files


def rows(trace: Trace) -> tuple[list[str], list[str]]:
    """The two files of a run, as lines."""
    schedule = trace.schedule
    instructions = ["plan,iteration,stage,instruction,microbatch,duration_s"]
    iterations = ["plan,iteration,stage,iteration_time_s,energy_j"]
    for k, (plan, time_s) in enumerate(zip(trace.plan.tolist(), trace.iteration_time_s.tolist(), strict=True)):
        for i in range(schedule.instructions):
            kind = Kind(int(schedule.kind[i])).label
            instructions.append(
                f"{plan},{k},{schedule.stage[i]},{kind},{schedule.microbatch[i]},{float(trace.duration_s[k, i])!r}"
            )
        # The slowest rank's time is the iteration's.
        iterations += [f"{plan},{k},{stage},{time_s - 0.001 * stage!r},1" for stage in range(schedule.stages)]
    return instructions, iterations


@pytest.fixture(scope="module")
def files() -> tuple[list[str], list[str]]:
    return rows(run(12, 2))


def test_files_are_read_back(files: tuple[list[str], list[str]], tmp_path: Path) -> None:
    instructions, iterations = ("\n".join(lines) for lines in files)
    packed, plain = tmp_path / "x.csv.gz", tmp_path / "y.csv"
    packed.write_bytes(gzip.compress(instructions.encode()))
    plain.write_text(iterations)
    wanted = run(12, 2)
    for found in (read_trace(instructions, iterations, "1f1b"), read_trace(packed, plain, "1f1b", stages=3)):
        assert np.array_equal(found.duration_s, wanted.duration_s)
        assert np.array_equal(found.iteration_time_s, wanted.iteration_time_s)
        assert np.array_equal(found.plan, wanted.plan)


@pytest.mark.parametrize(
    ("file", "line", "old", "new", "rule"),
    [
        (0, 0, "duration_s", "seconds", "instructions: column duration_s is missing"),
        (1, 0, "stage", "rank", "iterations: column stage is missing"),
        (0, 5, ",0,", ",0,0,", "instructions, line 6: has 7 columns"),
        (0, 5, "forward", "load", "instructions, line 6, column instruction: must be one of"),
        (0, 5, "0,0,0", "0,-1,0", "instructions, line 6, column iteration: must be a whole number"),
        (0, 5, None, "nan", "instructions, line 6, column duration_s: must be a number of seconds"),
        (0, 5, None, "-0.1", "line 6, column duration_s"),
        (0, 5, None, "inf", "line 6, column duration_s"),
        (0, 5, None, "fast", "line 6, column duration_s"),
        (0, 5, "0,0,0", "0,77,0", "line 6: plan 0, iteration 77 has no row in iterations"),
        (0, 2, ",forward,1,", ",forward,0,", "line 3: the same place of the same iteration is measured twice"),
        (0, 2, None, "", "column duration_s"),
        (1, 3, "0,0,2", "0,0,1", "iterations, line 4: the same place"),
        (1, 3, "0,0,2", "0,0,9", "iterations, line 4: stage is 9, but instructions has 3 stages"),
        (1, 3, "0,0,2", "0,50,2", "iterations: plan 0, iteration 0 has no row for stage 2"),
        (0, 3, "forward,2,", "weight_gradient,2,", "schedule 1f1b has no weight_gradient of microbatch 2"),
    ],
)
def test_bad_files_are_refused_by_name(
    files: tuple[list[str], list[str]], file: int, line: int, old: str | None, new: str, rule: str
) -> None:
    changed = [list(lines) for lines in files]
    was = changed[file][line]
    changed[file][line] = was.replace(old, new, 1) if old is not None else was.rsplit(",", 1)[0] + "," + new
    assert changed[file][line] != was
    with pytest.raises(InvalidTrace, match=rule):
        read_trace("\n".join(changed[0]), "\n".join(changed[1]), "1f1b")


def test_incomplete_and_unfitting_files_are_refused(files: tuple[list[str], list[str]]) -> None:
    instructions, iterations = ("\n".join(lines) for lines in files)
    with pytest.raises(InvalidTrace, match="lacks forward 0 on stage 0, which schedule 1f1b runs"):
        read_trace("\n".join([files[0][0], *files[0][2:]]), iterations, "1f1b")
    with pytest.raises(InvalidTrace, match=r"lacks input_gradient 0 on stage 0|has no backward"):
        read_trace(instructions, iterations, "zb-h1")
    with pytest.raises(InvalidTrace, match=r"stages are 0 … 2, but the schedule has 4"):
        read_trace(instructions, iterations, "1f1b", stages=4)
    with pytest.raises(InvalidTrace, match=r"microbatches are 0 … 7, but the schedule has 16"):
        read_trace(instructions, iterations, "1f1b", microbatches=16)
    with pytest.raises(InvalidSchedule, match="unknown"):
        read_trace(instructions, iterations, "2f2b")
    with pytest.raises(InvalidTrace, match="instructions has no rows"):
        read_trace(files[0][0], iterations, "1f1b")
    with pytest.raises(InvalidTrace, match="instructions cannot be read"):
        read_trace(gzip.compress(instructions.encode())[:-20], iterations, "1f1b")
    with pytest.raises(InvalidTrace, match="not UTF-8"):
        read_trace(b"plan\xff", iterations, "1f1b")
    with pytest.raises(InvalidTrace, match="cannot be read"):
        read_trace(Path("nowhere.csv"), iterations, "1f1b")


def test_arrays_are_checked_too() -> None:
    good = run(3, 2)
    for change, rule in (
        ({"plan": good.plan[:-1]}, "plan must have one number"),
        ({"duration_s": good.duration_s[:, :-1]}, "duration_s must be of shape"),
        ({"duration_s": good.duration_s * np.nan}, "duration_s must be more than 0"),
        ({"iteration_time_s": -good.iteration_time_s}, "iteration_time_s must be more than 0"),
    ):
        with pytest.raises(InvalidTrace, match=rule):
            dataclasses.replace(good, **change)


# ------------------------------------------------------------------------------------------------------ from telemetry


def stages_of(row: npt.NDArray[np.float64]) -> list[list[float]]:
    return [row[a:b].tolist() for a, b in pairwise(SCHEDULE.stage_offset.tolist())]


def test_a_job_that_runs_one_plan_can_be_calibrated_from_telemetry() -> None:
    recorder = Recorder(SCHEDULE)
    _, duration_s = durations(1, 40, 0.02)
    for row, time_s in zip(duration_s, truth_s(duration_s), strict=True):
        recorder.add(plan=7, iteration_time_s=float(time_s), stages=stages_of(row))
    found = calibrate(recorder.trace())
    assert found.explains
    assert found.quality.plans_fitted + found.quality.plans_heldout == 10  # blocks of four
    assert found.quality.heldout_mape_percent is not None
    assert found.quality.heldout_mape_percent < 0.1
    assert found.stage_noise is not None


def test_a_recorder_is_bounded_and_cuts_blocks_where_the_plan_changes() -> None:
    recorder = Recorder(SCHEDULE, most=8)
    with pytest.raises(InvalidTrace, match="no iteration"):
        recorder.trace()
    _, duration_s = durations(1, 11, 0.02)
    for plan, row in zip((9, 9, 9, 5, 5, 5, 5, 5, 5, 2, 5), duration_s, strict=True):
        recorder.add(plan=plan, iteration_time_s=2.0, stages=stages_of(row))
    assert len(recorder) == 8
    assert recorder.trace().plan.tolist() == [0, 0, 0, 0, 1, 1, 2, 3]
    assert np.array_equal(recorder.trace().duration_s, duration_s[-8:])


@pytest.mark.parametrize("damage", ["short", "stage", "zero", "time"])
def test_a_recorder_refuses_what_is_not_of_its_schedule(damage: str) -> None:
    recorder = Recorder(SCHEDULE)
    _, duration_s = durations(1, 1, 0.0)
    stages, time_s = stages_of(duration_s[0]), 2.0
    if damage == "short":
        stages[1].pop()
    elif damage == "stage":
        stages.pop()
    elif damage == "zero":
        stages[0][0] = 0.0
    else:
        time_s = float("nan")
    with pytest.raises(InvalidTrace):
        recorder.add(plan=0, iteration_time_s=time_s, stages=stages)
    assert len(recorder) == 0


# --------------------------------------------------------------------------------------------------- the command line


def test_calibrate_then_plan(
    files: tuple[list[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y, profile = tmp_path / "x.csv", tmp_path / "y.csv", tmp_path / "profile.csv"
    x.write_text("\n".join(files[0]))
    y.write_text("\n".join(files[1]))
    profile.write_text(PROFILE)
    learn = ["calibrate", "--instructions", str(x), "--iterations", str(y), "--schedule", "1f1b"]
    target = tmp_path / "cal.json"
    assert cli.main([*learn, "--output", str(target), "--plot", str(tmp_path / "cal.png")]) == 0
    said = capsys.readouterr().out
    assert "explains this run" in said
    assert "overhead per iteration" in said
    assert (tmp_path / "cal.png").read_bytes().startswith(b"\x89PNG")
    assert Calibration.from_json(target.read_bytes()).explains

    plan = ["frontier", "--profile", str(profile), "--schedule", "1f1b", "--stages", "3", "--microbatches", "8"]
    plan += ["--blocking-power", "50", "--points", "5", "--output"]
    times = {}
    for name, extra in (("bare", []), ("real", ["--calibration", str(target)])):
        assert cli.main([*plan, str(tmp_path / f"{name}.json"), *extra]) == 0
        times[name] = json.loads((tmp_path / f"{name}.json").read_text())["points"][0]["iteration_time_s"]
    assert times["real"] > times["bare"] + OVERHEAD_S
    capsys.readouterr()

    assert cli.main([*learn, "--train-fraction", "0.1", "--output", str(tmp_path / "no.json")]) == cli.BAD_INPUT
    refused = capsys.readouterr().err
    assert refused.startswith("perseus calibrate: too few plans")
    assert refused.count("\n") == 1
    assert not (tmp_path / "no.json").exists()
    target.write_text("{}")
    assert cli.main([*plan, "-", "--calibration", str(target)]) == cli.BAD_INPUT
    assert "calibration" in capsys.readouterr().err
