"""The pictures of the documentation show what is drawn today."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.drawn import numbers
from tests.offenders import about_each

import redraw
from perseus_sim.profiles import profile_csv
from perseus_solver.cli import main
from redraw import FOLDER, ROOT, SUBJECTS, digest, marked_digest


@about_each(SUBJECTS)
def test_a_picture_is_as_new_as_what_it_shows(name: str) -> None:
    assert marked_digest(name) == digest(name), f"docs/images/{name}.png is stale: run `make pictures`"


def test_every_picture_is_shown_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/([\w.-]+)\.png", page.read_text())}
    assert shown == {picture.stem for picture in FOLDER.glob("*.png")}


def test_the_pictures_of_the_concepts_state_what_the_command_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.csv").write_text(profile_csv(*redraw.PROFILE))
    words = ["plan", "--profile", f"{tmp_path}/p.csv", *redraw.PROBLEM, "--output", f"{tmp_path}/plan.json"]
    assert main.main(words) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    said = re.search(r"\(([-+][\d.]+) %\), [\d.]+ J \(([-+][\d.]+) %\)", capsys.readouterr().out)
    assert said is not None
    time, energy = (float(one) for one in said.groups())
    before, after = (numbers(line) for line in redraw.stated("concepts-pipeline") if " s, " in line)
    assert after == pytest.approx([plan["iteration_time_s"], plan["energy_j"]], rel=1e-3)
    assert 100 * (after[1] / before[1] - 1) == pytest.approx(energy, abs=0.1)
    frontier = redraw.stated("concepts-frontier")
    (saving,) = (numbers(line) for line in frontier if line.endswith("time"))
    assert saving == pytest.approx([energy, time], abs=0.06)
    (fastest,) = (numbers(line)[-1] for line in frontier if "T_{min}" in line)
    assert fastest == pytest.approx(plan["iteration_time_s"], abs=6e-4)
