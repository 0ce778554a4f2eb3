"""The relaxed frontier of a problem: proven lines below it, and timetables near it.

Every flow, at whatever price of time, proves a line below all plans; the relaxed frontier is the upper envelope of
these lines. Flows of the whole graph are exact (``whole``). Where a long schedule repeats, they are composed of parts
(``composed``), whose cost does not grow with its length.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem
from perseus_solver.relaxation.composed import Composed
from perseus_solver.relaxation.graph import Graph, build_graph
from perseus_solver.relaxation.periods import find_repetitions
from perseus_solver.relaxation.samples import Prover, Sample, crossing
from perseus_solver.relaxation.steady import NotSteady, Steady
from perseus_solver.relaxation.tables import build_tables
from perseus_solver.relaxation.timetables import intervals, stretch
from perseus_solver.relaxation.whole import Whole

BOUNDARY_BLOCKS, MOST_BOUNDARY_BLOCKS, BOUNDARY_SHARE = 6, 12, 0.4
"""Blocks that are solved at either end of a repetition: this share of the stages, but no fewer and no more than these.
Disturbances decay within about so many: on eight stages eight blocks prove the same as the whole graph to 1e-5. With
more than thirty stages, more blocks prove more, but their flows would take longer than all else.
"""
_SHORT = 8
"""Flows are composed if the graph has more than so many times the instructions of the parts."""


class Engine:
    """One problem, ready to be solved.

    Attributes:
        problem: the problem.
        tables: its options, in ticks.
        graph: its precedence, in levels.
        table_of: int[n], the table of each row of the graph.
        prover: proves what flows imply.
        steady: the repeated part, whose rows are alike; None where nothing repeats.
        relaxation: the relaxed frontier.
        kind: int[n], the kind of each row: rows of one kind are the same instruction in different blocks of a steady
            state, and carry the same flow at every price, or nearly so.
        fastest_ticks, slowest_ticks: makespan with every instruction at its fastest, and at its cheapest.
    """

    def __init__(self, problem: Problem, *, short: float = _SHORT) -> None:
        """Prepare a problem.

        Args:
            problem: the problem to solve.
            short: flows are composed of parts if the graph is more than so many times as large as these.

        Raises:
            InvalidProblem: the precedence has a cycle.
        """
        self.problem = problem
        self.tables = build_tables(problem)
        self.graph: Graph = build_graph(problem, self.tables.tick_s)
        self.table_of: Index = problem.option_of[self.graph.order].astype(np.intp)
        extreme_ticks = np.stack((self.tables.time_ticks[:, 0], self.tables.hull_ticks[:, -1]), axis=1)[self.table_of]
        self.fastest_ticks, self.slowest_ticks = map(float, self.graph.finish_ticks(extreme_ticks).max(axis=0))
        self.prover = Prover(problem, self.tables)
        self.steady = self._find_steady_state()
        self.kind: Index = self.steady.kinds()[self.graph.order] if self.steady else np.arange(self.graph.n)
        self.relaxation: Composed | Whole
        if self.steady and self.graph.n > short * self.steady.rows:
            ends_s = (ticks * self.tables.tick_s for ticks in (self.fastest_ticks, self.slowest_ticks))
            self.relaxation = Composed(self.prover, self.steady, *ends_s)
        else:
            self.relaxation = Whole(self.prover, self.graph, self.table_of, self.fastest_ticks, self.slowest_ticks)

    def _find_steady_state(self) -> Steady | None:
        """Return the solver of the repeated part of the graph, None where nothing repeats often enough."""
        share = math.ceil(BOUNDARY_SHARE * self.problem.stages)
        keep = min(max(share, BOUNDARY_BLOCKS), MOST_BOUNDARY_BLOCKS)
        repetitions = find_repetitions(self.problem, self.graph, 2 * keep + 1)
        if not repetitions:
            return None
        try:
            return Steady(self.problem, self.tables, repetitions, keep)
        except NotSteady:
            return None

    def timetables(self, samples: list[Sample]) -> tuple[Floats, Floats]:
        """Return relaxed timetables that belong to the flows, fast to slow.

        Args:
            samples: from high to low prices.

        Returns:
            Durations in ticks, float[n, samples] in level order, and makespans in ticks, float[samples].
        """
        order = self.graph.order
        through = np.stack([s.through for s in samples], axis=1)[order].astype(np.int64)
        meeting_ticks = [self.fastest_ticks]
        for fast, slow in pairwise(samples):
            meeting_ticks.append(crossing(fast.bound, slow.bound) / self.tables.tick_s)
        shortest_ticks, longest_ticks = intervals(self.tables, self.table_of, through)
        return stretch(
            self.graph,
            shortest_ticks,
            longest_ticks,
            np.floor(np.clip(meeting_ticks, self.fastest_ticks, self.slowest_ticks)),
        )

    def least_energy_ticks(self) -> float:
        """Return about the makespan of the plan of least energy: where a second is worth what waiting takes."""
        _, makespan_ticks = self.timetables([self.relaxation.at_waiting()])
        return float(makespan_ticks[0])
