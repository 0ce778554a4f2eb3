"""The command line where clocks take time: few changes, plans for hardware, rehearsals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.solver.conftest import resimulate

pytestmark = pytest.mark.usefixtures("short_search")


def test_plans_with_few_clock_changes(perseus: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    def plan(*extra: str) -> dict[str, Any]:
        target = tmp_path / "plan.json"
        code, _, _ = perseus("plan", "--max-slowdown", "8%", "--output", str(target), *extra)
        assert code == 0
        written: dict[str, Any] = json.loads(target.read_text())
        return written

    usual, few = plan(), plan("--max-switch-loss", "2%")
    assert few["clock_changes"] < usual["clock_changes"]
    assert few["energy_j"] <= usual["energy_j"] * 1.02
    assert resimulate(few) == pytest.approx((few["iteration_time_s"], few["energy_j"]))


def test_frontiers_with_few_clock_changes(perseus: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    def changes(*extra: str) -> list[int]:
        target = tmp_path / "frontier.json"
        code, _, _ = perseus("frontier", "--points", "20", "--output", str(target), *extra)
        assert code == 0
        return [point["clock_changes"] for point in json.loads(target.read_text())["points"]]

    assert np.mean(changes("--max-switch-loss", "2%")) < 0.8 * np.mean(changes())


HARDWARE: dict[str, Any] = {
    "model": "made up",
    "switch_latency_s": {"p50": 0.02, "p99": 0.06},
    "call_s": 0.002,
    "marks": "gpu",
    "launch_s": 1e-5,
    "launch_queue": 1024,
    "kernels": {"forward": 300, "backward": 600},
}


def hardware_file(folder: Path, **change: Any) -> str:
    file = folder / "hardware.json"
    file.write_text(json.dumps(HARDWARE | change))
    return str(file)


def test_a_plan_for_hardware_keeps_its_deadline_when_it_is_rehearsed(
    perseus: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    target = tmp_path / "plan.json"
    perseus("plan", "--output", str(target))
    baseline_s = json.loads(target.read_text())["iteration_time_s"]
    written = {}
    for marks in ("gpu", "run-ahead"):
        words = ("--hardware", hardware_file(tmp_path, marks=marks))
        code, out, err = perseus("plan", *words, "--max-slowdown", "5%", "--output", str(target))
        assert (code, err) == (0, "")
        assert "95th percentile" in out
        plan = written[marks] = json.loads(target.read_text())
        assert plan["expected"]["iteration_time_s"]["p50"] <= plan["expected"]["iteration_time_s"]["p95"]
        assert plan["expected"]["iteration_time_s"]["p95"] <= 1.05 * baseline_s * (1 + 1e-9)
        assert resimulate(plan) == pytest.approx((plan["iteration_time_s"], plan["energy_j"]), rel=1e-9)
        assert plan["gap"] >= 0
        report = tmp_path / "report.json"
        code, out, err = perseus("rehearse", "--plan", str(target), *words, "--output", str(report))
        assert (code, err) == (0, "")
        rehearsed = json.loads(report.read_text())
        for figure in ("iteration_time_s", "energy_j"):
            assert rehearsed[figure] == pytest.approx(plan["expected"][figure])
        assert rehearsed["ideal"]["energy_j"] == pytest.approx(plan["energy_j"])
    assert written["run-ahead"]["grain"] in ("stage", "none")
    assert written["gpu"]["expected"]["energy_j"]["mean"] < written["run-ahead"]["expected"]["energy_j"]["mean"]


def test_a_frontier_for_hardware_has_the_plans_that_are_worth_deploying(
    perseus: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    target, words = tmp_path / "frontier.json", ("--hardware", hardware_file(tmp_path), "--confidence", "90%")
    code, out, err = perseus("frontier", *words, "--output", str(target), "--full")
    assert (code, err) == (0, "")
    assert "grain: " in out
    points = json.loads(target.read_text())["points"]
    assert {point["grain"] for point in points} <= {"instruction", "segment", "stage", "none"}
    for point in points:
        times = point["expected"]["iteration_time_s"]
        assert times["p50"] <= times["p95"]
        assert resimulate(point) == pytest.approx((point["iteration_time_s"], point["energy_j"]), rel=1e-9)
    least = min(points, key=lambda point: point["expected"]["energy_j"]["mean"])
    assert [point for point in points if not point["straggler_part"]][-1] == least
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(points[0]))
    report = tmp_path / "report.json"
    code, _, err = perseus("rehearse", "--plan", str(plan), *words, "--output", str(report))
    assert (code, err) == (0, "")
    assert json.loads(report.read_text())["energy_j"] == pytest.approx(points[0]["expected"]["energy_j"])
    code, _, err = perseus("frontier", *words, "--max-switch-loss", "1%", "--output", "-")
    assert code == 2
    assert "leave out --max-switch-loss" in err


def test_a_rehearsal_names_the_cause_when_a_plan_does_worse(
    perseus: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    target = tmp_path / "plan.json"
    perseus("plan", "--max-slowdown", "5%", "--output", str(target))

    def rehearse(**change: Any) -> str:
        code, out, _ = perseus("rehearse", "--plan", str(target), "--hardware", hardware_file(tmp_path, **change))
        assert code == 0
        return out

    assert "cause: clock changes take 200 ms" in rehearse(switch_latency_s={"p50": 0.2, "p99": 0.8})
    assert "cause: marks lead by" in rehearse(marks="run-ahead")
    assert "cause" not in rehearse(switch_latency_s={"p50": 0, "p99": 0}, call_s=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not what perseus plan writes"),
        ("[]", "is not what perseus plan writes"),
        ('{"stages": [[{"instruction": "forward"}]]}', "is not what perseus plan writes"),
        ('{"stages": []}', "is of another schedule than 1F1B"),
    ],
)
def test_what_is_no_plan_of_the_schedule_is_refused(
    perseus: Callable[..., tuple[int, str, str]], tmp_path: Path, text: str, message: str
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    code, out, err = perseus("rehearse", "--plan", str(plan), "--hardware", hardware_file(tmp_path))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_plan_with_clocks_that_were_not_measured_is_refused(
    perseus: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    target = tmp_path / "plan.json"
    perseus("plan", "--output", str(target))
    good = json.loads(target.read_text())
    for clock, message in ((1234, "was not measured at 1234 MHz"), (-1, "whole number"), (True, "whole number")):
        good["stages"][0][0]["frequency_mhz"] = clock
        target.write_text(json.dumps(good))
        code, _, err = perseus("rehearse", "--plan", str(target), "--hardware", hardware_file(tmp_path))
        assert code == 2
        assert message in err


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"marks": "host"}, (), "marks must be one of"),
        ({}, ("--confidence", "20%"), "must be between 50% and 99.9%"),
        ({}, ("--max-switch-loss", "1%"), "leave out --max-switch-loss"),
        ({}, ("--deadline-s", "0.01"), "shorter than the fastest possible"),
    ],
)
def test_hardware_and_its_confidence_are_checked(
    perseus: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    change: dict[str, Any],
    words: tuple[str, ...],
    message: str,
) -> None:
    code, _, err = perseus("plan", "--output", "-", "--hardware", hardware_file(tmp_path, **change), *words)
    assert code == 2
    assert message in err


def test_a_missing_description_is_named(perseus: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, _, err = perseus("plan", "--output", "-", "--hardware", str(tmp_path / "none.json"))
    assert code == 2
    assert "none.json cannot be read: No such file" in err
