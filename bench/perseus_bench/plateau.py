"""Trial: which clocks the GPU really reaches under load, and what power and time they cost.

From the highest clock down. Where the power limit holds the clock, a lower request reaches the same clock: those are
one plateau, and the first clock below it is the highest that a plan can use.
"""

from __future__ import annotations

from bisect import bisect_left
from statistics import fmean, median
from typing import Final

from perseus_agent.devices.base import EventReason
from perseus_bench.bench import Bench
from perseus_bench.measures import plateaus_of, spread
from perseus_bench.report import ClockPoint, ClockScan
from perseus_core.units import s_from_us

SETTLE_S: Final = 0.5
"""From a lock to the measurement: longer than changes take, and long enough for the power limit to act."""
CAPPED: Final = 0.05
"""Share of readings with the power limit as reason from which on a clock counts as held down."""
LOWEST: Final = 0.4
"""Of the highest clock: plans do not use clocks below, where energy rises again."""
COARSE: Final = range(6, 25)
"""Clocks of the first pass, at least and at most; a second one finds the edge of the plateau to a step."""
SHORTEST_WINDOW_S: Final = 0.25
LONGEST_WINDOW_S: Final = 3.0


def scan_clocks(bench: Bench, seconds: float) -> ClockScan:
    """Measure clocks from the highest down.

    Args:
        bench: the GPU under test; without a workload it idles, and no power limit shows.
        seconds: for the whole scan.

    Raises:
        DeviceError: the driver refused.
        Interrupted: the user ended the run.
    """
    clocks = [clock for clock in bench.clocks_mhz if clock >= LOWEST * bench.clocks_mhz[-1]]
    refinements = len(clocks).bit_length()
    settle_s = min(SETTLE_S, seconds / (4 * (COARSE.start + refinements)))
    count = min(max(COARSE.start, int(seconds / (settle_s + 1.0)) - refinements), COARSE.stop - 1, len(clocks))
    window_s = min(max(SHORTEST_WINDOW_S, seconds / (count + refinements) - settle_s), LONGEST_WINDOW_S)
    with bench.working():
        default_mhz = bench.read_default_mhz(settle_s)
    points = {clock: _measure(bench, clock, settle_s, window_s) for clock in spread(clocks, count)}
    low, high = _edge(points, clocks)
    while high - low > 1:  # halve the interval between a clock that is free and one that is held down
        middle = (low + high) // 2
        points[clocks[middle]] = _measure(bench, clocks[middle], settle_s, window_s)
        low, high = _edge(points, clocks)
    ordered = tuple(points[clock] for clock in sorted(points, reverse=True))
    return ClockScan(default_mhz, ordered, clocks[low], plateaus_of(ordered, bench.step_mhz))


def _edge(points: dict[int, ClockPoint], clocks: list[int]) -> tuple[int, int]:
    """The places of the highest clock that is not held down and of the measured one above it; equal at the end."""
    free = [clock for clock, point in points.items() if point.power_cap_share < CAPPED]
    top = max(free, default=min(points))
    above = min((clock for clock in points if clock > top), default=top)
    return bisect_left(clocks, top), bisect_left(clocks, above)


def _measure(bench: Bench, clock_mhz: int, settle_s: float, window_s: float) -> ClockPoint:
    bench.lock(clock_mhz)
    with bench.working() as items:
        bench.wait(settle_s)
        energy = bench.energy_meter()
        energy.read()
        begin_s = bench.now_s
        span = bench.watch(window_s / 2)
        energy.read()
        rest = bench.watch(window_s / 2)
        end_s = bench.now_s
        # The counter moves rarely: its own edges must lie around the span, while the GPU still computes.
        energy_j = energy.between_j(begin_s + window_s / 4, end_s)
    clocks, powers = span.clocks_mhz + rest.clocks_mhz, span.powers_w + rest.powers_w
    reasons = span.reasons + rest.reasons
    inside = [s_from_us(item.duration_us) for item in items if begin_s <= s_from_us(item.begin_us) <= end_s]
    power_w = energy_j / (end_s - begin_s - window_s / 4) if energy_j is not None else None
    return ClockPoint(
        requested_mhz=clock_mhz,
        reached_mhz=round(median(clocks)),
        power_w=power_w if power_w is not None else fmean(powers) if powers else None,
        item_time_s=median(inside) if inside else None,
        power_cap_share=sum(EventReason.POWER_CAP in reason for reason in reasons) / len(reasons),
        reasons=tuple(sorted({flag.name or "" for reason in reasons for flag in reason})),
    )
