"""The public door of the mathematics: the whole frontier of a problem, or the best plan for one deadline.

Joins the engine (relaxation and bounds), the rounding and the exact simulator. No mathematics of its own beyond
choosing at which prices to solve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from perseus_solver.certify import Bound, Certificate, iteration_bound, prove
from perseus_solver.engine.graph import build_graph
from perseus_solver.engine.relaxation import Dual, build_network, durations, solve_price
from perseus_solver.engine.tables import build_tables
from perseus_solver.errors import Infeasible, InvalidProblem
from perseus_solver.problem import Floats, Problem
from perseus_solver.result import Frontier, Point, verdict
from perseus_solver.rounding import Rounder, round_plans
from perseus_solver.simulate import Simulator
from perseus_solver.switches import clock_changes

Progress = Callable[[int, int], None]

RELAXATION_GAP = 5e-5
"""Chord above tangent, relative to the energy, at which a stretch of the relaxed frontier counts as known."""
MOST_PRICES = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    dual: Dual
    duration: Floats
    makespan: float
    energy_j: float
    bound: Bound


class _Engine:
    """One problem, ready to be solved at prices."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = build_tables(problem)
        self.graph = build_graph(problem, self.tables.tick_s)
        self.table_of = problem.option_of[self.graph.order].astype(np.intp)
        self.network = build_network(self.tables, self.graph, self.table_of)
        self.rounder = Rounder(self.tables, self.graph, self.table_of)
        self.simulator = Simulator(problem)
        self.frequency_mhz = np.zeros(
            (len(problem.options), max(len(o.frequency_mhz) for o in problem.options)), dtype=np.uint16
        )
        for row, options in zip(self.frequency_mhz, problem.options, strict=True):
            row[: len(options.frequency_mhz)] = options.frequency_mhz
        self.certificates: list[Certificate] = []
        self.bounds: list[Bound] = []

    def sample(self, prices: list[int]) -> list[_Sample]:
        duals = [solve_price(self.network, self.graph, price) for price in prices]
        duration, makespan = durations(self.tables, self.graph, self.table_of, duals)
        energy = self.relaxed_energy_j(duration)
        return [
            _Sample(dual, duration[:, k], float(makespan[k]), float(energy[k]), self._prove(dual))
            for k, dual in enumerate(duals)
        ]

    def _prove(self, dual: Dual) -> Bound:
        certificate = Certificate(
            edge_w=dual.edge.astype(np.float64) * self.tables.unit_w,
            through_w=dual.through[self.graph.rank].astype(np.float64) * self.tables.unit_w,
        )
        bound = prove(self.problem, certificate)
        self.certificates.append(certificate)
        self.bounds.append(bound)
        return bound

    def relaxed_energy_j(self, duration: Floats) -> Floats:
        total = np.zeros(duration.shape[1])
        for k, corners in enumerate(self.tables.hull_size.tolist()):
            rows = self.table_of == k
            total += np.interp(
                duration[rows], self.tables.hull_ticks[k, :corners], self.tables.hull_energy_j[k, :corners]
            ).sum(axis=0)
        return total

    def choice(self, columns: np.ndarray) -> np.ndarray:
        """Rounder columns as rows of option positions, [plans, n], in the problem's numbering."""
        row: np.ndarray = self.tables.row[self.table_of[:, None], columns][self.graph.rank].T
        return row


def _steepest(engine: _Engine) -> int:
    """A price at which no instruction has a reason left to be slow: the sum of all first slopes bounds every cut."""
    counts = np.bincount(engine.table_of, minlength=len(engine.tables.size))
    return max(int(np.dot(counts, engine.tables.hull_price[:, 0])), 1)


def _trace(engine: _Engine, report: Callable[[float], None], only: float | None = None) -> list[_Sample]:
    """Samples of the relaxed frontier, fast to slow, until chords and tangents agree (Eisner & Severance 1976).

    ``only`` is a makespan in ticks: then just the stretch around it is refined.
    """
    samples = sorted(engine.sample([0, _steepest(engine)]), key=lambda s: -s.dual.price)
    tick_s, unit_w = engine.tables.tick_s, engine.tables.unit_w
    floor_j = engine.problem.blocking_power_w * engine.problem.stages * tick_s
    while len(samples) < MOST_PRICES:
        wanted = []
        for fast, slow in pairwise(samples):
            if slow.makespan <= fast.makespan or not (only is None or fast.makespan <= only <= slow.makespan):
                continue
            price = round((fast.energy_j - slow.energy_j) / ((slow.makespan - fast.makespan) * tick_s) / unit_w)
            if not slow.dual.price < price < fast.dual.price:
                continue
            at = (fast.bound.constant_j - slow.bound.constant_j) / (fast.bound.price_w - slow.bound.price_w) / tick_s
            share = (at - fast.makespan) / (slow.makespan - fast.makespan)
            chord = fast.energy_j + (slow.energy_j - fast.energy_j) * share
            gap = (chord - slow.bound.at(at * tick_s)) / abs(chord + floor_j * at)
            if gap > RELAXATION_GAP:
                wanted.append((gap, price))
        if not wanted:
            break
        wanted.sort(reverse=True)
        samples += engine.sample([price for _, price in wanted[: MOST_PRICES - len(samples)]])
        samples.sort(key=lambda s: -s.dual.price)
        report(len(samples) / MOST_PRICES)
    return samples


