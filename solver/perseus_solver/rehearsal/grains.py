"""Plans with few clocks: one for each stage, or one for each part of a stage's iteration.

Their clock changes are so few and so far apart that latency hardly touches them. The energy of a group of instructions
at one clock is a sum, whatever their order, and the iteration ends in time if every path through the graph does. So
the groups' relaxation is a small linear programme with a row for each path that was found too long. Its solution for
each deadline is rounded to faster clocks, and what time is left is given to the groups that save most.
"""

from __future__ import annotations

import itertools

import numpy as np

from perseus_core.grain import Grain
from perseus_solver.calibration.linear_program import Programme
from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Simulator
from perseus_solver.rehearsal.paths import Paths
from perseus_solver.relaxation.tables import lower_hull

_OPTIONS = 48
"""Clocks of a group that are tried. Published profiles have 60 to 100 clocks, of which half dominate the others."""
_ROUNDS = 40
"""Rounds in which too long paths are looked for, for one deadline; further ones change energies by less than rounding
to clocks does.
"""
_LONG = 1e-5
"""Share by which a path is longer than the deadline, if it is to be one more row."""
_STEPS = (1, 2, 4)
"""Options by which a group is slowed at once, when time is left."""
_TRIALS = 16
"""Times that one group of each plan is slowed."""


def group_of(problem: Problem, grain: Grain, parts: int = 1) -> Index:
    """Return the group of each instruction, int[n], numbered from 0; instructions of a group have one clock.

    Args:
        problem: the problem.
        grain: `Grain.STAGE`; or `Grain.SEGMENT`, which parts a stage into its lead, the first instructions of one kind,
            its tail, the last ones, and its steady state between them.
        parts: into how many segments of their own lead and tail are cut.
    """
    stage = problem.schedule.stage.astype(np.intp)
    key = stage * (2 * parts + 1)
    if grain is Grain.SEGMENT:
        kind = np.array([int(options.kind) for options in problem.options])[problem.option_of]
        sets = np.array([int(options.frequency_mhz[0]) > 0 for options in problem.options])[problem.option_of]
        for low, high in itertools.pairwise(problem.stage_offset.tolist()):
            rows = low + np.flatnonzero(sets[low:high])
            for number, begin in enumerate(_segments(kind[rows], parts)):
                key[rows[begin] : high] = key[low] + number
    _, group = np.unique(key, return_inverse=True)
    return group


