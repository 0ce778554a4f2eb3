"""Check proofs: what a dual flow proves about every plan of a problem, and whether the claims of a frontier follow.

The checker shares no code with the solver and reads only the problem itself, so that a bug in the solver cannot hide
here.

The theorem: let f ≥ 0 be watts on every edge and x_i watts through every instruction, with x_i at least what flows in
and at least what flows out. Route each surplus of inflow to the end of the iteration, and each surplus of outflow from
the start. Multiply the precedence constraints of any plan with makespan ≤ T by f and add them up. The start times
cancel, and

    Σ ε_i  ≥  Σ_i min over options (ε + x_i·t)  +  Σ f·delay  −  v·T,     v = Σ (x_i − outflow_i),

where ε = e − P_blk·t is the effective energy of an option. The minimum runs over the measured options themselves, so
neither the convex hulls nor the ticks nor the flow solver need to be trusted. (Lagrangian duality of the time-cost
tradeoff; Fulkerson 1961, Phillips and Dessouky 1977.)
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
"""Largest imbalance at an instruction, relative to the price, that counts as float rounding. The proof stays rigorous:
the theorem charges whatever does not balance to the end of the iteration.
"""


class InvalidCertificate(SolverError):
    """The flow is not a valid one, or a claim does not follow from it."""


@dataclass(frozen=True, slots=True, eq=False)
class Certificate:
    """A dual flow.

    Attributes:
        edge_w: float[m], watts on every edge, numbered as in the problem.
        through_w: float[n], watts through every instruction, numbered as in the problem.
    """

    edge_w: Floats
    through_w: Floats


@dataclass(frozen=True, slots=True)
class Bound:
    """A line below all plans: effective energy ≥ ``constant_j − price_w · makespan_s``.

    Attributes:
        constant_j: joules.
        price_w: watts, what a second of the makespan is worth.
    """

    constant_j: float
    price_w: float

    def at(self, makespan_s: float) -> float:
        """Return the bound on the effective energy, in joules, of plans with at most this makespan in seconds."""
        return self.constant_j - self.price_w * makespan_s


def prove(problem: Problem, certificate: Certificate) -> Bound:
    """Return the line that a flow proves. O(edges + instructions · options).

    Args:
        problem: the problem that the flow is about.
        certificate: the flow.

    Returns:
        The lower bound on the effective energy of every plan.

    Raises:
        InvalidCertificate: wrong shape, a negative or non-finite number, or flow that appears or vanishes inside the
            graph.
    """
    n, m = problem.instructions, len(problem.edge_from)
    edge, through = certificate.edge_w, certificate.through_w
    if edge.shape != (m,) or through.shape != (n,):
        raise InvalidCertificate(
            f"certificate: shapes {edge.shape} and {through.shape} do not fit {m} edges and {n} instructions"
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
    constant = float((edge * problem.edge_delay_s).sum())  # BLAS would start threads
    for k, options in enumerate(problem.options):
        watts = through[problem.option_of == k]
        effective = options.energy_j - problem.blocking_power_w * options.time_s
        constant += float((effective[:, None] + options.time_s[:, None] * watts).min(axis=0).sum())
    return Bound(constant, float(np.sum(through - outflow)))


def iteration_bound(problem: Problem, bounds: Iterable[Bound], iteration_time_s: Floats) -> Floats:
    """Return the best proven bound on the iteration energy at each iteration time.

    Args:
        problem: the problem that the bounds are about.
        bounds: lines from `prove`.
        iteration_time_s: float[times], seconds, overhead included.

    Returns:
        float[times], joules, with the blocking power of all stages over the whole iteration.
    """
    makespan = np.asarray(iteration_time_s) - problem.overhead_s
    best = np.full(np.shape(makespan), -np.inf)
    for bound in bounds:
        np.maximum(best, bound.constant_j - bound.price_w * makespan, out=best)
    return best + problem.blocking_power_w * problem.stages * np.asarray(iteration_time_s)


def deadline_bound(problem: Problem, bounds: Iterable[Bound], deadline_s: Floats) -> Floats:
    """Return the best proven bound on the iteration energy of every plan that ends by a deadline, waiting after it not
    counted.

    Energy may be least well before the deadline. A line that rises with time is least at its beginning, where nothing
    has been computed yet; one that falls, at the deadline.

    Args:
        problem: the problem that the bounds are about.
        bounds: lines from `prove`.
        deadline_s: float[deadlines], seconds, overhead included.

    Returns:
        float[deadlines], joules.
    """
    waiting_w = problem.blocking_power_w * problem.stages
    makespan_s = np.asarray(deadline_s) - problem.overhead_s
    best = np.full(np.shape(makespan_s), -np.inf)
    for bound in bounds:
        np.maximum(best, bound.constant_j + min(waiting_w - bound.price_w, 0.0) * makespan_s, out=best)
    return best + waiting_w * problem.overhead_s


def check_frontier(problem: Problem, frontier: Frontier, certificates: Iterable[Certificate]) -> None:
    """Check every claim of a frontier: plans, times, energies, order and bounds.

    Args:
        problem: the problem that was solved.
        frontier: its solution.
        certificates: the flows that shall prove its bounds.

    Raises:
        InvalidCertificate: a claim does not hold; the message names the point.
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
        raise InvalidCertificate("frontier: from point to point, time must rise and effective energy must fall")


def _replay(problem: Problem, frequencies_mhz: np.ndarray) -> tuple[float, float]:
    """Return time and energy of a plan, one instruction after the other: slow, simple, and not by the simulator."""
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
