"""The line of clocks over the places of a GPU in its iterations: what is planned there, and what to ask for there.

Places are microseconds from the begin of the first instruction of an iteration. Pure, as the timetable is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, Protocol

from perseus_agent.clocks.iteration_pattern import Pattern

_BESIDE: Final = 3
"""Changes so far apart do not decide about each other."""


class Leads(Protocol):
    """How long before a clock is needed, or a lower one allowed, it is asked for; see ``timetable.Lead``."""

    @property
    def median_us(self) -> int: ...
    @property
    def worth_us(self) -> int: ...
    @property
    def turn_us(self) -> int: ...
    def raise_us(self, mhz: int) -> int: ...
    def lower_us(self, mhz: int) -> int: ...


class ClockLine:
    """A clock from each place on."""

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

    def asked(self, leads: Leads, places_us: Sequence[int]) -> tuple[ClockLine, list[float]]:
        """The line of the clocks to ask for, for this one of those that are planned.

        Args:
            leads: how much earlier than it is right a clock is asked for.
            places_us: of boundaries, increasing; this line changes at such places only.

        Returns:
            The line, and for each boundary the place at which the clock after it is asked for.
        """
        line, right_us, clocks = ClockLine(), self._starts_us, self._clocks_mhz
        while True:
            starts_us, lacks_us = _asked_us(right_us, clocks, leads)
            worst = [
                at
                for at, lack_us in enumerate(lacks_us)
                if lack_us > 0 and lack_us == max(lacks_us[max(at - _BESIDE, 0) : at + _BESIDE + 1])
            ]
            if not worst:
                break
            before = clocks
            clocks = list(before)
            for at in worst:
                clocks[at] = min(mhz for mhz in (before[at - 1], before[at + 1]) if mhz > before[at])
            changes = [at for at, mhz in enumerate(clocks) if at == 0 or mhz != clocks[at - 1]]
            right_us, clocks = [right_us[at] for at in changes], [clocks[at] for at in changes]
        line._starts_us, line._clocks_mhz = starts_us, clocks
        asked_us = list[float]()
        for place_us in places_us:
            at = bisect_right(right_us, place_us) - 1
            next_us = starts_us[at + 1] if at + 1 < len(starts_us) else math.inf
            between_us = max(starts_us[at], min(place_us - leads.median_us, next_us - 1))
            asked_us.append(starts_us[at] if right_us[at] == place_us else between_us)
        return line, asked_us

    def highest_mhz(self, first_us: float, last_us: float) -> int:
        """The highest clock between two places."""
        first = bisect_right(self._starts_us, first_us) - 1
        return max(self._clocks_mhz[max(first, 0) : max(bisect_right(self._starts_us, last_us), first + 1, 1)])

    def raise_us(self, after_us: float, mhz: int) -> float:
        """The first place after this one where the clock is higher."""
        starts_us, clocks = self._starts_us, self._clocks_mhz
        for at in range(bisect_right(starts_us, after_us), len(starts_us)):
            if clocks[at] > mhz:
                return starts_us[at]
        return math.inf

    def lower_us(self, after_us: float, mhz: int, width_us: float, until_us: float) -> float:
        """The first place after this one and before another where the clock is lower, and not higher again for longer
        than a width."""
        starts_us, clocks, since_us = self._starts_us, self._clocks_mhz, math.inf
        for at in range(bisect_right(starts_us, after_us), len(starts_us)):
            start_us = starts_us[at]
            if start_us - since_us > width_us:
                break
            since_us = min(since_us, start_us) if clocks[at] < mhz else math.inf
            if since_us == math.inf and start_us > until_us:
                break
        return since_us


def _asked_us(right_us: Sequence[float], clocks_mhz: Sequence[int], leads: Leads) -> tuple[list[float], list[float]]:
    """When clocks are asked for that are right from some places on; and by how much each would have to last longer not
    to be asked for too late, or in vain.

    A higher clock must not wait for a lower one before it, since changes come into effect in order: the lower one is
    in vain. So is one on the way to a higher or lower one, if it would be asked for after it, or if not all GPUs that
    share a lock had made their calls in between: some would skip it, and those to the next clock would wait.
    """
    asked_us = [-math.inf]
    for at in range(1, len(clocks_mhz)):
        mhz = clocks_mhz[at]
        rises = mhz > clocks_mhz[at - 1]
        place_us = right_us[at] - (leads.raise_us(mhz) if rises else leads.lower_us(mhz))
        if not rises and at > 1 and clocks_mhz[at - 1] > clocks_mhz[at - 2]:
            # Only after all GPUs of the node have had their turn to raise it: they are sent the newest target only.
            place_us = max(place_us, asked_us[-1] + leads.worth_us)
        asked_us.append(place_us)
    lacks_us = [-math.inf] * len(clocks_mhz)
    for at in range(1, len(clocks_mhz) - 1):
        before, mhz, after = clocks_mhz[at - 1 : at + 2]
        lack_us = asked_us[at] - asked_us[at + 1]
        if mhz < before and mhz < after:
            in_order_us = asked_us[at] + leads.raise_us(mhz) - right_us[at + 1]
            lacks_us[at] = max(lack_us + leads.worth_us, in_order_us)
        elif before < mhz < after or before > mhz > after:
            lacks_us[at] = lack_us + leads.turn_us
    return asked_us, lacks_us
