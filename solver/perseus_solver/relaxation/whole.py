"""The relaxation at one deadline, on the whole graph, solved exactly as a circulation of least cost.

The dual of the relaxation at a makespan T is a flow from the start of the iteration to its end that goes back at a cost
of T for each unit. Its value is the price of time there, and it proves the line that touches the relaxed frontier at T.
From one makespan to the next only the cost of the way back changes, so few pivots of a network simplex lead from one
flow to the next: a hundred deadlines of eight stages take less time than one flow from nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from perseus_solver.kinds import Index
from perseus_solver.relaxation.graph import Graph
from perseus_solver.relaxation.network import Network
from perseus_solver.relaxation.samples import NOTHING_J, Prover, Sample, by_price, crossing
from perseus_solver.relaxation.simplex import ENDLESS, FORBIDDEN

SHARPNESS, _SHARP_ROWS = 1e-6, 4_000
"""Steps are such that a line in between would raise the bound by about so much of the energy, at most; with more rows
than these, by more, in the square of their number, because each line is long.
"""
_ROUGH = 16.0
"""Between two samples that may lose more than so many times as much, there are further ones."""
_FEWEST, _MOST = 96, 1_000
"""Steps from the slowest to the fastest makespan, at least and at most."""


class Whole:
    """The relaxed frontier of one problem.

    Attributes:
        rows: the instructions that are solved for a sample, all.
    """

    def __init__(
        self, prover: Prover, graph: Graph, table_of: Index, fastest_ticks: float, slowest_ticks: float
    ) -> None:
        """Prepare a problem.

        Args:
            prover: of the problem.
            graph: its precedence, in levels.
            table_of: int[n], the table of each row.
            fastest_ticks, slowest_ticks: makespan with every instruction at its fastest, and at its cheapest.
        """
        tables = prover.tables
        self._prover = prover
        self._waiting_w = prover.problem.blocking_power_w * prover.problem.stages
        self._fastest_ticks, self._slowest_ticks = int(fastest_ticks), int(slowest_ticks)
        self.rows = graph.n
        self._sharpness = SHARPNESS * max(graph.n / _SHARP_ROWS, 1.0) ** 2
        # The way back in two parts: up to the price of waiting, and beyond it.
        ends = (max(tables.waiting_price, 1), ENDLESS)
        self._network = Network(tables, graph, table_of, back=[(FORBIDDEN, end) for end in ends])
        self._waiting: Sample | None = None

    def trace(self, report: Callable[[float], None]) -> list[Sample]:
        """Sample the frontier from slow to fast, in steps between which a line more would raise the bound little.

        Args:
            report: called with the share of the work that is done.

        Returns:
            Samples from high to low prices.
        """
        span_ticks = self._slowest_ticks - self._fastest_ticks
        at_ticks, step_ticks = self._slowest_ticks, span_ticks / _FEWEST
        before, samples = self._at(at_ticks), []
        while at_ticks > self._fastest_ticks:
            samples.append(before)
            before_ticks, at_ticks = at_ticks, max(math.floor(at_ticks - step_ticks), self._fastest_ticks)
            after = self._at(at_ticks)
            if before.price < self._prover.tables.waiting_price <= after.price:
                self.at_waiting()  # near here; from elsewhere the way would be long
            unknown = self._unknown(before, before_ticks, after, at_ticks)
            if unknown > _ROUGH * self._sharpness:
                samples += self._between(before, before_ticks, after, at_ticks)
            change = math.sqrt(self._sharpness / max(unknown, self._sharpness / 4.0))
            step_ticks = min(max(step_ticks * change, span_ticks / _MOST, 1.0), span_ticks / _FEWEST)
            before = after
            report((self._slowest_ticks - at_ticks) / span_ticks)
        return by_price([*samples, before, self.at_waiting()])

    def _between(self, slow: Sample, slow_ticks: int, fast: Sample, fast_ticks: int) -> list[Sample]:
        """Return samples between two where a step was too long, each where the lines of its neighbours meet."""
        meeting_s = crossing(fast.bound, slow.bound)
        at_ticks = math.floor(meeting_s / self._prover.tables.tick_s)
        if not fast_ticks < at_ticks < slow_ticks:
            return []
        middle = self._at(at_ticks)
        at_s = at_ticks * self._prover.tables.tick_s
        rise_j = middle.bound.at(at_s) - slow.bound.at(at_s)
        if rise_j <= self._sharpness * (middle.bound.at(at_s) + self._waiting_w * at_s):
            return []  # a bend
        halves = ((middle, at_ticks, fast, fast_ticks), (slow, slow_ticks, middle, at_ticks))
        further = [self._between(*half) for half in halves if self._unknown(*half) > _ROUGH * self._sharpness]
        return [middle, *(sample for some in further for sample in some)]

    def near(self, samples: list[Sample], makespan_s: float) -> list[Sample]:
        """Return the samples and the one that proves most at a makespan."""
        at_ticks = math.floor(makespan_s / self._prover.tables.tick_s)
        return by_price([*samples, self._at(min(max(at_ticks, self._fastest_ticks), self._slowest_ticks))])

    def mixed(self, _samples: list[Sample]) -> list[Sample]:
        """Return nothing: between the samples of exact flows there is nothing to prove."""
        return []

    def at_waiting(self) -> Sample:
        """Return the sample at which a second is worth what waiting takes."""
        if self._waiting is None:
            self._waiting = self._solve(0, FORBIDDEN)
        return self._waiting

    def _at(self, makespan_ticks: int) -> Sample:
        """Return the sample that proves most at a makespan, which must be no shorter than the shortest."""
        return self._solve(makespan_ticks, makespan_ticks)

    def _unknown(self, slow: Sample, slow_ticks: int, fast: Sample, fast_ticks: int) -> float:
        """Return by how much the frontier may rise above the lines of two samples between them, a share of energy.

        Both touch the frontier, which is convex: it lies below the chord between the two.
        """
        tick_s = self._prover.tables.tick_s
        slow_s, fast_s = slow_ticks * tick_s, fast_ticks * tick_s
        meeting_s = crossing(fast.bound, slow.bound)
        if not fast_s < meeting_s < slow_s:
            return 0.0
        slow_j, fast_j = slow.bound.at(slow_s), fast.bound.at(fast_s)
        chord_j = fast_j + (slow_j - fast_j) * (meeting_s - fast_s) / (slow_s - fast_s)
        energy_j = chord_j + self._waiting_w * meeting_s
        return (chord_j - slow.bound.at(meeting_s)) / max(energy_j, NOTHING_J)

    def _solve(self, *back_ticks: int) -> Sample:
        for part, ticks in enumerate(back_ticks):
            self._network.set_back(part, ticks)
        return self._prover.samples([self._network.solve()])[0]
