"""Exchange options along the longest path of a plan: a knapsack, by dynamic programming over the time that is left.

Near T* one chain of instructions alone determines the time. The best plan then has the right number of each option on
that chain, and no small change leads from one such mixture to another. At the chain's own price of time nearly all
instructions take one best option; the rest of the deadline is filled with the few others that fit best together. The
results are proposals: the caller must simulate them, because other paths may be longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.relaxation.graph import Graph
from perseus_solver.relaxation.tables import Tables
from perseus_solver.search.rounding import Rounder

_CELLS = 1 << 13
"""Steps in which time is counted here."""
_TOLERANCE = 1e-6
"""Of such a step: what rounding of sums may lose."""
_BEHIND, _AHEAD = 2, 3
"""An exchange moves at most so many of the commonest step below, or above, what the chain can give away."""
_MOST = 4
"""Instructions of one table that leave their best option, besides those that take the commonest step."""
_TRACED, _PROPOSALS = 64, 8
"""Mixtures that seem the best, and those of them that are proposed if they fit."""
_ORDERS = 12
"""Random orders in which the best mixture is proposed in addition, because the last bit of a sum depends on the order.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Mixture:
    """Most instructions of each table at ``base``, and ``common`` of one table, if any, a step slower."""

    price_j: float  # of a tick
    base: Index
    table: int
    step: int
    gain_ticks: float  # of that step
    common: int
    left_ticks: float  # of the deadline


def longest_path(graph: Graph, duration_ticks: Floats) -> tuple[Index, float]:
    """Return the rows of a longest path of one plan, in order, and the ticks of delay on it.

    Args:
        graph: the levels.
        duration_ticks: float[n].
    """
    finish_ticks = graph.finish_ticks(duration_ticks[:, None])[:, 0]
    begins = np.array([level.begin for level in graph.levels])
    row, path, delay_ticks = int(finish_ticks[:-1].argmax()), [], 0.0
    while row < graph.n:
        path.append(row)
        level = graph.levels[int(begins.searchsorted(row, side="right")) - 1]
        at, latest_ticks, own_delay_ticks = graph.n, 0.0, 0.0
        for index, wait_ticks, _ in level.before:
            before = int(index[row - level.begin])
            pause_ticks = 0.0 if wait_ticks is None else float(wait_ticks[row - level.begin, 0])
            if before < graph.n and finish_ticks[before] + pause_ticks >= latest_ticks:
                at, latest_ticks, own_delay_ticks = before, finish_ticks[before] + pause_ticks, pause_ticks
        row, delay_ticks = at, delay_ticks + own_delay_ticks
    return np.array(path[::-1], dtype=np.intp), delay_ticks


def exchanged(
    rounder: Rounder, choice: Index, deadline_ticks: float, *, most_j: float | None = None, within: float = math.inf
) -> Index:
    """Return plans like this one with other mixtures of options on its longest path, the best first.

    A mixture misses the relaxed optimum of the chain by less than one commonest step. Where the plan to beat is much
    further away, other paths hold it too, and nothing is proposed. O(cells · options) work.

    Args:
        rounder: of the problem.
        choice: int[n], the plan to beat.
        deadline_ticks: when plans must end, not rounded.
        most_j: effective energy that a proposal may take; None: what this plan takes.
        within: propose nothing if ``most_j`` is more than so many commonest steps above the chain's relaxed optimum.

    Returns:
        int[n, proposals].
    """
    tables = rounder.tables
    path, delay_ticks = longest_path(rounder.graph, rounder.duration_ticks(choice[:, None])[:, 0])
    table_of = rounder.table_of[path]
    count = np.bincount(table_of, minlength=len(tables.size))
    time_ticks = tables.time_s / tables.tick_s
    mixture = _mixture(tables, time_ticks, count, deadline_ticks - delay_ticks)
    if mixture is None:
        return np.zeros((len(choice), 0), dtype=np.intp)
    now = choice[path]
    value = tables.energy_j + mixture.price_j * time_ticks
    spare_ticks = deadline_ticks - delay_ticks - float(time_ticks[table_of, now].sum())
    excess = (
        float((value[table_of, now] - value[table_of, mixture.base[table_of]]).sum()) + mixture.price_j * spare_ticks
    )
    if most_j is not None:
        excess += most_j - float(rounder.energy_j(choice[:, None])[0])
    if excess > within * mixture.price_j * mixture.gain_ticks:
        return np.zeros((len(choice), 0), dtype=np.intp)
    plans, random = [choice], np.random.default_rng(0)
    for place, moved in enumerate(_fill(tables, time_ticks, count, mixture, excess)):
        one, other, *shuffled = (choice.copy() for _ in range(2 if place else 2 + _ORDERS))
        for k in np.flatnonzero(count).tolist():
            options = np.full(count[k], mixture.base[k])
            if k == mixture.table:
                options[: mixture.common] = mixture.step
            own = moved.get(k, [])
            options[count[k] - len(own) :] = own
            rows = path[table_of == k]
            # One proposal leaves slow instructions slow, which changes other paths least. The other puts slow ones
            # last, because the last bit of a sum depends on its order.
            one[rows[np.argsort(choice[rows], kind="stable")]] = other[rows] = np.sort(options)
            for plan in shuffled:
                plan[rows] = random.permutation(options)
        plans += [one, other, *shuffled]
    return np.stack(plans[1:], axis=1) if len(plans) > 1 else np.zeros((len(choice), 0), dtype=np.intp)


