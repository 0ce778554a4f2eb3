"""Write docs/benchmarks.md from out/bench.json: a summary and a picture, then the figures of `make bench`.

The page has no dates, so it changes only when a figure changes. Groups of figures that the file does not hold stay as
they are on the page, and the summary changes only with the solver's figures. Run the program on the machine that
measured: `.venv/bin/python -m tests.bench.table`.
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

from tests.bench import fleet_growth, solver_summary

Result = dict[str, Any]

PAGE = """# Benchmarks

Generated from `out/bench.json`; do not edit.

    make bench                                # measures every figure and its real peer in the same run
    .venv/bin/python -m tests.bench.table     # writes this page

"""
ALL = """## All figures

The ratio is the peer's value divided by this project's value; for savings it is this project's value divided by the
peer's. If a peer was stopped, its time is the time until then, and the ratio is a lower bound; energies are compared
only for the plans that it had found. Gaps are certified: each is the energy above a proven lower bound. The cells of
the grid of control are in a table of [their own](clocks-take-time.md#measured-on-simulated-gpus).
"""
GROUP = re.compile(r"^#{2,3} (?P<title>\w+)\n\n(?P<table>\| figure .*?\n)(?=\n#|\Z)", re.MULTILINE | re.DOTALL)
SUMMARY = re.compile(r"^## Solver in short\n.*?(?=^## All figures)", re.MULTILINE | re.DOTALL)
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


def group_tables(figures: dict[str, Result], machine: str) -> dict[str, str]:
    """Return one table for each first word of the figures' names, by that word."""
    groups: dict[str, list[str]] = {}
    for name, figure in figures.items():
        if CELL.match(name):
            continue
        cells = (figure["value"], figure["unit"], figure["peer"], figure["peer_value"], figure["ratio"])
        row = " | ".join((f"`{name}`", *(text(cell) for cell in cells)))
        groups.setdefault(name.split("_", 1)[0], []).append(f"| {row} |")
    head = ["| figure | value | unit | peer | peer's value | ratio |", "|---|--:|---|---|--:|--:|"]
    return {
        title.capitalize(): "\n".join([*head, *rows]) + f"\n\nMachine: {machine}.\n" for title, rows in groups.items()
    }


def page(figures: dict[str, Result], machine: str, known: str = "") -> str:
    """Return the page: new figures, and what the known page holds of all other groups."""
    tables = {found["title"]: found["table"] for found in GROUP.finditer(known)}
    tables |= group_tables(figures, machine)
    in_short = solver_summary.in_short(figures, machine)
    if not in_short and (found := SUMMARY.search(known)):
        in_short = found[0]
    parts = [PAGE, in_short, ALL, *(f"\n### {title}\n\n{table}" for title, table in tables.items())]
    return "".join(parts)


def main() -> None:
    """Read the figures and write the page and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, default=Path("out/bench.json"))
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks.md"))
    arguments = parser.parse_args()
    figures = json.loads(arguments.input.read_text())
    known = arguments.output.read_text() if arguments.output.exists() else ""
    arguments.output.write_text(page(figures, machine(), known))
    for drawn in (solver_summary, fleet_growth):
        if picture := drawn.picture(figures):
            (arguments.output.parent / drawn.PICTURE).write_bytes(picture)


if __name__ == "__main__":
    main()
