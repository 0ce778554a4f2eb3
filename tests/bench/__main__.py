"""`make bench`: measure every figure and its real peer in the same run, print a table, and write JSON.

A figure is a name and a function without arguments. The function returns one result
``{"value", "unit", "peer", "peer_value", "ratio"}``, or several as ``{name: result}``. Each module of ``MODULES`` lists
its figures in ``FIGURES`` and measures nothing at import. ``--only`` takes a name or the beginning of names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

MODULES = (
    "tests.bench.solver",
    "tests.bench.switches",
    "tests.bench.calibration",
    "tests.bench.stragglers",
    "tests.bench.steps",
    "tests.bench.idle",
    "tests.bench.serving",
    "tests.bench.serving_node",
    "tests.bench.serving_kills",
    "tests.bench.serving_interval",
    "tests.bench.serving_pool",
    "tests.bench.serving_router",
    "tests.bench.serving_vllm",
    "tests.bench.control_grid",
    "tests.bench.control_causes",
    "tests.bench.control_measured",
    "tests.bench.client",
    "tests.bench.agent",
    "tests.bench.agent_state",
    "tests.bench.operator",
    "tests.bench.fleet",
    "tests.bench.fleet_wire",
    "tests.bench.frameworks",
    "tests.bench.hostile",
    "tests.bench.hostile_operator",
    "tests.bench.simulation",
)
Result = dict[str, Any]
KEYS = ("value", "unit", "peer", "peer_value", "ratio")


def measured(only: str | None) -> Iterator[tuple[str, Result]]:
    """Measure the selected figures, one after another so that they do not disturb each other."""
    every: dict[str, Callable[[], Result]] = {}
    for module in MODULES:
        every.update(importlib.import_module(module).FIGURES)
    for name, measure in every.items():
        if name in chosen(only, every):
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            result = measure()
            several = result if "value" not in result else {name: result}
            yield from ((key, {field: figure.get(field) for field in KEYS}) for key, figure in several.items())


def chosen(only: str | None, names: Iterable[str]) -> set[str]:
    """Return the names that begin with a word; if none do, the longest with which it begins: a figure of several."""
    if not only:
        return set(names)
    begin = {name for name in names if name.startswith(only)}
    return begin or {max((name for name in names if only.startswith(name)), key=len, default="")}


def row(name: str, figure: Result) -> str:
    """Return one line of the table."""

    def text(value: object) -> str:
        return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    peer = f"{figure['peer']}: {text(figure['peer_value'])}" if figure["peer"] else "–"
    return f"{name:58} {text(figure['value']):>12} {figure['unit'] or '':8} {text(figure['ratio']):>9}  {peer}"


def main() -> None:
    """Measure the figures, print the table and write the file."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", help="name of a figure, or the beginning of several names")
    parser.add_argument("--output", type=Path, default=Path("out/bench.json"))
    arguments = parser.parse_args()
    started_s = time.monotonic()
    print(f"{'figure':58} {'value':>12} {'unit':8} {'ratio':>9}  peer", flush=True)
    figures: dict[str, Result] = {}
    for name, figure in measured(arguments.only):
        figures[name] = figure
        print(row(name, figure), flush=True)
    if not figures:
        sys.exit(f"make bench: no figure has a name that begins with {arguments.only!r}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    partial = arguments.output.with_suffix(".partial")
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    os.replace(partial, arguments.output)
    print(f"{len(figures)} figures in {time.monotonic() - started_s:.0f} s, written to {arguments.output}")


if __name__ == "__main__":
    main()
