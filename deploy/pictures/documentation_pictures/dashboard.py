"""A dashboard as one page of HTML: panels in Grafana's grid of 24 columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple, Protocol

from documentation_pictures.charts import COLOURS, Series, curves, points
from documentation_pictures.units import text_of

WIDTH_PX: Final = 1440
_COLUMN_PX, _ROW_PX, _GAP_PX = WIDTH_PX // 24, 32, 8
_TITLE_PX: Final = 34
_INK: Final = {"text": "#1f2733", "green": COLOURS[2], "red": COLOURS[5]}
_STYLE: Final = f"""
body {{ margin: 0; background: #f4f5f5; font: 13px "DejaVu Sans", sans-serif; color: #1f2733; width: {WIDTH_PX}px; }}
h1 {{ font-size: 18px; margin: 14px 12px 6px; }} h1 span {{ color: #6a7280; font-weight: normal; font-size: 14px; }}
main {{ position: relative; }}
section {{ position: absolute; background: #fff; border: 1px solid #dcdfe3; border-radius: 3px; overflow: hidden; }}
h2 {{ position: absolute; font-size: 14px; margin: 8px 6px; }}
h3 {{ font-size: 13px; font-weight: 600; margin: 8px 10px; }}
.figure {{ font-size: 30px; text-align: center; margin-top: 16px; }}
p {{ margin: 6px 10px; line-height: 1.5; }} .none {{ color: #8a919c; text-align: center; margin-top: 26px; }}
table {{ width: 100%; border-collapse: collapse; }} th {{ text-align: left; color: #3274d9; font-weight: 600; }}
th, td {{ padding: 6px 10px; border-bottom: 1px solid #eceef0; }}
"""


class Sample(NamedTuple):
    """One series of an answer."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]
    """Seconds since the epoch, and value: one of an instant query."""


class Source(Protocol):
    """What answers the queries of a dashboard."""

    def ask(self, expression: str, span_s: tuple[float, float] | None) -> Sequence[Sample]:
        """Answer now, or over a span of time."""


def page(board: Mapping[str, Any], values: Mapping[str, str], source: Source, span_s: tuple[float, float]) -> str:
    """Draw a dashboard.

    Args:
        board: as its JSON.
        values: what Grafana would put in for each of its variables, by the variable with its ``$``.
        source: of the answers.
        span_s: the chosen range of time, seconds since the epoch.
    """
    drawn = _Panels(values, source, span_s)
    panels = [drawn.panel(panel) for panel in board["panels"]]
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    variables = [f"${variable['name']}" for variable in board["templating"]["list"]]
    chosen = ", ".join(value for name, value in values.items() if name in variables and value != ".*")
    return (
        f'<!doctype html><meta charset="utf-8"><title>{escape(board["title"])}</title><style>{_STYLE}</style>'
        f"<h1>{escape(board['title'])} <span>{escape(chosen)}</span></h1>"
        f'<main style="height: {bottom * _ROW_PX + _GAP_PX}px">{"".join(panels)}</main>'
    )


class _Panels:
    def __init__(self, values: Mapping[str, str], source: Source, span_s: tuple[float, float]) -> None:
        self._values = values
        self._source = source
        self._span_s = span_s

    def panel(self, panel: Mapping[str, Any]) -> str:
        place = panel["gridPos"]
        left, top = place["x"] * _COLUMN_PX, place["y"] * _ROW_PX
        width, height = place["w"] * _COLUMN_PX - _GAP_PX, place["h"] * _ROW_PX - _GAP_PX
        title = escape(panel["title"])
        if panel["type"] == "row":
            return f'<h2 style="left: {left}px; top: {top}px">{title}</h2>'
        if panel["type"] == "text":
            words = re.sub(r"[`*]", "", panel["options"]["content"])
            return _section((left, top, width, height), title, f"<p>{escape(words)}</p>")
        kinds = {"stat": self._figure, "timeseries": self._curves, "table": self._table, "xychart": self._points}
        body = kinds[panel["type"]](panel, (width, height - _TITLE_PX)) or '<p class="none">No data</p>'
        return _section((left, top, width, height), title, body)

    def _figure(self, panel: Mapping[str, Any], _: tuple[int, int]) -> str:
        [target] = panel["targets"]
        answer = self._ask(target, None)
        if not answer:
            return ""
        value, defaults = answer[0].points[-1][1], panel["fieldConfig"]["defaults"]
        steps = defaults["thresholds"]["steps"]
        colour = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
        text = text_of(value, defaults.get("unit", ""))
        return f'<p class="figure" style="color: {_INK[colour]}">{escape(text)}</p>'

    def _curves(self, panel: Mapping[str, Any], size: tuple[int, int]) -> str:
        defaults = panel["fieldConfig"]["defaults"]
        series = [
            Series(_legend(target.get("legendFormat", ""), sample.labels), sample.points, defaults.get("unit", ""))
            for target in panel["targets"]
            for sample in self._ask(target, self._span_s)
        ]
        stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
        return curves(series, size, self._span_s, stacked=stacked) if series else ""

    def _table(self, panel: Mapping[str, Any], _: tuple[int, int]) -> str:
        columns, rows = self._joined(panel)
        units = _units(panel)
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_cell(row.get(name, ''), units.get(name, '')))}</td>" for name in columns)
            for row in rows
        )
        return f"<table><tr>{head}</tr>{body}</table>" if rows else ""

    def _points(self, panel: Mapping[str, Any], size: tuple[int, int]) -> str:
        columns, rows = self._joined(panel)
        units = _units(panel)
        x, *ys = [name for name in columns if name in units]
        series = [
            Series(name, [(row[x], row[name]) for row in rows if x in row and name in row], units[name]) for name in ys
        ]
        drawn = [each for each in series if each.points]
        return points(drawn, size, (x, units[x])) if drawn else ""

    def _joined(self, panel: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the columns that are shown, and the rows, with the panel's transformations."""
        options = {each["id"]: each["options"] for each in panel.get("transformations", ())}
        key = options.get("joinByField", {}).get("byField")
        rename = options.get("organize", {}).get("renameByName", {})
        rows: dict[Any, dict[str, Any]] = {}
        labels: list[str] = []
        named = [rename.get(f"Value #{target['refId']}", "Value") for target in panel["targets"]]
        for name, target in zip(named, panel["targets"], strict=True):
            for sample in self._ask(target, None):
                own = {label: value for label, value in sample.labels.items() if label != "__name__"}
                row = rows.setdefault(own.get(key) if key else frozenset(own.items()), {})
                row.update(own)
                row[name] = sample.points[-1][1]
                labels += [label for label in own if label not in labels]
        hidden = {
            each["matcher"]["options"]
            for each in panel["fieldConfig"]["overrides"]
            if {"id": "custom.hidden", "value": True} in each["properties"]
        }
        shown = [key] if key else labels
        return [name for name in (*shown, *named) if name not in hidden], [*rows.values()]

    def _ask(self, target: Mapping[str, Any], span_s: tuple[float, float] | None) -> Sequence[Sample]:
        expression = target["expr"]
        for name, value in self._values.items():
            expression = expression.replace(name, value)
        return self._source.ask(expression, span_s)


def _section(place: tuple[int, int, int, int], title: str, body: str) -> str:
    left, top, width, height = place
    style = f"left: {left + _GAP_PX // 2}px; top: {top}px; width: {width}px; height: {height}px"
    return f'<section style="{style}"><h3>{title}</h3>{body}</section>'


def _units(panel: Mapping[str, Any]) -> dict[str, str]:
    return {
        each["matcher"]["options"]: unit["value"]
        for each in panel["fieldConfig"]["overrides"]
        for unit in each["properties"]
        if unit["id"] == "unit"
    }


def _cell(value: str | float, unit: str) -> str:
    return value if isinstance(value, str) else text_of(value, unit)


def _legend(pattern: str, labels: Mapping[str, str]) -> str:
    if not pattern:
        return ", ".join(f"{name}={value}" for name, value in labels.items() if name != "__name__") or "value"
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), pattern)
