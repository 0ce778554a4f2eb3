"""A planning problem as the executor reads it: plain lists, and time and power of each instruction at any clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from perseus_solver.kinds import Options
from perseus_solver.model.problem import Problem

_LIMITED: Final = 0.999
"""Share of the power limit from which on it counts as reached: profiles are rounded."""


class Curve:
    """Time and power of one kind of instruction against the clock, held down where it would exceed a power limit."""

    def __init__(self, options: Options, power_limit_w: float = math.inf) -> None:
        rows = sorted(
            zip(options.frequency_mhz.tolist(), options.time_s.tolist(), options.energy_j.tolist(), strict=True)
        )
        self._clocks: list[int] = [clock for clock, _, _ in rows]
        self._rows = [(time_s, energy_j / time_s if time_s > 0 else 0.0) for _, time_s, energy_j in rows]
        self._found: dict[int, tuple[float, float]] = {}
        self._plateau_mhz = self._reaches(_LIMITED * power_limit_w)

    def at(self, mhz: int) -> tuple[float, float]:
        """Time (s) and power (W) at a clock that is locked: between measured ones interpolated, above them as the
        highest, below in proportion to the period.
        """
        found = self._found.get(mhz)
        if found is None:
            found = self._found[mhz] = self._interpolated(self.effective_mhz(mhz))
        return found

    def effective_mhz(self, mhz: int) -> float:
        """The clock that the power limit leaves of one that is locked."""
        return min(mhz, self._plateau_mhz)

    def _reaches(self, power_w: float) -> float:
        """The lowest clock at which so much is drawn; infinite if none is measured."""
        powers = [power_w for _, power_w in self._rows]
        place = next((place for place, drawn_w in enumerate(powers) if drawn_w >= power_w), None)
        if not place:
            return math.inf if place is None else self._clocks[0] or math.inf
        share = (power_w - powers[place - 1]) / (powers[place] - powers[place - 1])
        return self._clocks[place - 1] + share * (self._clocks[place] - self._clocks[place - 1])

    def _interpolated(self, mhz: float) -> tuple[float, float]:
        clocks, rows = self._clocks, self._rows
        place = bisect_left(clocks, mhz)
        if place == len(clocks) or clocks == [0]:
            return rows[-1]
        if clocks[place] == mhz:
            return rows[place]
        if place == 0:
            return rows[0][0] * clocks[0] / mhz, rows[0][1]
        share = (mhz - clocks[place - 1]) / (clocks[place] - clocks[place - 1])
        (time_s, power_w), (next_s, next_w) = rows[place - 1], rows[place]
        return time_s + share * (next_s - time_s), power_w + share * (next_w - power_w)


class Pipeline:
    """A problem and the plan to follow. Instructions are numbered as in the problem, ranks as stages.

    Attributes:
        plan: clock of each instruction, MHz.
        offsets: first instruction of each rank, and their number at the end.
        rank_of, curve_of: rank and curve of each instruction.
        after: per instruction, those that wait for it, with their delay in seconds.
        waits_for: how many instructions each waits for.
        default_mhz: the clock of a GPU that is not locked.
    """

    def __init__(
        self, problem: Problem, plan: Sequence[int], default_mhz: int, power_limit_w: float = math.inf
    ) -> None:
        self.problem = problem
        curves = [Curve(options, power_limit_w) for options in problem.options]
        self.curve_of = [curves[table] for table in problem.option_of.tolist()]
        self.offsets: list[int] = problem.stage_offset.tolist()
        self.ranks = problem.stages
        self.rank_of: list[int] = problem.schedule.stage.tolist()
        self.after: list[list[tuple[int, float]]] = [[] for _ in self.rank_of]
        self.waits_for = [0] * len(self.rank_of)
        edges = (problem.edge_from.tolist(), problem.edge_to.tolist(), problem.edge_delay_s.tolist())
        for before, after, delay_s in zip(*edges, strict=True):
            self.after[before].append((after, delay_s))
            self.waits_for[after] += 1
        self.default_mhz = default_mhz
        # An instruction whose time does not depend on the clock wants that of the one before it.
        self.plan = [int(mhz) for mhz in plan]
        for first, end in pairwise(self.offsets):
            known = next((mhz for mhz in self.plan[first:end] if mhz), default_mhz)
            for number in range(first, end):
                known = self.plan[number] = self.plan[number] or known
