"""Solve a planning problem: the whole frontier, or the cheapest plan for one deadline.

The relaxation proves a lower bound on the energy for every iteration time; the search rounds its solutions to measured
clocks and improves them. This module chooses the deadlines for which plans are made and joins the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from perseus_solver.certify import Certificate
from perseus_solver.errors import Infeasible, InvalidProblem
from perseus_solver.kinds import Floats, latest_s
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frontier, Point
from perseus_solver.model.simulator import Simulator
from perseus_solver.relaxation.curve import Engine, trace_curve
from perseus_solver.search.placement import distance
from perseus_solver.search.pool import Pool

Progress = Callable[[int, int], None]

_TRACED, _DONE = 60, 100  # progress, percent
_ROUNDED_PER_POINT = 1.15
"""Deadlines for which plans are made, for each point wanted: some plans turn out to be dominated by others."""
_STEP, _LEAST_POINTS, _MOST_POINTS, _ROWS = 7e-4, 100, 400, 40_000_000
"""By default, neighbouring points differ by this share of energy, so that a step adds less to the deployed gap than the
search leaves; but no fewer and no more points than these, and no more instructions in all of them.
"""
_SHORTER = np.array([0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04])
"""Shares of the way from the deadline to T_min for which plans are made as well: a plan for a slightly shorter deadline
is sometimes cheaper.
"""


def solve_frontier(problem: Problem, points: int | None = None, *, progress: Progress | None = None) -> Frontier:
    """Compute plans on the time-energy frontier, from T_min to T*, each with a certified gap.

    The frontier is that of Perseus (SOSP 2024, section 4).

    Args:
        problem: the problem to plan.
        points: the largest number of plans to return, placed so that the worst deployed gap is least (see
            `perseus_solver.model.deployed`); None: so many that the steps between them add little to the gaps.
        progress: called with (done, total) while the work proceeds.

    Returns:
        The frontier, at most ``points`` plans, sorted by iteration time.

    Raises:
        InvalidProblem: ``points`` is not positive, or the precedence has a cycle.
    """
    return solve_certified(problem, points, progress=progress)[0]


def solve_certified(
    problem: Problem, points: int | None = None, *, progress: Progress | None = None
) -> tuple[Frontier, tuple[Certificate, ...]]:
    """Compute the frontier together with the dual flows that prove its bounds.

    Args:
        problem: the problem to plan.
        points: the largest number of plans to return; None: as in `solve_frontier`.
        progress: called with (done, total) while the work proceeds.

    Returns:
        The frontier, and the certificates that `perseus_solver.certify.check_frontier` accepts for it.

    Raises:
        InvalidProblem: ``points`` is not positive, or the precedence has a cycle.
    """
    if points is not None and points < 1:
        raise InvalidProblem(f"points must be 1 or more, not {points}")
    report = progress or _silent
    report(0, _DONE)
    engine = Engine(problem)
    samples = trace_curve(engine, lambda share: report(int(_TRACED * share), _DONE))
    pool = Pool(engine, samples)
    deadline_ticks, most = _deadlines(pool, engine, points)
    pool.add_single_clocks(0.0)
    pool.add(deadline_ticks, lambda share: report(int(_TRACED + (_DONE - _TRACED) * share), _DONE))
    pool.search(deadline_ticks)
    pool.move(deadline_ticks)
    frontier = pool.frontier(most)
    report(_DONE, _DONE)
    return frontier, tuple(engine.certificate(proof.edge, proof.through) for proof in pool.proofs)


def solve_deadline(
    problem: Problem, deadline_s: float, *, known: Frontier | None = None, progress: Progress | None = None
) -> Point:
    """Compute the plan of least energy found that ends by a deadline; more time never gives a dearer plan.

    Energy is that of the iteration alone: what waiting until the deadline would take is not counted. From the time of
    least energy on, a later deadline changes nothing.

    Args:
        problem: the problem to plan.
        deadline_s: longest iteration time allowed, seconds, overhead included. A plan that takes the same time up to
            `perseus_solver.kinds.SAME_TIME` is in time.
        known: plans of the same problem that are known already; the result is not dearer than any of them in time.
        progress: called with (done, total) while the work proceeds.

    Returns:
        A plan with its exact time and energy, and the proven bound on all plans that end by the deadline.

    Raises:
        Infeasible: the deadline is shorter than T_min.
        InvalidProblem: the deadline is not a positive finite number, the precedence has a cycle, or ``known`` is of
            another problem.
    """
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise InvalidProblem(f"deadline_s must be a positive finite number, not {deadline_s}")
    report = progress or _silent
    report(0, _DONE)
    engine = Engine(problem)
    t_min_s = _fastest_s(engine)
    if latest_s(deadline_s) < t_min_s:
        raise Infeasible(deadline_s, t_min_s)
    # Rounded up to ticks, T_min may exceed the deadline by a few: then only the fastest plan remains.
    most_ticks = math.floor((latest_s(deadline_s) - problem.overhead_s) / engine.tables.tick_s)
    most_ticks = min(max(most_ticks, int(engine.fastest_ticks)), int(engine.slowest_ticks))
    end_ticks = min(float(most_ticks), math.ceil(engine.least_energy_ticks()))
    samples = trace_curve(engine, lambda share: report(int(_TRACED * share), _DONE), only_ticks=end_ticks)
    pool = Pool(engine, samples, exact=True)
    room_ticks = (end_ticks - engine.fastest_ticks) * _SHORTER
    # Around least energy, a later plan may take as little as one that ends there.
    deadline_ticks = np.unique(
        np.floor(np.append(end_ticks - room_ticks, np.minimum(end_ticks + room_ticks, most_ticks)))
    )
    if known is not None:
        pool.add_known(known)
    pool.add_single_clocks(end_ticks)
    pool.add(deadline_ticks, lambda _share: None)
    pool.search(end_ticks)
    pool.move_exactly(end_ticks)
    report(_DONE, _DONE)
    return pool.best_by(deadline_s)


def _silent(_done: int, _total: int) -> None:
    """Report nothing."""


def _fastest_s(engine: Engine) -> float:
    """Return T_min in seconds: every instruction at its fastest option."""
    choice = engine.tables.row[engine.table_of, 0][engine.graph.rank]
    return float(np.asarray(Simulator(engine.problem).run(choice).iteration_time_s))


def _deadlines(pool: Pool, engine: Engine, points: int | None) -> tuple[Floats, int]:
    """Return deadlines in ticks, T_min first, between which a job would lose the same; and how many points to keep."""
    time_ticks = np.unique(np.append(pool.curve.makespan_ticks, engine.fastest_ticks))
    seconds = time_ticks * engine.tables.tick_s + engine.problem.overhead_s
    waiting_w = engine.problem.blocking_power_w * engine.problem.stages
    along = distance(seconds, pool.bound_j(seconds), waiting_w)
    if points is None:
        points = min(max(math.ceil(along[-1] / _STEP), _LEAST_POINTS), _MOST_POINTS, max(_ROWS // engine.graph.n, 1))
    if along[-1] <= 0 or points == 1:
        return time_ticks[:1], points
    even: Floats = np.interp(np.linspace(0.0, along[-1], math.ceil(points * _ROUNDED_PER_POINT)), along, time_ticks)
    return np.unique(np.floor(even)), points
