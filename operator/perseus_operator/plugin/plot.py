"""A frontier drawn with characters: energy over time.

A Braille character holds eight dots; a terminal that shows only ASCII gets one dot to a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of the dot in each row and column of a Braille character."""
LEAST_WIDTH = 40
_HEIGHT = 12


@dataclass(frozen=True)
class Mark:
    """A point of the plot that is marked: its sign, and its letter where only ASCII is shown."""

    x: float
    y: float
    sign: str
    plain: str


def draw(curve: Sequence[tuple[float, float]], marks: Sequence[Mark], *, width: int, fancy: bool) -> list[str]:
    """Draw lines of at most ``width`` characters (not below ``LEAST_WIDTH``); x grows to the right, y upwards.

    Args:
        curve: at least one point, x not falling.
        marks: drawn over it, the last on top.
        width: of the terminal.
        fancy: whether it shows Braille and signs.
    """
    points = [*curve, *((mark.x, mark.y) for mark in marks)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    labels = [_number(value) for value in (max(ys), min(ys))]
    margin = max(map(len, labels)) + 1
    columns = max(LEAST_WIDTH, width) - margin - 1
    canvas = _Canvas(columns, _HEIGHT, (min(xs), max(xs)), (min(ys), max(ys)), fancy=fancy)
    for (x1, y1), (x2, y2) in pairwise(curve):
        canvas.line(x1, y1, x2, y2)
    if len(curve) == 1:
        canvas.line(*curve[0], *curve[0])
    rows = canvas.rows()
    for mark in marks:
        column, row = canvas.cell(mark.x, mark.y)
        rows[row][column] = mark.sign if fancy else mark.plain
    wall, corner, floor = ("│", "└", "─") if fancy else ("|", "+", "-")
    heads = {0: labels[0], _HEIGHT - 1: labels[1]}
    lines = [f"{heads.get(i, ''):>{margin - 1}} {wall}{''.join(row)}".rstrip() for i, row in enumerate(rows)]
    left, right = _number(min(xs)), _number(max(xs))
    gap = max(1, columns - len(left) - len(right))
    return [*lines, " " * margin + corner + floor * columns, " " * (margin + 1) + left + " " * gap + right]


class _Canvas:
    def __init__(self, columns: int, rows: int, x: tuple[float, float], y: tuple[float, float], *, fancy: bool) -> None:
        self._columns, self._rows, self._x, self._y = columns, rows, x, y
        self._dots = (2, 4) if fancy else (1, 1)
        self._fancy = fancy
        self._set: set[tuple[int, int]] = set()

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        (a, b), (c, d) = self._dot(x1, y1), self._dot(x2, y2)
        steps = max(abs(c - a), abs(d - b), 1)
        self._set.update((a + round((c - a) * k / steps), b + round((d - b) * k / steps)) for k in range(steps + 1))

    def cell(self, x: float, y: float) -> tuple[int, int]:
        across, down = self._dot(x, y)
        return across // self._dots[0], down // self._dots[1]

    def rows(self) -> list[list[str]]:
        cells = [[0] * self._columns for _ in range(self._rows)]
        for across, down in self._set:
            wide, high = self._dots
            cells[down // high][across // wide] |= _DOTS[down % high][across % wide]
        return [[self._sign(bits) if bits else " " for bits in row] for row in cells]

    def _sign(self, bits: int) -> str:
        return chr(_BRAILLE + bits) if self._fancy else "."

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        width, height = self._columns * self._dots[0] - 1, self._rows * self._dots[1] - 1
        across = _share(x, *self._x) * width
        return round(across), height - round(_share(y, *self._y) * height)


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
