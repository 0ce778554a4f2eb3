"""Quantities in messages: seconds, joules and per cents, with as many digits as are significant.

No program parses these texts; fields for programs are integers with their unit in the name. Time stamps are the
exception: Kubernetes and the operator parse them.
"""

from __future__ import annotations

from datetime import UTC, datetime

from perseus_core.units import j_from_mj, s_from_us


def seconds(time_us: float) -> str:
    """Format microseconds: 1687043 as ``1.687 s``."""
    return f"{_digits(s_from_us(time_us))} s"


def milliseconds(time_us: float) -> str:
    """Format microseconds: 60000 as ``60 ms``, 5400 as ``5.4 ms``."""
    return f"{_digits(round(1e3 * s_from_us(time_us), 1))} ms"


def megahertz(clock_mhz: int) -> str:
    """Format a clock: 1335 as ``1,335 MHz``."""
    return f"{clock_mhz:,} MHz"


def joules(energy_mj: float) -> str:
    """Format millijoules: 5057312 as ``5057 J``."""
    return f"{_digits(j_from_mj(energy_mj))} J"


def small_percent(share: float) -> str:
    """Format a small ratio with two significant digits: 0.0003 as ``0.03 %``."""
    return f"{100 * share:.2g} %"


def percent(ratio: float) -> str:
    """Format a ratio as the fields of a status have it: 0.0312 as ``3.12%``, bounded to ±999 %."""
    bounded = min(max(100 * ratio, -999.0), 999.0)
    return f"{bounded + 0.0:.2f}%".replace("-0.00%", "0.00%")


def exact_percent(ratio: float) -> str:
    """Format a share as the fields of a status have it that are read again: to the part per million, 0.155489 as
    ``15.5489%``, bounded to ±999.9999 %.
    """
    digits = f"{min(max(100 * ratio, -999.9999), 999.9999):.4f}".rstrip("0").rstrip(".")
    return "0%" if digits == "-0" else f"{digits}%"


def fine_percent(ratio: float) -> str:
    """Format a small error as the fields of a status have it: 0.00312 as ``0.312%``, at most 999 %."""
    return f"{min(100 * ratio, 999.0):.3f}%"


def stamp(wall_s: float) -> str:
    """Format seconds since 1970 as ``2026-01-31T08:00:00Z``, as Kubernetes writes times."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def counted(number: int, noun: str) -> str:
    """Format a number of things: ``1 node``, ``1,024 nodes``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def per_minute(per_s: float) -> str:
    """Format a rate by the minute, without an exponent: 1.1886 as ``71.3``, 19.87 as ``1,192``."""
    rate = 60 * per_s
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def slowed_by(budget: str, slowdown: str) -> str:
    """Name the PowerBudget that slows a job, and by how much: ``slowed by PowerBudget hall-b by 52.07%``."""
    return f"slowed by PowerBudget {budget} by {slowdown}"
