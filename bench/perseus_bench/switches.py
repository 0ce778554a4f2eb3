"""Trial: how long a change of the clock takes, from each of some clocks to each other one, up and down.

Two answers: when the SM clock is read as the new one, by fast readings after each call; and when work items take the
time of the new clock, which is what counts.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Final

from perseus_bench.bench import POLL_S, Bench
from perseus_bench.measures import all_pairs, durations_of, speed_change_us, spread
from perseus_bench.report import ClockScan, Durations, MeasuredTransition, SwitchTimes
from perseus_core.units import s_from_us, us_from_s

CLOCKS: Final = 5
"""Clocks of the trial where there is time: twenty pairs."""
FEW_CLOCKS: Final = 3
FEW_S: Final = 30.0
"""Below so many seconds, fewer clocks."""
SHORT_S: Final = 10.0
"""Below so many seconds each change is watched for a shorter time."""
GIVE_UP_S: Final = 2.0
"""A clock that is not read after so long was not reached; the slowest changes published take about 0.5 s."""
_Seen = dict[tuple[int, int], list[float]]


def time_switches(bench: Bench, scan: ClockScan, seconds: float) -> SwitchTimes:
    """Time changes between clocks that the GPU reaches.

    Args:
        bench: the GPU under test.
        scan: of the same GPU: no clock above its top usable one is used.
        seconds: for all changes together; every pair is measured once at least.

    Raises:
        DeviceError: the driver refused.
        Interrupted: the user ended the run.
    """
    usable = sorted(point.requested_mhz for point in scan.points if point.requested_mhz <= scan.top_usable_mhz)
    clocks = spread(usable, min(len(usable), CLOCKS if seconds >= FEW_S else FEW_CLOCKS))
    settled_s = 0.05 if seconds >= SHORT_S else 0.02
    reported: _Seen = defaultdict(list)
    by_speed: _Seen = defaultdict(list)
    unreached = 0
    pairs = len(clocks) * (len(clocks) - 1)
    end_s = bench.now_s + seconds
    bench.lock(clocks[0])
    bench.wait(settled_s)
    walk = pairwise(all_pairs(clocks)) if pairs else iter(())
    for number, (old_mhz, new_mhz) in enumerate(walk):
        if number >= pairs and bench.now_s >= end_s:
            break
        reported_s, speed_s = _change(bench, new_mhz, settled_s)
        if reported_s is None:
            unreached += 1
        else:
            reported[old_mhz, new_mhz].append(reported_s)
        if speed_s is not None:
            by_speed[old_mhz, new_mhz].append(speed_s)
    top = next(point for point in scan.points if point.requested_mhz == clocks[0])
    return SwitchTimes(
        transitions=tuple(
            MeasuredTransition(*pair, durations_of(seen), durations_of(by_speed[pair]) if by_speed[pair] else None)
            for pair, seen in sorted(reported.items(), reverse=True)
        ),
        reported=_together(reported) or Durations(0, 0.0, 0.0, 0.0),
        raises=_together({pair: seen for pair, seen in reported.items() if pair[0] < pair[1]}),
        lowerings=_together({pair: seen for pair, seen in reported.items() if pair[0] > pair[1]}),
        speed=_together(by_speed),
        unreached=unreached,
        item_time_s=top.item_time_s,
    )


def _change(bench: Bench, new_mhz: int, settled_s: float) -> tuple[float | None, float | None]:
    """One change: how long until it is read, and until it is felt, seconds."""
    with bench.working() as items:
        bench.wait(settled_s)
        asked_s = bench.now_s
        bench.lock(new_mhz)
        reached_s: float | None = None
        while bench.now_s < (asked_s + GIVE_UP_S if reached_s is None else reached_s + settled_s):
            if not bench.reads_as(new_mhz):
                reached_s = None  # it was a glance at the new clock, not the new clock
            elif reached_s is None:
                reached_s = bench.now_s
            bench.wait(POLL_S)
        bench.wait(settled_s)
    asked_us = us_from_s(asked_s)
    changed_us = speed_change_us(items, asked_us)
    speed_s = None if changed_us is None or reached_s is None else max(0.0, s_from_us(changed_us - asked_us))
    return (None if reached_s is None else reached_s - asked_s), speed_s


def _together(seen: _Seen) -> Durations | None:
    every = [value for values in seen.values() for value in values]
    return durations_of(every) if every else None
