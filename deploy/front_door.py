"""Writes the lists of pages in README.md and docs/index.md from the navigation of the site (``mkdocs.yml``).

So a reader meets the same sections in the same order on GitHub, on the first page of the site and in its menu.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FIRST = 5
"""Pages of a section that README names: its row then fits a screen."""


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the title of each section of the navigation, and its pages: title and path below docs/."""
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]:
        [(title, pages)] = entry.items()
        if isinstance(pages, list):
            yield title, [item for page in pages for item in page.items()]
        elif pages.endswith("/"):  # a folder whose pages are read in their order
            first = min((ROOT / "docs" / pages).glob("*.md"))
            yield title, [(f"from {first.stem.partition('-')[0]} on", pages + first.name)]


def front_doors() -> dict[Path, str]:
    """Return README.md and docs/index.md with their lists as the navigation has them."""
    doors = {ROOT / "README.md": ("docs/", FIRST), ROOT / "docs" / "index.md": ("", None)}
    return {door: _with_list(door.read_text(encoding="utf-8"), *style) for door, style in doors.items()}


def write_front_doors() -> None:
    """Write both pages."""
    for door, text in front_doors().items():
        door.write_text(text, encoding="utf-8")


def _with_list(page: str, prefix: str, count: int | None) -> str:
    rows = ["| to | read |", "|---|---|"]
    for title, pages in sections():
        rows.append(f"| {title} | {', '.join(f'[{name}]({prefix}{path})' for name, path in pages[:count])} |")
    table = "\n".join(rows)
    start, end = "<!-- Generated from mkdocs.yml by `make generate`. -->", "<!-- End -->"
    return re.sub(f"(?<={re.escape(start)}\n\n).*?(?=\n\n{end})", lambda _: table, page, flags=re.DOTALL)
