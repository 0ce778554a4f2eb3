"""Read the fields of a JSON object by name, with an error that names the field and the rule."""

from __future__ import annotations

import math
from typing import Any

from perseus_solver.errors import InvalidCalibration


def _number(value: object, where: str) -> float:
    """Return a JSON number that is finite and not negative."""
    # A JSON true is an int to Python.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise InvalidCalibration(f"{where} must be a finite number, zero or more, not {str(value)[:40]!r}")
    return float(value)


class Fields:
    """One JSON object. Every getter raises `InvalidCalibration` if the field breaks its rule."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise InvalidCalibration(f"{where.rstrip('.') or 'the calibration'} must be an object")
        self._values: dict[str, Any] = value
        self.where = where

    def _get(self, name: str, wanted: type, rule: str) -> Any:
        value = self._values.get(name)
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise InvalidCalibration(f"{self.where}{name} must be {rule}, not {str(value)[:40]!r}")
        return value

    def text(self, name: str) -> str:
        """Return a text."""
        return str(self._get(name, str, "a text"))

    def flag(self, name: str) -> bool:
        """Return true or false."""
        return bool(self._get(name, bool, "true or false"))

    def count(self, name: str, least: int = 0, most: int | None = None) -> int:
        """Return a whole number from ``least`` to ``most``."""
        value = int(self._get(name, int, "a whole number"))
        if value < least or (most is not None and value > most):
            upper = "" if most is None else f" and at most {most}"
            raise InvalidCalibration(f"{self.where}{name} must be at least {least}{upper}, not {value}")
        return value

    def number(self, name: str) -> float:
        """Return a finite number, zero or more."""
        return _number(self._values.get(name), self.where + name)

    def maybe(self, name: str) -> float | None:
        """Return a finite number, zero or more, or None for null."""
        return None if self._values.get(name) is None else self.number(name)

    def numbers(self, name: str, length: int) -> tuple[float, ...] | None:
        """Return ``length`` finite numbers, zero or more, or None for null."""
        if self._values.get(name) is None:
            return None
        values = self.list(name)
        if len(values) != length:
            raise InvalidCalibration(f"{self.where}{name} must have {length} entries, one a stage, not {len(values)}")
        return tuple(_number(value, f"{self.where}{name}[{i}]") for i, value in enumerate(values))

    def list(self, name: str) -> list[Any]:
        """Return a list."""
        items: list[Any] = self._get(name, list, "a list")
        return items

    def child(self, name: str) -> Fields:
        """Return an object."""
        return Fields(self._values.get(name), f"{self.where}{name}.")

    def children(self, name: str) -> tuple[Fields, ...]:
        """Return a list of objects."""
        return tuple(Fields(value, f"{self.where}{name}[{i}].") for i, value in enumerate(self.list(name)))
