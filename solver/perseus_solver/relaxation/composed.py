"""The relaxed frontier of a long schedule, at prices of time, with flows composed of parts that repeat (``steady``).

Prices are added where they may raise the envelope of the lines most (``prices``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from perseus_solver.relaxation.prices import Uncertainty
from perseus_solver.relaxation.samples import NOTHING_J, Prover, Sample, by_price
from perseus_solver.relaxation.steady import Steady

SHARPNESS = 2e-5
"""Refinement ends when a new line can raise the envelope by no more than this share of the energy."""
MOST_PRICES, LEAST_PRICES, PRICED_ROWS = 60, 40, 300_000
"""With 60 well chosen prices the envelope is within 0.002 % of the relaxed frontier on average, with 40 within 0.008 %
on eight stages. A network with many rows gets fewer: what they prove must be computed on the whole graph.
"""
FORECAST = 0.5
"""Share of the prices that the repeated part chooses. The other half goes where the whole is least known."""
_NEAR = 2
"""Prices that are solved for the bound at a single makespan."""


class Composed:
    """The relaxed frontier of a problem that repeats.

    Attributes:
        rows: the instructions that are solved for a sample.
        most_prices: how many prices are solved at most.
    """

    def __init__(self, prover: Prover, steady: Steady, fastest_s: float, slowest_s: float) -> None:
        """Prepare a problem.

        Args:
            prover: of the problem.
            steady: solves it.
            fastest_s, slowest_s: makespan with every instruction at its fastest, and at its cheapest, seconds.
        """
        self._prover, self._steady, self.rows = prover, steady, steady.rows
        self._fastest_s, self._slowest_s = fastest_s, slowest_s
        self.most_prices = min(max(PRICED_ROWS // max(steady.rows, 1), LEAST_PRICES), MOST_PRICES)

    def trace(self, report: Callable[[float], None]) -> list[Sample]:
        """Sample the frontier until new lines can no longer raise the envelope noticeably.

        Args:
            report: called with the share of the work that is done.

        Returns:
            Samples from high to low prices.
        """
        samples = self.at_prices(self.forecast(max(round(FORECAST * self.most_prices), 3)))
        return self._explore(samples, self.at_prices, self.most_prices, self._fastest_s, report)

    def at_prices(self, prices: list[int]) -> list[Sample]:
        """Solve at these prices, units of `Tables.unit_w`. Every bound is proven on the full problem."""
        return self._prover.samples(self._steady.solve(prices))

    def at_waiting(self) -> Sample:
        """Return the sample at which a second is worth what waiting takes."""
        return self.at_prices([self._prover.tables.waiting_price])[0]

    def near(self, samples: list[Sample], makespan_s: float) -> list[Sample]:
        """Return the samples and a few where they may raise the bound at a makespan most."""
        for _ in range(_NEAR):
            price, _rise = self._next(samples, makespan_s, self._fastest_s)
            if price is None:
                break
            samples = by_price([*samples, *self.at_prices([price])])
        return samples

    def mixed(self, samples: list[Sample]) -> list[Sample]:
        """Return a proof between any two neighbours: a convex combination of two flows is a flow.

        They raise the envelope, and their timetables are further ones to round.
        """
        mixtures = []
        for one, other in pairwise(samples):
            # At the geometric mean of the prices, or in the middle between a price and none.
            share = 1.0 / (1.0 + math.sqrt(other.price / one.price)) if other.price else 0.5
            edge = one.edge * (1 - share) + other.edge * share
            through = one.through * (1 - share) + other.through * share
            mixtures.append(self._prover.sample(round(one.price * (1 - share) + other.price * share), edge, through))
        return mixtures

    def forecast(self, most: int) -> list[int]:
        """Return the prices to begin with: the ends, and those that the repeated part alone, which is cheap, would add.

        Near the steepest price the composed flows prove too little to show where the frontier bends; the repeated part
        shows it.
        """
        top, twice = self._circulations([self.steepest(), 2 * self.steepest()])
        # Above the steepest price everything is at its fastest, so there the line rises with the shortest time.
        fastest_s = (twice.bound.constant_j - top.bound.constant_j) / (twice.bound.price_w - top.bound.price_w)
        samples = self._explore([top, *self._circulations([0])], self._circulations, most - 1, fastest_s)
        return sorted({self._prover.tables.waiting_price, *(sample.price for sample in samples)})

    def _circulations(self, prices: list[int]) -> list[Sample]:
        nothing = np.zeros(0, dtype=np.int64)
        return [Sample(price, nothing, nothing, self._steady.lines(price)) for price in prices]

    def _explore(
        self,
        samples: list[Sample],
        solve: Callable[[list[int]], list[Sample]],
        most: int,
        fastest_s: float,
        report: Callable[[float], None] = lambda _share: None,
    ) -> list[Sample]:
        """Add the price that may raise the envelope most, until the gain is negligible or ``most`` samples are there.

        Args:
            samples: the samples to begin with.
            solve: returns the samples at prices.
            most: largest number of samples.
            fastest_s: the shortest makespan.
            report: called with the share of the work that is done.
        """
        samples = by_price(samples)
        while len(samples) < most:
            price, rise = self._next(samples, None, fastest_s)
            if price is None or rise <= SHARPNESS:
                break
            samples = by_price([*samples, *solve([price])])
            report(len(samples) / most)
        return samples

    def _next(self, samples: list[Sample], at_s: float | None, fastest_s: float) -> tuple[int | None, float]:
        """Return the price that may raise the envelope most, and by what share of the energy.

        The rise is that at one makespan, or the largest anywhere. The price is None where all prices between
        neighbouring samples have been solved.
        """
        problem = self._prover.problem
        prices = np.array([sample.price for sample in reversed(samples)])
        lines = [sample.bound for sample in reversed(samples)]
        price_w, value_j = np.array([b.price_w for b in lines]), np.array([b.constant_j for b in lines])
        uncertainty = Uncertainty.between(price_w, value_j, fastest_s, self._slowest_s)
        waiting_w = problem.blocking_power_w * problem.stages
        if at_s is None:
            energy_j = uncertainty.least_j + (waiting_w - uncertainty.price_w) * uncertainty.makespan_s
            rise = uncertainty.rise_j() / np.maximum(energy_j, NOTHING_J)
        else:
            known_j = float((value_j - price_w * at_s).max())
            rise = uncertainty.rise_at_j(at_s, known_j) / max(known_j + waiting_w * at_s, NOTHING_J)
        middle = np.rint(uncertainty.price_w / self._prover.tables.unit_w).astype(np.int64)
        lower, upper = prices[: len(middle)], prices[1 : len(middle) + 1]
        rise = np.where((lower < middle) & (middle < upper), rise, 0.0)
        best = int(rise.argmax())
        return (int(middle[best]), float(rise[best])) if rise[best] > 0 else (None, 0.0)

    def steepest(self) -> int:
        """Return a price at which every instruction is at its fastest.

        No cut costs more than the steepest slopes of the instructions it may contain, and of a stage, whose
        instructions follow each other, it contains one.
        """
        problem = self._prover.problem
        slope = self._prover.tables.hull_price[problem.option_of, 0]
        first = problem.stage_offset[:-1][np.diff(problem.stage_offset) > 0]
        chained = problem.edge_from[problem.edge_to == problem.edge_from + 1]
        if len(np.setdiff1d(np.arange(problem.instructions), chained)) > len(first):
            return max(int(slope.sum()), 1)
        return max(int(np.maximum.reduceat(slope, first).sum()), 1)
