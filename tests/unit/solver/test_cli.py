"""The command line: formats, messages, exit codes, and no partly written files."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.solver.conftest import PROFILE, resimulate

from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule, write_schedule

pytestmark = pytest.mark.usefixtures("short_search")


def test_frontier_format(perseus: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "frontier.json"
    code, out, err = perseus("frontier", "--points", "20", "--output", str(file), "--full")
    assert (code, err) == (0, "")
    assert "20 plans from T_min" in out
    document = json.loads(file.read_text())
    assert list(document) == [
        "schedule",
        "stages",
        "microbatches",
        "blocking_power_w",
        "solve_seconds",
        "baseline",
        "deployed_gap",
        "points",
    ]
    assert document["schedule"] == "1F1B"
    assert (document["stages"], document["microbatches"], document["blocking_power_w"]) == (3, 6, 60.0)
    baseline = document["baseline"]
    points = document["points"]
    assert 5 <= len(points) <= 20
    assert points[0]["iteration_time_s"] <= baseline["iteration_time_s"]
    assert points[0]["energy_j"] < baseline["energy_j"]
    times = [p["iteration_time_s"] for p in points]
    effective = [p["energy_j"] - 60 * 3 * p["iteration_time_s"] for p in points]
    assert times == sorted(times)
    assert effective == sorted(effective, reverse=True)
    assert set(document["deployed_gap"]) == {"worst", "mean", "straggler_worst"}
    least = min(range(len(points)), key=lambda k: float(points[k]["energy_j"]))
    assert [point["straggler_part"] for point in points] == [k > least for k in range(len(points))]
    for point in points:
        figures = ["iteration_time_s", "energy_j", "energy_lower_bound_j", "gap", "status", "clock_changes"]
        assert list(point) == [*figures, "straggler_part", "stages"]
        assert point["energy_lower_bound_j"] <= point["energy_j"]
        assert point["gap"] == pytest.approx(point["energy_j"] / point["energy_lower_bound_j"] - 1)
        assert point["status"] in {"optimal", "within_gap", "limit_reached"}
        assert resimulate(point) == pytest.approx((point["iteration_time_s"], point["energy_j"]), rel=1e-9)
        schedule = build_schedule("1f1b", stages=3, microbatches=6)
        for stage, row in enumerate(point["stages"]):
            assert [(i["instruction"], i["microbatch"], i["chunk"]) for i in row] == schedule.of_stage(stage)


def test_a_frontier_names_its_instructions_once(perseus: Callable[..., tuple[int, str, str]]) -> None:
    words = ("--points", "20", "--output", "-")
    short, full = (json.loads(perseus("frontier", *words, *more)[1]) for more in ((), ("--full",)))
    names = short.pop("instructions")
    for point in short["points"]:
        clocks = point.pop("frequency_mhz")
        point["stages"] = [
            [name | {"frequency_mhz": clock} for name, clock in zip(*row, strict=True)]
            for row in zip(names, clocks, strict=True)
        ]
    assert short | {"solve_seconds": 0} == full | {"solve_seconds": 0}


def test_plan_meets_its_deadline_however_it_is_given(
    perseus: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    problem = build_problem(
        read_profile(PROFILE), build_schedule("1f1b", stages=3, microbatches=6), blocking_power_w=60
    )
    base = Simulator(problem).run(np.zeros(problem.instructions, dtype=int))
    base_s = float(base.iteration_time_s)
    file = tmp_path / "plan.json"
    energies = []
    for extra, limit_s in (
        ((), base_s),
        (("--max-slowdown", "5%"), base_s * 1.05),
        (("--deadline-s", str(base_s * 1.2)), base_s * 1.2),
    ):
        code, out, err = perseus("plan", *extra, "--output", str(file))
        assert (code, err) == (0, "")
        assert "against all clocks at maximum" in out
        point = json.loads(file.read_text())
        assert point["iteration_time_s"] <= limit_s
        assert resimulate(point) == pytest.approx((point["iteration_time_s"], point["energy_j"]), rel=1e-9)
        energies.append(point["energy_j"] - 180 * point["iteration_time_s"])
    assert energies == sorted(energies, reverse=True)


def test_standard_output_carries_the_json_alone(perseus: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = perseus("plan", "--output", "-")
    assert code == 0
    assert json.loads(out)["stages"][0][0]["instruction"] == "forward"
    assert "against all clocks at maximum" in err


def test_what_is_read_is_never_overwritten(
    perseus: Callable[..., tuple[int, str, str]], profile: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(profile)
    for command, words in (("plan", ("--output", str(profile))), ("plan", ("--output", str(link)))):
        code, _, err = perseus(command, *words)
        assert (code, err.count("\n")) == (2, 1)
        assert "cannot be written: --profile reads the same file" in err
    code, _, err = perseus("compare", "--plot", str(profile))
    assert "--plot" in err
    assert code == 2
    assert profile.read_text() == PROFILE


def test_schedules_are_named_as_in_a_job(perseus: Callable[..., tuple[int, str, str]]) -> None:
    written = [perseus("plan", "--output", "-", "--schedule", name)[1] for name in ("1f1b", "1F1B")]
    assert json.loads(written[0]) == json.loads(written[1])


def test_a_comparison_refuses_what_a_plan_refuses(perseus: Callable[..., tuple[int, str, str]]) -> None:
    refusals = [perseus(command, "--deadline-s", "0.1", "--output", "-") for command in ("plan", "compare")]
    assert [code for code, _, _ in refusals] == [2, 2]
    assert len({err.partition(": ")[2] for _, _, err in refusals}) == 1


def test_a_comparison_says_when_lowtime_is_wanted_and_absent(
    perseus: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perseus_solver.comparison.lowtime_peer.installed", lambda: False)
    code, out, err = perseus("compare", "--lowtime")
    assert (code, out) == (2, "")
    assert "lowtime is not installed: pip install" in err
    assert "not run, because it takes minutes" in perseus("compare")[1]


@pytest.mark.parametrize(
    ("column", "factor", "code", "message"),
    [
        (4, 1000, 2, "300 kW a GPU at the highest clock; likely cause: energy in mJ"),
        (3, 1000, 2, "a GPU that waits takes 60 W, more than one that computes"),
        (4, 12, 0, "WARNING: instructions take 3.6 kW a GPU"),
        (4, 1.7, 0, ""),
    ],
)
def test_implausible_units_are_named(
    perseus: Callable[..., tuple[int, str, str]],
    profile: Path,
    column: int,
    factor: float,
    code: int,
    message: str,
) -> None:
    rows = [line.split(",") for line in PROFILE.splitlines()]
    for row in rows[1:]:
        row[column] = repr(float(row[column]) * factor)
    profile.write_text("\n".join(map(",".join, rows)))
    found, _, err = perseus("compare")
    assert found == code
    assert message in err
    assert bool(err) == bool(message)


def test_an_outlier_among_repeated_rows_is_not_averaged_silently(
    perseus: Callable[..., tuple[int, str, str]], profile: Path
) -> None:
    first = PROFILE.splitlines()[1].split(",")
    profile.write_text(PROFILE + ",".join([*first[:3], repr(10 * float(first[3])), first[4]]) + "\n")
    code, _, err = perseus("compare", "--samples")
    assert code == 0
    assert "WARNING: stage 0, forward: the two samples of time at 1400 MHz (lines 2 and 44) are 10 times apart" in err
    assert "time raised" not in err  # what an outlier differs by is no scatter


def test_another_dialect_of_csv_is_recognised(perseus: Callable[..., tuple[int, str, str]], profile: Path) -> None:
    profile.write_text(PROFILE.replace(",", ";"))
    code, _, err = perseus("plan", "--output", "-")
    assert code == 2
    assert "the first line reads 'stage;instruction;frequency;time;energy'" in err
    assert "separated by semicolons, not commas" in err


def test_a_terminal_without_unicode_gets_ascii(profile: Path) -> None:
    words = ["--profile", str(profile), "--blocking-power", "60", "--schedule", "1F1B", "--microbatches", "6"]
    for stages, shown in (("3", "lowtime                        -"), ("9", "(0 ... 2)")):
        command = [sys.executable, "-m", "perseus_solver.cli.main", "compare", *words, "--stages", stages]
        ended = subprocess.run(
            command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False
        )
        assert shown in (ended.stdout + ended.stderr).decode("ascii")


def test_a_proof_closes_the_gap_of_a_small_pipeline(perseus: Callable[..., tuple[int, str, str]]) -> None:
    words = ("--microbatches", "2", "--max-slowdown", "5%", "--output", "-")
    code, out, err = perseus("plan", *words, "--prove", "30")
    assert code == 0
    assert json.loads(out)["status"] == "optimal"
    assert "proven: no plan of these clocks takes less energy by the deadline" in err
    assert json.loads(out)["energy_j"] <= json.loads(perseus("plan", *words)[1])["energy_j"]
    code, _, err = perseus("plan", *words, "--prove", "--max-switch-loss", "1%")
    assert code == 2
    assert "--prove is about plans whose clocks change at once" in err


def test_an_estimate_is_what_a_plan_saves_on_so_many_gpus(perseus: Callable[..., tuple[int, str, str]]) -> None:
    _, out, _ = perseus("plan", "--max-slowdown", "5%", "--output", "-")
    plan = json.loads(out)
    fleet = ("--gpus", "300", "--hours", "10", "--max-slowdown", "5%")
    _, out, err = perseus("estimate", *fleet, "--price", "0.5", "--carbon", "400", "--output", "-")
    found = json.loads(out)
    baseline = found["baseline"]
    assert found["expected"] is None
    assert found["ideal"]["energy"] == pytest.approx(plan["energy_j"] / baseline["energy_j"] - 1)
    iterations = 10 * 3600 / baseline["iteration_time_s"]
    saved_kwh = iterations * (baseline["energy_j"] - plan["energy_j"]) * (300 / 3) / 3.6e6
    assert found["saved_kwh"] == [pytest.approx(saved_kwh)]
    assert f"{0.5 * saved_kwh:,.0f} at 0.5 a kWh" in err
    assert f"{0.4 * saved_kwh / 1000:,.1f} t of CO2 at 400 g a kWh" in err
    assert "this is the most" in err


def test_slow_clocks_make_an_estimate_an_interval(perseus: Callable[..., tuple[int, str, str]]) -> None:
    _, out, err = perseus("estimate", "--gpus", "3", "--gpu", "NVIDIA H100 80GB HBM3", "--output", "-")
    found = json.loads(out)
    least, most = found["saved_kwh"]
    assert 0 <= least < most == pytest.approx(-found["ideal"]["energy"] * found["baseline"]["energy_kwh"])
    assert least == pytest.approx(-found["expected"]["energy"] * found["baseline"]["energy_kwh"])
    assert "between clocks that change in 30 ms" in err
    for wrong, message in (
        (("--gpus", "0"), "argument --gpus: must be a whole number from 1 to 10,000,000, not 0"),
        (("--hours", "0"), "argument --hours: must be greater than zero, not 0"),
        (("--gpu", "x", "--hardware", "h.json"), "--hardware already says what --gpu would; leave one out"),
    ):
        assert perseus("estimate", *wrong) == (2, "", f"perseus estimate: {message}\n")


def test_an_estimate_for_more_gpus_is_one_for_a_job_that_waits_for_more(
    perseus: Callable[..., tuple[int, str, str]],
) -> None:
    shape = ("--gpu", "NVIDIA A100-SXM4-80GB", "--max-slowdown", "1%", "--output", "-")
    few, many = (json.loads(perseus("estimate", *shape, "--gpus", gpus)[1])["expected"] for gpus in ("3", "3000000"))
    assert few["energy"] < many["energy"] < 0


def test_a_plan_keeps_its_deadline_under_scatter(perseus: Callable[..., tuple[int, str, str]]) -> None:
    words = ("--max-slowdown", "2%", "--output", "-")
    code, out, err = perseus("plan", *words, "--scatter", "1%", "--confidence", "90%")
    assert code == 0
    plan = json.loads(out)
    assert plan["kept"] >= 0.9
    times = plan["expected"]["iteration_time_s"]
    assert times["p50"] <= times["p95"] <= times["p99"]
    assert "of the iterations end by" in err
    assert resimulate(plan) == pytest.approx((plan["iteration_time_s"], plan["energy_j"]), rel=1e-9)
    code, _, err = perseus("plan", *words, "--confidence", "90%")
    assert code == 2
    assert "--confidence needs to know how times scatter" in err
    assert "no plan found keeps" in perseus("plan", "--output", "-", "--deadline-s", "1.396", "--scatter", "3%")[2]
    for more in (("--prove",), ("--max-switch-loss", "1%"), ("--hardware", "h.json")):
        assert perseus("plan", *words, "--scatter", "1%", *more)[0] == 2


def test_an_exported_schedule_gives_the_same_plan(perseus: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    csv_file = tmp_path / "order.csv"
    csv_file.write_text(write_schedule(build_schedule("1f1b", stages=3, microbatches=6)))
    _, named, _ = perseus("plan", "--output", "-")
    code, exported, _ = perseus("plan", "--order", str(csv_file), "--output", "-", pipeline=False)
    assert code == 0
    assert json.loads(exported) == json.loads(named)


def test_a_deadline_below_t_min_is_refused_with_t_min(
    perseus: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    code, out, err = perseus("plan", "--deadline-s", "0.1", "--output", str(file))
    assert code == 2
    assert out == ""
    assert err.startswith("perseus plan: deadline 0.1 s is shorter than the fastest possible iteration, T_min = ")
    assert err.count("\n") == 1
    assert not file.exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--schedule", "2f2b"], "schedule '2f2b' is unknown"),
        (["--stages", "0"], "stages must be at least 1, not 0"),
        (["--stages", "9"], "profile has 3 stages (0 … 2), but 9 are needed"),
        (["--stages", "many"], "argument --stages: invalid int value: 'many'"),
        (["--microbatches", "-1"], "microbatches must be at least 1, not -1"),
        (["--chunks", "2"], "chunks must be 1 for 1F1B, not 2"),
        (["--schedule", "ZBH1"], "needs 'input_gradient' of stage 0, for which the profile has no rows"),
        (["--blocking-power", "nan"], "argument --blocking-power: nan is not finite"),
        (["--blocking-power", "-3"], "argument --blocking-power: must be zero or more, not -3"),
        (["--deadline-s", "0"], "argument --deadline-s: must be greater than zero, not 0"),
        (["--max-slowdown", "fast"], "argument --max-slowdown: 'fast' is not a percentage such as 3% or 2.5%"),
        (["--deadline-s", "1", "--max-slowdown", "3%"], "not allowed with argument"),
        (["--repair"], "--repair needs --samples"),
        (
            ["--order", "o.csv"],
            "--order already gives what --schedule, --stages, --microbatches would give; leave them out",
        ),
        (["--profile", "absent.csv"], "profile absent.csv cannot be read: No such file or directory"),
        (["--output", "absent/plan.json"], "--output absent/plan.json cannot be written: No such file or directory"),
        (["--output", "/"], "--output / cannot be written: it is a directory"),
        (["--gantt", "plan.json"], "--gantt plan.json cannot be written: another option names the same file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    perseus: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    code, out, err = perseus("plan", "--output", "plan.json", *extra)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("perseus plan: ")
    assert err.count("\n") == 1
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("command", ["plan", "frontier", "compare"])
def test_without_a_file_to_write_the_summary_is_all(
    perseus: Callable[..., tuple[int, str, str]], tmp_path: Path, command: str
) -> None:
    file = tmp_path / "out.json"
    code, said, _ = perseus(command)
    assert code == 0
    assert "J" in said
    assert "{" not in said
    _, beside, _ = perseus(command, "--output", str(file))
    same = re.compile(r"[\d.]+ s")  # solving takes another time
    assert same.sub("", beside) == same.sub("", said)
    assert not list(tmp_path.glob("*.png"))


def test_missing_arguments_are_named(perseus: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = perseus("plan", pipeline=False)
    assert (code, err) == (2, "perseus plan: --schedule, --stages, --microbatches needed (or --order)\n")
    code, _, err = perseus("plan", "--output", "-", pipeline=False)
    assert (code, err) == (2, "perseus plan: --schedule, --stages, --microbatches needed (or --order)\n")
    code, _, err = perseus("frontier", "--output", "-", "--points", "0")
    assert (code, err) == (
        2,
        "perseus frontier: argument --points: must be a whole number from 1 to 10,000, not 0\n",
    )


def test_unwritable_output_is_found_before_the_work(
    perseus: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def solve(*_: object, **__: object) -> None:
        raise AssertionError("solved although the output cannot be written")

    monkeypatch.setattr("perseus_solver.frontier.Planner.plan", solve)
    code, _, err = perseus("plan", "--output", str(tmp_path / "profile.csv" / "plan.json"))
    assert code == 2
    assert "cannot be written: Not a directory" in err


def test_a_failure_leaves_the_old_file_alone(
    perseus: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perseus_solver.cli.documents.plan_document", interrupted)
    code, _, _ = perseus("plan", "--output", str(file))
    assert code == 130
    assert file.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "profile.csv"]


def test_links_permissions_and_devices_are_respected(
    perseus: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    assert perseus("plan", "--output", str(link))[0] == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["status"]
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert perseus("plan", "--output", "/dev/null")[0] == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_repeated_rows_need_samples(perseus: Callable[..., tuple[int, str, str]], profile: Path) -> None:
    lines = PROFILE.splitlines()
    profile.write_text("\n".join(lines + lines[1:]) + "\n")
    code, _, err = perseus("plan", "--output", "-")
    assert code == 2
    assert "duplicate row" in err
    code, out, err = perseus("plan", "--output", "-", "--samples")
    assert code == 0
    assert json.loads(out)["status"]
    assert "note: stage 0, forward: time raised by" in err


def test_unused_stages_are_noted(perseus: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = perseus("plan", "--output", "-", "--stages", "2")
    assert code == 0
    assert "note: the profile has 3 stages; the first 2 are used" in err


def test_importing_the_command_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'ortools', 'matplotlib', 'google'}"
    code = (
        "import sys; from perseus_solver.cli import main; main.command_parser(); "
        f"assert not {heavy} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_is_for_terminals_and_long_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from perseus_solver.cli import progress

    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with progress.ProgressBar("solving") as bar:
            bar(1, 10)
            assert capsys.readouterr().err == ""  # too early
            now += 1
            bar(5, 10)
            assert capsys.readouterr().err == ("\rsolving " + "█" * 15 + "░" * 15 + "  50 %" if terminal else "")
        assert capsys.readouterr().err == ("\r\x1b[K" if terminal else "")
