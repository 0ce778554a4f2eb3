"""The load of a day as text: one row for each hour and class of requests, as people have it in a spreadsheet.

Every row is checked by itself, and the rows of a class against each other: what is wrong is one line that names the
row, the column and the rule.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from typing import Final

from perseus_solver.errors import InvalidTrace, quoted
from perseus_solver.serving.planner.problem import MOST_EPOCHS, MOST_POOLS

COLUMNS: Final = ("hour", "class", "requests_per_s", "prompt_tokens", "output_tokens")
OPTIONAL: Final = ("per_kwh",)
MOST_BYTES: Final = 16 << 20
_BOUNDS: Final = {
    "requests_per_s": (0.0, 1e6),
    "prompt_tokens": (1.0, 1e7),
    "output_tokens": (1.0, 1e7),
    "per_kwh": (0.0, 1e6),
}


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """The load of one class.

    Attributes:
        name: of the class.
        requests_per_s: in each hour.
        prompt_tokens: of a prompt, mean over the day's requests.
        output_tokens: of an answer, likewise.
    """

    name: str
    requests_per_s: tuple[float, ...]
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class DayLoad:
    """The load of all classes, in the order of the file.

    Attributes:
        classes: with as many hours each.
        per_kwh: what a kWh counts in each hour; empty: the file does not say.
    """

    classes: tuple[ClassLoad, ...]
    per_kwh: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    hour: int
    name: str
    values: dict[str, float]


def load_from_csv(name: str, text: str) -> DayLoad:
    r"""Return the load of a CSV that anybody may have written.

    Args:
        name: of the file, for messages.
        text: a first line with `COLUMNS`, and ``per_kwh`` if wanted, in any order; a row for each hour from 0 on and
            each class.

    Raises:
        InvalidTrace: it is none; one line that names the file, the row, the column and the rule.

    >>> day = load_from_csv("day.csv", "hour,class,requests_per_s,prompt_tokens,output_tokens\n0,chat,2,900,200\n")
    >>> day.classes[0].requests_per_s, day.classes[0].prompt_tokens
    ((2.0,), 900.0)
    """
    where = f"load {name}"
    if len(text) > MOST_BYTES:
        raise InvalidTrace(f"{where} has more than {MOST_BYTES:,} characters")
    try:
        rows = list(_rows(where, text))
    except csv.Error as error:
        raise InvalidTrace(f"{where} is no CSV: {error}") from None
    if not rows:
        raise InvalidTrace(f"{where} has no rows")
    by_class: dict[str, list[_Row]] = {}
    for row in rows:
        by_class.setdefault(row.name, []).append(row)
    if len(by_class) > MOST_POOLS:
        raise InvalidTrace(f"{where}: classes must be at most {MOST_POOLS}, not {len(by_class)}")
    hours = max(row.hour for row in rows) + 1
    for class_, kept in by_class.items():
        _check_hours(where, class_, kept, hours)
    return DayLoad(tuple(_class_load(class_, kept) for class_, kept in by_class.items()), _factors(where, rows, hours))


def _rows(where: str, text: str) -> list[_Row]:
    lines = csv.reader(io.StringIO(text), strict=True)
    header = [column.strip() for column in next(lines, [])]
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise InvalidTrace(f"{where}, row 1: column {missing[0]} is missing; the first row must be {','.join(COLUMNS)}")
    unknown = [column for column in header if column not in COLUMNS + OPTIONAL]
    if unknown:
        raise InvalidTrace(f"{where}, row 1: column {quoted(unknown[0])} is not known")
    rows = []
    for number, cells in enumerate(lines, start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise InvalidTrace(f"{where}, row {number}: must have {len(header)} columns, not {len(cells)}")
        rows.append(_row(where, number, dict(zip(header, (cell.strip() for cell in cells), strict=True))))
    return rows


def _row(where: str, number: int, cells: dict[str, str]) -> _Row:
    at = f"{where}, row {number}, column"
    hour = cells["hour"]
    if not (hour.isascii() and hour.isdigit() and len(hour) < 6 and int(hour) < MOST_EPOCHS):
        raise InvalidTrace(f"{at} hour: must be a whole number from 0 to {MOST_EPOCHS - 1:,}, not {quoted(hour)}")
    if not 0 < len(cells["class"]) <= 63:
        raise InvalidTrace(f"{at} class: must have 1 to 63 characters, not {len(cells['class'])}")
    values = {}
    for column, (least, most) in _BOUNDS.items():
        if column in cells:
            try:
                value = float(cells[column])
            except ValueError:
                value = math.nan
            if not least <= value <= most:
                raise InvalidTrace(
                    f"{at} {column}: must be a number from {least:g} to {most:,.0f}, not {quoted(cells[column])}"
                )
            values[column] = value
    return _Row(number, int(hour), cells["class"], values)


def _check_hours(where: str, name: str, rows: list[_Row], hours: int) -> None:
    seen: dict[int, int] = {}
    for row in rows:
        if row.hour in seen:
            raise InvalidTrace(
                f"{where}, row {row.number}, column hour: class {quoted(name)} has hour {row.hour} in row "
                f"{seen[row.hour]}, too"
            )
        seen[row.hour] = row.number
    missing = next((hour for hour in range(hours) if hour not in seen), None)
    if missing is not None:
        raise InvalidTrace(f"{where}, column hour: class {quoted(name)} has no row for hour {missing} of {hours}")


def _class_load(name: str, rows: list[_Row]) -> ClassLoad:
    ordered = sorted(rows, key=lambda row: row.hour)
    loads = [row.values["requests_per_s"] for row in ordered]
    weights = loads if sum(loads) > 0.0 else [1.0] * len(loads)
    prompt, output = (
        sum(weight * row.values[column] for weight, row in zip(weights, ordered, strict=True)) / sum(weights)
        for column in ("prompt_tokens", "output_tokens")
    )
    return ClassLoad(name, tuple(loads), prompt, output)


def _factors(where: str, rows: list[_Row], hours: int) -> tuple[float, ...]:
    factors: dict[int, _Row] = {}
    for row in rows:
        if "per_kwh" not in row.values:
            return ()
        first = factors.setdefault(row.hour, row)
        if first.values["per_kwh"] != row.values["per_kwh"]:
            raise InvalidTrace(
                f"{where}, row {row.number}, column per_kwh: must be that of row {first.number}, of the same hour"
            )
    return tuple(factors[hour].values["per_kwh"] for hour in range(hours))
