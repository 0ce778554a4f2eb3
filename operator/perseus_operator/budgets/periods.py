"""The days and months of an energy budget, as a time zone counts them: with summer time a day has 23 or 25 hours."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

from perseus_operator.api.budget import EnergyPeriod, EnergySpec


@dataclass(frozen=True)
class Period:
    """From a midnight to a midnight, in seconds since 1970; the end is of the next one."""

    begin_s: float
    end_s: float


def period_at(energy: EnergySpec, wall_s: float) -> Period:
    """The period of an energy budget that a moment is in.

    Args:
        energy: of the budget.
        wall_s: seconds since 1970.
    """
    zone = ZoneInfo(energy.time_zone)
    today = datetime.fromtimestamp(wall_s, zone).date()
    if energy.per is EnergyPeriod.DAY:
        begin, end = today, today + timedelta(days=1)
    else:
        begin = today.replace(day=1)
        end = (begin + timedelta(days=31)).replace(day=1)
    return Period(_midnight_s(begin, zone), _midnight_s(end, zone))


def _midnight_s(day: date, zone: ZoneInfo) -> float:
    """A midnight that clocks skip is the moment at which they skip it; of two, the first."""
    return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()
