"""Curves over time and points in the plane, as SVG for a page of HTML, drawn by matplotlib."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from documentation_pictures.units import texts_of

COLOURS: Final = (
    "#3274d9", "#e0752d", "#299c46", "#a352cc", "#d4a017", "#c4162a", "#0f8b8d", "#7a5c3e", "#b8469b", "#5f6b7a"
)  # fmt: skip
"""Of the series of a panel, in turn."""
_DOTS_PER_INCH: Final = 96
"""Of a page of HTML."""
_TIME_PX: Final = 130
"""Between two times of an axis."""
_CHARACTER_PX, _LINE_PX = 6.6, 38
"""Width of a character of the legend, and of the line before a name with the room around it."""
_STYLE: Final[Any] = {
    "svg.fonttype": "none",  # letters stay letters of the page
    "font.size": 8,
    "axes.edgecolor": "#dcdfe3",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e7e9ec",
    "xtick.color": "#5a6270",
    "ytick.color": "#5a6270",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Series:
    """One curve, or the points of one kind."""

    name: str
    points: Sequence[tuple[float, float]]
    """Time or x, and value."""
    unit: str


def curves(series: Sequence[Series], size: tuple[int, int], span_s: tuple[float, float], *, stacked: bool) -> str:
    """Draw values over time.

    Args:
        series: at least one.
        size: width and height, pixels.
        span_s: begin and end of the time axis, seconds since the epoch.
        stacked: whether each curve stands on those before it.
    """
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(size)
        sums: dict[float, float] = {}
        for each in series:
            below = {at_s: sums.get(at_s, 0.0) if stacked else 0.0 for at_s, _ in each.points}
            line = {at_s: below[at_s] + value for at_s, value in each.points}
            if stacked:
                axes.fill_between([*line], [*below.values()], [*line.values()], alpha=0.25, linewidth=0)
                sums |= line
            # A line ends where nothing was scraped for a while.
            gaps = [(t1 + t2) / 2 for t1, t2 in pairwise(line) if t2 - t1 >= (span_s[1] - span_s[0]) / 20]
            line |= dict.fromkeys(gaps, math.nan)
            # Also what lies on the axis is seen.
            axes.plot(*zip(*sorted(line.items()), strict=True), linewidth=1.3, label=each.name, clip_on=False, zorder=3)
        low, high = axes.dataLim.intervaly
        # Where what varies is small beside what is there, zero would hide it.
        if stacked or 0 <= low <= 0.6 * high:
            axes.set_ylim(bottom=0)
        parts = max(2, size[0] // _TIME_PX)
        steps_s = [span_s[0] + (part + 0.5) * (span_s[1] - span_s[0]) / parts for part in range(parts)]
        axes.set_xlim(*span_s)
        axes.set_xticks(steps_s, [time.strftime("%H:%M:%S", time.gmtime(at_s)) for at_s in steps_s])
        return _svg(figure, axes, series, 5)


def points(series: Sequence[Series], size: tuple[int, int], x: tuple[str, str]) -> str:
    """Draw points in the plane; ``x``: name and unit of the axis across."""
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(size)
        for each in series:
            area = 24 if len(each.points) > 1 else 100
            axes.scatter(*zip(*each.points, strict=True), s=area, alpha=0.8, linewidth=0, label=each.name)
        _write_numbers(axes.xaxis, x[1], 8)
        return _svg(figure, axes, series, 8)


def _figure(size: tuple[int, int]) -> tuple[Figure, Any]:
    figure = Figure(figsize=(size[0] / _DOTS_PER_INCH, size[1] / _DOTS_PER_INCH), layout="constrained")
    axes = figure.add_subplot()
    axes.set_prop_cycle(color=COLOURS)
    return figure, axes


def _write_numbers(axis: Any, unit: str, wanted: int) -> None:
    low, high = axis.get_view_interval()
    at = MaxNLocator(wanted, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    inside = [float(number) for number in at if low <= number <= high]
    axis.set_ticks(inside, texts_of(inside, unit))


def _svg(figure: Figure, axes: Any, series: Sequence[Series], wanted: int) -> str:
    _write_numbers(axes.yaxis, series[0].unit, wanted)
    width_px = _LINE_PX + _CHARACTER_PX * max(len(each.name) for each in series)
    columns = max(1, int(figure.get_figwidth() * _DOTS_PER_INCH / width_px))
    figure.legend(loc="outside lower left", ncols=columns)
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True)
    return text.getvalue()[text.getvalue().index("<svg") :]
