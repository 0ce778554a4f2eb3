"""Real vLLM on CPU: tests run in the project's environment, the engine in one that has vLLM and the client alone."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def vllm_python() -> Path | None:
    """The interpreter that has vLLM; None: there is none."""
    found = Path(os.environ.get("PERSEUS_VLLM_PYTHON", REPOSITORY / ".venv-vllm" / "bin" / "python"))
    looks = [str(found), "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"]
    return found if found.exists() and subprocess.run(looks, check=False).returncode == 0 else None


@dataclass(frozen=True)
class Vllm:
    """An installed version."""

    python: Path
    path: str
    """Its PYTHONPATH; empty: that of its environment."""


@pytest.fixture(scope="session", params=["newest", "before"])
def vllm(request: pytest.FixtureRequest) -> Vllm:
    python = vllm_python()
    if python is None:
        pytest.skip("no vLLM in .venv-vllm: make vllm installs it")
    if request.param == "newest":
        return Vllm(python, "")
    before = python.parents[1] / "before"
    if not before.is_dir():
        pytest.skip(f"no older vLLM in {before}: make vllm installs it")
    return Vllm(python, str(before))
