"""The README's commands that need no cluster, as written, and what it shows of them. ``make demo`` runs on its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


def blocks(page: Path) -> list[list[tuple[str, list[str]]]]:
    """Return commands and the lines shown after each, of every console block of a page."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        commands: list[tuple[str, list[str]]] = []
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            else:
                commands[-1][1].append(line)
        found.append(commands)
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/worth.md"])
def test_what_a_fleet_would_save_is_what_the_page_shows(page: str, tmp_path: Path) -> None:
    (commands,) = [block for block in blocks(ROOT / page) if any("perseus-sim sample" in text for text, _ in block)]
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
            timeout=300,
            env={**os.environ, "COLUMNS": "120"},
        )
        if ">" in text:
            (tmp_path / text.partition(">")[2].strip()).write_text(done.stdout)
        said = (done.stderr if ">" in text else done.stdout).splitlines()
        for line in shown:
            words = NUMBER.sub("#", line)
            (same,) = [found for found in said if NUMBER.sub("#", found).startswith(words)]
            for expected, found in zip(NUMBER.findall(line), NUMBER.findall(same), strict=False):
                assert float(found.replace(",", "")) == pytest.approx(float(expected.replace(",", "")), rel=0.02), same
