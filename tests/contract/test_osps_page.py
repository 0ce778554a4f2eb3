"""docs/osps-baseline.md: every requirement of levels 1 and 2 has a state, what is met names where, and what the page
says of the repository holds.

Requirements: the Open Source Project Security Baseline (baseline.openssf.org), as read in November 2026. That links
have targets is tested for all pages by ``test_docs``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "osps-baseline.md"
LEVELS = {
    1: (
        *("AC-01.01", "AC-02.01", "AC-03.01", "AC-03.02", "BR-01.01", "BR-01.03", "BR-03.01", "BR-03.02", "BR-07.01"),
        *("DO-01.01", "DO-02.01", "GV-02.01", "GV-03.01", "LE-02.01", "LE-02.02", "LE-03.01", "LE-03.02"),
        *("QA-01.01", "QA-01.02", "QA-02.01", "QA-04.01", "QA-05.01", "QA-05.02", "VM-02.01"),
    ),
    2: (
        *("AC-04.01", "BR-02.01", "BR-04.01", "BR-05.01", "BR-06.01", "DO-06.01", "DO-07.01"),
        *("GV-01.01", "GV-01.02", "GV-03.02", "LE-01.01", "QA-03.01", "QA-06.01"),
        *("SA-01.01", "SA-02.01", "SA-03.01", "VM-01.01", "VM-03.01", "VM-04.01"),
    ),
}
STATES = {"met", "when published", "missing"}
EXECUTABLE = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"PK\x03\x04", b"!<arch>", b"\x1f\x8b")
"""First bytes of programs, libraries and archives."""
PICTURES = {".png"}
SECRET = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}")
LOCAL = re.compile(r"localhost|127\.0\.0\.1|[\w-]+\.(monitoring|observability)\b|user:")
"""Addresses that nobody reaches from outside: of this machine, or of a Service of the reader's own cluster."""


def rows(level: int) -> list[list[str]]:
    part = PAGE.read_text(encoding="utf-8").partition(f"## Level {level}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| OSPS-")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("level", LEVELS)
def test_every_requirement_has_a_state_and_what_is_met_says_where(level: int) -> None:
    assert [row[0] for row in rows(level)] == [f"OSPS-{requirement}" for requirement in LEVELS[level]]
    for requirement, _, state, where in rows(level):
        assert state in STATES, requirement
        assert (where == "–") == (state != "met"), f"{requirement}: what is met says where, and nothing else does"
        assert state != "met" or re.search(r"\]\([^)]+\)|https", where), f"{requirement}: a link"


def test_no_program_and_no_binary_but_pictures_is_tracked() -> None:
    found = []
    for path in tracked():
        with path.open("rb") as file:
            begin = file.read(8192)
        if begin.startswith(EXECUTABLE) or (b"\0" in begin and path.suffix not in PICTURES):
            found.append(str(path.relative_to(ROOT)))
    assert found == []


def test_no_private_key_is_tracked() -> None:
    assert [str(path.relative_to(ROOT)) for path in tracked() if SECRET.search(path.read_bytes())] == []


def test_pages_lead_nowhere_in_the_clear() -> None:
    found = [
        (str(page.relative_to(ROOT)), address)
        for page in tracked()
        if page.suffix == ".md"
        for address in re.findall(r"http://[^\s)`\"']+", page.read_text(encoding="utf-8"))
        if not LOCAL.match(address.removeprefix("http://"))
    ]
    assert found == []
