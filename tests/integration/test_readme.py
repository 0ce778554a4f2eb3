"""The README's commands that need no cluster, as written, and what it shows of them. ``make demo`` runs on its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import assert_said, blocks
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/worth.md"])
def test_what_a_fleet_would_save_is_what_the_page_shows(page: str, tmp_path: Path) -> None:
    (commands,) = [block for block in blocks(ROOT / page) if any("perseus estimate" in text for text, _ in block)]
    scripts = Path(sys.executable).parent
    for command, shown in commands:
        text = command.partition("#")[0].replace(".venv/bin/", "")
        if text.startswith("make"):
            continue
        tool, *rest = shlex.split(text.partition(">")[0])
        done = subprocess.run(
            [scripts / tool, *rest],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
            env={**os.environ, "COLUMNS": "120"},
        )
        if ">" in text:
            (tmp_path / text.partition(">")[2].strip()).write_text(done.stdout)
        assert_said(shown, done.stderr if ">" in text else done.stdout)
