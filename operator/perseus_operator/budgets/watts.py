"""How many watts a PowerBudget shares at a moment: by its timetable, and no faster than its largest step.

A grid, a generator or a cooling plant does not bear that a fleet takes or drops its power at once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from perseus_operator.api.budget import BudgetSpec, TimetableEntry

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY_MIN: Final = 24 * 60
_WEEK_MIN: Final = 7 * _DAY_MIN


def wanted_watts(spec: BudgetSpec, wall_s: float) -> int:
    """What a budget is to share at a moment.

    Args:
        spec: of the budget.
        wall_s: seconds since 1970.
    """
    if not spec.timetable:
        return spec.watts
    now = datetime.fromtimestamp(wall_s, UTC)
    minute = now.weekday() * _DAY_MIN + now.hour * 60 + now.minute
    begun = min((_minutes_ago(entry, minute), " " not in entry.at, entry.watts) for entry in spec.timetable)
    return begun[-1]


def next_watts(spec: BudgetSpec, before_w: float | None, wall_s: float, elapsed_s: float) -> float:
    """What a budget shares now.

    Args:
        spec: of the budget.
        before_w: what it shared before; None: nothing.
        wall_s: seconds since 1970.
        elapsed_s: since then.
    """
    wanted_w = float(wanted_watts(spec, wall_s))
    if before_w is None or spec.max_step_watts_per_second is None:
        return wanted_w
    step_w = spec.max_step_watts_per_second * elapsed_s
    return min(max(wanted_w, before_w - step_w), before_w + step_w)


def _minutes_ago(entry: TimetableEntry, minute: int) -> int:
    """How long before this minute of the week an entry began last."""
    day, _, time = entry.at.rpartition(" ")
    hours, _, minutes = time.partition(":")
    begins = int(hours) * 60 + int(minutes)
    if not day:
        return (minute - begins) % _DAY_MIN
    return (minute - begins - _DAYS.index(day) * _DAY_MIN) % _WEEK_MIN
