"""Numbers as Grafana writes them, by the unit of their panel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_PREFIXES: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))
_SI: Final = {"watt": "W", "joule": "J", "hertz": "Hz"}
_SUFFIXES: Final = {"reqps": " req/s", "cps": " c/s"}


def text_of(value: float, unit: str, digits: int = 3) -> str:
    """Return a value with its unit.

    Args:
        value: in base units; ratios as parts of 1.
        unit: of Grafana's; one that is not known here is left out.
        digits: that count, at least.
    """
    if not math.isfinite(value):
        return "–"
    if unit == "bool":
        return "True" if value else "False"
    if unit == "percentunit":
        return f"{_short(100 * value, digits)} %"
    if unit == "s":
        return _seconds(value, digits)
    if unit in _SI:
        return _scaled(value, _SI[unit], digits)
    return _short(value, digits) + _SUFFIXES.get(unit, "")


def texts_of(values: Sequence[float], unit: str) -> list[str]:
    """Return values with their unit, with as many digits as tell them apart."""
    found: list[str] = []
    for digits in range(3, 8):
        found = [text_of(value, unit, digits) for value in values]
        if len({*found}) == len(found):
            break
    return found


def _seconds(value: float, digits: int) -> str:
    for least, divisor, name in ((86400.0, 86400.0, "day"), (3600.0, 3600.0, "hour"), (120.0, 60.0, "min")):
        if abs(value) >= least:
            return f"{_short(value / divisor, digits)} {name}"
    return _scaled(value, "s", digits)


def _scaled(value: float, name: str, digits: int) -> str:
    fitting = [prefix for prefix in _PREFIXES if abs(value) >= 0.9995 * prefix[0]]
    factor, prefix = fitting[0] if fitting else (1.0, "")
    return f"{_short(value / factor, digits)} {prefix}{name}"


def _short(value: float, digits: int) -> str:
    """So many digits or more, without zeros that say nothing."""
    whole = math.floor(math.log10(abs(value))) + 1 if abs(value) > 1e-9 else digits
    text = f"{value:.{min(max(0, digits - whole), 6)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text.replace("-", "−")
