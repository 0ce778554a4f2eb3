"""How long clock changes take on several GPUs of a model together, for any clock and by the clock that is changed to.

An iteration waits for the slowest GPU, so an upper quantile over the GPUs counts, where each has measured enough by
itself. While each has few changes, as after a sweep, they count together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Final

from perseus_core.clock_latency import MAX_CLOCKS, ClockLatency, ClockMedian, Transition, weighted_median
from perseus_core.latency import ENOUGH_OF_CLOCK, SwitchLatency, by_clock, published_latency

ENOUGH_CHANGES: Final = 32
"""Changes before figures count, of one GPU or of all together. Agents hold to the same number."""
ENOUGH_FOR_TAIL: Final = 300
"""Changes before their 99th percentile is known: of fewer, the longest is shorter than that in more than one of twenty
cases."""
WORST_SHARE: Final = 0.9
"""An iteration waits for the slowest GPU, so of up to ten the slowest counts; of more, this quantile: a single broken
one must not decide the plans of a thousand."""


_MOST_GPUS: Final = 1_024
"""GPUs whose changes count by clock; of more every n-th. They say it well enough, and all would take a second."""


def measured_latency(model: str, latencies: list[ClockLatency]) -> ClockLatency | None:
    """What GPUs of a model measured; None: still too few. Until the tail is known, the published one counts as well:
    plans that trusted the longest of some dozen changes would be made again as soon as a longer one came.
    """
    latency = _together(latencies)
    if latency is None or latency.changes >= ENOUGH_FOR_TAIL:
        return latency
    return replace(latency, p99_us=max(latency.p99_us, published_latency(model).p99_us))


def latency_by_clock(latency: ClockLatency, latencies: Iterable[ClockLatency]) -> dict[int, SwitchLatency]:
    """Estimate how long changes take by the clock that is changed to.

    Args:
        latency: of changes to any clock.
        latencies: of each GPU, with its transitions.

    Returns:
        Of the clocks that were changed to often enough, ascending by clock, MHz, at most `MAX_CLOCKS`; see
        `perseus_core.latency.by_clock`.
    """
    gpus, of_clock = list(latencies), dict[int, list[ClockMedian]]()
    gpus = gpus[:: 1 + len(gpus) // _MOST_GPUS]
    for gpu in gpus:
        for of_gpu in gpu.medians:
            of_clock.setdefault(of_gpu.mhz, []).append(of_gpu)
    measured = {mhz: (sum(one.changes for one in of_gpus), _median_us(of_gpus)) for mhz, of_gpus in of_clock.items()}
    frequent = sorted(measured, key=lambda mhz: (-measured[mhz][0], mhz))[:MAX_CLOCKS]
    # How much changes scatter is that of the usual GPU: of many, the longest change of all is an outlier.
    scatter = [gpu.p99_us / gpu.p50_us for gpu in gpus if gpu.changes >= ENOUGH_CHANGES]
    factor = median(scatter) if scatter else latency.p99_us / latency.p50_us
    overall = replace(latency, p99_us=round(factor * latency.p50_us))
    by_frequency = by_clock(overall, {mhz: measured[mhz] for mhz in frequent}, _own_sigma(of_clock.values()))
    return dict(sorted(by_frequency.items()))


def _own_sigma(of_clocks: Iterable[list[ClockMedian]]) -> float | None:
    """Return the standard deviation of the logarithm of changes to one clock, by how far GPUs lie apart that have
    changed to it a few times, as after a sweep; None: too few have. Where they did so often, the GPUs differ.
    """
    squares, freedom = 0.0, 0
    for of_gpus in of_clocks:
        few = [one for one in of_gpus if one.changes < ENOUGH_OF_CLOCK]
        logs = [math.log(one.p50_us) for one in few]
        weights = [1 + 2 * (one.changes - 1) / math.pi for one in few]  # of medians of normal values, one over variance
        both = [*zip(weights, logs, strict=True)]
        centre = sum(weight * log for weight, log in both) / sum(weights) if few else 0.0
        squares += sum(weight * (log - centre) ** 2 for weight, log in both)
        freedom += max(len(few) - 1, 0)
    return math.sqrt(squares / freedom) if freedom >= ENOUGH_FOR_TAIL else None


def _median_us(of_gpus: list[ClockMedian]) -> int:
    """Of changes to one clock: an upper quantile over the GPUs, or of their changes together while each has few."""
    alone = [one.p50_us for one in of_gpus if one.changes >= ENOUGH_CHANGES]
    if alone and 2 * len(alone) >= len(of_gpus):
        return _upper(alone)
    return weighted_median((one.p50_us, one.changes) for one in of_gpus)


def _together(latencies: list[ClockLatency]) -> ClockLatency | None:
    """Each figure's upper quantile over the GPUs, or of their changes together while each has few, as after a sweep."""
    alone = [latency for latency in latencies if latency.changes >= ENOUGH_CHANGES]
    if 2 * len(alone) < len(latencies) or not alone:
        return _pooled(latencies)
    p50_us = _upper([latency.p50_us for latency in alone])
    return ClockLatency(
        p50_us=p50_us,
        p99_us=max(p50_us, _upper([latency.p99_us for latency in alone])),
        call_us=_upper([latency.call_us for latency in alone]),
        changes=sum(latency.changes for latency in alone),
        shared_lock=any(latency.shared_lock for latency in alone),
        transitions=max(alone, key=lambda latency: latency.changes).transitions,
    )


def _pooled(latencies: list[ClockLatency]) -> ClockLatency | None:
    """The changes of all GPUs together, by their transitions: the median one, and the longest tail."""
    pooled: dict[tuple[int, int], Transition] = {}
    for one in chain.from_iterable(latency.transitions for latency in latencies):
        key = one.from_mhz, one.to_mhz
        before = pooled.get(key, Transition(*key, 0, 0, 0))
        changes = before.changes + one.changes
        # Of two medians the larger: the iteration waits for the slower GPU.
        pooled[key] = Transition(*key, changes, max(before.p50_us, one.p50_us), max(before.p99_us, one.p99_us))
    changes = sum(one.changes for one in pooled.values())
    if changes < ENOUGH_CHANGES:
        return None
    ordered = sorted(pooled.values(), key=lambda one: -one.changes)[:64]
    joint = ClockLatency(
        p50_us=round(median(one.p50_us for one in ordered)),
        p99_us=max(one.p99_us for one in ordered),
        call_us=_upper([latency.call_us for latency in latencies]),
        changes=changes,
        shared_lock=any(latency.shared_lock for latency in latencies),
        transitions=tuple(ordered),
    )
    return joint if joint.is_possible else None


def _upper(figures: list[int]) -> int:
    return sorted(figures)[max(0, math.ceil(WORST_SHARE * len(figures)) - 1)]
