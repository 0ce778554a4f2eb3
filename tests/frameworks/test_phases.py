"""Trainers of TRL and the hybrid worker of verl, real ones: one iteration for each generation, with its phases."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from perseus_core.keys import ENV_SOCKET

HERE = Path(__file__).resolve().parent
STEPS, PAIR = 4, 2


def marks_of(python: Path, module: str, worker: Path, folder: Path, *arguments: str) -> list[str]:
    """What a worker marks, in an interpreter that has a module."""
    if subprocess.run([str(python), "-c", f"import {module}"], check=False, capture_output=True).returncode:
        pytest.skip(f"{python} has no {module}: set PERSEUS_FRAMEWORKS_PYTHON to one that has it")
    ended = subprocess.run(
        [str(python), str(worker), str(folder), *arguments],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", ENV_SOCKET: "/nowhere"},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    marks: list[str] = json.loads((folder / "marks.json").read_text())
    return marks


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
@pytest.mark.parametrize("reused", [1, 2])
def test_a_generation_and_all_steps_with_it_are_three_phases(
    python: Path, tmp_path: Path, method: str, reused: int
) -> None:
    marks = marks_of(python, "trl", HERE / "phases_worker.py", tmp_path, method, str(reused))
    evaluated = ["scored"] * PAIR * 2
    inside = evaluated * (reused - 1)
    one = ["[", "0", ">", "1", "scored", ">", "2", *inside, ">", *evaluated]
    assert marks == one * (STEPS // reused)


def test_from_new_weights_to_the_actor_s_update_are_two_phases(python: Path, tmp_path: Path) -> None:
    marks = marks_of(python, "verl.workers.engine_workers", HERE / "verl_worker.py", tmp_path)
    work = ["log probabilities", "log probabilities", "trained"]
    hybrid = ["[", "0", "weights", ">", "1", *work, ">"] * 2
    assert marks == [*hybrid, "|", *["weights", *work] * 2, "|"], "an actor without an engine is not followed"
