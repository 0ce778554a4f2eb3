"""The line of clocks over the places of a GPU in its iterations: what is planned there, and what to ask for there.

Places are microseconds from the begin of the first instruction of an iteration. Pure, as the timetable is. Where the
places are, a rank decides: what takes longer the more of them there are comes in steps (``StepsOf``), and looks at a
line end after so many clocks, on the side of a clock that is too high.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator, Sequence
from typing import Final, Protocol, TypeVar

from perseus_agent.clocks.iteration_pattern import Pattern

T = TypeVar("T")
StepsOf = Generator[int, None, T]
"""Work that is done piece by piece: it yields how many clocks or places each piece has looked at."""

LOOK_CLOCKS: Final = 1_024
"""How many clocks of a line one look goes through: 0.1 ms."""
ASKED_CLOCKS: Final = 1 << 16
ASKED_ROUNDS: Final = 16
"""How many clocks are looked at to find those to ask for: so many, and each so many times beside. Plans of random
clocks take seven rounds. Where a rank wrote times of which each round finds one change, it gets its highest clock."""
_BESIDE: Final = 3
"""Changes so far apart do not decide about each other."""
_PART: Final = 1_024
"""What is done between two steps."""


class Leads(Protocol):
    """How long before a clock is needed, or a lower one allowed, it is asked for; see ``lead.Lead``."""

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
        self.draw_part(pattern.offsets_us, 0, clocks_mhz, origin_us, next_mhz)

    def draw_part(
        self, offsets_us: Sequence[int], first: int, clocks_mhz: Sequence[int], origin_us: int, next_mhz: int
    ) -> None:
        """Add a part of an iteration, as ``draw``: the instructions from ``first`` on, whose boundaries are passed at
        ``offsets_us``."""
        after = [*clocks_mhz[first + 1 : first + 1 + len(offsets_us) // 2], next_mhz]
        last = len(clocks_mhz) - 1 - first
        for at, (begin_us, end_us) in enumerate(zip(offsets_us[::2], offsets_us[1::2], strict=True)):
            mhz, next_one = clocks_mhz[first + at], after[at]
            self.add(origin_us + begin_us, mhz)
            if mhz != next_one:
                self.add(origin_us + end_us, max(mhz, next_one) if at == last else min(mhz, next_one))

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

    def asked(self, leads: Leads, places_us: Sequence[float]) -> tuple[ClockLine, list[float]]:
        """The line of the clocks to ask for, for this one of those that are planned.

        Args:
            leads: how much earlier than it is right a clock is asked for.
            places_us: of boundaries, increasing; this line changes at such places only.

        Returns:
            The line, and for each boundary the place at which the clock after it is asked for.
        """
        steps = self.asked_steps(leads, places_us)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                line: tuple[ClockLine, list[float]] = done.value
                return line

    def asked_steps(self, leads: Leads, places_us: Sequence[float]) -> StepsOf[tuple[ClockLine, list[float]]]:
        """As ``asked``, in steps. The line must not change meanwhile."""
        line, right_us, clocks = ClockLine(), self._starts_us, self._clocks_mhz
        room = ASKED_CLOCKS + ASKED_ROUNDS * len(clocks)
        while True:
            starts_us, lacks_us = yield from _asked_us(right_us, clocks, leads)
            worst = yield from _worst(lacks_us)
            room -= len(clocks)
            if not worst:
                break
            if room < 0:
                right_us, clocks = [-math.inf], [max(self._clocks_mhz)]
                continue
            before, clocks = clocks, list(clocks)
            for at in worst:
                clocks[at] = min(mhz for mhz in (before[at - 1], before[at + 1]) if mhz > before[at])
            changes = [at for at, mhz in enumerate(clocks) if at == 0 or mhz != clocks[at - 1]]
            right_us, clocks = [right_us[at] for at in changes], [clocks[at] for at in changes]
        line._starts_us, line._clocks_mhz = starts_us, clocks
        asked_us = list[float]()
        for first in range(0, len(places_us), _PART):
            for place_us in places_us[first : first + _PART]:
                at = bisect_right(right_us, place_us) - 1
                next_us = starts_us[at + 1] if at + 1 < len(starts_us) else math.inf
                between_us = max(starts_us[at], min(place_us - leads.median_us, next_us - 1))
                asked_us.append(starts_us[at] if right_us[at] == place_us else between_us)
            yield _PART
        return line, asked_us

    def highest_mhz(self, first_us: float, last_us: float) -> int:
        """The highest clock between two places."""
        first = bisect_right(self._starts_us, first_us) - 1
        return max(self._clocks_mhz[max(first, 0) : max(bisect_right(self._starts_us, last_us), first + 1, 1)])

    def raise_us(self, after_us: float, mhz: int) -> float:
        """The first place after this one where the clock is higher; or one before it, from which to look on."""
        starts_us, clocks = self._starts_us, self._clocks_mhz
        first = bisect_right(starts_us, after_us)
        for at in range(first, min(len(starts_us), first + LOOK_CLOCKS)):
            if clocks[at] > mhz:
                return starts_us[at]
        return starts_us[first + LOOK_CLOCKS] if first + LOOK_CLOCKS < len(starts_us) else math.inf

    def lower_us(self, after_us: float, mhz: int, width_us: float, until_us: float) -> float:
        """The first place after this one and before another where the clock is lower, and not higher again for longer
        than a width; infinite also where that is farther than one look goes."""
        starts_us, clocks, since_us = self._starts_us, self._clocks_mhz, math.inf
        first = bisect_right(starts_us, after_us)
        for at in range(first, min(len(starts_us), first + LOOK_CLOCKS)):
            start_us = starts_us[at]
            if start_us - since_us > width_us:
                return since_us
            since_us = min(since_us, start_us) if clocks[at] < mhz else math.inf
            if since_us == math.inf and start_us > until_us:
                return since_us
        return since_us if first + LOOK_CLOCKS >= len(starts_us) else math.inf


def _worst(lacks_us: Sequence[float]) -> StepsOf[list[int]]:
    """The changes to leave out next: those that lack most among their neighbours."""
    worst: list[int] = []
    for first in range(0, len(lacks_us), _PART):
        worst += [
            at
            for at, lack_us in enumerate(lacks_us[first : first + _PART], first)
            if lack_us > 0 and lack_us == max(lacks_us[max(at - _BESIDE, 0) : at + _BESIDE + 1])
        ]
        yield 0
    return worst


def _asked_us(
    right_us: Sequence[float], clocks_mhz: Sequence[int], leads: Leads
) -> StepsOf[tuple[list[float], list[float]]]:
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
        if at % _PART == 0:
            yield _PART
    lacks_us = [-math.inf] * len(clocks_mhz)
    for at in range(1, len(clocks_mhz) - 1):
        before, mhz, after = clocks_mhz[at - 1 : at + 2]
        lack_us = asked_us[at] - asked_us[at + 1]
        if mhz < before and mhz < after:
            in_order_us = asked_us[at] + leads.raise_us(mhz) - right_us[at + 1]
            lacks_us[at] = max(lack_us + leads.worth_us, in_order_us)
        elif before < mhz < after or before > mhz > after:
            lacks_us[at] = lack_us + leads.turn_us
        if at % _PART == 0:
            yield _PART
    yield len(clocks_mhz) % _PART
    return asked_us, lacks_us
