"""What repeats in iterations: the times of a plan's boundaries, µs from the begin of the first instruction."""

from __future__ import annotations

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


def _spread(values_us: Sequence[int]) -> int:
    """How far values lie apart, without the lowest and the highest where there are enough."""
    ordered = sorted(values_us)
    return ordered[-2] - ordered[1] if len(ordered) >= KEPT else ordered[-1] - ordered[0]
