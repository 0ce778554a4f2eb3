"""Curves over time and points in the plane, as SVG."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from documentation_pictures.units import texts_of, ticks

COLOURS: Final = (
    "#3274d9", "#e0752d", "#299c46", "#a352cc", "#d4a017", "#c4162a", "#0f8b8d", "#7a5c3e", "#b8469b", "#5f6b7a"
)  # fmt: skip
"""Of the series of a panel, in turn."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 8, 26
_LINE_PX: Final = 18
"""Height of a line of the legend."""
_CHARACTER_PX: Final = 6.6
_TIME_PX: Final = 130
"""Between two times of an axis."""


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
        series: at least one; stacked ones have the same times.
        size: width and height, pixels.
        span_s: begin and end of the time axis, seconds since the epoch.
        stacked: whether each curve stands on those before it.
    """
    drawn = _stack(series) if stacked else series
    values = [value for each in drawn for _, value in each.points]
    low, high = min(values, default=0.0), max(values, default=1.0)
    # Where what varies is small beside what is there, zero would hide it.
    low = low if low < 0 or (low > 0.6 * high and not stacked) else 0.0
    frame = _Frame(size, span_s, ticks(low, high), [each.name for each in series])
    parts = max(2, size[0] // _TIME_PX)
    steps = [span_s[0] + part * (span_s[1] - span_s[0]) / parts for part in range(parts + 1)]
    body = frame.grid(series[0].unit, [(at, time.strftime("%H:%M:%S", time.gmtime(at))) for at in steps])
    gap_s = (span_s[1] - span_s[0]) / 20
    for number, each in reversed([*enumerate(drawn)]):
        places = [(frame.x(at_s), frame.y(value), at_s) for at_s, value in each.points]
        path, before_s = "", -math.inf
        for x, y, at_s in places:
            path += f"{'L' if at_s - before_s < gap_s else 'M'}{x:.1f} {y:.1f}"
            before_s = at_s
        colour = COLOURS[number % len(COLOURS)]
        if stacked and places:
            area = "M" + path[1:].replace("M", "L") + f"V{frame.y(0):.1f}H{places[0][0]:.1f}Z"
            body += f'<path d="{area}" fill="{colour}" fill-opacity="0.25"/>'
        body += f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    return frame.drawn(body)


def points(series: Sequence[Series], size: tuple[int, int], x: tuple[str, str]) -> str:
    """Draw points in the plane; ``x``: name and unit of the axis across."""
    every = [point for each in series for point in each.points]
    across = ticks(min(at for at, _ in every), max(at for at, _ in every), 8)
    up = ticks(min(value for _, value in every), max(value for _, value in every), 8)
    frame = _Frame(size, (across[0], across[-1]), up, [each.name for each in series])
    body = frame.grid(series[0].unit, [*zip(across, texts_of(across, x[1]), strict=True)])
    for number, each in enumerate(series):
        colour, radius = COLOURS[number % len(COLOURS)], 3.5 if len(each.points) > 1 else 7
        for at, value in each.points:
            place = f'cx="{frame.x(at):.1f}" cy="{frame.y(value):.1f}"'
            body += f'<circle {place} r="{radius}" fill="{colour}" fill-opacity="0.8"/>'
    return frame.drawn(body)


class _Frame:
    """The place of a chart's axes, grid and legend."""

    def __init__(
        self, size: tuple[int, int], across: tuple[float, float], up: Sequence[float], names: Sequence[str]
    ) -> None:
        self._width, self._height = size
        self._across = across
        self._up = up
        self._legend, self._legend_px = self._legend_of(names)

    def x(self, at: float) -> float:
        first, last = self._across
        return _LEFT + (at - first) / (last - first) * (self._width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        first, last = self._up[0], self._up[-1]
        bottom = self._height - _BOTTOM - self._legend_px
        return bottom - (value - first) / (last - first) * (bottom - _TOP)

    def grid(self, unit: str, across: Sequence[tuple[float, str]]) -> str:
        bottom = self.y(self._up[0])
        lines = [f'<path class="grid" d="M{_LEFT} {self.y(v):.1f}H{self._width - _RIGHT}"/>' for v in self._up]
        texts = zip(self._up, texts_of(self._up, unit), strict=True)
        lines += [_label(_LEFT - 8, self.y(value) + 4, text, "end") for value, text in texts]
        lines += [f'<path class="grid" d="M{self.x(at):.1f} {_TOP}V{bottom:.1f}"/>' for at, _ in across]
        *others, last = across
        lines += [_label(self.x(at), bottom + 17, text, "middle") for at, text in others]
        lines.append(_label(self.x(last[0]), bottom + 17, last[1], "end"))
        return "".join(lines)

    def drawn(self, body: str) -> str:
        return f'<svg width="{self._width}" height="{self._height}">{body}{self._legend}</svg>'

    def _legend_of(self, names: Sequence[str]) -> tuple[str, int]:
        """Return the names beside their colours, in as many lines as they need, and the height of these."""
        at, row, places = float(_LEFT), 0, []
        for name in names:
            width = 26 + _CHARACTER_PX * len(name)
            if at + width > self._width - _RIGHT and at > _LEFT:
                at, row = float(_LEFT), row + 1
            places.append((at, row, name))
            at += width
        height = (row + 1) * _LINE_PX
        drawn = ""
        for number, (left, line, name) in enumerate(places):
            middle = self._height - height + line * _LINE_PX + 8
            colour = COLOURS[number % len(COLOURS)]
            drawn += f'<rect x="{left:.0f}" y="{middle - 2}" width="14" height="4" rx="2" fill="{colour}"/>'
            drawn += _label(left + 19, middle + 4, name, "start")
        return drawn, height


def _stack(series: Sequence[Series]) -> list[Series]:
    sums: dict[float, float] = {}
    stacked = []
    for each in series:
        for at, value in each.points:
            sums[at] = sums.get(at, 0.0) + value
        stacked.append(Series(each.name, [(at, sums[at]) for at, _ in each.points], each.unit))
    return stacked


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
