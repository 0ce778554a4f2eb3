"""Proof checking: what a dual flow proves about every plan of a problem, and whether a frontier's claims follow.

Shares no code with the engine and reads only the problem itself. Used by tests, benchmarks and anyone who doubts a
bound.

The theorem: let f ≥ 0 be watts on every edge and x_i watts through every instruction, with x_i at least what flows in
and at least what flows out. Give each surplus of inflow its own way to the end of the iteration, each surplus of
outflow its own way from the start. Then for every plan with makespan ≤ T, multiplying its precedence constraints by f
and adding them up gives

    Σ ε_i  ≥  Σ_i min over options (ε + x_i·t)  +  Σ f·delay  −  v·T,     v = Σ (x_i − outflow_i),

because start times cancel. The minimum runs over the measured options themselves, so hulls, ticks and solvers need no
trust.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from perseus_solver.errors import SolverError
from perseus_solver.kinds import Floats
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frontier

CONSERVATION = 1e-9
"""Largest imbalance at an instruction, relative to the price, that passes as float rounding. It costs nothing in
rigour: whatever does not balance is charged to the end of the iteration by the theorem."""


class InvalidCertificate(SolverError):
    """A flow that is not one, or a claim that does not follow from it."""


@dataclass(frozen=True, slots=True, eq=False)
class Certificate:
    """A dual flow, in watts: on every edge and through every instruction, numbered as in the problem."""

    edge_w: Floats
    through_w: Floats


@dataclass(frozen=True, slots=True)
class Bound:
    """A line under all plans: effective energy ≥ ``constant_j − price_w · makespan_s``."""

    constant_j: float
    price_w: float

    def at(self, makespan_s: float) -> float:
        """The bound on the effective energy of plans with at most this makespan."""
        return self.constant_j - self.price_w * makespan_s


def prove(problem: Problem, certificate: Certificate) -> Bound:
    """The line that a flow proves. O(instructions + edges + options · distinct flows).

    Raises:
        InvalidCertificate: wrong shape, a negative or non-finite number, or flow that appears or vanishes inside the
        graph.
    """
    n, m = problem.instructions, len(problem.edge_from)
    edge, through = certificate.edge_w, certificate.through_w
    if edge.shape != (m,) or through.shape != (n,):
        raise InvalidCertificate(
            f"certificate: {edge.shape} and {through.shape} do not fit {m} edges and {n} instructions"
        )
    if not (np.isfinite(edge).all() and np.isfinite(through).all() and (edge >= 0).all() and (through >= 0).all()):
        raise InvalidCertificate("certificate: every flow must be finite and zero or more")
    inflow = np.bincount(problem.edge_to, weights=edge, minlength=n)
    outflow = np.bincount(problem.edge_from, weights=edge, minlength=n)
    has_inflow = np.bincount(problem.edge_to, minlength=n) > 0
    has_outflow = np.bincount(problem.edge_from, minlength=n) > 0
    price = float(np.sum(through[~has_outflow]))
    lost = max(
        float(np.abs(through - inflow)[has_inflow].max(initial=0.0)),
        float(np.abs(through - outflow)[has_outflow].max(initial=0.0)),
    )
    if lost > CONSERVATION * max(price, 1.0):
        raise InvalidCertificate(f"certificate: conservation of flow is violated by {lost:.3g} W at an instruction")
    through = np.maximum(through, np.maximum(inflow, outflow))
    constant = float(np.dot(edge, problem.edge_delay_s))
    for k, options in enumerate(problem.options):
        watts, count = np.unique(through[problem.option_of == k], return_counts=True)
        effective = options.energy_j - problem.blocking_power_w * options.time_s
        best = np.full(len(watts), np.inf)
        for time_s, energy_j in zip(options.time_s.tolist(), effective.tolist(), strict=True):
            np.minimum(best, energy_j + watts * time_s, out=best)
        constant += float(np.dot(best, count))
    return Bound(constant, float(np.sum(through - outflow)))


def iteration_bound(problem: Problem, bounds: Iterable[Bound], iteration_time_s: Floats) -> Floats:
    """The best proven bound on iteration energy at each iteration time."""
    makespan = np.asarray(iteration_time_s) - problem.overhead_s
    best = np.full(np.shape(makespan), -np.inf)
    for bound in bounds:
        np.maximum(best, bound.constant_j - bound.price_w * makespan, out=best)
    return best + problem.blocking_power_w * problem.stages * np.asarray(iteration_time_s)


def check_frontier(problem: Problem, frontier: Frontier, certificates: Iterable[Certificate]) -> None:
    """Check every claim of a frontier: plans, times, energies, order and bounds.

    Raises:
        InvalidCertificate: a claim does not hold; names the point.
    """
    bounds = [prove(problem, certificate) for certificate in certificates]
    proven = iteration_bound(problem, bounds, frontier.time_s)
    for i, point in enumerate(frontier):
        time_s, energy_j = _replay(problem, point.frequencies_mhz)
        if not np.isclose(time_s, point.iteration_time_s, rtol=1e-12, atol=0):
            raise InvalidCertificate(f"point {i}: takes {time_s!r} s, not {point.iteration_time_s!r} s")
        if not np.isclose(energy_j, point.energy_j, rtol=1e-12, atol=0):
            raise InvalidCertificate(f"point {i}: takes {energy_j!r} J, not {point.energy_j!r} J")
        if point.energy_lower_bound_j > proven[i] * (1 + 1e-12):
            raise InvalidCertificate(
                f"point {i}: bound {point.energy_lower_bound_j!r} J exceeds the proven {proven[i]!r} J"
            )
        if point.energy_j < point.energy_lower_bound_j:
            raise InvalidCertificate(f"point {i}: energy {point.energy_j!r} J lies below its bound")
    if (np.diff(frontier.time_s) <= 0).any() or (np.diff(frontier.effective_energy_j) >= 0).any():
        raise InvalidCertificate("frontier: points must rise in time and fall in effective energy")


def _replay(problem: Problem, frequencies_mhz: np.ndarray) -> tuple[float, float]:
    """Time and energy of a plan, one instruction after the other in an order of readiness: slow, obvious,
    independent.
    """
    n = problem.instructions
    choice = [
        int(np.flatnonzero(problem.options[k].frequency_mhz == f)[0])
        for k, f in zip(problem.option_of.tolist(), frequencies_mhz.tolist(), strict=True)
    ]
    time = [float(problem.options[k].time_s[c]) for k, c in zip(problem.option_of.tolist(), choice, strict=True)]
    energy = [float(problem.options[k].energy_j[c]) for k, c in zip(problem.option_of.tolist(), choice, strict=True)]
    after: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    waiting = [0] * n
    for a, b, delay in zip(
        problem.edge_from.tolist(), problem.edge_to.tolist(), problem.edge_delay_s.tolist(), strict=True
    ):
        after[a].append((b, delay))
        waiting[b] += 1
    start = [0.0] * n
    ready = [i for i in range(n) if not waiting[i]]
    end = 0.0
    for i in ready:  # grows while it is read
        finish = start[i] + time[i]
        end = max(end, finish)
        for b, delay in after[i]:
            start[b] = max(start[b], finish + delay)
            waiting[b] -= 1
            if not waiting[b]:
                ready.append(b)
    total = end + problem.overhead_s
    return total, sum(energy) + problem.blocking_power_w * (problem.stages * total - sum(time))
