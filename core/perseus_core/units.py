"""Units of quantities that travel between programs, one type for each, and the only conversions between them.

Inside the solver and the planners quantities are floats in base units (``_s``, ``_j``, ``_w``). On the wire, in the
custom resource and in the agent they are integers with the unit in the name (``_us``, ``_mj``, ``_mw``, ``_mhz``).
Conversions round to nearest.
"""

from __future__ import annotations

import re
from typing import NewType

Microseconds = NewType("Microseconds", int)
Millijoules = NewType("Millijoules", int)
Milliwatts = NewType("Milliwatts", int)

_MICRO = 1_000_000
_MILLI = 1_000
_J_PER_KWH = 3_600_000
_J_PER_WH = 3_600
_NANO = 1_000_000_000


def us_from_s(seconds: float) -> Microseconds:
    """Seconds to the nearest microsecond."""
    return Microseconds(round(seconds * _MICRO))


def s_from_us(microseconds: float) -> float:
    """Microseconds to seconds."""
    return microseconds / _MICRO


def mj_from_j(joules: float) -> Millijoules:
    """Joules to the nearest millijoule."""
    return Millijoules(round(joules * _MILLI))


def j_from_mj(millijoules: float) -> float:
    """Millijoules to joules."""
    return millijoules / _MILLI


def kwh_from_j(joules: float) -> float:
    """Joules to kilowatt-hours."""
    return joules / _J_PER_KWH


def j_from_kwh(kilowatt_hours: float) -> float:
    """Kilowatt-hours to joules."""
    return kilowatt_hours * _J_PER_KWH


def wh_from_j(joules: float) -> float:
    """Joules to watt-hours."""
    return joules / _J_PER_WH


def j_from_wh(watt_hours: float) -> float:
    """Watt-hours to joules."""
    return watt_hours * _J_PER_WH


def mw_from_w(watts: float) -> Milliwatts:
    """Watts to the nearest milliwatt."""
    return Milliwatts(round(watts * _MILLI))


def w_from_mw(milliwatts: float) -> float:
    """Milliwatts to watts."""
    return milliwatts / _MILLI


def ms_from_s(seconds: float) -> int:
    """Seconds to the nearest millisecond."""
    return round(seconds * _MILLI)


def fractional_ms_from_s(seconds: float) -> float:
    """Seconds to milliseconds, not rounded, for messages."""
    return seconds * _MILLI


def s_from_ms(milliseconds: float) -> float:
    """Milliseconds to seconds."""
    return milliseconds / _MILLI


def s_from_ns(nanoseconds: int) -> float:
    """Nanoseconds to seconds."""
    return nanoseconds / _NANO


def us_from_ns(nanoseconds: int) -> Microseconds:
    """Nanoseconds to whole microseconds, rounded down so that a timestamp never lies in the future."""
    return Microseconds(nanoseconds // _MILLI)


def mean_power_w(energy_mj: float, time_us: float) -> float:
    """Mean power in watts of an energy in millijoules over a time in microseconds.

    >>> mean_power_w(energy_mj=300_000, time_us=1_000_000)  # 300 J in one second
    300.0
    """
    return _MILLI * energy_mj / time_us


def energy_mj(power_w: float, time_us: float) -> float:
    """Energy in millijoules of a power in watts over a time in microseconds: 1 W for 1 ms is 1 mJ."""
    return power_w * time_us / _MILLI


def hz_from_mhz(megahertz: int) -> int:
    """Megahertz to hertz: Prometheus series use base units."""
    return megahertz * _MICRO


_PERCENT = re.compile(r"(?P<number>\d{1,3}(?:\.\d{1,4})?)%")


def ratio_from_percent(text: str) -> float:
    """Convert a percentage, as PerseusJob and the CLI write a slowdown, to a ratio.

    >>> ratio_from_percent("2.5%")
    0.025

    Args:
        text: digits with at most four decimals and a percent sign.

    Raises:
        ValueError: the text is not a non-negative percentage such as ``3%`` or ``2.5%``.
    """
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a percentage such as 3% or 2.5%")
    return float(match["number"]) / 100


def ratio_from_share(text: str) -> float:
    """Convert a share, as a status has it, to a ratio: to the part per million.

    >>> ratio_from_share("-0.5%")
    -0.005

    Raises:
        ValueError: the text is no percentage.
    """
    return ratio_from_ppm(round(float(text.removesuffix("%")) * 10_000))


def ppm_from_ratio(ratio: float) -> int:
    """A ratio such as 0.0003 to the nearest part per million: 300."""
    return round(ratio * _MICRO)


def ratio_from_ppm(parts: int) -> float:
    """Parts per million to a ratio."""
    return parts / _MICRO
