"""Test files that know nothing of the client pass with the client attached to every schedule they step.

PyTorch's wheel ships no tests, and no package of its sources is published: PERSEUS_TORCH_TESTS names the folder
``test/distributed/pipelining`` of a checkout of the installed version, such as
git clone --depth 1 --branch v2.13.0 --filter blob:none --sparse https://github.com/pytorch/pytorch
git -C pytorch sparse-checkout set test/distributed/pipelining
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def run_attached(python: Path, suite: Path, result: Path) -> dict[str, int]:
    ended = subprocess.run(
        [str(python), str(HERE / "attach_everywhere.py"), str(result), str(suite)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    counts: dict[str, int] = json.loads(result.read_text())
    return counts


def test_every_schedule_on_one_rank(python: Path, tmp_path: Path) -> None:
    counts = run_attached(python, HERE / "pipelining_suite.py", tmp_path / "result.json")
    assert counts["attached"] == 11
    # Seven schedules, the file and the custom function three times each, the broken one before and after; GPipe twice.
    assert counts["complete"] == 3 * (7 + 2 + 2) + 2
    assert counts["incomplete"] == 1  # the step that failed


@pytest.mark.parametrize(
    "name", ["test_schedule.py", "test_stage.py", "test_microbatch.py", "test_schedule_multiproc.py"]
)
@pytest.mark.timeout(660)
def test_pytorchs_own_tests(python: Path, tmp_path: Path, name: str) -> None:
    folder = os.environ.get("PERSEUS_TORCH_TESTS")
    if not folder:
        pytest.skip("PERSEUS_TORCH_TESTS names no checkout of PyTorch's test/distributed/pipelining")
    run_attached(python, Path(folder) / name, tmp_path / "result.json")
