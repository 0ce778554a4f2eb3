"""A planning problem as the executor reads it: plain lists, and time and power of each instruction at any clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from perseus_solver.kinds import Options
from perseus_solver.model.problem import Problem


class Curve:
    """Time and power of one kind of instruction against the clock."""

    def __init__(self, options: Options) -> None:
        rows = sorted(
            zip(options.frequency_mhz.tolist(), options.time_s.tolist(), options.energy_j.tolist(), strict=True)
        )
        self._clocks = [clock for clock, _, _ in rows]
        self._rows = [(time_s, energy_j / time_s if time_s > 0 else 0.0) for _, time_s, energy_j in rows]
        self._found: dict[int, tuple[float, float]] = {}

    def at(self, mhz: int) -> tuple[float, float]:
        """Time (s) and power (W) at a clock: between measured ones interpolated, above them as the highest, below in
        proportion to the period.
        """
        found = self._found.get(mhz)
        if found is None:
            found = self._found[mhz] = self._interpolated(mhz)
        return found

    def _interpolated(self, mhz: int) -> tuple[float, float]:
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

    def __init__(self, problem: Problem, plan: Sequence[int], default_mhz: int) -> None:
        self.problem = problem
        curves = [Curve(options) for options in problem.options]
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
