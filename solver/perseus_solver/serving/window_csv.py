"""Windows as text: what was seen of an engine outlives the program that saw it, and is fitted again by the next one.

The models are not stored: the windows say by themselves how far they hold, and a later release may fit them otherwise.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from perseus_solver.errors import InvalidProblem
from perseus_solver.serving.windows import MOST_WINDOWS, Window

_COLUMNS: Final = tuple(field.name for field in fields(Window))
_TYPES: Final = {field.name: float if "float" in str(field.type) else int for field in fields(Window)}
_OPTIONAL: Final = frozenset({"watts", "reached_mhz"})


def windows_to_csv(windows: Sequence[Window]) -> str:
    """Return windows as CSV whose columns have the names of their attributes; what was not measured is empty.

    Args:
        windows: in any order.

    >>> print(windows_to_csv([Window(1980, 1.0, 8.0, 4e3, 50, 0.0123)]).splitlines()[1])
    1980,1,8,4000,50,0.0123,0,0,0,,
    """
    lines = [",".join(_COLUMNS)]
    lines += [",".join(map(_written, (getattr(window, name) for name in _COLUMNS))) for window in windows]
    return "\n".join(lines) + "\n"


def windows_from_csv(text: str) -> tuple[Window, ...]:
    """Return the windows of a CSV that anybody may have written.

    Args:
        text: as `windows_to_csv` writes it.

    Raises:
        InvalidProblem: it is none, or a value is out of range; the message names the line, the column and the rule.
    """
    rows = csv.reader(io.StringIO(text), strict=True)
    windows: list[Window] = []
    try:
        if tuple(next(rows, ())) != _COLUMNS:
            raise InvalidProblem(f"the first line must be {','.join(_COLUMNS)}")
        for number, row in enumerate(rows, start=2):
            if len(windows) == MOST_WINDOWS:
                raise InvalidProblem(f"windows must be at most {MOST_WINDOWS:,}")
            windows.append(_window(number, row))
    except csv.Error as error:
        raise InvalidProblem(f"it is no CSV: {error}") from None
    return tuple(windows)


def _window(number: int, row: Sequence[str]) -> Window:
    if len(row) != len(_COLUMNS):
        raise InvalidProblem(f"line {number} must have {len(_COLUMNS)} values, not {len(row)}")
    values = {}
    for name, value in zip(_COLUMNS, row, strict=True):
        try:
            values[name] = None if name in _OPTIONAL and not value else _TYPES[name](value)
        except ValueError:
            raise InvalidProblem(f"line {number}: {name} must be a number, not {value[:20]!r}") from None
    try:
        return Window(**values)  # type: ignore[arg-type]  # each has the type of its field
    except InvalidProblem as error:
        raise InvalidProblem(f"line {number}: {error}") from None


def _written(value: float | None) -> str:
    return "" if value is None else f"{value:d}" if isinstance(value, int) else f"{value:.6g}"