def _deadlines(samples: list[_Sample], points: int) -> Floats:
    """Makespans spread evenly over the curve, time and energy counting alike."""
    time = np.array([s.makespan for s in samples])
    energy = np.array([s.energy_j for s in samples])
    width, height = time[-1] - time[0], energy[0] - energy[-1]
    if width <= 0 or points == 1:
        return time[:1]
    along = (time - time[0]) / width + ((energy[0] - energy) / height if height > 0 else 0.0)
    even: Floats = np.interp(np.linspace(0.0, along[-1], points), along, time)
    return np.floor(even)


def _between(samples: list[_Sample], deadline: Floats) -> tuple[Floats, Floats]:
    """Durations and flows of the relaxation at makespans between samples: convex combinations stay feasible."""
    time = np.array([s.makespan for s in samples])
    left = np.clip(np.searchsorted(time, deadline, side="right") - 1, 0, max(len(time) - 2, 0))
    right = np.minimum(left + 1, len(time) - 1)
    span = np.maximum(time[right] - time[left], 1.0)
    share = np.clip((deadline - time[left]) / span, 0.0, 1.0)
    duration = np.stack([s.duration for s in samples], axis=1)
    through = np.stack([s.dual.through for s in samples], axis=1).astype(np.float64)
    return (
        np.floor(duration[:, left] * (1 - share) + duration[:, right] * share),
        through[:, left] * (1 - share) + through[:, right] * share,
    )


def solve_frontier(problem: Problem, points: int = 100, *, progress: Progress | None = None) -> Frontier:
    """All Pareto-optimal plans, sampled: from T_min to T*, each with a certified gap.

    Args:
        problem: what to plan.
        points: how many plans to compute; at most this many remain after dominated ones are dropped.
        progress: called with (done, total) as the work proceeds.

    Raises:
        InvalidProblem: ``points`` is not positive, or the precedence has a cycle.
    """
    return solve_certified(problem, points, progress=progress)[0]


def solve_certified(
    problem: Problem, points: int = 100, *, progress: Progress | None = None
) -> tuple[Frontier, tuple[Certificate, ...]]:
    """`solve_frontier` together with the dual flows that prove its bounds, for `perseus_solver.certify`."""
    if points < 1:
        raise InvalidProblem(f"points must be 1 or more, not {points}")
    tell = progress or (lambda _done, _total: None)
    tell(0, 100)
    engine = _Engine(problem)
    samples = _trace(engine, lambda share: tell(int(70 * share), 100))
    deadline = _deadlines(samples, points)
    frontier = _assemble(engine, samples, deadline)
    tell(100, 100)
    return frontier, tuple(engine.certificates)


def _assemble(engine: _Engine, samples: list[_Sample], deadline: Floats) -> Frontier:
    planned, through = _between(samples, deadline)
    columns = round_plans(engine.rounder, planned, through, deadline)
    choice = engine.choice(columns)
    simulation = engine.simulator.run(choice)
    time_s, energy_j = np.atleast_1d(simulation.iteration_time_s), np.atleast_1d(simulation.energy_j)
    problem = engine.problem
    effective = energy_j - problem.blocking_power_w * problem.stages * time_s
    order = np.lexsort((effective, time_s))
    best = np.minimum.accumulate(effective[order])
    kept = order[np.append(True, best[1:] < best[:-1])]
    frequency = engine.frequency_mhz[problem.option_of, choice[kept]]
    bound = np.minimum(iteration_bound(problem, engine.bounds, time_s[kept]), energy_j[kept])
    return Frontier(
        time_s=time_s[kept],
        energy_j=energy_j[kept],
        energy_lower_bound_j=bound,
        statuses=tuple(verdict(gap) for gap in (energy_j[kept] / bound - 1.0).tolist()),
        frequencies_mhz=frequency,
        stage_offset=problem.stage_offset,
        clock_changes=clock_changes(frequency, problem.stage_offset),
        blocking_power_w=problem.blocking_power_w,
    )


def solve_deadline(problem: Problem, deadline_s: float, *, progress: Progress | None = None) -> Point:
    """The cheapest plan we can find that ends by a deadline; beyond T*, the T* plan.

    Raises:
        Infeasible: the deadline is shorter than T_min.
        InvalidProblem: the deadline is not a positive finite number.
    """
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise InvalidProblem(f"deadline_s must be a positive finite number, not {deadline_s}")
    tell = progress or (lambda _done, _total: None)
    tell(0, 100)
    engine = _Engine(problem)
    fastest = engine.choice(np.zeros((engine.graph.n, 1), dtype=np.intp))
    t_min_s = float(np.atleast_1d(engine.simulator.run(fastest).iteration_time_s)[0])
    if deadline_s < t_min_s:
        raise Infeasible(deadline_s, t_min_s)
    makespan = math.floor((deadline_s - problem.overhead_s) / engine.tables.tick_s)
    samples = _trace(engine, lambda share: tell(int(70 * share), 100), only=makespan)
    # Rounded up to ticks T_min may pass the deadline by a hair: the fastest plan is then the only one.
    deadline = np.array([min(max(float(makespan), samples[0].makespan), samples[-1].makespan)])
    frontier = _assemble(engine, samples, deadline)
    tell(100, 100)
    return frontier[0]
