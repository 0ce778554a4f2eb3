"""The sources of a calibration: files, arrays, telemetry of a job, and the command line."""

from __future__ import annotations

import dataclasses
import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.made_up_runs import (
    OVERHEAD_S,
    PROFILE,
    SCHEDULE,
    durations,
    run,
    truth_s,
)

from perseus_core.instruction import InstructionKind
from perseus_solver.calibration import Calibration, Recorder, Trace, calibrate, read_trace
from perseus_solver.cli import main
from perseus_solver.errors import InvalidSchedule, InvalidTrace

pytestmark = pytest.mark.usefixtures("short_search")


def rows(trace: Trace) -> tuple[list[str], list[str]]:
    """The two files of a run, as lines."""
    schedule = trace.schedule
    instructions = ["plan,iteration,stage,instruction,microbatch,duration_s"]
    iterations = ["plan,iteration,stage,iteration_time_s,energy_j"]
    for k, (plan, time_s) in enumerate(zip(trace.plan.tolist(), trace.iteration_time_s.tolist(), strict=True)):
        for i in range(schedule.instructions):
            kind = InstructionKind(int(schedule.kind[i])).label
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
        (
            0,
            2,
            ",forward,1,",
            ",forward,0,",
            "line 3: the same stage or instruction",
        ),
        (0, 2, None, "", "column duration_s"),
        (1, 3, "0,0,2", "0,0,1", "iterations, line 4: the same stage"),
        (1, 3, "0,0,2", "0,0,9", "iterations, line 4: stage is 9, but instructions has 3 stages"),
        (1, 3, "0,0,2", "0,50,2", "iterations: plan 0, iteration 0 has no row for stage 2"),
        (0, 3, "forward,2,", "weight_gradient,2,", "schedule 1F1B has no weight_gradient of microbatch 2"),
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
    with pytest.raises(InvalidTrace, match="lacks forward 0 on stage 0, which schedule 1F1B runs"):
        read_trace("\n".join([files[0][0], *files[0][2:]]), iterations, "1f1b")
    with pytest.raises(InvalidTrace, match=r"lacks input_gradient 0 on stage 0|has no backward"):
        read_trace(instructions, iterations, "ZBH1")
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
def test_a_recorder_refuses_durations_of_another_schedule(damage: str) -> None:
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
    assert main.main([*learn, "--output", str(target), "--plot", str(tmp_path / "cal.png")]) == 0
    said = capsys.readouterr().out
    assert "explains this run" in said
    assert "overhead per iteration" in said
    assert (tmp_path / "cal.png").read_bytes().startswith(b"\x89PNG")
    assert Calibration.from_json(target.read_bytes()).explains

    plan = ["frontier", "--profile", str(profile), "--schedule", "1f1b", "--stages", "3", "--microbatches", "8"]
    plan += ["--blocking-power", "50", "--points", "5", "--output"]
    times = {}
    for name, extra in (("bare", []), ("real", ["--calibration", str(target)])):
        assert main.main([*plan, str(tmp_path / f"{name}.json"), *extra]) == 0
        times[name] = json.loads((tmp_path / f"{name}.json").read_text())["points"][0]["iteration_time_s"]
    assert times["real"] > times["bare"] + OVERHEAD_S
    capsys.readouterr()

    assert main.main([*learn, "--train-fraction", "0.1", "--output", str(tmp_path / "no.json")]) == main.BAD_INPUT
    refused = capsys.readouterr().err
    assert refused.startswith("perseus calibrate: too few plans")
    assert refused.count("\n") == 1
    assert not (tmp_path / "no.json").exists()
    target.write_text("{}")
    assert main.main([*plan, "-", "--calibration", str(target)]) == main.BAD_INPUT
    assert "calibration" in capsys.readouterr().err
