"""How many watts a PowerBudget shares at a moment: by its timetable and its energy, no faster than its largest step.

A grid, a generator or a cooling plant does not bear that a fleet takes or drops its power at once. Energy for a day or
a month is kept by a level: the watts of the timetable, cut off there, use up what is left of it exactly at the end. So
hours that the timetable makes frugal leave their energy to the others, and what jobs do not use raises the level.
"""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from functools import lru_cache
from itertools import accumulate
from typing import Final

from perseus_operator.api.budget import BudgetSpec, TimetableEntry

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY_MIN: Final = 24 * 60
_WEEK_MIN: Final = 7 * _DAY_MIN
_EPOCH_MIN: Final = 3 * _DAY_MIN
"""1970 began on a Thursday."""
DECISION_S: Final = 60.0
"""How often the level is decided: jobs follow a share within some iterations, which last seconds. Nor does it count
with less time than this: at the end of a period a remainder must not be spent at once."""


def wanted_watts(spec: BudgetSpec, wall_s: float) -> int:
    """What a budget is to share at a moment, whatever its energy.

    Args:
        spec: of the budget.
        wall_s: seconds since 1970.
    """
    if not spec.timetable:
        return spec.watts
    now = datetime.fromtimestamp(wall_s, UTC)
    return _week(spec.timetable)[now.weekday() * _DAY_MIN + now.hour * 60 + now.minute]


def watts_until(spec: BudgetSpec, wall_s: float, end_s: float) -> list[tuple[int, float]]:
    """What a budget is to share until a moment, whatever its energy: watts and for how many seconds, least first.

    Args:
        spec: of the budget.
        wall_s: seconds since 1970.
        end_s: likewise.
    """
    left_s = max(0.0, end_s - wall_s)
    if not spec.timetable:
        return [(spec.watts, left_s)]
    week = _week(spec.timetable)
    first, last = math.floor(wall_s / 60), math.ceil(end_s / 60)
    minutes = Counter(week[(minute + _EPOCH_MIN) % _WEEK_MIN] for minute in range(first, last))
    counted = sum(minutes.values()) or 1
    return [(watts, left_s * number / counted) for watts, number in sorted(minutes.items())]


def level_w(spec: BudgetSpec, left_j: float, wall_s: float, end_s: float) -> float:
    """The watts at which a budget's energy lasts until the end of its period; infinite: it lasts in any case.

    Args:
        spec: of the budget.
        left_j: of its energy.
        wall_s: seconds since 1970.
        end_s: of the period, likewise.
    """
    caps = watts_until(spec, wall_s, max(end_s, wall_s + DECISION_S))
    left_s = math.fsum(seconds for _, seconds in caps)
    for watts, seconds in caps:
        if left_j <= watts * left_s:
            return max(0.0, left_j / left_s)
        left_j -= watts * seconds
        left_s -= seconds
    return math.inf


def next_watts(
    spec: BudgetSpec, before_w: float | None, wall_s: float, elapsed_s: float, level: float = math.inf
) -> float:
    """What a budget shares now.

    Args:
        spec: of the budget.
        before_w: what it shared before; None: nothing.
        wall_s: seconds since 1970.
        elapsed_s: since then.
        level: the watts at which its energy lasts.
    """
    wanted_w = min(float(wanted_watts(spec, wall_s)), level)
    if before_w is None or spec.max_step_watts_per_second is None:
        return wanted_w
    step_w = spec.max_step_watts_per_second * elapsed_s
    return min(max(wanted_w, before_w - step_w), before_w + step_w)


@lru_cache(maxsize=64)
def _week(timetable: tuple[TimetableEntry, ...]) -> tuple[int, ...]:
    """The watts of each minute of the week; an entry with a day goes before one of each day."""
    begun: list[int | None] = [None] * _WEEK_MIN
    for entry in sorted(timetable, key=lambda entry: " " in entry.at):
        day, _, time = entry.at.rpartition(" ")
        hours, _, minutes = time.partition(":")
        for number in [_DAYS.index(day)] if day else range(len(_DAYS)):
            begun[number * _DAY_MIN + int(hours) * 60 + int(minutes)] = entry.watts
    latest = next(watts for watts in reversed(begun) if watts is not None)
    return tuple(accumulate(begun, lambda before, watts: before if watts is None else watts, initial=latest))[1:]
