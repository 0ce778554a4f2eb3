"""Plans with few clocks: whole runs of a stage's instructions at one clock each.

The instructions of a stage fall into the lead (its first instructions of one kind), the steady state and the tail. A
run at one clock takes no longer than the same instructions in the plan it is made from, times a ratio: a timetable
stretched by a ratio is still a timetable. Within the run, time moves between instructions, so a plan may end later than
intended and must be simulated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Floats, Index, looked_up
from perseus_solver.model.problem import Problem

CUTS = ((1, 0), (16, 0), (16, 8))
"""Ways to cut a stage: number of runs in lead and tail each, because instructions on critical paths need clocks of
their own there; and number of single instructions at both ends of the steady state, where a shift of time would delay
other stages.
"""


class Clocks:
    """A problem's options by clock. A plan is a row of positions in ``mhz``, one for each instruction.

    Attributes:
        mhz: all clocks, increasing; 0, for constant-time instructions, comes first, if any.
        time_s, energy_j: float[tables, clocks], infinite where not measured; the energy is effective: less blocking
            power.
        rows: int[], the instructions that set a clock.
        rows_of_stage: the same for each stage.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.option_of = problem, problem.option_of
        self.mhz = np.unique(np.concatenate([options.frequency_mhz for options in problem.options]))
        self.time_s = np.full((len(problem.options), len(self.mhz)), np.inf)
        self.energy_j = np.full_like(self.time_s, np.inf)
        for k, options in enumerate(problem.options):
            at = np.searchsorted(self.mhz, options.frequency_mhz)
            self.time_s[k, at] = options.time_s
            self.energy_j[k, at] = options.energy_j - problem.blocking_power_w * options.time_s
        sets = np.array([bool((options.frequency_mhz > 0).any()) for options in problem.options])[self.option_of]
        self.rows = np.flatnonzero(sets)
        ends = np.searchsorted(self.rows, problem.stage_offset)
        self.rows_of_stage = [self.rows[a:b] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]

    def duration_s(self, plans: Index) -> Floats:
        """Return the seconds of each instruction, float[plans, n]."""
        return looked_up(self.time_s, self.option_of, plans)

    def changed(self, plans: Index) -> npt.NDArray[np.bool_]:
        """Return whether each instruction's clock differs from that of the preceding one on its stage.

        The first instruction follows the last.
        """
        changed = np.zeros(plans.shape, dtype=np.bool_)
        for rows in self.rows_of_stage:
            clocks = plans[:, rows]
            changed[:, rows] = clocks != np.roll(clocks, 1, axis=1)
        return changed


class Runs:
    """One way to cut all stages into runs, and the best single clock for each run."""

    def __init__(self, clocks: Clocks, parts: int, single: int) -> None:
        """Cut the stages; see `CUTS` for ``parts`` and ``single``."""
        self._clocks = clocks
        kind = np.array([int(options.kind) for options in clocks.problem.options])[clocks.option_of]
        begins, first = [], 0
        for rows in clocks.rows_of_stage:
            begins += [first + cut for cut in _cuts(kind[rows], parts, single)]
            first += len(rows)
        self._begin = np.array(begins, dtype=np.intp)
        length = np.diff(np.append(self._begin, first))
        self._run_of = np.repeat(np.arange(len(begins)), length)
        self._time_s = np.zeros((len(begins), len(clocks.mhz)))
        self._energy_j = np.zeros_like(self._time_s)
        table = clocks.option_of[clocks.rows]
        for k in np.unique(table).tolist():
            count = np.bincount(self._run_of[table == k], minlength=len(begins))
            present = count > 0
            self._time_s[present] += count[present, None] * clocks.time_s[k]
            self._energy_j[present] += count[present, None] * clocks.energy_j[k]

    def _sum(self, values: npt.NDArray[np.float64]) -> Floats:
        """Sum values [plans, instructions] over each run."""
        total: Floats = np.add.reduceat(values[:, self._clocks.rows], self._begin, axis=1)
        return total

    def _best(self, time_s: Floats) -> tuple[Index, Floats]:
        """Return for each run [plans, runs] the cheapest clock that takes no longer, or the fastest, and its energy.

        The energy is infinite where no clock was measured for all instructions of the run.
        """
        energy = np.where(self._time_s <= time_s[:, :, None], self._energy_j, np.inf)
        best = energy.argmin(axis=2)
        none = np.isinf(energy.min(axis=2))
        best = np.where(none, self._time_s.argmin(axis=1), best)
        return best, self._energy_j[np.arange(len(self._begin)), best]

    def stretched(self, plan: Index, ratio: Floats) -> Index:
        """Return the plan with each run at one clock, in at most its time in this plan times each ratio."""
        planned = self._sum(self._clocks.duration_s(plan[None]))
        best, energy = self._best(planned * ratio[:, None])
        rows = self._clocks.rows
        merged = np.repeat(plan[None], len(ratio), axis=0)
        merged[:, rows] = np.where(np.isfinite(energy)[:, self._run_of], best[:, self._run_of], plan[rows])
        return merged

    def merged(self, plans: Index, shares: Floats) -> Iterator[Index]:
        """Yield the plans with some runs at one clock, those first that cost least energy for each change saved.

        Each share gives one variant: as many runs are merged as hold that share of the changes inside runs.
        """
        clocks = self._clocks
        best, energy = self._best(self._sum(clocks.duration_s(plans)))
        extra_j = energy - self._sum(looked_up(clocks.energy_j, clocks.option_of, plans))
        inside = clocks.changed(plans)
        inside[:, clocks.rows[self._begin]] = False
        changes = self._sum(inside.astype(np.float64))
        order = np.where(changes > 0, extra_j / np.maximum(changes, 1.0), np.inf).argsort(axis=1, kind="stable")
        saved = np.empty_like(changes)  # by this run and all before it
        np.put_along_axis(saved, order, np.take_along_axis(changes, order, axis=1).cumsum(axis=1), axis=1)
        for share in shares.tolist():
            least = saved - changes < share * changes.sum(axis=1, keepdims=True)
            taken = (least & (changes > 0) & np.isfinite(extra_j))[:, self._run_of]
            merged = plans.copy()
            merged[:, clocks.rows] = np.where(taken, best[:, self._run_of], plans[:, clocks.rows])
            yield merged


def _cuts(kind: npt.NDArray[np.integer], parts: int, single: int) -> list[int]:
    """Return where the runs of a stage begin; see `CUTS`."""
    n = len(kind)
    if n == 0:
        return []
    lead = int((kind != kind[0]).argmax()) or n
    tail = max(n - (int((kind[::-1] != kind[-1]).argmax()) or n), lead)
    if tail - lead <= 2 * single:
        single = 0
    ends = [np.linspace(a, b, parts, endpoint=False).astype(int) for a, b in ((0, lead), (tail, n)) if a < b]
    single_begins = [np.arange(lead, lead + single + 1) % n, np.arange(tail - single, tail)]
    begins: list[int] = np.unique(np.concatenate(ends + single_begins)).tolist()
    return begins
