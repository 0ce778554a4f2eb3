"""Write docs/benchmarks.md from out/bench.json: the figures of `make bench`, and the machine that measured them.

The page has no dates, so it changes only when a figure changes. Run the program on the machine that measured:
`.venv/bin/python -m tests.bench.table`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

Result = dict[str, Any]

PAGE = """# Benchmarks

Generated from `out/bench.json`; do not edit.

    make bench                                # measures every figure and its real peer in the same run
    .venv/bin/python -m tests.bench.table     # writes this page

Machine: {machine}.

The ratio is the peer's value divided by this project's value; for savings it is this project's value divided by the
peer's. If a peer was stopped, its time is the time until then, and the ratio is a lower bound; energies are compared
only for the plans that it had found. Gaps are certified: each is the energy above a proven lower bound. The cells of
the grid of control are in a table of [their own](control.md).
"""
CELL = re.compile(r"control_.*_\d+x\d+(_own_lock)?$")


def machine() -> str:
    """Describe the machine: processor, cores, memory, and versions of Python and the numerical packages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "ortools"))
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}, {packages}"


def text(value: object) -> str:
    """Format a number with four significant digits."""
    return "–" if value is None else f"{value:,.4g}" if isinstance(value, int | float) else str(value)


def page(figures: dict[str, Result], machine: str) -> str:
    """Return the page, with one table for each first word of the figures' names."""
    groups: dict[str, list[str]] = {}
    for name, figure in figures.items():
        if CELL.match(name):
            continue
        cells = (figure["value"], figure["unit"], figure["peer"], figure["peer_value"], figure["ratio"])
        row = " | ".join((f"`{name}`", *(text(cell) for cell in cells)))
        groups.setdefault(name.split("_", 1)[0], []).append(f"| {row} |")
    parts = [PAGE.format(machine=machine)]
    for title, rows in groups.items():
        head = ["| figure | value | unit | peer | peer's value | ratio |", "|---|--:|---|---|--:|--:|"]
        parts.append("\n".join([f"\n## {title.capitalize()}\n", *head, *rows]) + "\n")
    return "".join(parts)


def main() -> None:
    """Read the figures and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, default=Path("out/bench.json"))
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks.md"))
    arguments = parser.parse_args()
    arguments.output.write_text(page(json.loads(arguments.input.read_text()), machine()))


if __name__ == "__main__":
    main()
