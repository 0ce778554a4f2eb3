"""Programs that run before there is a virtual environment need the standard library alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("program", ["deploy/cluster/cluster.py check", "deploy/control-plane/build.py --help"])
def test_a_program_needs_no_packages(program: str) -> None:
    path, argument = program.split()
    ran = subprocess.run(
        [sys.executable, "-S", path, argument], cwd=ROOT, env={}, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 0 or ran.stderr.startswith("cluster: ")
