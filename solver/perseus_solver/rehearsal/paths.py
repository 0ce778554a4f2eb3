"""The longest paths through the graph of a schedule, at least one through every stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Simulator


class Paths:
    """Finds paths of one problem."""

    def __init__(self, problem: Problem, simulator: Simulator) -> None:
        """Prepare the neighbours of every instruction.

        Args:
            problem: the problem.
            simulator: of the problem.
        """
        self._simulator, self._stage_offset = simulator, problem.stage_offset
        self._before: list[list[tuple[int, float]]] = [[] for _ in range(problem.instructions)]
        self._after: list[list[tuple[int, float]]] = [[] for _ in range(problem.instructions)]
        edges = problem.edge_from.tolist(), problem.edge_to.tolist(), problem.edge_delay_s.tolist()
        for a, b, delay_s in zip(*edges, strict=True):
            self._before[b].append((a, delay_s))
            self._after[a].append((b, delay_s))

    def longer_than(self, duration_s: Floats, limit_s: float) -> Iterator[tuple[Index, float]]:
        """Yield a longest path, and the longest through each stage, of those that are longer than a limit.

        Args:
            duration_s: float[n], of each instruction.
            limit_s: seconds.

        Yields:
            The instructions of a path, and the seconds of delay on it.
        """
        end_s = self._simulator.end_s(duration_s)
        if end_s.max() <= limit_s:
            return
        slack_s = self._simulator.slack_s(duration_s)
        ends, tails = (
            end_s.tolist(),
            (end_s.max() - slack_s - end_s).tolist(),
        )  # tails: from the end of each to the last
        durations = duration_s.tolist()
        for low, high in itertools.pairwise(self._stage_offset.tolist()):
            through = low + int(slack_s[low:high].argmin())
            if ends[through] + tails[through] > limit_s:
                yield self._path(through, ends, tails, durations)

    def _path(self, through: int, ends: list[float], tails: list[float], durations: list[float]) -> tuple[Index, float]:
        path, delay_s = [through], 0.0
        at = through
        while self._before[at]:
            at, wait_s = max(self._before[at], key=lambda edge: ends[edge[0]] + edge[1])
            path.append(at)
            delay_s += wait_s
        at = through
        while self._after[at]:
            at, wait_s = max(self._after[at], key=lambda edge: tails[edge[0]] + durations[edge[0]] + edge[1])
            path.append(at)
            delay_s += wait_s
        return np.array(path, dtype=np.intp), delay_s
