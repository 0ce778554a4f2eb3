"""What repeats in iterations: the times of a plan's boundaries, and the line of planned clocks over them.

Both are pure and count microseconds from the begin of the first instruction of an iteration.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from operator import sub
from typing import Final

KEPT: Final = 5
"""Iterations remembered: the median ignores two outliers, and a change of pace is followed soon."""
TRUSTED: Final = 2
"""Iterations after which the times are used: so many show by how much they differ."""


class Pattern:
    """The last iterations under one plan. A boundary is the begin (2·k) or the end (2·k + 1) of instruction k."""

    def __init__(self) -> None:
        self._kept: deque[list[int]] = deque(maxlen=KEPT)
        self._periods_us: deque[int] = deque(maxlen=KEPT)
        self.offsets_us: list[int] = []
        """When each boundary is passed: the median."""
        self.period_us = 0
        """From the begin of the iteration to the begin of the next."""
        self.period_spread_us = 0
        self._times_us: list[tuple[int, ...]] = []  # of each boundary, in the iterations that are kept
        self._spreads_us: dict[tuple[int, int], int] = {}

    @property
    def trusted(self) -> bool:
        """Whether enough is known to predict."""
        return len(self._kept) >= TRUSTED and len(self._periods_us) > 0

    def add(self, offsets_us: list[int]) -> None:
        """One more iteration."""
        self._kept.append(offsets_us)
        self._spreads_us = {}
        middle = len(self._kept) // 2
        self._times_us = list(zip(*self._kept, strict=True))
        self.offsets_us = [sorted(times_us)[middle] for times_us in self._times_us]

    def add_period(self, period_us: int) -> None:
        """One more iteration has been followed by another, so long after its begin."""
        self._periods_us.append(period_us)
        self.period_us = sorted(self._periods_us)[len(self._periods_us) // 2]
        self.period_spread_us = _spread(self._periods_us)

    def place_us(self, boundary: int) -> int:
        """When a boundary is passed; the one after the last is the first of the next iteration."""
        return self.offsets_us[boundary] if boundary < len(self.offsets_us) else self.period_us

    def spread_us(self, since: int, until: int) -> int:
        """By how much the time between two boundaries differs between iterations, at most; one below 0 is the first."""
        key = since, until
        spread_us = self._spreads_us.get(key)
        if spread_us is None:
            first, last = max(since, 0), max(until, 0)
            if first == last:
                spread_us = 0
            elif last == len(self.offsets_us):
                return self.spread_us(0, first) + self.period_spread_us
            else:
                spread_us = _spread(list(map(sub, self._times_us[last], self._times_us[first])))
            self._spreads_us[key] = spread_us
        return spread_us


class ClockLine:
    """The clock that is planned from each place on."""

    def __init__(self) -> None:
        self._starts_us: list[float] = []
        self._clocks_mhz: list[int] = []

    def draw(self, pattern: Pattern, clocks_mhz: Sequence[int], origin_us: int, next_mhz: int) -> None:
        """Add an iteration. In a wait between two instructions the lower of their clocks is planned; after the last
        one, where gradients are reduced and applied, the higher of its own and of the next iteration's first."""
        following = (*clocks_mhz[1:], next_mhz)
        for index, (mhz, next_one) in enumerate(zip(clocks_mhz, following, strict=True)):
            last = index + 1 == len(clocks_mhz)
            self.add(origin_us + pattern.offsets_us[2 * index], mhz)
            self.add(origin_us + pattern.offsets_us[2 * index + 1], max(mhz, next_one) if last else min(mhz, next_one))

    def add(self, start_us: float, mhz: int) -> None:
        """From a place on, not before those added already; where instructions overlap, the higher clock is planned."""
        starts_us, clocks = self._starts_us, self._clocks_mhz
        while starts_us and starts_us[-1] >= start_us and clocks[-1] <= mhz:
            starts_us.pop()
            clocks.pop()
        if not starts_us:
            start_us = -math.inf
        if not clocks or (clocks[-1] != mhz and starts_us[-1] < start_us):
            starts_us.append(start_us)
            clocks.append(mhz)

    def highest_mhz(self, first_us: float, last_us: float) -> int:
        """The highest clock planned between two places."""
        first = bisect_right(self._starts_us, first_us) - 1
        return max(self._clocks_mhz[max(first, 0) : max(bisect_right(self._starts_us, last_us), first + 1, 1)])

    def raise_us(self, after_us: float, mhz: int) -> float:
        """The first place after this one where more is planned."""
        starts_us, clocks = self._starts_us, self._clocks_mhz
        for at in range(bisect_right(starts_us, after_us), len(starts_us)):
            if clocks[at] > mhz:
                return starts_us[at]
        return math.inf

    def lower_us(self, after_us: float, mhz: int, width_us: float, until_us: float) -> float:
        """The first place after this one and before another where less is planned, and nothing else for longer than a
        width."""
        starts_us, clocks, since_us = self._starts_us, self._clocks_mhz, math.inf
        for at in range(bisect_right(starts_us, after_us), len(starts_us)):
            start_us = starts_us[at]
            if start_us - since_us > width_us:
                break
            since_us = min(since_us, start_us) if clocks[at] < mhz else math.inf
            if since_us == math.inf and start_us > until_us:
                break
        return since_us


def _spread(values_us: Sequence[int]) -> int:
    """How far values lie apart, without the lowest and the highest where there are enough."""
    ordered = sorted(values_us)
    return ordered[-2] - ordered[1] if len(ordered) >= KEPT else ordered[-1] - ordered[0]
