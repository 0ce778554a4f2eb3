"""How far the canary is: the clock that it holds, what was seen at it, and which clocks have missed a limit.

The clock goes downwards, one step of the ladder at a time, as ``Exploration`` of the solver says. Misses outlive a
restart: they are in the status, so that a clock that broke a limit is not tried again at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from perseus_core.serving import DEFAULT_CLOCKS, ServingLimits
from perseus_operator.families.serving.features.objective.requests import (
    beyond_chance,
    least_quantile_s,
    seconds_at,
)
from perseus_operator.nodes.engines import EngineWindow
from perseus_solver.serving import SHARE, Exploration, Sight, Why, windows_needed

LADDER_STEP_MHZ: Final = 105
"""Between two clocks that may be locked: less changes watts by less than is measured."""
MOST_CLOCKS: Final = 32
_ENDS: Final = frozenset({Why.LOWEST, Why.WAITS, Why.NEAR_LIMIT})
_SETTLES: Final = 1
"""Windows after a change of the clock that do not count: what ends in them says nothing of either clock."""
_LEAST_TIMES: Final = 20
"""Requests that ended at a clock before their times count; of fewer, the mean times of steps do."""
_MISSED_BY_CHANCE: Final = 0.001
"""How often chance alone may say that a clock misses a limit. It is asked with each window, so seldom: a clock that is
left by chance is not tried for ten minutes, and without three clocks there is no model."""
_NEAR_BY_CHANCE: Final = 0.05
"""The same of the limit being near, which is asked once of a clock."""
_PAUSE_S: Final = 3_600.0
"""After the limit was near: another hour has another load."""


@dataclass(frozen=True)
class Missed:
    """A clock at which a limit was missed.

    Attributes:
        mhz: the clock.
        misses: how often.
        barred_until_s: before then it is not tried again (wall clock).
    """

    mhz: int
    misses: int
    barred_until_s: float


def ladder_of(clocks_mhz: tuple[int, ...], minimum_mhz: int) -> tuple[int, ...]:
    """Return the clocks below the highest that may be locked, ascending.

    >>> ladder_of(tuple(range(210, 1411, 15)), 1000)
    (1095, 1200, 1305)
    """
    ladder: list[int] = []
    last_mhz = clocks_mhz[-1]
    for mhz in reversed(clocks_mhz):
        if mhz >= minimum_mhz and last_mhz - mhz >= LADDER_STEP_MHZ and len(ladder) < MOST_CLOCKS:
            ladder.append(mhz)
            last_mhz = mhz
    return tuple(reversed(ladder))


class Trials:
    """The exploration of one fingerprint at one replica."""

    def __init__(self) -> None:
        self.canary = ""
        """UID of its pod; empty: there is none."""
        self.exploration: Exploration | None = None
        """None: nothing may be tried, or it is not known what there is."""
        self.paused_until_s = -math.inf
        """Every clock that may be tried was; again from then on (wall clock)."""
        self.seen = 0
        """Windows that count at the present clock."""
        self._settling = _SETTLES
        self._steps_s: list[float] = []
        self._first, self._tokens = Counter[int](), Counter[int]()

    # ---------------------------------------------------------------------------------------------------------- events

    def began(
        self, ladder_mhz: tuple[int, ...], limit_s: float, missed: Mapping[int, Missed], share: float = SHARE
    ) -> None:
        """These clocks are to be tried, the last of which is the highest, up to a share of this limit."""
        self.exploration = Exploration(
            ladder_mhz,
            limit_s,
            share=share,
            misses=tuple(missed[mhz].misses if mhz in missed else 0 for mhz in ladder_mhz),
            barred_until_s=tuple(missed[mhz].barred_until_s if mhz in missed else 0.0 for mhz in ladder_mhz),
        )
        self.paused_until_s = -math.inf
        self._clock_changed()

    def limit_moved(self, limit_s: float) -> None:
        """The baseline that the limit is relative to has changed a little: what was tried holds."""
        if self.exploration is not None:
            self.exploration = replace(self.exploration, limit_s=limit_s)

    def inherited(self, lowest_mhz: int, wall_s: float) -> None:
        """Clocks down to this one were measured elsewhere: what is below is tried after a pause."""
        if self.exploration is not None:
            ladder = self.exploration.ladder_mhz
            place = next((place for place, mhz in enumerate(ladder) if mhz >= lowest_mhz), len(ladder) - 1)
            self.exploration = replace(self.exploration, place=place)
            self.paused_until_s = wall_s + _PAUSE_S if place else math.inf
            self._clock_changed()

    def canary_chosen(self, pod_uid: str) -> None:
        """This replica is the canary from now on; empty: none is."""
        if pod_uid != self.canary:
            self.canary = pod_uid
            self._clock_changed()

    def window_seen(self, window: EngineWindow, limits: ServingLimits, *, scatter: float, wall_s: float) -> bool:
        """The canary did this while clocks are tried; whether a clock is left, or all were tried.

        Args:
            window: of the canary.
            limits: of its requests.
            scatter: of a window's steps, as a share.
            wall_s: the time.
        """
        before = self.exploration
        if before is None or window.changed or window.clock_mhz != self.clock_mhz:
            self._settling = _SETTLES
            return False
        if self._settling or not window.steps + window.prompt_steps:
            self._settling = max(0, self._settling - 1)
            return False
        self.seen += 1
        self._first.update(window.first_tokens)
        self._tokens.update(window.tokens)
        if window.steps:
            self._steps_s.append(window.steps_us / window.steps / 1e6)
        needed, missed = windows_needed(scatter), self._missed(before, limits)
        p99_s = self._p99_s(limits)
        if math.isnan(p99_s) and not missed:
            return False
        after = self.exploration = before.after(wall_s, Sight(self.seen, p99_s, missed), needed)
        ended = after.why in _ENDS and self.seen >= needed
        if after.place == before.place and not ended:
            return False
        if ended:
            self.paused_until_s = self._again_s(after, wall_s)
        self._clock_changed()
        return True

    def _clock_changed(self) -> None:
        self.seen, self._settling = 0, _SETTLES
        self._steps_s.clear()
        self._first.clear()
        self._tokens.clear()

    # -------------------------------------------------------------------------------------------- what follows from it

    def under_way(self, wall_s: float) -> bool:
        """Whether the canary holds a clock that is tried."""
        return bool(self.canary) and self.exploration is not None and wall_s >= self.paused_until_s

    @property
    def clock_mhz(self) -> int:
        """That the canary is to hold; 0: the default clocks."""
        exploration = self.exploration
        if exploration is None or exploration.attempt.clock_mhz == exploration.ladder_mhz[-1]:
            return DEFAULT_CLOCKS
        return exploration.attempt.clock_mhz

    @property
    def missed(self) -> tuple[Missed, ...]:
        """The clocks that have missed a limit."""
        one = self.exploration
        if one is None:
            return ()
        clocks = zip(one.ladder_mhz, one.misses, one.barred_until_s, strict=True)
        return tuple(Missed(mhz, misses, until_s) for mhz, misses, until_s in clocks if misses)

    def _p99_s(self, limits: ServingLimits) -> float:
        """Of the time that has a limit, the least that it may be; NaN: not known yet."""
        times = self._first if limits.per_token_s is None else self._tokens
        if times.total() >= _LEAST_TIMES:
            return least_quantile_s(times, 0.99, _NEAR_BY_CHANCE)
        if limits.per_token_s is None or not self._steps_s:
            return math.nan
        ordered = sorted(self._steps_s)
        return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]

    def _missed(self, exploration: Exploration, limits: ServingLimits) -> bool:
        """Whether more requests than half of those that may missed a limit which the highest clock would have kept.

        More for certain: of a baseline's own requests some are beyond it by a share, at any clock.
        """
        slower = exploration.ladder_mhz[-1] / exploration.attempt.clock_mhz
        for times, limit_s in ((self._first, limits.first_token_s), (self._tokens, limits.per_token_s)):
            late = (count for place, count in times.items() if limit_s and 1.0 < seconds_at(place) / limit_s <= slower)
            if beyond_chance(sum(late), times.total(), 0.5 * (1.0 - limits.attainment), _MISSED_BY_CHANCE):
                return True
        return False

    @staticmethod
    def _again_s(after: Exploration, wall_s: float) -> float:
        if after.why is Why.LOWEST:
            return math.inf
        return after.barred_until_s[after.place - 1] if after.why is Why.WAITS else wall_s + _PAUSE_S
