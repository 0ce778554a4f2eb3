"""Quantities in messages for people: seconds, joules and per cents with as many digits as mean something. Nothing
parses them; fields for programs are integers with their unit in the name. Times of day, too, and these are parsed.
"""

from __future__ import annotations

from datetime import UTC, datetime


def seconds(time_us: float) -> str:
    """1687043 as ``1.687 s``."""
    return f"{_digits(time_us / 1e6)} s"


def joules(energy_mj: float) -> str:
    """5057312 as ``5057 J``."""
    return f"{_digits(energy_mj / 1e3)} J"


def small_percent(share: float) -> str:
    """0.0003 as ``0.03 %``."""
    return f"{100 * share:.2g} %"


def percent(ratio: float) -> str:
    """0.0312 as ``3.12%``, as fields of a status have it."""
    bounded = min(max(100 * ratio, -999.0), 999.0)
    return f"{bounded + 0.0:.2f}%".replace("-0.00%", "0.00%")


def stamp(wall_s: float) -> str:
    """Seconds since 1970 as ``2026-01-31T08:00:00Z``, as Kubernetes writes times."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
