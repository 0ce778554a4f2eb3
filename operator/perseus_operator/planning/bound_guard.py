"""Whether measured iterations keep the bound of the objective, and what the job is held at after they did not.

Pure; asked by the planner at every thought. A prediction may be wrong: then the plan goes, first to the fastest plan,
then to default clocks, whatever it would save; and it is tried again after a pause that doubles each time. At default
clocks it shows whether the job itself has become slower, which is no fault of the plan: the bound then counts from
there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from statistics import median
from typing import Any, Final

from perseus_operator.api.job import Objective
from perseus_operator.api.schema import parse
from perseus_operator.api.status import GuardStatus
from perseus_operator.errors import InvalidSpec
from perseus_operator.formatting import stamp
from perseus_operator.planning.iterations import JobIteration

TOLERANCE: Final = 0.01
"""Beyond the bound before an iteration counts: a job's iterations differ by some tenths of a per cent by themselves."""
CONFIRM: Final = 5
"""Consecutive iterations that must be beyond: more than a straggler needs to be told, or one checkpoint lasts."""
FIRST_PAUSE_S: Final = 60.0
LONGEST_PAUSE_S: Final = 3600.0


class Hold(IntEnum):
    """What the job is held at."""

    NOTHING = 0
    FASTEST_PLAN = 1
    DEFAULT_CLOCKS = 2


@dataclass(frozen=True)
class Guard:
    """What is known of a bound: nothing, at first.

    Attributes:
        about: digest of frontier and objective; with others, everything begins anew.
        hold: at what, until ``until_s`` (monotonic), which is ``until_wall_s`` for an operator that comes after.
        since: iterations before this one are no evidence.
        trips: how often in a row the plan had to go.
        reference_us: an iteration at default clocks, as measured during the last hold.
        measured_us, bound_us: what was seen when it had to go, and what was allowed.
    """

    about: str = ""
    hold: Hold = Hold.NOTHING
    since: int = 0
    until_s: float = 0.0
    until_wall_s: float = 0.0
    trips: int = 0
    reference_us: int | None = None
    measured_us: int = 0
    bound_us: int = 0

    @property
    def pause_s(self) -> float:
        """How long the plan stays away after the last trip."""
        return float(min(FIRST_PAUSE_S * 2 ** max(0, self.trips - 1), LONGEST_PAUSE_S))


def about(frontier_digest: str, objective: Objective) -> str:
    """What a guard is about."""
    return hashlib.sha256(f"{frontier_digest}\n{objective!r}".encode()).hexdigest()


def judge(
    guard: Guard,
    iterations: Iterable[JobIteration],
    *,
    bound_us: float | None,
    confirm: int,
    furthest: int,
    now_s: float,
    wall_s: float,
) -> Guard:
    """The guard after these iterations, which may have been seen before.

    Args:
        guard: as it was.
        iterations: the latest, oldest first.
        bound_us: what an iteration may take now, stragglers allowed for; None: there is no bound.
        confirm: consecutive iterations that must be beyond it.
        furthest: the furthest iteration that any rank has begun.
        now_s: monotonic.
        wall_s: the same moment by the wall clock.
    """
    seen = [i for i in iterations if not i.mixed and i.iteration >= guard.since]
    if guard.hold is not Hold.NOTHING and now_s >= guard.until_s:
        at_default = [i.time_us for i in seen if all(point is None for point in i.points.values())]
        reference_us = round(median(at_default)) if len(at_default) >= CONFIRM else guard.reference_us
        return replace(guard, hold=Hold.NOTHING, since=furthest + 1, reference_us=reference_us)
    if guard.hold is Hold.NOTHING and guard.trips and now_s >= guard.until_s + guard.pause_s:
        return replace(guard, trips=0)  # it held for as long as it was away

    last = seen[-confirm:]
    planned = [point for i in last for point in i.points.values() if point is not None]
    if bound_us is None or guard.hold is Hold.DEFAULT_CLOCKS or len(last) < confirm or not planned:
        return guard
    if any(i.time_us <= bound_us * (1 + TOLERANCE) for i in last):
        return guard
    slower = guard.hold is Hold.NOTHING and any(planned)
    tripped = replace(
        guard,
        hold=Hold.FASTEST_PLAN if slower else Hold.DEFAULT_CLOCKS,
        since=furthest + 1,
        trips=guard.trips + (guard.hold is Hold.NOTHING),
        measured_us=round(median(i.time_us for i in last)),
        bound_us=round(bound_us),
    )
    return replace(tripped, until_s=now_s + tripped.pause_s, until_wall_s=wall_s + tripped.pause_s)


def remembered(guard: Guard) -> GuardStatus | None:
    """What an operator that comes after must know; None: nothing."""
    if guard.hold is Hold.NOTHING and not guard.trips and guard.reference_us is None:
        return None
    return GuardStatus(
        hold=_WORDS[guard.hold],
        about=guard.about,
        trips=guard.trips,
        until=stamp(guard.until_wall_s),
        since_iteration=guard.since,
        measured_time_microseconds=guard.measured_us,
        allowed_time_microseconds=guard.bound_us,
        reference_time_microseconds=guard.reference_us,
    )


def recalled(written: Mapping[str, Any], *, now_s: float, wall_s: float) -> Guard:
    """What an operator before this one knew. A pause goes on, but for no longer than it was made for, whatever the
    clocks say; what cannot be read is nothing."""
    try:
        known = parse(GuardStatus, written, "status.guard")
    except InvalidSpec:
        return Guard()
    hold = next((hold for hold, word in _WORDS.items() if word == known.hold), Hold.NOTHING)
    until_wall_s = datetime.fromisoformat(known.until).timestamp()
    guard = Guard(
        about=known.about,
        hold=hold,
        since=known.since_iteration,
        until_wall_s=until_wall_s,
        trips=known.trips,
        reference_us=known.reference_time_microseconds,
        measured_us=known.measured_time_microseconds,
        bound_us=known.allowed_time_microseconds,
    )
    # A hold that is over, but whose pause of watching is not, lies in the past by less than that.
    left_s = min(until_wall_s - wall_s, guard.pause_s)
    return replace(guard, until_s=now_s + max(left_s, -guard.pause_s))


_WORDS: Final = {Hold.NOTHING: "Nothing", Hold.FASTEST_PLAN: "FastestPlan", Hold.DEFAULT_CLOCKS: "DefaultClocks"}
