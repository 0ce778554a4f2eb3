"""Runs other programs, and makes one sentence of their failure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


class ReleaseFailed(Exception):
    """A part of the release could not be made. The message says which, and what to do."""


def run(
    *command: str | Path, cwd: Path | None = None, more: Mapping[str, str] | None = None, shown: bool = False
) -> str:
    """Run a command and return its standard output.

    Args:
        command: the program and its arguments.
        cwd: folder to run it in; default: this process's.
        more: variables to add to the environment.
        shown: whether what it prints goes to this process's output as it comes; then nothing is returned.

    Raises:
        ReleaseFailed: it failed; with the last lines that it printed.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **(more or {})},
        stdin=subprocess.DEVNULL,
        capture_output=not shown,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "\n".join(f"{done.stdout or ''}{done.stderr or ''}".strip().splitlines()[-15:])
        words = " ".join(Path(str(word)).name if at == 0 else str(word) for at, word in enumerate(command[:4]))
        raise ReleaseFailed(f"`{words} …` failed with {done.returncode}\n{said}")
    return done.stdout or ""
