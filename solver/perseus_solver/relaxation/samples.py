"""What a flow proves, and where two such lines meet."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_solver.certify import Bound, Certificate, prove
from perseus_solver.model.problem import Problem
from perseus_solver.relaxation.network import Dual
from perseus_solver.relaxation.tables import Tables

Flow = npt.NDArray[np.int64] | npt.NDArray[np.float64]

NOTHING_J = 1e-300
"""Avoids a division by zero where a problem takes no energy at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A flow from the start of the iteration to its end, and the line that it proves.

    Attributes:
        price: its value, units of `Tables.unit_w`.
        edge: float or int[m], units on every edge.
        through: float or int[n], units through every instruction.
        bound: the proven line.
    """

    price: int
    edge: Flow
    through: Flow
    bound: Bound


class Prover:
    """Proves what flows imply for all plans of a problem."""

    def __init__(self, problem: Problem, tables: Tables) -> None:
        self.problem, self.tables = problem, tables

    def certificate(self, edge: Flow, through: Flow) -> Certificate:
        """Convert a flow to watts."""
        unit = self.tables.unit_w
        return Certificate(edge.astype(np.float64) * unit, through.astype(np.float64) * unit)

    def sample(self, price: int, edge: Flow, through: Flow) -> Sample:
        """Return a flow with its proof on the full problem."""
        return Sample(price, edge, through, prove(self.problem, self.certificate(edge, through)))

    def samples(self, duals: list[Dual]) -> list[Sample]:
        """Return flows with their proofs."""
        return [self.sample(dual.price, dual.edge, dual.through) for dual in duals]


def by_price(samples: list[Sample]) -> list[Sample]:
    """Return samples from high to low prices, which is from fast to slow timetables; of equal prices the best."""
    order = sorted(samples, key=lambda sample: (-sample.price, -sample.bound.constant_j))
    return [one for k, one in enumerate(order) if not k or one.price != order[k - 1].price]


def crossing(fast: Bound, slow: Bound) -> float:
    """Return the makespan in seconds at which two lines meet."""
    if fast.price_w <= slow.price_w:
        return math.inf
    return (fast.constant_j - slow.constant_j) / (fast.price_w - slow.price_w)
