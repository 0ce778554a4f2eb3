"""Which clock a canary tries next: downwards, one step of the ladder at a time, and back at the first miss.

Nothing has to be known of the engine for that: no step takes longer than in proportion to 1 / clock, so the 99th
percentile at the next lower clock is at most that of this clock times their ratio. Where a model says less, that holds.
A clock is left when enough windows were seen at it, or when a limit was missed. A clock with a miss is not tried again
for a while, which doubles with each; as clocks are tried one after another, none below it is either.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from perseus_core.serving import MOST_EDGES
from perseus_solver.errors import InvalidProblem

SHARE: Final = 0.7
"""Of the limit, below which the 99th percentile must be predicted to stay: less than a table's margin of 0.8, so
that a canary has no clock that no table would give."""
FIRST_WAIT_S: Final = 600.0
LONGEST_WAIT_S: Final = 86_400.0
_HALF_WIDTH: Final = 0.02
"""The mean time at a clock is known by this share: less than half of what a fit tells from an engine that it does not
explain."""
_FEWEST, _MOST = 10, 400
"""Windows at a clock: six parameters at three clocks need ten each; more than 400 take too long to wait for."""


class Why(enum.Enum):
    """Why a canary has its clock."""

    TRIED = "Tried"
    """It is one step below the last, and predicted to stay below the share of the limit."""
    MEASURED = "Measured"
    """Windows are still counted at it."""
    NEAR_LIMIT = "NearLimit"
    """The next lower clock would come too near to the limit, or this one has: then it is one step above the last."""
    MISSED = "Missed"
    """A limit was missed one step below."""
    WAITS = "Waits"
    """The next lower clock was missed at, and is not tried again yet."""
    LOWEST = "Lowest"
    """There is no lower clock."""


class Attempt(NamedTuple):
    """The clock of a canary, MHz, and why."""

    clock_mhz: int
    why: Why


class Sight(NamedTuple):
    """What was seen at the present clock since it holds.

    Attributes:
        windows: how many.
        p99_s: 99th percentile of the time that has a limit; NaN: not known yet.
        missed: whether a request missed a limit that it would have kept at the highest clock.
        next_p99_s: what a model predicts for the next lower clock; None: there is no model.
    """

    windows: int
    p99_s: float
    missed: bool = False
    next_p99_s: float | None = None


def windows_needed(scatter: float) -> int:
    """Return after how many windows the mean time at a clock is known within 2 %, with 95 % confidence.

    Args:
        scatter: standard deviation of one window, as a share: `FitResult.scatter`, or 0.05 before there is one.

    >>> windows_needed(0.05), windows_needed(0.01)
    (25, 10)
    """
    if not scatter < math.inf:
        return _MOST
    return min(_MOST, max(_FEWEST, math.ceil((1.96 * min(scatter, 1.0) / _HALF_WIDTH) ** 2)))


@dataclass(frozen=True, slots=True)
class Exploration:
    """How far one canary is. A value: `after` returns the next one, so that it can be stored.

    Attributes:
        ladder_mhz: the clocks to try, ascending; it begins at the last.
        limit_s: of the time whose 99th percentile is seen.
        place: of the present clock in the ladder.
        misses: for each clock how often a limit was missed at it.
        barred_until_s: for each clock the time before which it is not tried again.
        why: the present clock was chosen.
        share: of the limit, below which the 99th percentile must be predicted to stay.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    ladder_mhz: tuple[int, ...]
    limit_s: float
    place: int = -1
    misses: tuple[int, ...] = ()
    barred_until_s: tuple[float, ...] = ()
    why: Why = Why.MEASURED
    share: float = SHARE

    def __post_init__(self) -> None:
        ladder, count = self.ladder_mhz, len(self.ladder_mhz)
        if not 0 < count <= MOST_EDGES or not all(low < high for low, high in zip((0, *ladder), ladder, strict=False)):
            raise InvalidProblem(f"ladder_mhz must be 1 to {MOST_EDGES} clocks, positive and ascending")
        if not 0.0 < self.limit_s < math.inf:
            raise InvalidProblem(f"limit_s must be more than 0 and finite, not {self.limit_s!r}")
        if not 0.0 < self.share <= 1.0:
            raise InvalidProblem(f"share must be more than 0 and at most 1, not {self.share!r}")
        if not -1 <= self.place < count:
            raise InvalidProblem(f"place must be from -1, the last, to {count - 1}, not {self.place}")
        object.__setattr__(self, "place", self.place % count)
        for name in ("misses", "barred_until_s"):
            values = getattr(self, name) or (0,) * count
            if len(values) != count or not all(value >= 0 for value in values):
                raise InvalidProblem(f"{name} must have a value of at least 0 for each clock of ladder_mhz")
            object.__setattr__(self, name, values)

    @property
    def attempt(self) -> Attempt:
        """The present clock, and why."""
        return Attempt(self.ladder_mhz[self.place], self.why)

    def after(self, now_s: float, sight: Sight, needed: int) -> Exploration:
        """Return the exploration after what was seen.

        Args:
            now_s: of any clock that does not go back.
            sight: at the present clock.
            needed: windows after which it may be left for a lower one: `windows_needed`.
        """
        place, top = self.place, len(self.ladder_mhz) - 1
        if sight.missed and place < top:
            return self._missed(now_s)
        if sight.windows >= needed and not sight.p99_s < self.share * self.limit_s:
            return replace(self, place=min(top, place + 1), why=Why.NEAR_LIMIT)
        obstacles = (
            (sight.missed or sight.windows < needed, Why.MEASURED),
            (place == 0, Why.LOWEST),
            (now_s < self.barred_until_s[place - 1], Why.WAITS),
            (self._predicted_s(sight) >= self.share * self.limit_s, Why.NEAR_LIMIT),
        )
        why = next((why for holds, why in obstacles if holds), Why.TRIED)
        return replace(self, place=place - (why is Why.TRIED), why=why)

    def _predicted_s(self, sight: Sight) -> float:
        here_mhz, next_mhz = self.ladder_mhz[self.place], self.ladder_mhz[self.place - 1]
        most_s = sight.p99_s * here_mhz / next_mhz
        return most_s if sight.next_p99_s is None else min(most_s, max(sight.next_p99_s, sight.p99_s))

    def _missed(self, now_s: float) -> Exploration:
        place = self.place
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self.misses[place], 30))
        misses, barred = list(self.misses), list(self.barred_until_s)
        misses[place] += 1
        barred[place] = now_s + wait_s
        return replace(self, place=place + 1, misses=tuple(misses), barred_until_s=tuple(barred), why=Why.MISSED)
