"""Sweeps over a problem's graph for many plans at once, compiled (``compiled/sweeps.c``).

A sweep visits the instructions in order, from the start or the end of the iteration, and gives each the option that is
best within the time that its neighbours leave. A plan is a line of options, counted from the fastest of each table, in
the order of `Graph`. Times are in ticks.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perseus_solver.compiled import at, library
from perseus_solver.kinds import Floats, Index
from perseus_solver.relaxation.graph import Graph
from perseus_solver.relaxation.tables import Tables

Plans = npt.NDArray[np.int16]
"""int16[plans, n]."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Timetables to mix, fast to slow, a line each.

    Attributes:
        start_ticks, finish_ticks: float[lines, n].
        through: float[lines, kinds], flows through each kind of instruction, which say what time is worth there.
        makespan_ticks: float[lines], increasing.
    """

    start_ticks: Floats
    finish_ticks: Floats
    through: Floats
    makespan_ticks: Floats

    def around(self, deadline_ticks: Floats) -> tuple[Index, Index]:
        """Return the neighbours of each deadline on the curve."""
        last = len(self.makespan_ticks) - 1
        left = np.clip(np.searchsorted(self.makespan_ticks, deadline_ticks, side="right") - 1, 0, max(last - 1, 0))
        return left, np.minimum(left + 1, last)


@dataclass(frozen=True, slots=True, eq=False)
class Mixtures:
    """Which two timetables of a curve are mixed for each deadline, and how.

    Attributes:
        fast, slow: int64[mixtures, deadlines], lines of the curve.
        late: whether the slow one comes last, uint8[mixtures].
        backward: whether options are chosen from the end of the iteration, uint8[mixtures].
    """

    fast: Index
    slow: Index
    late: npt.NDArray[np.uint8]
    backward: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Ruin:
    """How a part of a plan is made faster before its slack is offered again.

    Attributes:
        most_worth: time is worth up to so many times more in the part.
        least_noise, most_noise: standard deviation of the logarithm of that worth, by kind of instruction.
        least_part: the smallest part, a share of the levels of the graph; the largest is the whole.
    """

    most_worth: float
    least_noise: float
    most_noise: float
    least_part: float


class Sweeps:
    """The tables and the graph of one problem, laid out for sweeps.

    Instructions of one kind have the same table and, in whatever flow, the same worth of time: the blocks of a steady
    state have as many kinds as one of them has instructions.
    """

    def __init__(self, tables: Tables, graph: Graph, table_of: Index, kind: Index) -> None:
        """Lay a problem out.

        Args:
            tables: its options.
            graph: its precedence.
            table_of: int[n], the table of each row of the graph.
            kind: int[n], the kind of each row.
        """
        self.graph, self.tables = graph, tables
        self.kinds = int(kind.max(initial=-1)) + 1
        levels = [level.end - level.begin for level in graph.levels]
        # Behind its slowest option every table has one of infinite time.
        ticks = np.pad(tables.time_ticks, ((0, 0), (0, 1)), constant_values=np.inf)
        self._arrays = (
            np.ascontiguousarray(table_of, np.int32),
            np.ascontiguousarray(kind, np.int32),
            np.repeat(np.arange(len(levels)), levels).astype(np.int32),
            np.ascontiguousarray(table_of[np.unique(kind, return_index=True)[1]], np.int32),
            tables.size.astype(np.int32),
            *_links(graph.head, graph.tail, graph),
            *_links(graph.tail, graph.head, graph),
            ticks,
            np.pad(tables.energy_j, ((0, 0), (0, 1))),
            _thresholds(tables),
            np.ascontiguousarray(_best_of_first(tables, ticks.shape[1])),
        )
        corners = tables.hull_price.shape[1]
        self._problem = _Problem(
            graph.n, self.kinds, len(levels), ticks.shape[1], corners, *(a.ctypes.data for a in self._arrays)
        )

    def totals(self, plans: Plans) -> tuple[Floats, Floats]:
        """Return the ticks from start to end of each plan, and its effective energy in joules."""
        makespan_ticks, energy_j = np.empty(len(plans)), np.empty(len(plans))
        self._run("measure", len(plans), at(plans, np.int16), at(energy_j), at(makespan_ticks), None, None)
        return makespan_ticks, energy_j

    def timetables(self, plans: Plans) -> tuple[Floats, Floats]:
        """Return when each instruction begins and ends, float[plans, n] each, ticks."""
        start_ticks, finish_ticks, totals = np.empty(plans.shape), np.empty(plans.shape), np.empty(len(plans))
        times = at(start_ticks), at(finish_ticks)
        self._run("measure", len(plans), at(plans, np.int16), at(totals), at(totals), *times)
        return start_ticks, finish_ticks

    def improved(self, plans: Plans, deadline_ticks: Floats) -> Plans:
        """Return the plans with their slack distributed, up to their own end or a later deadline, at no more energy."""
        improved = plans.copy()
        self._run("improve", len(improved), at(improved, np.int16), at(deadline_ticks))
        return improved

    def mixed(
        self, curve: Curve, mixtures: Mixtures, deadline_ticks: Floats, through: Floats, *, tie: float, shares: Floats
    ) -> Plans:
        """Return the best plan of measured options that results from mixtures of timetables, for each deadline.

        Args:
            curve: timetables.
            mixtures: which of them are mixed.
            deadline_ticks: float[deadlines].
            through: float[deadlines, kinds], what time is worth.
            tie: while a timetable is followed, time is worth this share of what it is in both timetables.
            shares: float[sweeps], at which slack is offered after that, falling, 8 at most.
        """
        plans: Plans = np.zeros((len(deadline_ticks), self.graph.n), dtype=np.int16)  # the fastest meets every deadline
        energy_j = self.totals(plans)[1]
        lines = _Curve(at(curve.start_ticks), at(curve.finish_ticks), at(curve.through), at(curve.makespan_ticks))
        ways = _Mixtures(
            len(mixtures.late),
            at(mixtures.fast, np.int64),
            at(mixtures.slow, np.int64),
            at(mixtures.late, np.uint8),
            at(mixtures.backward, np.uint8),
        )
        self._run(
            "mix", len(plans), at(plans, np.int16), at(energy_j), at(deadline_ticks), at(through),
            len(shares), at(shares), ctypes.byref(lines), ctypes.byref(ways), tie,
        )  # fmt: skip
        return plans

    def descended(
        self,
        plans: Plans,
        deadline_ticks: Floats,
        through: Floats,
        ruin: Ruin,
        shares: Floats,
        *,
        tries: int,
        rounds: int,
        seed: int,
    ) -> Plans:
        """Return the best of some trials of each plan; the plan itself where none takes less energy.

        Args:
            plans: each within its deadline.
            deadline_ticks: float[plans].
            through: float[plans, kinds], what time is worth.
            ruin: how a part is made faster.
            shares: float[sweeps], at which slack is offered, falling from 1, 8 at most.
            tries: trials of each plan in a round.
            rounds: each begins with the best plans of the one before.
            seed: of the random numbers; the same finds the same.
        """
        descended = plans.copy()
        energy_j = self.totals(descended)[1]
        numbers = _Ruin(ruin.most_worth, ruin.least_noise, ruin.most_noise, ruin.least_part)
        self._run(
            "descend", len(descended), at(descended, np.int16), at(energy_j), at(deadline_ticks), at(through),
            len(shares), at(shares), ctypes.byref(numbers), tries, rounds, seed,
        )  # fmt: skip
        return descended

    def _run(self, name: str, *arguments: object) -> None:
        """Call a compiled function.

        Raises:
            MemoryError: there is too little memory for its work arrays.
        """
        if getattr(library(), f"sweeps_{name}")(ctypes.byref(self._problem), *arguments):
            raise MemoryError


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "kinds", "levels", "width", "corners")),
        *((name, ctypes.c_void_p) for name in ("table", "kind", "level", "table_of_kind", "options")),
        *((f"{way}_{name}", ctypes.c_void_p) for way in ("before", "after") for name in ("first", "near", "delay")),
        *((name, ctypes.c_void_p) for name in ("ticks", "energy", "above", "best")),
    )


class _Curve(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("start", "finish", "through", "makespan"))


class _Mixtures(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("fast", "slow", "late", "backward")))


class _Ruin(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_double) for name in ("most", "least_noise", "most_noise", "least_part"))


def _links(near: Index, far: Index, graph: Graph) -> tuple[npt.NDArray[Any], ...]:
    """Return edges by their near end: where those of each row begin, the rows at the far end, and delays in ticks."""
    order = np.argsort(near, kind="stable")
    first = np.searchsorted(near[order], np.arange(graph.n + 1))
    return first.astype(np.int32), far[order].astype(np.int32), np.ascontiguousarray(graph.delay_ticks[order], float)


def _thresholds(tables: Tables) -> Floats:
    """Return float[tables, corners + 1]: −1, and the prices of time above which a faster corner of the hull is better.

    A price that is met exactly leaves the slower corner.
    """
    price = np.full((len(tables.size), tables.hull_price.shape[1] + 1), np.inf)
    price[:, 0] = -1.0
    for k, corners in enumerate(tables.hull_size.tolist()):
        price[k, 1:corners] = np.nextafter(tables.hull_price[k, : corners - 1][::-1].astype(np.float64), np.inf)
    return price


def _best_of_first(tables: Tables, width: int) -> npt.NDArray[np.int16]:
    """Return int16[table, corner, k]: the best of options 0 … k at a price for which a corner is best, slowest first.

    Behind its last option a row has zeros, which are never read.
    """
    best = np.zeros((len(tables.size), tables.hull_price.shape[1], width), dtype=np.int16)
    for k, (options, corners) in enumerate(zip(tables.size.tolist(), tables.hull_size.tolist(), strict=True)):
        price = tables.hull_price[k, :corners] * tables.unit_w
        seconds = tables.time_ticks[k, :options] * tables.tick_s
        for corner in range(corners):
            # Any price between the neighbouring ones serves; the middle is least sensitive to rounding.
            above = price[corner - 1] if corner else 2.0 * price[0]
            value = tables.energy_j[k, :options] + (above + price[corner]) / 2.0 * seconds
            position = np.arange(options)
            position[value > np.minimum.accumulate(value)] = 0
            best[k, corners - 1 - corner, :options] = np.maximum.accumulate(position)
    return best
