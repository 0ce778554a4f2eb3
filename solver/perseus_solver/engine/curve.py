"""The relaxed frontier of a problem, sampled at prices: proven lines below it and schedules near it.

Every flow, at whatever price, proves a line; the frontier is their upper envelope. Prices are added where the last ones
still raised it. Where the graph repeats, flows come from ``steady``, else from one network for all. Called by
``frontier``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from perseus_solver.certify import Bound, Certificate, prove
from perseus_solver.engine.graph import Graph, Index, build_graph
from perseus_solver.engine.periods import find_runs
from perseus_solver.engine.relaxation import Dual, build_network, durations, intervals, solve_price, stretch
from perseus_solver.engine.steady import NotSteady, Steady
from perseus_solver.engine.tables import build_tables
from perseus_solver.problem import Floats, Problem

Flow = npt.NDArray[np.int64] | npt.NDArray[np.float64]

SHARPNESS = 2e-5
"""A stretch of the envelope is known well enough once a new line raises it by less than this share of the energy."""
MOST_PRICES, LEAST_PRICES, PRICED_ROWS = 48, 7, 72_000
"""48 prices are enough for steps of a few percent over the three decades that profiles span. A network with many rows
gets fewer, so that prices × rows stay about constant, and the flows between two prices are mixed instead
(`Engine.mixed`)."""
MIXED = 4
"""Mixtures between two samples."""
KEEP, LEAST_GAIN = 8, 2
"""Blocks of a run solved at either end of it: disturbances die out within about so many (eight prove the same as the
whole to 1e-5 on the published profiles). Repetition is used where it leaves out at least twice as many as it keeps."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A price, the flow that is best at it, and the line that this proves."""

    price: int
    edge: Flow
    through: Flow
    bound: Bound


