"""How clocks followed the plan in an iteration: whose time marks are in, how far they lead the GPU, how long GPUs ran
below and above the planned clock, and what the power limit left of it.

Agents report it with every iteration. None always means that it is not known, for example because the agent is older:
unknown is not zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeVar

from perseus_core.marks import BEST_MARKS_FIRST, ClockControl, MarkSource

T = TypeVar("T")


HELD_SHARE: Final = 0.05
"""Of the computing time above the planned clock: less is what any control causes, and no iteration is left out for."""


@dataclass(frozen=True)
class Evidence:
    """What is known of one rank's iteration, or of all ranks together.

    Attributes:
        marks, control: of several ranks the worst.
        lead_us: when the GPU began an instruction minus when the host marked it, median; of several ranks the largest.
        below_us, above_us: computing time with a clock below, and above, the planned one; of several ranks the sum.
        computing_us: time spent in instructions; of several ranks the sum.
        clock_mhz: median SM clock during instructions; of several ranks the lowest.
        limited_mhz: the same of GPUs whose clock the power limit held below the requested one; None: of none.
    """

    marks: MarkSource | None = None
    control: ClockControl | None = None
    lead_us: int | None = None
    below_us: int | None = None
    above_us: int | None = None
    computing_us: int = 0
    clock_mhz: int | None = None
    limited_mhz: int | None = None

    @classmethod
    def of_iteration(
        cls,
        *,
        marks: MarkSource | None,
        control: ClockControl | None,
        lead_us: int | None,
        below_us: int,
        above_us: int,
        computing_us: int,
        clock_mhz: int,
        power_limited: bool,
    ) -> Evidence | None:
        """Return what is known of an iteration; None: nothing is.

        Args:
            marks, control: None: not known, or of no plan.
            lead_us: median lead; None: not known.
            below_us, above_us: as measured; they count where marks and control are known.
            computing_us: time spent in instructions.
            clock_mhz: median clock; 0: not known.
            power_limited: whether the power limit held the clock below the one requested.
        """
        if marks is None and control is None and not clock_mhz:
            return None
        # Without control there was no planned clock, and without marks no time of an instruction to compare with.
        reckoned = control is not None and marks is not None
        return cls(
            marks=marks,
            control=control,
            lead_us=lead_us,
            below_us=min(below_us, computing_us) if reckoned else None,
            above_us=min(above_us, computing_us) if reckoned else None,
            computing_us=computing_us,
            clock_mhz=clock_mhz or None,
            limited_mhz=clock_mhz or None if power_limited else None,
        )

    @property
    def below_share(self) -> float | None:
        """Share of the computing time below the planned clock."""
        return _share(self.below_us, self.computing_us)

    @property
    def above_share(self) -> float | None:
        """Share of the computing time above the planned clock."""
        return _share(self.above_us, self.computing_us)

    @property
    def is_transition(self) -> bool:
        """Of one rank: whether its clock was held above the plan only until a timetable is known. The iteration was
        then faster than its plan, and says nothing of it. Where GPU times are never known, clocks are held for good,
        and that counts.
        """
        passing = self.control is ClockControl.HELD and self.marks is not MarkSource.HOST
        return passing and (self.above_share or 0.0) > HELD_SHARE


def combine(ranks: Iterable[Evidence | None]) -> Evidence | None:
    """Combine what ranks reported of the same iteration; None: none reported anything."""
    reported = [rank for rank in ranks if rank is not None]
    if not reported:
        return None
    return Evidence(
        marks=_worst(BEST_MARKS_FIRST, (rank.marks for rank in reported)),
        control=_worst(tuple(ClockControl), (rank.control for rank in reported)),
        lead_us=_of(max, (rank.lead_us for rank in reported)),
        below_us=_of(sum, (rank.below_us for rank in reported)),
        above_us=_of(sum, (rank.above_us for rank in reported)),
        computing_us=sum(rank.computing_us for rank in reported),
        clock_mhz=_of(min, (rank.clock_mhz for rank in reported)),
        limited_mhz=_of(min, (rank.limited_mhz for rank in reported)),
    )


def summarise(iterations: Iterable[Evidence | None]) -> Evidence:
    """Summarise several iterations: what most of them say, median leads, sums of times.

    A power limit counts if it held clocks in more than half of them.
    """
    reported = [iteration for iteration in iterations if iteration is not None]
    limited = [iteration.limited_mhz for iteration in reported if iteration.limited_mhz is not None]
    return Evidence(
        marks=_most([iteration.marks for iteration in reported if iteration.marks is not None]),
        control=_most([iteration.control for iteration in reported if iteration.control is not None]),
        lead_us=_of(_median, (iteration.lead_us for iteration in reported)),
        below_us=_of(sum, (iteration.below_us for iteration in reported)),
        above_us=_of(sum, (iteration.above_us for iteration in reported)),
        computing_us=sum(iteration.computing_us for iteration in reported),
        clock_mhz=_of(_median, (iteration.clock_mhz for iteration in reported)),
        limited_mhz=_median(limited) if 2 * len(limited) > len(reported) else None,
    )


def _share(part_us: int | None, whole_us: int) -> float | None:
    return None if part_us is None or whole_us <= 0 else part_us / whole_us


def _worst(order: Sequence[T], words: Iterable[T | None]) -> T | None:
    places = [order.index(one) for one in words if one is not None]
    return order[max(places)] if places else None


def _most(words: list[T]) -> T | None:
    return Counter(words).most_common(1)[0][0] if words else None


def _of(function: Callable[[list[int]], int], figures: Iterable[int | None]) -> int | None:
    reported = [figure for figure in figures if figure is not None]
    return function(reported) if reported else None


def _median(figures: list[int]) -> int:
    return round(median(figures))
