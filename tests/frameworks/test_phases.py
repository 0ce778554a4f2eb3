"""TRL's real GRPOTrainer: one iteration for each generation, and what happens in which of its phases."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from perseus_core.keys import ENV_SOCKET

HERE = Path(__file__).resolve().parent
STEPS, PAIR = 4, 2


@pytest.mark.parametrize("reused", [1, 2])
def test_a_generation_and_all_steps_with_it_are_three_phases(python: Path, tmp_path: Path, reused: int) -> None:
    if subprocess.run([str(python), "-c", "import trl"], check=False, capture_output=True).returncode:
        pytest.skip(f"TRL is not installed for {python}: set PERSEUS_FRAMEWORKS_PYTHON to one that has it")
    worker = subprocess.run(
        [str(python), str(HERE / "phases_worker.py"), str(tmp_path), str(reused)],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", ENV_SOCKET: "/nowhere"},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert worker.returncode == 0, worker.stderr[-3000:]
    evaluated = ["scored"] * PAIR * 2
    inside = evaluated * (reused - 1)
    one = ["[", "0", ">", "1", "scored", ">", "2", *inside, ">", *evaluated]
    assert json.loads((tmp_path / "marks.json").read_text()) == one * (STEPS // reused)