class Engine:
    """One problem, ready to be solved at prices. ``edge`` and ``through`` of samples are numbered as in the problem."""

    def __init__(self, problem: Problem, *, repeat: bool = True) -> None:
        """Prepare; without ``repeat`` the graph is solved as a whole even where it repeats."""
        self.problem = problem
        self.tables = build_tables(problem)
        self.graph: Graph = build_graph(problem, self.tables.tick_s)
        self.table_of: Index = problem.option_of[self.graph.order].astype(np.intp)
        self.steady = self._find_rhythm() if repeat else None
        self._network = None if self.steady else build_network(self.tables, self.graph, self.table_of)
        rows = self.steady.rows if self.steady else self.graph.n
        self.most_prices = min(max(PRICED_ROWS // max(rows, 1), LEAST_PRICES), MOST_PRICES)
        ends = np.stack((self.tables.ticks[:, 0], self.tables.hull_ticks[:, -1]), axis=1)[self.table_of]
        self.fastest, self.slowest = self.graph.finish(ends).max(axis=0).tolist()

    def _find_rhythm(self) -> Steady | None:
        runs = find_runs(self.problem, self.graph, (2 + LEAST_GAIN) * KEEP)
        if not runs:
            return None
        try:
            return Steady(self.problem, self.tables, runs, KEEP)
        except NotSteady:
            return None

    def sample(self, prices: list[int]) -> list[Sample]:
        """Solve at these prices; every bound is proven on the full problem."""
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

    def refine(self, samples: list[Sample], makespan: Floats) -> list[Sample]:
        """More samples on either side of the lines that are highest at these makespans."""
        value = np.stack([s.bound.constant_j - s.bound.price_w * makespan * self.tables.tick_s for s in samples])
        best = np.unique(value.argmax(axis=0))
        prices = np.array([s.price for s in samples])
        left = np.unique(np.clip(np.concatenate((best - 1, best)), 0, len(samples) - 2))
        middle = {round(math.sqrt(float(prices[i]) * max(float(prices[i + 1]), 1.0))) for i in left.tolist()}
        more = self.sample(sorted(middle - set(prices.tolist())))
        return sorted((*samples, *more), key=lambda s: -s.price)

    def mixed(self, samples: list[Sample]) -> list[Sample]:
        """Proofs between the samples where these are few: convex combinations of two flows are flows."""
        if self.most_prices == MOST_PRICES:
            return []
        found = []
        for one, other in pairwise(samples):
            # Prices in geometric steps, as the curve bends; from 0 there are none.
            ratio = other.price / one.price
            steps = np.linspace(0.0, 1.0, MIXED + 2)[1:-1]
            for share in ((1 - ratio**steps) / (1 - ratio) if ratio else steps).tolist():
                edge = one.edge * (1 - share) + other.edge * share
                through = one.through * (1 - share) + other.through * share
                price = round(one.price * (1 - share) + other.price * share)
                found.append(Sample(price, edge, through, prove(self.problem, self.certificate(edge, through))))
        return found

    def certificate(self, edge: Flow, through: Flow) -> Certificate:
        """A flow in watts."""
        unit = self.tables.unit_w
        return Certificate(edge.astype(np.float64) * unit, through.astype(np.float64) * unit)

    def schedules(self, samples: list[Sample]) -> tuple[Floats, Floats]:
        """Durations (level order) and makespans, in ticks, of schedules that go with the flows, fast to slow."""
        order = self.graph.order
        through = np.stack([s.through for s in samples], axis=1)[order].astype(np.int64)
        if not self.steady:
            duals = [Dual(s.price, s.edge.astype(np.int64), s.through[order].astype(np.int64)) for s in samples]
            return durations(self.tables, self.graph, self.table_of, duals)
        ends = [self.fastest]
        for fast, slow in pairwise(samples):
            ends.append(crossing(fast.bound, slow.bound) / self.tables.tick_s)
        shortest, longest = intervals(self.tables, self.table_of, through)
        return stretch(self.graph, shortest, longest, np.floor(np.clip(ends, self.fastest, self.slowest)))

    def worthwhile(self, most: int) -> list[int]:
        """Prices to begin with: both ends; where few can be afforded, also those that the rhythm finds most telling."""
        ends = [0, self.steepest()]
        if self.steady is None or self.most_prices == MOST_PRICES:
            return ends
        blocking = self.problem.blocking_power_w * self.problem.stages
        forecast = _bisect(self._forecast, self._forecast(ends), MOST_PRICES // 2, blocking)
        # Lines that lie nowhere visibly above their neighbours' tell nothing.
        telling = []
        for fast, this, slow in zip(forecast, forecast[1:], forecast[2:], strict=False):
            at = crossing(fast.bound, slow.bound)
            here = fast.bound.at(at)
            if this.bound.at(at) - here > SHARPNESS * abs(here + blocking * at):
                telling.append(this.price)
        chosen = np.unique(np.linspace(0, len(telling) - 1, most - len(ends)).round().astype(int))
        return [*ends, *(telling[i] for i in chosen.tolist() if telling)]

    def _forecast(self, prices: list[int]) -> list[Sample]:
        assert self.steady is not None
        nothing = np.zeros(0, dtype=np.int64)
        return [Sample(price, nothing, nothing, self.steady.lines(price)) for price in prices]

    def steepest(self) -> int:
        """A price at which nothing has a reason left to be slow: no cut is dearer than all first slopes together."""
        counts = np.bincount(self.table_of, minlength=len(self.tables.size))
        return max(int(np.dot(counts, self.tables.hull_price[:, 0])), 1)


def crossing(fast: Bound, slow: Bound) -> float:
    """The makespan in seconds at which two lines meet."""
    if fast.price_w <= slow.price_w:
        return math.inf
    return (fast.constant_j - slow.constant_j) / (fast.price_w - slow.price_w)


def trace(engine: Engine, report: Callable[[float], None], only: float | None = None) -> list[Sample]:
    """Samples of the frontier from dear to cheap time, until new lines no longer raise the envelope.

    ``only`` is a makespan in ticks: then just the stretch around it is refined.
    """
    at_s = None if only is None else only * engine.tables.tick_s
    first = engine.sample(engine.worthwhile(engine.most_prices if only is None else LEAST_PRICES // 2))
    blocking = engine.problem.blocking_power_w * engine.problem.stages
    return _bisect(engine.sample, first, engine.most_prices, blocking, report=report, at_s=at_s)


def _bisect(
    solve: Callable[[list[int]], list[Sample]],
    first: list[Sample],
    most: int,
    blocking_w: float,
    *,
    report: Callable[[float], None] = lambda _share: None,
    at_s: float | None = None,
) -> list[Sample]:
    """Add prices between neighbours until nothing is gained, or ``most`` are there.

    The envelope is concave in the price, so a line between two others raises it most near where those cross, and by
    about a quarter of what its own parents' line did.
    """
    samples = sorted(first, key=lambda s: -s.price)
    hopes = {(a.price, b.price): math.inf for a, b in pairwise(samples)}
    while len(samples) < most and hopes:
        if at_s is not None:
            hopes = _around(samples, hopes, at_s)
        pairs = {(a.price, b.price): (a, b) for a, b in pairwise(samples)}
        wanted = []
        for key in sorted(hopes, key=hopes.__getitem__, reverse=True)[: most - len(samples)]:
            fast, slow = pairs[key]
            price = round(math.sqrt(fast.price * max(slow.price, 1)))
            if slow.price < price < fast.price:
                wanted.append((key, price))
        hopes = {}
        new = solve([price for _, price in wanted])
        for (key, _), sample in zip(wanted, new, strict=True):
            fast, slow = pairs[key]
            at = crossing(fast.bound, slow.bound)
            here = max(fast.bound.at(at), slow.bound.at(at))
            raised = (sample.bound.at(at) - here) / max(abs(here + blocking_w * at), 1e-300)
            if raised > SHARPNESS:
                hopes[fast.price, sample.price] = hopes[sample.price, slow.price] = raised
        samples = sorted((*samples, *new), key=lambda s: -s.price)
        report(len(samples) / most)
    return samples


def _around(samples: list[Sample], hopes: dict[tuple[int, int], float], at_s: float) -> dict[tuple[int, int], float]:
    """The hopes next to the line that is highest at a makespan."""
    best = max(samples, key=lambda s: s.bound.at(at_s)).price
    return {key: hope for key, hope in hopes.items() if best in key}
