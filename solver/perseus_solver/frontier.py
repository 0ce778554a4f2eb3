"""Solve a planning problem: the whole frontier, or the cheapest plan for one deadline.

The relaxation proves a lower bound on the energy for every iteration time; the search rounds its solutions to measured
clocks and improves them. This module chooses the deadlines for which plans are made and joins the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from perseus_solver.certify import Bound, Certificate
from perseus_solver.errors import Infeasible, InvalidProblem
from perseus_solver.kinds import Floats, latest_s
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frontier, Point
from perseus_solver.model.simulator import Simulator
from perseus_solver.relaxation.curve import Engine
from perseus_solver.search.placement import distance
from perseus_solver.search.pool import Pool

Progress = Callable[[int, int], None]

_TRACED, _DONE = 60, 100  # progress, percent
_SPACING, _LEAST_DEADLINES, _MOST_DEADLINES = 6e-4, 115, 460
"""Between neighbouring deadlines for which plans are made, the bound falls by this share of energy; but no fewer and no
more deadlines than these. Mixtures find other plans between them.
"""
_STEP, _LEAST_POINTS, _MOST_POINTS, _ROWS = 1e-4, 100, 1_500, 40_000_000
"""By default, neighbouring points differ by this share of energy, so that a step adds less to the deployed gap than the
search leaves; but no fewer and no more points than these, and no more instructions in all of them.
"""
_SHORTER = np.array([0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04])
"""Shares of the way from the deadline to T_min for which plans are made as well: a plan for a slightly shorter deadline
is sometimes cheaper.
"""


class Planner:
    """One problem, with all plans that were found for it: no answer is dearer than a plan known for that time.

    Every question improves the plans for later ones. The functions of this module ask one question each.
    """

    def __init__(self, problem: Problem) -> None:
        """Prepare the problem; nothing is solved yet.

        Args:
            problem: the problem to plan.

        Raises:
            InvalidProblem: the precedence has a cycle.
        """
        self._problem, self._engine = problem, Engine(problem)
        self._pool: Pool | None = None
        self._planned = 0

    @property
    def problem(self) -> Problem:
        """The problem that is planned."""
        return self._problem

    @property
    def t_min_s(self) -> float:
        """Iteration time with every instruction at its fastest option, seconds."""
        engine = self._engine
        choice = engine.tables.row[engine.table_of, 0][engine.graph.rank]
        return float(np.asarray(Simulator(self._problem).run(choice).iteration_time_s))

    @property
    def proofs(self) -> tuple[Certificate, ...]:
        """The dual flows that prove all bounds so far."""
        proofs = self._pool.proofs if self._pool else []
        return tuple(self._engine.prover.certificate(proof.edge, proof.through) for proof in proofs)

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The lines below all plans that are proven so far; see `perseus_solver.certify`."""
        return tuple(proof.bound for proof in self._pool.proofs) if self._pool else ()

    def frontier(self, points: int | None = None, *, progress: Progress | None = None) -> Frontier:
        """Compute plans on the frontier; see `solve_frontier`.

        Args:
            points: the largest number of plans to return; None: as many as are needed.
            progress: called with (done, total) while the work proceeds.

        Returns:
            The frontier.

        Raises:
            InvalidProblem: ``points`` is not positive.
        """
        if points is not None and points < 1:
            raise InvalidProblem(f"points must be 1 or more, not {points}")
        report = progress or _silent
        pool = self._explored(points or 0, report)
        report(_DONE, _DONE)
        return pool.frontier(self._count(_STEP, _LEAST_POINTS, _MOST_POINTS) if points is None else points)

    def plan(self, deadline_s: float, *, progress: Progress | None = None) -> Point:
        """Compute the plan of least energy found that ends by a deadline; see `solve_deadline`.

        Args:
            deadline_s: longest iteration time allowed, seconds, overhead included.
            progress: called with (done, total) while the work proceeds.

        Returns:
            A plan, and the proven bound on all plans that end by the deadline.

        Raises:
            Infeasible: the deadline is shorter than T_min.
            InvalidProblem: the deadline is not a positive finite number.
        """
        if not (math.isfinite(deadline_s) and deadline_s > 0):
            raise InvalidProblem(f"deadline_s must be a positive finite number, not {deadline_s}")
        if latest_s(deadline_s) < self.t_min_s:
            raise Infeasible(deadline_s, self.t_min_s)
        report = progress or _silent
        engine, pool = self._engine, self._explored(0, report)
        # Rounded up to ticks, T_min may exceed the deadline by a few: then only the fastest plan remains.
        most_ticks = math.floor((latest_s(deadline_s) - self._problem.overhead_s) / engine.tables.tick_s)
        most_ticks = min(max(most_ticks, int(engine.fastest_ticks)), int(engine.slowest_ticks))
        end_ticks = min(float(most_ticks), math.ceil(engine.least_energy_ticks()))
        room_ticks = (end_ticks - engine.fastest_ticks) * _SHORTER
        # Around least energy, a later plan may take as little as one that ends there.
        around_ticks = np.append(end_ticks - room_ticks, np.minimum(end_ticks + room_ticks, most_ticks))
        pool.improve_at(end_ticks, np.unique(np.floor(around_ticks)))
        report(_DONE, _DONE)
        return pool.best_by(deadline_s)

    def _explored(self, points: int, report: Progress) -> Pool:
        """Return the pool with plans along the whole frontier; more are added if more points are wanted than before."""
        report(0, _DONE)
        if self._pool is None:
            samples = self._engine.relaxation.trace(lambda share: report(int(_TRACED * share), _DONE))
            self._pool = Pool(self._engine, samples)
            self._pool.add_single_clocks()
        pool = self._pool
        wanted = max(points, self._count(_SPACING, _LEAST_DEADLINES, _MOST_DEADLINES))
        if wanted > self._planned:
            deadline_ticks = _spread(*self._along(), wanted)
            pool.add(deadline_ticks, lambda share: report(int(_TRACED + (_DONE - _TRACED) * share), _DONE))
            self._planned = wanted
        return pool

    def _along(self) -> tuple[Floats, Floats]:
        """Return times in ticks, T_min first, and how much a job would lose on the way to each, as shares of energy."""
        assert self._pool is not None
        engine, problem = self._engine, self._problem
        time_ticks = np.unique(np.append(self._pool.curve.makespan_ticks, engine.fastest_ticks))
        seconds = time_ticks * engine.tables.tick_s + problem.overhead_s
        return time_ticks, distance(seconds, self._pool.bound_j(seconds), problem.blocking_power_w * problem.stages)

    def _count(self, step: float, least: int, most: int) -> int:
        """Return into how many steps the frontier divides, a share of energy each, within limits."""
        steps = math.ceil(float(self._along()[1][-1]) / step)
        return min(max(steps, least), most, max(_ROWS // self._engine.graph.n, 1))


def _spread(time_ticks: Floats, along: Floats, count: int) -> Floats:
    """Return so many deadlines in ticks, T_min first, between which a job would lose the same."""
    if along[-1] <= 0 or count == 1:
        return time_ticks[:1]
    return np.unique(np.floor(np.interp(np.linspace(0.0, along[-1], count), along, time_ticks)))


def solve_frontier(problem: Problem, points: int | None = None, *, progress: Progress | None = None) -> Frontier:
    """Compute plans on the time-energy frontier, from T_min to T*, each with a certified gap.

    The frontier is that of Perseus (SOSP 2024, section 4). Up to least energy it holds the best plans for deadlines;
    the part after that, up to T*, is only for pipelines that wait for a straggler.

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
    return Planner(problem).frontier(points, progress=progress)


def solve_deadline(problem: Problem, deadline_s: float, *, progress: Progress | None = None) -> Point:
    """Compute the plan of least energy found that ends by a deadline, never dearer than `solve_frontier`'s.

    Energy is that of the iteration alone: what waiting until the deadline would take is not counted. From the time of
    least energy on, a later deadline changes nothing. For many deadlines, use one `Planner`.

    Args:
        problem: the problem to plan.
        deadline_s: longest iteration time allowed, seconds, overhead included. A plan that takes the same time up to
            `perseus_solver.kinds.SAME_TIME` is in time.
        progress: called with (done, total) while the work proceeds.

    Returns:
        A plan with its exact time and energy, and the proven bound on all plans that end by the deadline.

    Raises:
        Infeasible: the deadline is shorter than T_min.
        InvalidProblem: the deadline is not a positive finite number, or the precedence has a cycle.
    """
    return Planner(problem).plan(deadline_s, progress=progress)


def _silent(_done: int, _total: int) -> None:
    """Report nothing."""