def _mixture(tables: Tables, time_ticks: Floats, count: Index, budget_ticks: float) -> _Mixture | None:
    """Return the relaxed optimum of the chain, rounded down; None where the chain has no choice."""
    used = np.flatnonzero(count)
    prices = np.unique(tables.hull_price[used])[::-1]
    corner = np.stack([(tables.hull_price[used] >= price).sum(axis=1) for price in prices])
    # ``above`` is the corner that is best just above a price, ``corner`` the one just below it.
    above = np.stack([(tables.hull_price[used] > price).sum(axis=1) for price in prices])
    last = tables.hull_size[used] - 1
    above, corner = np.minimum(above, last), np.minimum(corner, last)
    length_ticks = (tables.hull_ticks[used, above] * count[used]).sum(axis=1)
    at = int((length_ticks <= budget_ticks).sum()) - 1
    if at < 0 or (above[at] == corner[at]).all():
        return None
    base = np.zeros(len(count), dtype=np.intp)
    for k, first in zip(used.tolist(), above[at].tolist(), strict=True):
        base[k] = int(tables.time_ticks[k].searchsorted(tables.hull_ticks[k, first]))
    steps = np.flatnonzero(above[at] != corner[at])
    j = int(steps[count[used[steps]].argmax()])
    table = int(used[j])
    step = int(tables.time_ticks[table].searchsorted(tables.hull_ticks[table, above[at, j] + 1]))
    gain_ticks = float(time_ticks[table, step] - time_ticks[table, base[table]])
    left_ticks = budget_ticks - float((time_ticks[used, base[used]] * count[used]).sum())
    common = min(max(int(left_ticks / gain_ticks) - _BEHIND, 0), int(count[table]))
    price_j = float(prices[at]) * tables.unit_w * tables.tick_s
    return _Mixture(price_j, base, table, step, gain_ticks, common, left_ticks - common * gain_ticks)


def _fill(
    tables: Tables, time_ticks: Floats, count: Index, mixture: _Mixture, excess_j: float
) -> list[dict[int, list[int]]]:
    """Return, for each proposal, the options that a few instructions take instead of the base, by table.

    ``excess_j`` is what the plan to beat takes more than the relaxed optimum.
    """
    span_ticks = min(mixture.left_ticks, _AHEAD * mixture.gain_ticks) + _BEHIND * mixture.gain_ticks
    if span_ticks <= 0:
        return []
    # The commonest step is a whole number of cells, because many of it may fill a deadline exactly. Other steps are
    # rounded, so a mixture may take a few cells more or less than it seems to.
    step = max(int(_CELLS * mixture.gain_ticks / span_ticks), 1)
    cell_ticks, zero = mixture.gain_ticks / step, _BEHIND * step
    full = int(span_ticks / cell_ticks + _TOLERANCE)
    if full < zero:
        return []
    cells = full + _MOST
    cost = np.full(cells + 1, np.inf)  # of the instructions exchanged, by the time that they take together
    cost[zero] = 0.0
    trail: list[tuple[int, Index, list[tuple[list[int], Index, Index]]]] = []
    for k in np.flatnonzero(count).tolist():
        free = int(count[k]) - (mixture.common if k == mixture.table else 0)
        options = np.delete(np.arange(int(tables.size[k])), mixture.base[k])
        value = tables.energy_j[k] + mixture.price_j * time_ticks[k]
        extra_j = np.maximum(value[options] - value[mixture.base[k]], 0.0)
        shift = np.rint((time_ticks[k, options] - time_ticks[k, mixture.base[k]]) / cell_ticks)
        near = (np.abs(shift) <= cells) & (extra_j <= excess_j)
        options, extra_j, shift = options[near], extra_j[near], shift[near].astype(np.intp)
        layers, current, best, taken = [], cost, cost.copy(), np.zeros(cells + 1, dtype=np.intp)
        for depth in range(1, min(free, _MOST) + 1):
            following, which = np.full(cells + 1, np.inf), np.full(cells + 1, -1, dtype=np.intp)
            for i, (move, price) in enumerate(zip(shift.tolist(), extra_j.tolist(), strict=True)):
                to, source = (
                    slice(max(move, 0), cells + 1 + min(move, 0)),
                    slice(max(-move, 0), cells + 1 - max(move, 0)),
                )
                cheaper = current[source] + price < following[to]
                following[to][cheaper] = (current[source] + price)[cheaper]
                which[to][cheaper] = i
            layers.append((options.tolist(), shift, which))
            taken[following < best] = depth
            best = np.minimum(best, following)
            current = following
        trail.append((k, taken, layers))
        cost = best
    wasted = cost + mixture.price_j * cell_ticks * np.maximum(full - np.arange(cells + 1), 0)
    found: list[tuple[float, int, dict[int, list[int]]]] = []
    for at in np.argsort(wasted, kind="stable")[:_TRACED].tolist():
        if np.isfinite(cost[at]):
            moved = _traced(trail, at)
            takes_ticks = sum(
                float(time_ticks[k, option] - time_ticks[k, mixture.base[k]])
                for k, own in moved.items()
                for option in own
            )
            if takes_ticks <= mixture.left_ticks + _TOLERANCE * cell_ticks:
                found.append((float(cost[at]) + mixture.price_j * (mixture.left_ticks - takes_ticks), at, moved))
    return [moved for _, _, moved in sorted(found)[:_PROPOSALS]]


def _traced(trail: list[tuple[int, Index, list[tuple[list[int], Index, Index]]]], at: int) -> dict[int, list[int]]:
    """Follow the dynamic programme back from a cell to the options taken, by table."""
    moved: dict[int, list[int]] = {}
    for k, taken, layers in reversed(trail):
        own = []
        for depth in range(int(taken[at]), 0, -1):
            options, shift, which = layers[depth - 1]
            i = int(which[at])
            own.append(options[i])
            at -= int(shift[i])
        moved[k] = own
    return moved
