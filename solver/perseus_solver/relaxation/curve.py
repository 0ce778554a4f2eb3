"""The relaxed frontier of a problem, sampled at prices of time: proven lines below it, and timetables near it.

Every flow, at whatever price, proves a line below all plans; the relaxed frontier is the upper envelope of these lines.
Prices are added where they may raise the envelope most (``prices``). Where the schedule repeats, flows come from
``steady``, otherwise from one network for the whole graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from perseus_solver.certify import Bound, Certificate, prove
from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem
from perseus_solver.relaxation.graph import Graph, build_graph
from perseus_solver.relaxation.network import Dual, build_network, intervals, solve_price, stretch
from perseus_solver.relaxation.periods import find_repetitions
from perseus_solver.relaxation.prices import Uncertainty
from perseus_solver.relaxation.steady import NotSteady, Steady
from perseus_solver.relaxation.tables import build_tables

Flow = npt.NDArray[np.int64] | npt.NDArray[np.float64]

SHARPNESS = 2e-5
"""Refinement ends when a new line can raise the envelope by no more than this share of the energy."""
_NOTHING = 1e-300
"""Joules; avoids a division by zero where a problem takes no energy at all."""
MOST_PRICES, LEAST_PRICES, PRICED_ROWS = 60, 12, 30_000
"""With 60 well chosen prices the envelope is within 0.002 % of the relaxed frontier on average, with 40 within 0.008 %
on eight stages. A network with many rows gets fewer, so that prices × rows is about constant.
"""
FORECAST = 0.5
"""Share of the prices that the repeated part chooses. The other half goes where the whole is least known."""
MIXED = 2
"""Mixtures between two samples: they raise the envelope, and their timetables are further ones to round."""
BOUNDARY_BLOCKS, MOST_BOUNDARY_BLOCKS, BOUNDARY_SHARE = 6, 12, 0.4
"""Blocks that are solved at either end of a repetition: this share of the stages, but no fewer and no more than these.
Disturbances decay within about so many: on eight stages eight blocks prove the same as the whole graph to 1e-5. With
more than thirty stages, more blocks prove more, but their flows would take longer than all else.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The best flow at one price, and the line that it proves.

    Attributes:
        price: units of `Tables.unit_w`.
        edge: float or int[m], units on every edge.
        through: float or int[n], units through every instruction.
        bound: the proven line.
    """

    price: int
    edge: Flow
    through: Flow
    bound: Bound


class Engine:
    """One problem, ready to be solved at prices of time.

    Attributes:
        problem: the problem.
        tables: its options, in ticks.
        graph: its precedence, in levels.
        table_of: int[n], the table of each row of the graph.
        steady: the solver of the repeated part; None where nothing repeats.
        alike, kind: instructions of one kind carry the same flow at every price; ``alike`` holds one of each kind, and
            ``kind`` the kind of each row.
        fastest_ticks, slowest_ticks: makespan with every instruction at its fastest, and at its cheapest.
    """

    def __init__(self, problem: Problem, *, repeat: bool = True) -> None:
        """Prepare a problem.

        Args:
            problem: the problem to solve.
            repeat: solve one block of a repeated part instead of all; False solves the whole graph.

        Raises:
            InvalidProblem: the precedence has a cycle.
        """
        self.problem = problem
        self.tables = build_tables(problem)
        self.graph: Graph = build_graph(problem, self.tables.tick_s)
        self.table_of: Index = problem.option_of[self.graph.order].astype(np.intp)
        self.steady = self._find_steady_state() if repeat else None
        self._network = None if self.steady else build_network(self.tables, self.graph, self.table_of)
        self.alike, kind = self.steady.kinds() if self.steady else (self.graph.order, self.graph.rank)
        self.kind: Index | None = kind[self.graph.order] if self.steady else None
        rows = self.steady.rows if self.steady else self.graph.n
        self.most_prices = min(max(PRICED_ROWS // max(rows, 1), LEAST_PRICES), MOST_PRICES)
        extreme_ticks = np.stack((self.tables.time_ticks[:, 0], self.tables.hull_ticks[:, -1]), axis=1)[self.table_of]
        self.fastest_ticks, self.slowest_ticks = map(float, self.graph.finish_ticks(extreme_ticks).max(axis=0))

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

    def sample(self, prices: list[int]) -> list[Sample]:
        """Solve at these prices. Every bound is proven on the full problem.

        Args:
            prices: units of `Tables.unit_w`.
        """
        if self.steady:
            found = self.steady.solve(prices)
        else:
            assert self._network is not None
            rank = self.graph.rank
            found = [
                Dual(d.price, d.edge, d.through[rank])
                for d in (solve_price(self._network, self.graph, price) for price in prices)
            ]
        return [
            Sample(d.price, d.edge, d.through, prove(self.problem, self.certificate(d.edge, d.through))) for d in found
        ]

    def refine(self, samples: list[Sample], makespan_ticks: Floats) -> list[Sample]:
        """Solve further prices where they may raise the bound at given makespans most.

        Args:
            samples: the samples so far.
            makespan_ticks: float[makespans], a price is solved for each.

        Returns:
            All samples, from high to low prices.
        """
        fastest_s = self.fastest_ticks * self.tables.tick_s
        prices = {self._next(samples, at_s, fastest_s) for at_s in (makespan_ticks * self.tables.tick_s).tolist()}
        return _sorted([*samples, *self.sample(sorted({price for price, _ in prices if price is not None}))])

    def mixed(self, samples: list[Sample]) -> list[Sample]:
        """Return proofs between the samples: convex combinations of two flows are flows."""
        found = []
        for one, other in pairwise(samples):
            # Prices in geometric steps; in linear steps from 0.
            ratio = other.price / one.price
            steps = np.linspace(0.0, 1.0, MIXED + 2)[1:-1]
            for share in ((1 - ratio**steps) / (1 - ratio) if ratio else steps).tolist():
                edge = one.edge * (1 - share) + other.edge * share
                through = one.through * (1 - share) + other.through * share
                price = round(one.price * (1 - share) + other.price * share)
                found.append(Sample(price, edge, through, prove(self.problem, self.certificate(edge, through))))
        return found

    def certificate(self, edge: Flow, through: Flow) -> Certificate:
        """Convert a flow to watts."""
        unit = self.tables.unit_w
        return Certificate(edge.astype(np.float64) * unit, through.astype(np.float64) * unit)

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
        _, makespan_ticks = self.timetables(self.sample([self.tables.waiting_price]))
        return float(makespan_ticks[0])

    def end_prices(self) -> list[int]:
        """Return the prices at which every duration is known, all slowest and all fastest, and that of waiting."""
        return sorted({0, self.tables.waiting_price, self.steepest()})

    def forecast(self, most: int) -> list[int]:
        """Return the prices to begin with: the ends, and those that the repeated part alone, which is cheap, would add.

        Near the steepest price the composed flows prove too little to show where the frontier bends; the repeated part
        shows it.
        """
        if self.steady is None:
            return self.end_prices()
        top, twice = self._circulation_samples([self.steepest(), 2 * self.steepest()])
        # Above the steepest price everything is at its fastest, so there the line rises with the shortest time.
        fastest_s = (twice.bound.constant_j - top.bound.constant_j) / (twice.bound.price_w - top.bound.price_w)
        found = self.explore(
            [top, *self._circulation_samples([0])], self._circulation_samples, most - 1, fastest_s=fastest_s
        )
        return sorted({self.tables.waiting_price, *(sample.price for sample in found)})

    def _circulation_samples(self, prices: list[int]) -> list[Sample]:
        assert self.steady is not None
        nothing = np.zeros(0, dtype=np.int64)
        return [Sample(price, nothing, nothing, self.steady.lines(price)) for price in prices]

    def explore(
        self,
        samples: list[Sample],
        solve: Callable[[list[int]], list[Sample]],
        most: int,
        *,
        fastest_s: float | None = None,
        report: Callable[[float], None] = lambda _share: None,
    ) -> list[Sample]:
        """Add the price that may raise the envelope most, until the gain is negligible or ``most`` samples are there.

        Args:
            samples: the samples to begin with.
            solve: returns the samples at prices.
            most: largest number of samples.
            fastest_s: the shortest makespan; None: that of the problem.
            report: called with the share of the work that is done.
        """
        samples = _sorted(samples)
        if fastest_s is None:
            fastest_s = self.fastest_ticks * self.tables.tick_s
        while len(samples) < most:
            price, rise = self._next(samples, None, fastest_s)
            if price is None or rise <= SHARPNESS:
                break
            samples = _sorted([*samples, *solve([price])])
            report(len(samples) / most)
        return samples

    def _next(self, samples: list[Sample], at_s: float | None, fastest_s: float) -> tuple[int | None, float]:
        """Return the price that may raise the envelope most, and by what share of the energy.

        The rise is that at one makespan, or the largest anywhere. The price is None where all prices between
        neighbouring samples have been solved.
        """
        prices = np.array([sample.price for sample in reversed(samples)])
        lines = [sample.bound for sample in reversed(samples)]
        price_w, value_j = np.array([b.price_w for b in lines]), np.array([b.constant_j for b in lines])
        uncertainty = Uncertainty.between(price_w, value_j, fastest_s, self.slowest_ticks * self.tables.tick_s)
        waiting_w = self.problem.blocking_power_w * self.problem.stages
        if at_s is None:
            energy_j = uncertainty.least_j + (waiting_w - uncertainty.price_w) * uncertainty.makespan_s
            rise = uncertainty.rise_j() / np.maximum(energy_j, _NOTHING)
        else:
            known_j = float((value_j - price_w * at_s).max())
            rise = uncertainty.rise_at_j(at_s, known_j) / max(known_j + waiting_w * at_s, _NOTHING)
        middle = np.rint(uncertainty.price_w / self.tables.unit_w).astype(np.int64)
        lower, upper = prices[: len(middle)], prices[1 : len(middle) + 1]
        rise = np.where((lower < middle) & (middle < upper), rise, 0.0)
        best = int(rise.argmax())
        return (int(middle[best]), float(rise[best])) if rise[best] > 0 else (None, 0.0)

    def steepest(self) -> int:
        """Return a price at which every instruction is at its fastest.

        No cut costs more than the steepest slopes of the instructions it may contain, and of a stage, whose
        instructions follow each other, it contains one.
        """
        problem = self.problem
        slope = self.tables.hull_price[problem.option_of, 0]
        first = problem.stage_offset[:-1][np.diff(problem.stage_offset) > 0]
        chained = problem.edge_from[problem.edge_to == problem.edge_from + 1]
        if len(np.setdiff1d(np.arange(problem.instructions), chained)) > len(first):
            return max(int(slope.sum()), 1)
        return max(int(np.maximum.reduceat(slope, first).sum()), 1)


def _sorted(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda s: -s.price)


def crossing(fast: Bound, slow: Bound) -> float:
    """Return the makespan in seconds at which two lines meet."""
    if fast.price_w <= slow.price_w:
        return math.inf
    return (fast.constant_j - slow.constant_j) / (fast.price_w - slow.price_w)


def trace_curve(engine: Engine, report: Callable[[float], None]) -> list[Sample]:
    """Sample the relaxed frontier until new lines can no longer raise the envelope noticeably.

    Args:
        engine: the problem.
        report: called with the share of the work that is done.

    Returns:
        Samples from high to low prices, which is from fast to slow timetables.
    """
    known = engine.sample(engine.forecast(max(round(FORECAST * engine.most_prices), 3)))
    return engine.explore(known, engine.sample, engine.most_prices, report=report)
