"""Replay measured iterations through the schedule's graph, and count what each critical path crosses.

All iterations are swept at once. The delays of the model are few and shared: one for every direction of every stage
boundary, and one gap for every stage between its consecutive instructions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Floats, Index
from perseus_solver.schedules import Schedule
from perseus_solver.topology import levels

Pairs = tuple[tuple[int, int], ...]


class Replay:
    """Longest paths of one schedule under shared delays. Runs do not change it.

    Attributes:
        pairs: (from stage, to stage) of each communication delay; delay j belongs to ``pairs[j]``.
        parameters: number of delays, the communication delays first, then the gap of each stage.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Level the graph of a schedule."""
        self.schedule = schedule
        before, after = schedule.edges()
        stage = schedule.stage.astype(np.int64)
        self.instructions = n = schedule.instructions
        across = stage[before] != stage[after]
        codes, pair_of = np.unique((stage[before] * schedule.stages + stage[after])[across], return_inverse=True)
        self.pairs: Pairs = tuple(divmod(int(code), schedule.stages) for code in codes)
        self.parameters = len(self.pairs) + schedule.stages
        group = len(self.pairs) + stage[after]
        group[across] = pair_of

        level = levels(n, before, after)
        self._order = np.argsort(level, kind="stable")
        rank = np.empty(n, dtype=np.intp)
        rank[self._order] = np.arange(n)
        by_target = np.argsort(rank[after], kind="stable")
        source, target, group = rank[before[by_target]], rank[after[by_target]], group[by_target]
        in_degree = np.bincount(target, minlength=n)
        slot = np.arange(target.size) - (np.cumsum(in_degree) - in_degree)[target]
        # Row n stands for a missing neighbour, which ends at 0 without delay, so that every instruction has equally
        # many predecessors.
        self._before: Index = np.full((int(in_degree.max(initial=1)), n), n, dtype=np.intp)
        self._group: Index = np.full_like(self._before, self.parameters)
        self._before[slot, target], self._group[slot, target] = source, group
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(level))]).tolist()

    def time_s(self, duration_s: Floats, delay_s: Floats) -> Floats:
        """Return the makespan of each iteration in seconds.

        Args:
            duration_s: float[iterations, instructions], seconds.
            delay_s: float[parameters], seconds.
        """
        end, _ = self._ends(duration_s, delay_s)
        time: Floats = end.max(axis=0)
        return time

    def crossings(self, duration_s: Floats, delay_s: Floats) -> tuple[Floats, Floats]:
        """Return the makespan of each iteration, and how often its critical path crosses each delay.

        The makespan is the maximum over paths of (durations + crossings · delays), so the counts are its gradient.

        Args:
            duration_s: float[iterations, instructions], seconds.
            delay_s: float[parameters], seconds.

        Returns:
            float[iterations] seconds, and float[iterations, parameters] counts.
        """
        end, critical = self._ends(duration_s, delay_s)
        column = np.arange(duration_s.shape[0])
        counts = np.zeros((column.size, self.parameters + 1))
        at = end.argmax(axis=0)
        while (at < self.instructions).any():
            inner = np.minimum(at, self.instructions - 1)  # a path that has ended stays at the missing neighbour
            slot = critical[inner, column]
            live = at < self.instructions
            counts[column[live], self._group[slot, inner][live]] += 1
            at = np.where(live, self._before[slot, inner], self.instructions)
        time: Floats = end.max(axis=0)
        return time, counts[:, : self.parameters]

    def _ends(self, duration_s: Floats, delay_s: Floats) -> tuple[Floats, npt.NDArray[np.int8]]:
        """Return the end of each instruction, and the slot of its latest predecessor.

        Rows are in level order; the last row of the ends stands for a missing neighbour.
        """
        delay = np.append(delay_s, 0.0)
        columns = duration_s.T[self._order]
        end = np.zeros((self.instructions + 1, columns.shape[1]))
        critical = np.zeros(columns.shape, dtype=np.int8)
        for low, high in zip(self._bounds[:-1], self._bounds[1:], strict=True):
            ready = end[self._before[0, low:high]] + delay[self._group[0, low:high], None]
            for slot in range(1, self._before.shape[0]):
                other = end[self._before[slot, low:high]] + delay[self._group[slot, low:high], None]
                critical[low:high][other > ready] = slot
                np.maximum(ready, other, out=ready)
            np.add(ready, columns[low:high], out=end[low:high])
        return end, critical