def _segments(kind: Index, parts: int) -> list[int]:
    """Return where the segments of a stage begin, whose instructions are of these kinds."""
    n = len(kind)
    lead = int((kind != kind[:1]).argmax()) if n else 0
    if not lead:
        return [0] if n else []
    tail = max(n - int((kind[::-1] != kind[-1]).argmax()), lead)
    cuts = [lead * k // parts for k in range(parts)], [tail + (n - tail) * k // parts for k in range(parts)]
    return sorted({*cuts[0], lead, *cuts[1]} - {n})


def grouped_plans(problem: Problem, simulator: Simulator, group: Index, deadline_s: Floats) -> Index:
    """Return the cheapest plans found with one clock for each group, one for each deadline.

    Args:
        problem: the problem.
        simulator: of the problem.
        group: int[n], see `group_of`.
        deadline_s: float[plans], iteration times, overhead included. What no plan meets gets the fastest plan.

    Returns:
        int[plans, n], positions in the options.
    """
    groups = _Groups(problem, group)
    limit_s = np.maximum(deadline_s - problem.overhead_s, groups.time_s(simulator, groups.fastest[None]))
    return groups.choices(groups.filled(simulator, groups.rounded(simulator, limit_s), limit_s))


class _Groups:
    """The options of each group: a few clocks, by falling speed and energy.

    A plan is a row of positions in them, one for each group.
    """

    def __init__(self, problem: Problem, group: Index) -> None:
        self._problem, self._group, self._table = problem, group, problem.option_of.astype(np.intp)
        count = int(group.max()) + 1
        amount = np.zeros((count, len(problem.options)))
        np.add.at(amount, (group, self._table), 1.0)
        options = [_options_of(problem, instructions) for instructions in amount]
        self._last = np.array([len(energy_j) - 1 for _, energy_j in options])
        width = int(self._last.max()) + 1
        self._choice = np.zeros((count, width, amount.shape[1]), dtype=np.intp)
        self._energy_j = np.full((count, width), np.inf)
        for g, (choice, energy_j) in enumerate(options):
            self._choice[g, : len(choice)], self._energy_j[g, : len(energy_j)] = choice, energy_j
        longest = max(len(table.time_s) for table in problem.options)
        padded = np.stack([np.pad(table.time_s, (0, longest - len(table.time_s))) for table in problem.options])
        # What one instruction of each table takes at each option of each group.
        self._takes_s = padded[np.arange(amount.shape[1]), self._choice]
        self.fastest = np.zeros(count, dtype=np.intp)

    def choices(self, at: Index) -> Index:
        """Return the positions in the options of each instruction, int[plans, n]."""
        return self._choice[self._group, at[:, self._group], self._table]

    def energy_j(self, at: Index) -> Floats:
        """Return the effective energy of all instructions, float[plans]."""
        total: Floats = self._energy_j[np.arange(len(self._last)), at].sum(axis=1)
        return total

    def time_s(self, simulator: Simulator, at: Index) -> Floats:
        """Return the time of the graph, float[plans]."""
        time: Floats = simulator.end_s(simulator.duration_s(self.choices(at))).max(axis=1)
        return time

    def rounded(self, simulator: Simulator, limit_s: Floats) -> Index:
        """Return plans in time for each limit, as the relaxation with faster clocks.

        Shares of options are rounded to the slowest option that takes no longer than their mean, so that no path
        becomes longer.
        """
        where = [(g, o) for g, last in enumerate(self._last.tolist()) for o in range(last + 1)]
        group, option = (np.array(part) for part in zip(*where, strict=True))
        cost = self._energy_j[group, option]
        programme = Programme(cost / np.abs(cost).max(), np.zeros(len(cost)), np.ones(len(cost)))
        for g in range(len(self._last)):
            programme.add((group == g).astype(np.float64), 1.0, 1.0)
        paths, unit_s = Paths(self._problem, simulator), float(limit_s.max())
        delays_s: list[float] = []
        takes_s = self._takes_s[group, option]
        plans = np.repeat(self.fastest[None], len(limit_s), axis=0)
        seen: set[bytes] = set()
        for row in np.argsort(-limit_s).tolist():
            limit = float(limit_s[row])
            for k, delay_s in enumerate(delays_s):
                programme.limit(len(self._last) + k, (limit - delay_s) / unit_s)
            for _ in range(_ROUNDS):
                share = programme.solve()
                mean_s = np.zeros((len(self._last), takes_s.shape[1]))
                np.add.at(mean_s, group, share[:, None] * takes_s)
                added = False
                for members, delay_s in paths.longer_than(mean_s[self._group, self._table], limit * (1 + _LONG)):
                    amount = np.zeros_like(mean_s)
                    np.add.at(amount, (self._group[members], self._table[members]), 1.0)
                    if (name := amount.tobytes()) not in seen:
                        seen.add(name)
                        added = True
                        delays_s.append(delay_s)
                        programme.add(
                            (amount[group] * takes_s).sum(axis=1) / unit_s, -np.inf, (limit - delay_s) / unit_s
                        )
                if not added:
                    break
            no_longer = (self._takes_s <= mean_s[:, None] * (1 + 1e-9)).all(axis=2)
            no_longer &= np.isfinite(self._energy_j)
            plans[row] = np.where(no_longer, np.arange(no_longer.shape[1]), 0).max(axis=1)
        return plans

    def filled(self, simulator: Simulator, at: Index, limit_s: Floats) -> Index:
        """Return the plans with groups slowed as far as the limits allow, those first that save most energy."""
        at = np.where((self.time_s(simulator, at) <= limit_s)[:, None], at, self.fastest)
        for _ in range(_TRIALS):
            rows, moved = self._moves(at)
            if not len(rows):
                break
            saved_j = self.energy_j(at)[rows] - self.energy_j(moved)
            saved_j[self.time_s(simulator, moved) > limit_s[rows]] = 0.0
            order = np.argsort(-saved_j, kind="stable")
            best_rows, first = np.unique(rows[order], return_index=True)
            best = order[first]
            gains = saved_j[best] > 0
            if not gains.any():
                break
            at[best_rows[gains]] = moved[best[gains]]
        return at

    def _moves(self, at: Index) -> tuple[Index, Index]:
        """Return all plans in which one group is slower, and the plan that each is made from."""
        rows, moved = [], []
        for step in _STEPS:
            for g, last in enumerate(self._last.tolist()):
                plans = np.flatnonzero(at[:, g] + step <= last)
                slower = at[plans]
                slower[:, g] += step
                rows.append(plans)
                moved.append(slower)
        return np.concatenate(rows), np.concatenate(moved)


def _options_of(problem: Problem, amount: Floats) -> tuple[Index, Floats]:
    """Return the clocks that a group may have, as positions in the options of each table, and its effective energies.

    They are those that no other beats in both time and energy. A group whose kinds were not all measured at one clock
    keeps its fastest options.
    """
    fastest = np.array([int(options.time_s.argmin()) for options in problem.options])
    present = np.flatnonzero(amount)
    free = [k for k in present.tolist() if int(problem.options[k].frequency_mhz[0]) > 0]
    common = sorted(set.intersection(*(set(problem.options[k].frequency_mhz.tolist()) for k in free)) if free else ())
    choice = np.repeat(fastest[None], max(len(common), 1), axis=0)
    for k in free if common else ():
        choice[:, k] = np.searchsorted(-problem.options[k].frequency_mhz, -np.array(common))
    time_s, energy_j = np.zeros(len(choice)), np.zeros(len(choice))
    for k in present.tolist():
        options = problem.options[k]
        effective_j = options.energy_j - problem.blocking_power_w * options.time_s
        time_s += amount[k] * options.time_s[choice[:, k]]
        energy_j += amount[k] * effective_j[choice[:, k]]
    order = np.lexsort((energy_j, time_s))
    cheaper = np.minimum.accumulate(energy_j[order])
    order = order[np.append(True, cheaper[1:] < cheaper[:-1])]
    if len(order) > _OPTIONS:
        even = np.linspace(0, len(order) - 1, _OPTIONS).astype(np.intp)
        order = order[np.union1d(even, lower_hull(time_s[order], energy_j[order]))]
    return choice[order], energy_j[order]
