"""Statistics of the trials: quantiles, the moment at which the speed changed, plateaus, one lock or several. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import median
from typing import Final

from perseus_bench.report import ClockPoint, Durations, Plateau
from perseus_bench.workload import WorkItem

DISTINCT: Final = 0.03
"""Two clocks whose work items take times closer than this share cannot be separated item by item."""


def durations_of(seconds: Sequence[float]) -> Durations:
    """Quantiles by the nearest rank: always values that were seen.

    Args:
        seconds: at least one duration.
    """
    ordered = sorted(seconds)
    ranks = [max(0, math.ceil(share * len(ordered)) - 1) for share in (0.5, 0.99)]
    return Durations(len(ordered), ordered[ranks[0]], ordered[ranks[1]], ordered[-1])


def waits_for_others(alone_s: float, contended_s: float, others: int) -> bool:
    """Whether calls of several GPUs wait for each other.

    With one lock a call waits for up to one call of each other GPU, and takes (1 + others) times as long; with a lock
    for each GPU it takes as long as alone. The middle between the two decides.
    """
    return contended_s > alone_s * (1 + others / 2)


def speed_change_us(items: Sequence[WorkItem], asked_us: int) -> float | None:
    """When the speed changed, µs.

    Each item is on the side of the time before or of the time after; the boundary that puts the most items on their own
    side wins, so that single slow items do not move it. The change lies in one of the two items around it: how much of
    each was done at the old speed follows from how long it took.

    Args:
        items: without gaps, from well before the request to well after the new clock was read.
        asked_us: when the new clock was requested.

    Returns:
        None: too few items on one side, or both clocks take the same time.
    """
    before = [item.duration_us for item in items if item.begin_us + item.duration_us <= asked_us]
    after = [item.duration_us for item in items[-max(1, len(items) // 5) :] if item.begin_us > asked_us]
    if len(before) < 3 or len(after) < 3:
        return None
    old_us, new_us = median(before), median(after)
    if abs(math.log(new_us / old_us)) < DISTINCT:
        return None
    middle_us = math.sqrt(old_us * new_us)
    votes = [1 if (item.duration_us > middle_us) == (old_us > middle_us) else -1 for item in items]
    standing = list(accumulate(votes, initial=0))
    first = max(range(len(standing)), key=lambda place: (standing[place], place))
    if not 0 < first < len(items):
        return None
    around = items[first - 1 : first + 1]
    old_shares = [min(1.0, max(0.0, (item.duration_us - new_us) / (old_us - new_us))) for item in around]
    return around[0].begin_us + old_us * sum(old_shares)


def plateaus_of(points: Sequence[ClockPoint], step_mhz: int) -> tuple[Plateau, ...]:
    """Runs of requested clocks, highest first, that reach the same clock within less than half a step of the grid."""
    runs: list[list[ClockPoint]] = []
    for point in points:
        if runs and 2 * abs(runs[-1][0].reached_mhz - point.reached_mhz) < step_mhz:
            runs[-1].append(point)
        else:
            runs.append([point])
    return tuple(
        Plateau(run[0].requested_mhz, run[-1].requested_mhz, round(median(point.reached_mhz for point in run)))
        for run in runs
        if len(run) > 1
    )


def spread(clocks_mhz: Sequence[int], count: int) -> list[int]:
    """``count`` clocks, evenly over an ascending list, both ends included; highest first."""
    last = len(clocks_mhz) - 1
    places = {round(place * last / max(1, count - 1)) for place in range(count)}
    return [clocks_mhz[place] for place in sorted(places, reverse=True)]


def all_pairs(clocks_mhz: Sequence[int]) -> Iterator[int]:
    """A closed walk that goes from each clock to each other one exactly once, without end; the start comes first.

    The complete graph with both directions has one (Euler); this is Hierholzer's construction.
    """
    left = {clock: [other for other in clocks_mhz if other != clock] for clock in clocks_mhz}
    stack, walk = [clocks_mhz[0]], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    yield walk[-1]
    while True:
        yield from walk[-2::-1]
