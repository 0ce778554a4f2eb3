"""Commands that pages of the documentation show, and what they show of their output."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


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


def commands_of(page: Path) -> list[str]:
    """Return the commands of every fenced or indented block of a shell on a page, without their comments."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(?:console|bash|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(
        r"(?:^    .*\n)+", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    lines = [line.strip() for block in [*fenced, *indented] for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s+# .*", "", line.removeprefix("$ ")) for line in lines]


def assert_said(shown: Iterable[str], said: str) -> None:
    """Every line that is shown was said, with numbers that differ by 2 % at most."""
    lines = said.splitlines()
    for line in shown:
        words = _NUMBER.sub("#", line)
        (same,) = [found for found in lines if _NUMBER.sub("#", found).startswith(words)]
        for expected, found in zip(_NUMBER.findall(line), _NUMBER.findall(same), strict=False):
            assert float(found.replace(",", "")) == pytest.approx(float(expected.replace(",", "")), rel=0.02), same
