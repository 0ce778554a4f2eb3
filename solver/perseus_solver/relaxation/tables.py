"""Options as rectangular arrays in integer time: Pareto-efficient options, and their lower convex hulls.

Time is counted in *ticks*. Every duration is rounded up to whole ticks and stored in a float64, whose sums are exact
below 2^53. So the solver compares times without a tolerance, and a plan that meets a deadline in ticks meets it in
seconds. Energies are effective energies, e − P_blk·t, in joules: energy beyond what a waiting GPU takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Floats, Index, Options, latest_s
from perseus_solver.model.problem import Problem

TICKS_PER_HORIZON = 2.0**42
"""Ticks in an upper bound of the longest iteration divided by the stages, so about 2^42 in an iteration. Rounding up
makes a path of a thousand instructions about 2·10^-10 longer, which is less than `SAME_TIME`. Sums along any path stay
below 2^53, where a float64 is no longer exact, and costs times nodes, with which the flow solver computes, below 2^63.
"""

_SHARE = 0.5
"""Of the tolerance of time for options. The other half is for ticks and sums: the fastest plan must meet T_min."""
PRICE_UNITS = 2.0**24
"""Units in the steepest hull slope (joules per second): prices are resolved to 6e-8 of it, finer than any measured
watt.
"""
_FEW = 64
"""Points whose hull is found sooner one by one than all at once."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of options side by side, fastest option first; short rows are padded on the right.

    Attributes:
        tick_s: seconds in a tick.
        unit_w: watts in a unit of flow.
        waiting_price: units of what all stages take while they wait. At this price of time, the plan of least energy is
            the best.
        size: int[tables], options that are Pareto-efficient in (time, effective energy).
        time_ticks: float[tables, width], strictly increasing, padded with infinity.
        energy_j: float[tables, width], strictly decreasing, padded with the last value.
        time_s: float[tables, width], the exact durations, padded with the last value.
        row: int[tables, width], the position of the option in ``Options``.
        hull_size: int[tables], corners of the lower convex hull.
        hull_ticks, hull_energy_j: float[tables, hull width], padded with the last corner.
        hull_price: int64[tables, hull width], the least flow at which corner k is better than corner k + 1. Decreases
            along the row; the last corner of each row has 0.
    """

    tick_s: float
    unit_w: float
    waiting_price: int
    size: Index
    time_ticks: Floats
    energy_j: Floats
    time_s: Floats
    row: Index
    hull_size: Index
    hull_ticks: Floats
    hull_energy_j: Floats
    hull_price: npt.NDArray[np.int64]


def efficient(options: Options, blocking_power_w: float) -> Index:
    """Return the Pareto-efficient options: no other option is as fast for as little effective energy.

    Args:
        options: measured options.
        blocking_power_w: power of one waiting GPU, watts.

    Returns:
        int[efficient options], their positions by increasing time.
    """
    effective_j = options.energy_j - blocking_power_w * options.time_s
    return undominated(options.time_s, effective_j, _SHARE)


def undominated(time_s: Floats, energy_j: Floats, share: float = 1.0) -> Index:
    """Return which of these no other dominates: as fast, up to `SAME_TIME`, for as little energy.

    Args:
        time_s: float[items], seconds.
        energy_j: float[items], joules.
        share: of the tolerance.

    Returns:
        int[items left], their positions by increasing time; energy falls.
    """
    order = np.lexsort((energy_j, time_s))
    sorted_j = energy_j[order]
    falling = order[sorted_j < np.append(np.inf, np.minimum.accumulate(sorted_j))[:-1]]
    # Of those that take the same time, the last is the cheapest. A chain of such steps could add up to a longer one, so
    # each is compared with what is kept.
    kept: list[int] = []
    for one in falling[::-1].tolist():
        if not kept or time_s[kept[-1]] > latest_s(time_s[one], share):
            kept.append(one)
    return np.array(kept[::-1], dtype=np.intp)


def lower_hull(time: Floats, energy: Floats) -> Index:
    """Return the corners of the lower convex hull of points (Andrew's monotone chain).

    Args:
        time: float[points], increasing.
        energy: float[points].

    Returns:
        int[corners], their positions.
    """
    left = np.arange(len(time))
    above = np.ones(1, dtype=bool)
    while above.any() and len(left) > _FEW:  # what is above the line between its neighbours is no corner
        t, e = time[left], energy[left]
        above = (e[1:-1] - e[:-2]) * (t[2:] - t[:-2]) >= (e[2:] - e[:-2]) * (t[1:-1] - t[:-2])
        left = left[np.concatenate(([True], ~above, [True]))]
    hull: list[int] = []
    t, e = time[left].tolist(), energy[left].tolist()  # several times as fast as arrays, number by number
    for i in range(len(t)):
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (e[b] - e[a]) * (t[i] - t[a]) < (e[i] - e[a]) * (t[b] - t[a]):
                break
            hull.pop()
        hull.append(i)
    return left[hull]


def _stack(rows: list[Floats], pad: float | None) -> Floats:
    """Return rows of different length as one array; ``pad`` None repeats the last value."""
    out = np.empty((len(rows), max(map(len, rows))))
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
        line[len(row) :] = row[-1] if pad is None else pad
    return out


def build_tables(problem: Problem) -> Tables:
    """Filter, sort and scale the options of a problem.

    O(options · log), independent of the number of instructions.

    Args:
        problem: the problem.
    """
    counts = np.bincount(problem.option_of, minlength=len(problem.options))
    # No timetable is longer than all slowest instructions and delays one after the other.
    horizon_s = float(
        sum(c * o.time_s.max() for c, o in zip(counts, problem.options, strict=True)) + problem.edge_delay_s.sum()
    )
    # The stages of a pipeline work at the same time, so the horizon is divided: finer ticks, still exact
    # (2^42 · 2^10 < 2^53).
    tick_s = horizon_s / max(1, min(problem.stages, 2**10)) / TICKS_PER_HORIZON if horizon_s > 0 else 1.0

    rows, times, time_ticks, energies, hulls = [], [], [], [], []
    for options in problem.options:
        row = efficient(options, problem.blocking_power_w)
        whole_ticks = np.ceil(options.time_s[row] / tick_s)
        # Of two options with the same ticks, the later one is cheaper.
        last = np.append(np.diff(whole_ticks) > 0, True)
        row, whole_ticks = row[last], whole_ticks[last]
        energy = options.energy_j[row] - problem.blocking_power_w * options.time_s[row]
        rows.append(row.astype(np.float64))
        times.append(options.time_s[row])
        time_ticks.append(whole_ticks)
        energies.append(energy)
        hulls.append(lower_hull(whole_ticks, energy))

    slopes = [-np.diff(e[h]) / np.diff(t[h] * tick_s) for e, t, h in zip(energies, time_ticks, hulls, strict=True)]
    steepest = max((float(s.max()) for s in slopes if len(s)), default=1.0)
    unit_w = steepest / PRICE_UNITS
    # What a second of waiting takes is a whole number of units, so that the least energy of all plans has its own line.
    waiting_w = problem.blocking_power_w * problem.stages
    waiting_price = math.ceil(waiting_w / unit_w)
    unit_w = waiting_w / waiting_price if waiting_price else unit_w
    prices = [np.append(np.rint(s / unit_w), 0.0) for s in slopes]
    return Tables(
        tick_s=tick_s,
        unit_w=unit_w,
        waiting_price=waiting_price,
        size=np.array([len(r) for r in rows], dtype=np.intp),
        time_ticks=_stack(time_ticks, np.inf),
        energy_j=_stack(energies, None),
        time_s=_stack(times, None),
        row=_stack(rows, None).astype(np.intp),
        hull_size=np.array([len(h) for h in hulls], dtype=np.intp),
        hull_ticks=_stack([t[h] for t, h in zip(time_ticks, hulls, strict=True)], None),
        hull_energy_j=_stack([e[h] for e, h in zip(energies, hulls, strict=True)], None),
        hull_price=_stack(prices, 0.0).astype(np.int64),
    )
