"""Profiles of jobs that nobody has measured, against published ones and against laws."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from perseus_core.gpus import BACKWARD_RATIO, TRUE_SHARES, known_gpus
from perseus_core.instruction import InstructionKind
from perseus_solver.cli.main import main
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.errors import SolverError
from perseus_solver.frontier import Planner
from perseus_solver.model.assumed import assumed_profile, times_of_layers, times_of_run
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import SCHEDULES, build_schedule

pytestmark = pytest.mark.usefixtures("short_search")

Perseus = Callable[..., tuple[int, str, str]]
CURVES = known_gpus()
ONE_F_ONE_B = ("--schedule", "1F1B", "--stages", "4", "--microbatches", "8")


@pytest.fixture
def perseus(capsys: pytest.CaptureFixture[str]) -> Perseus:
    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main(["estimate", *words])
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def saving(problem: Problem) -> float:
    """What the best plan without slowdown saves of an iteration with all clocks at their maximum."""
    highest = Simulator(problem).run(all_maximum(problem))
    return 1 - Planner(problem).plan(float(highest.iteration_time_s)).energy_j / float(highest.energy_j)


@cache
def measured_saving(profile: Path, watts: float, microbatches: int) -> float:
    schedule = build_schedule("1f1b", stages=8, microbatches=microbatches)
    return saving(build_problem(read_profile(profile, stages=8), schedule, blocking_power_w=watts))


@pytest.mark.parametrize(("microbatches", "curves"), [(8, "a100"), (24, "a100"), (24, "a40")])
@pytest.mark.parametrize(
    ("name", "watts", "layers"), [("gpt3-175b_a100-sxm", 83.64, 96), ("bloom-176b_a40", 70.38, 70)]
)
def test_layers_predict_published_profiles_as_well_as_stated(
    sosp24: Path, name: str, watts: float, layers: int, microbatches: int, curves: str
) -> None:
    """Without slowdown, where all depends on the imbalance; with curves of the GPU itself, and of another."""
    saved = measured_saving(sosp24 / "stage_profile" / f"{name}.csv", watts, microbatches)
    schedule = build_schedule("1f1b", stages=8, microbatches=microbatches)
    csv = assumed_profile(CURVES[curves], times_of_layers(schedule, layers))
    guessed = build_problem(read_profile(csv), schedule, blocking_power_w=CURVES[curves].blocking_power_w)
    assert TRUE_SHARES[0] <= saved / saving(guessed) <= TRUE_SHARES[1]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "Steps"])
def test_every_schedule_runs_all_layers_once_and_the_head_once(name: str) -> None:
    chunks = 2 if name == "Interleaved1F1B" else None
    schedule = build_schedule(name, stages=4, microbatches=8, chunks=chunks)
    times = times_of_layers(schedule, 37, 2.0)
    forwards = {(stage, chunk): time for (stage, kind, chunk), time in times.items() if kind is InstructionKind.FORWARD}
    of_layer = (37 + 2.0) / 4
    copies = 2 if schedule.bidirectional else 1
    chain = {key: time for key, time in forwards.items() if schedule.position[key] >= 0}
    assert sum(chain.values()) * of_layer == pytest.approx(39 * copies)
    last = int(schedule.position.max())
    for (stage, chunk), time in chain.items():
        layers = time * of_layer - 2.0 * (schedule.position[stage, chunk] == last)
        assert layers == pytest.approx(round(layers))
        assert abs(layers - 37 / (last + 1)) < 1
        backward = sum(
            times.get((stage, kind, chunk), 0.0)
            for kind in (InstructionKind.BACKWARD, InstructionKind.INPUT_GRADIENT, InstructionKind.WEIGHT_GRADIENT)
            if (stage, InstructionKind.BACKWARD, chunk) not in times or kind is InstructionKind.BACKWARD
        )
        assert backward == pytest.approx(BACKWARD_RATIO * time)
    problem = build_problem(read_profile(assumed_profile(CURVES["h100"], times)), schedule, blocking_power_w=100.0)
    assert problem.instructions == schedule.instructions
    with pytest.raises(SolverError, match=f"layers must be at least {last + 1}, "):
        times_of_layers(schedule, last)


def test_a_run_gives_the_median_of_every_instruction() -> None:
    schedule = build_schedule("1f1b", stages=2, microbatches=3)
    wanted = {
        (stage, kind, 0): 1.0 + stage + 0.5 * kind
        for stage in range(2)
        for kind in (InstructionKind.FORWARD, InstructionKind.BACKWARD)
    }
    kinds = zip(schedule.stage.tolist(), schedule.kind.tolist(), strict=True)
    once = np.array([wanted[stage, InstructionKind(kind), 0] for stage, kind in kinds])
    assert times_of_run(schedule, np.stack([once, 0.9 * once, 10 * once])) == pytest.approx(wanted)


def test_an_estimate_without_a_profile_is_an_interval_that_says_why(perseus: Perseus) -> None:
    words = ("--gpu", "NVIDIA H100 80GB HBM3", *ONE_F_ONE_B)
    code, out, err = perseus(*words, "--layers", "32", "--head-layers", "4", "--gpus", "64", "--iteration-s", "3.5")
    assert (code, err) == (0, "")
    assert "baseline: 3.5000 s and " in out
    assert "64 GPUs draw" in out
    assert "rests on: 32 equal layers and a head of 4 and the curves of NVIDIA H100 80GB HBM3, partly assumed" in out
    step = ("--schedule", "steps", "--stages", "1", "--microbatches", "1", "--max-slowdown", "5%")
    assert "an iteration of 1 GPU; 1 GPU draws " in perseus("--gpu", "h100", *step)[1]


def test_a_run_at_default_clocks_stands_in_for_a_profile(perseus: Perseus, tmp_path: Path) -> None:
    run, times = tmp_path / "run.csv", tmp_path / "times.csv"
    schedule = build_schedule("1f1b", stages=2, microbatches=3)
    rows = [
        f"0,{iteration},{stage},{kind},{microbatch},{0.1 if kind == 'forward' else 0.2}"
        for iteration in range(3)
        for stage in range(2)
        for kind, microbatch, _ in schedule.of_stage(stage)
    ]
    run.write_text("\n".join(["plan,iteration,stage,instruction,microbatch,duration_s", *rows]))
    lines = [f"0,{iteration},{stage},1.3" for iteration in range(3) for stage in range(2)]
    times.write_text("\n".join(["plan,iteration,stage,iteration_time_s", *lines]))
    words = ("--gpu", "h100", "--schedule", "1F1B", "--instructions", str(run), "--iterations", str(times))
    code, out, err = perseus(*words)
    assert (code, err) == (0, "")
    assert "baseline: 1.2000 s" in out, "four forwards and four backwards"
    assert "rests on: the run's times and the curves of" in out
    assert "--instructions already says what --layers would; leave it out" in perseus(*words, "--layers", "8")[2]
    run.write_text(run.read_text() + "\n" + "\n".join("1" + row[1:] for row in rows))
    times.write_text(times.read_text() + "\n" + "\n".join("1" + line[1:] for line in lines))
    assert "--instructions: the run has 2 plans; needed is one at default clocks" in perseus(*words)[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--profile and --blocking-power needed, or --gpu with --layers or a run (--instructions)"),
        (("--layers", "8"), "without --profile, --gpu is needed: which curves time and power follow"),
        (("--profile", "p.csv"), "--profile needs --blocking-power"),
        (
            ("--profile", "p.csv", "--blocking-power", "60", "--layers", "8", "--iteration-s", "2"),
            "--profile already says what --layers, --iteration-s would; leave them out",
        ),
        (
            ("--gpu", "h100", "--instructions", "i.csv", "--iterations", "t.csv"),
            "--instructions needs --schedule: which one was run",
        ),
        (("--gpu", "h100", "--instructions", "i.csv"), "--instructions and --iterations belong together"),
        *(
            # meta-pytorch/tritonbench issue 78, facebookexperimental/triton issue 2023: SXM figures for others
            (
                ("--gpu", model, "--layers", "8"),
                f"no curves of {model!r} are known: give --profile, or one of NVIDIA A100-SXM4-80GB, NVIDIA A40, "
                "NVIDIA B200, NVIDIA H100 80GB HBM3, NVIDIA H200",
            )
            for model in ("NVIDIA L4", "NVIDIA H100 PCIe", "A100-PCIE-40GB", "NVIDIA H100 NVL", "NVIDIA RTX A4000")
        ),
        *(
            # NVIDIA/Megatron-LM pull request 5768: the first of the most common errors
            (
                ("--gpu", "h100", "--layers", "8", *ONE_F_ONE_B, "--gpus", gpus),
                f"--gpus must be a multiple of 4, the GPUs of one pipeline, not {gpus}",
            )
            for gpus in ("2", "6", "999")
        ),
        (
            ("--gpu", "h100", "--layers", "8", *ONE_F_ONE_B, "--overhead-s", "2", "--iteration-s", "1"),
            "--iteration-s must be more than the overhead, 2, not 1",
        ),
    ],
)
def test_a_pipeline_is_described_once(perseus: Perseus, words: tuple[str, ...], message: str) -> None:
    assert perseus(*words) == (2, "", f"perseus estimate: {message}\n")
