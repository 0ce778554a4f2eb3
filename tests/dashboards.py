"""Every query of the chart's dashboards and of the documentation, in the form that Prometheus gets.

Tests with simulated nodes and tests on a real cluster both check that every query returns data. A query is identified
by its dashboard and panel, or by its page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
BOARDS = sorted((_ROOT / "charts" / "perseus" / "files" / "dashboards").glob("*.json"))
_PAGES = sorted((_ROOT / "docs").rglob("*.md"))
Values = Mapping[str, str]
"""The value that Grafana would insert for each of its variables."""


def filled(expression: str, values: Values) -> str:
    for name, value in values.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def panels(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries(values: Values) -> dict[str, str]:
    """Return the query of every panel and every page, by its name."""
    found = {}
    for path in BOARDS:
        for panel in panels(json.loads(path.read_text())):
            for target in panel.get("targets", ()):
                where = f"{path.stem}, {panel['type']} {panel['title']}: {target['refId']}"
                found[where] = filled(target["expr"], values)
    for path in _PAGES:
        for block in re.findall(r"^```promql\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            for number, line in enumerate(filter(None, block.splitlines()), 1):
                found[f"{path.name}, query {number}"] = filled(line, values)
    return found
