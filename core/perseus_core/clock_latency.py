"""What a GPU has measured of its clock changes: of all together, and by the clocks that it changed between.

An agent measures it, the wire carries it, and the operator reckons with it in this form. ``latency`` has what is known
of a GPU that measured nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from perseus_core.latency import MAX_LATENCY_US, SwitchLatency

MAX_CLOCKS: Final = 255
"""Clocks of a plan set, and clocks whose latencies are known."""
MAX_CLOCK_MHZ: Final = 10_000
"""Highest clock that a plan set may have."""
_MOST_CHANGES: Final = 2**32
"""Of one GPU from one clock to another: agents send no larger number."""


@dataclass(frozen=True)
class Transition:
    """Changes from one clock to another; 0 MHz: the default clocks."""

    from_mhz: int
    to_mhz: int
    changes: int
    p50_us: int
    p99_us: int


class ClockMedian(NamedTuple):
    """Changes to one clock, from any other: how many were measured, and their median."""

    mhz: int
    changes: int
    p50_us: int


@dataclass(frozen=True)
class ClockLatency(SwitchLatency):
    """How long changes of a GPU's clock take, and what that was measured on.

    Attributes:
        changes: how many were measured; 0: the figures are the published or assumed ones of the model.
        transitions: by pair of clocks, the most frequent first.
    """

    changes: int = 0
    transitions: tuple[Transition, ...] = ()

    @cached_property
    def medians(self) -> tuple[ClockMedian, ...]:
        """By the clock that is changed to. Transitions come from agents and profiles: what cannot be true is left out,
        and so are changes to the default clocks, which no plan has. Computed once: a planner looks several times a
        second.
        """
        by_target: dict[int, list[tuple[int, int]]] = {}
        for one in self.transitions:
            named, timed = 0 < one.to_mhz <= MAX_CLOCK_MHZ, 0 < one.p50_us <= MAX_LATENCY_US
            if named and timed and 0 < one.changes < _MOST_CHANGES:
                by_target.setdefault(one.to_mhz, []).append((one.p50_us, one.changes))
        return tuple(
            ClockMedian(mhz, sum(n for _, n in medians), weighted_median(medians)) for mhz, medians in by_target.items()
        )


def weighted_median(values: Iterable[tuple[int, int]]) -> int:
    """The median of values each of which counts as often as its weight says.

    Args:
        values: value and weight; at least one, and weights are positive.
    """
    ordered = sorted(values)
    totals = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(totals, totals[-1] / 2)][0]
