"""docs/comparison.md: every row about another system names its sources, and each was read within a year.

What others do changes: a page that nobody read again within a year is no comparison any more.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "comparison.md"
YEAR = datetime.timedelta(days=366)


def _tables() -> list[list[list[str]]]:
    """The tables of the page; each is its rows, the first its headings; each row its cells."""
    blocks = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    tables = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()] for block in blocks
    ]
    return [[rows[0], *rows[2:]] for rows in tables]


def _sources() -> dict[str, tuple[str, str]]:
    (headings, *rows) = _tables()[-1]
    assert headings == ["source", "where", "read"]
    return {name: (where, read) for name, where, read in rows}


def test_every_row_names_a_source() -> None:
    sources = _sources()
    without = [
        (row[0], row[-1])
        for headings, *rows in _tables()[:-1]
        for row in rows
        if headings[-1] != "sources" or not set(row[-1].split(", ")) <= set(sources)
    ]
    assert without == []


def test_every_source_is_used() -> None:
    used = {name for _, *rows in _tables()[:-1] for row in rows for name in row[-1].split(", ")}
    assert set(_sources()) - used == set()


def test_every_source_has_an_address_and_was_read_within_a_year() -> None:
    today = datetime.datetime.now(datetime.UTC).date()
    stale = [
        (name, read)
        for name, (where, read) in _sources().items()
        if "](https://" not in where or not today - YEAR <= datetime.date.fromisoformat(f"{read}-01") <= today
    ]
    assert stale == []
