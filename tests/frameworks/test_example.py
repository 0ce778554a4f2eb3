"""The example does what it says: it trains, is profiled and planned by the operator, and saves energy."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "simulate.py"


@pytest.fixture(scope="module")
def simulate() -> Any:
    spec = importlib.util.spec_from_file_location("simulate", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["simulate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(600)
def test_the_example_is_planned_by_the_operator_and_saves_energy(simulate: Any, python: Path, tmp_path: Path) -> None:
    figures = simulate.Example(python, tmp_path).run()  # raises DemoFailed
    assert json.loads((tmp_path / "example.json").read_text()) == figures
    # Time is the machine's and may be lost to others on it; the energy of the instructions is the simulated GPUs'.
    assert figures["energy_saved"] > 0.05
    assert (tmp_path / "profile.csv").read_text().count("\n") == 1 + 2 * 4 * len(simulate.PIPELINE_CLOCKS_MHZ)


@pytest.mark.timeout(600)
def test_a_job_without_a_pipeline_keeps_its_bound_and_saves(simulate: Any, python: Path, tmp_path: Path) -> None:
    """Accelerate on two ranks, which may take 3 % longer."""
    figures = simulate.Example(python, tmp_path, "accelerate").run()  # raises DemoFailed
    assert figures["energy_saved"] - figures["energy_saved_within"] > 0
    # What iterations took is not judged: they run on this machine, which has other things to do.
    assert 0 < figures["planned_slowdown"] <= 0.03
    measured = (tmp_path / "profile.csv").read_text().count("\n") - 1
    assert measured > 7, "the clocks around the best one as well"
