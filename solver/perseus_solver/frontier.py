"""The public door of the mathematics: the whole frontier of a problem, or the best plan for one deadline.

Joins the engine (relaxation and bounds) and the search for plans (``pool``); decides which deadlines to plan for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from perseus_solver.certify import Certificate
from perseus_solver.errors import Infeasible, InvalidProblem
from perseus_solver.kinds import Floats
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frontier, Point
from perseus_solver.model.simulator import Simulator
from perseus_solver.relaxation.curve import Engine, trace
from perseus_solver.search.pool import Pool

Progress = Callable[[int, int], None]

_TRACED, _DONE = 60, 100  # progress, percent
_ROUNDED_PER_POINT = 1.15
_SHORTER = np.array([0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04])


def solve_frontier(problem: Problem, points: int = 100, *, progress: Progress | None = None) -> Frontier:
    """All Pareto-optimal plans, sampled: from T_min to T*, each with a certified gap.

    Args:
        problem: what to plan.
        points: how many plans to aim for. More are computed than kept, dominated ones are dropped.
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
    report = progress or _silent
    report(0, _DONE)
    engine = Engine(problem)
    samples = trace(engine, lambda share: report(int(_TRACED * share), _DONE))
    pool = Pool(engine, samples)
    # Some plans turn out dominated by others: round a few more than wanted.
    deadline_ticks = _deadlines(pool, engine, math.ceil(points * _ROUNDED_PER_POINT))
    pool.add_single_clocks(0.0)
    pool.add(deadline_ticks, lambda share: report(int(_TRACED + (_DONE - _TRACED) * share), _DONE))
    pool.search(deadline_ticks)
    pool.move(deadline_ticks)
    frontier = pool.frontier(points)
    report(_DONE, _DONE)
    return frontier, tuple(engine.certificate(proof.edge, proof.through) for proof in pool.proofs)


def solve_deadline(problem: Problem, deadline_s: float, *, progress: Progress | None = None) -> Point:
    """The cheapest plan we can find that ends by a deadline; beyond T*, the T* plan.

    Raises:
        Infeasible: the deadline is shorter than T_min.
        InvalidProblem: the deadline is not a positive finite number, or the precedence has a cycle.
    """
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise InvalidProblem(f"deadline_s must be a positive finite number, not {deadline_s}")
    report = progress or _silent
    report(0, _DONE)
    engine = Engine(problem)
    t_min_s = _fastest_s(engine)
    if deadline_s < t_min_s:
        raise Infeasible(deadline_s, t_min_s)
    # Rounded up to ticks, T_min may pass the deadline by a hair: then the fastest plan is the only one.
    makespan_ticks = math.floor((deadline_s - problem.overhead_s) / engine.tables.tick_s)
    makespan_ticks = min(max(makespan_ticks, int(engine.fastest_ticks)), int(engine.slowest_ticks))
    samples = trace(engine, lambda share: report(int(_TRACED * share), _DONE), only_ticks=makespan_ticks)
    pool = Pool(engine, samples, exact=True)
    # A plan for a slightly shorter deadline sometimes turns out cheaper.
    shorter_ticks = np.floor(makespan_ticks - (makespan_ticks - engine.fastest_ticks) * _SHORTER)
    # A plan may end in time though its durations, rounded up to ticks, do not: less than a tick for each instruction
    # and delay on a path. Plans made for that little more are kept where the exact simulation lets them pass.
    longer_ticks = makespan_ticks + 2.0 * len(engine.graph.levels)
    pool.add_single_clocks(makespan_ticks)
    deadline_ticks = np.unique(np.append(shorter_ticks, longer_ticks))
    pool.add(deadline_ticks, lambda _share: None)
    pool.search(deadline_ticks)
    pool.exchange(deadline_s)
    pool.move_exactly(deadline_s)
    frontier = pool.frontier()
    report(_DONE, _DONE)
    return frontier[frontier.lookup(deadline_s)]


def _silent(_done: int, _total: int) -> None:
    """No one listens."""


def _fastest_s(engine: Engine) -> float:
    """T_min: every instruction at its fastest option."""
    choice = engine.tables.row[engine.table_of, 0][engine.graph.rank]
    return float(np.asarray(Simulator(engine.problem).run(choice).iteration_time_s))


def _deadlines(pool: Pool, engine: Engine, points: int) -> Floats:
    """Makespans in ticks, T_min first, spread evenly over the curve; time and energy count alike."""
    time_ticks = np.unique(np.append(pool.curve.makespan_ticks, engine.fastest_ticks))
    seconds = time_ticks * engine.tables.tick_s + engine.problem.overhead_s
    blocking_w = engine.problem.blocking_power_w * engine.problem.stages
    energy = pool.bound_j(seconds) - blocking_w * seconds
    width, height = time_ticks[-1] - time_ticks[0], energy[0] - energy[-1]
    if width <= 0 or points == 1:
        return time_ticks[:1]
    along = (time_ticks - time_ticks[0]) / width + (energy[0] - energy) / max(height, 1e-300)
    even: Floats = np.interp(np.linspace(0.0, along[-1], points), along, time_ticks)
    return np.floor(even)
