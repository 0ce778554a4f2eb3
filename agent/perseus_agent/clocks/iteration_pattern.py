"""What repeats in iterations: the times of a plan's boundaries, µs from the begin of the first instruction.

The times are a rank's own words, and there may be many: they are kept as they came, in eight bytes each, and medians
and spreads are computed of the boundaries that are asked for.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final

KEPT: Final = 5
"""Iterations remembered: the median ignores two outliers, and a change of pace is followed soon."""
TRUSTED: Final = 2
"""Iterations after which the times are used: so many show by how much they differ."""
SPREADS_KEPT: Final = 4_096
"""Spreads remembered: a rank chooses which boundaries are asked for, and there are as many pairs as their square."""


class Pattern:
    """The last iterations under one plan. A boundary is the begin (2·k) or the end (2·k + 1) of instruction k."""

    def __init__(self) -> None:
        self._kept: deque[array[int]] = deque(maxlen=KEPT)
        self._periods_us: deque[int] = deque(maxlen=KEPT)
        self.boundaries = 0
        """How many are known."""
        self.period_us = 0
        """From the begin of the iteration to the begin of the next, which does not come before its last boundary: of
        iterations that differ, the medians of both may be of different ones."""
        self.period_spread_us = 0
        self._spreads_us: dict[tuple[int, int], int] = {}

    @property
    def trusted(self) -> bool:
        """Whether enough is known to predict."""
        return len(self._kept) >= TRUSTED and len(self._periods_us) > 0

    @property
    def offsets_us(self) -> list[int]:
        """When each boundary is passed: the median."""
        return self.places_us(0, self.boundaries)

    def add(self, offsets_us: Sequence[int]) -> None:
        """One more iteration, of as many boundaries as those before."""
        self._kept.append(array("q", offsets_us))
        self.boundaries = len(offsets_us)
        self._spreads_us = {}
        self.period_us = max(self.period_us, self.place_us(self.boundaries - 1))

    def add_period(self, period_us: int) -> None:
        """One more iteration has been followed by another, so long after its begin."""
        self._periods_us.append(period_us)
        period_us = sorted(self._periods_us)[len(self._periods_us) // 2]
        self.period_us = max(period_us, self.place_us(self.boundaries - 1)) if self.boundaries else period_us
        self.period_spread_us = _spread(self._periods_us)

    def place_us(self, boundary: int) -> int:
        """When a boundary is passed; the one after the last is the first of the next iteration."""
        if boundary >= self.boundaries:
            return self.period_us
        return sorted([kept[boundary] for kept in self._kept])[len(self._kept) // 2]

    def places_us(self, first: int, last: int) -> list[int]:
        """When the boundaries from ``first`` to the one before ``last`` are passed."""
        middle = len(self._kept) // 2
        return [sorted(times_us)[middle] for times_us in zip(*(kept[first:last] for kept in self._kept), strict=True)]

    def spread_us(self, since: int, until: int) -> int:
        """By how much the time between two boundaries differs between iterations, at most; one below 0 is the first."""
        key = since, until
        spread_us = self._spreads_us.get(key)
        if spread_us is None:
            first, last = max(since, 0), max(until, 0)
            if first == last:
                spread_us = 0
            elif last == self.boundaries:
                return self.spread_us(0, first) + self.period_spread_us
            else:
                spread_us = _spread([kept[last] - kept[first] for kept in self._kept])
            if len(self._spreads_us) >= SPREADS_KEPT:
                self._spreads_us = {}
            self._spreads_us[key] = spread_us
        return spread_us


def _spread(values_us: Sequence[int]) -> int:
    """How far values lie apart, without the lowest and the highest where there are enough."""
    ordered = sorted(values_us)
    return ordered[-2] - ordered[1] if len(ordered) >= KEPT else ordered[-1] - ordered[0]
