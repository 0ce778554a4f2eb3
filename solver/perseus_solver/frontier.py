"""The public door of the mathematics: the whole frontier of a problem, or the best plan for one deadline.

Joins the engine (relaxation and bounds), the rounding and the exact simulator; decides which deadlines to round for and
which plans to keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from perseus_solver.certify import Certificate, iteration_bound
from perseus_solver.engine.curve import Engine, Sample, trace
from perseus_solver.errors import Infeasible, InvalidProblem
from perseus_solver.problem import Floats, Problem
from perseus_solver.result import DEFAULT_GAP, Frontier, Point, verdict
from perseus_solver.rounding import Curve, Rounder, exchange, improve, round_plans
from perseus_solver.simulate import Choice, Simulator
from perseus_solver.switches import clock_changes

Progress = Callable[[int, int], None]
Index = npt.NDArray[np.intp]

_TRACED, _DONE = 60, 100  # progress, percent
_GOOD_GAP = 1e-3
"""Plans within this of their bound are left as they are; for the others more ways of rounding are tried."""
_CELLS, _LARGE = 4_000_000, 2_000_000
"""Instructions × plans rounded at once, a few hundred megabytes of work arrays; beyond so many in all, in one pass."""
_SURPLUS = 1.15
_SHORTER = np.array([0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04])
_SMALL, _TRIES, _ROUNDS = 400, 48, 6
"""Local search is for graphs of at most this many instructions, where whole options weigh most: so many trials a
round.
"""
_STARTS, _LONG = 2, 12
"""For a single deadline it begins from so many plans, and takes more rounds."""
_NEAR = [(0, 0), (1, 1)]
_WIDE = [(2, 2), (0, 1), (1, 0), (4, 4), (0, 3), (3, 0), (0, 6), (6, 0), (7, 7)]
"""Spans tried for every deadline, and where the result is poor (see `round_plans`)."""


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
    tell = progress or _silent
    tell(0, _DONE)
    engine = Engine(problem)
    samples = trace(engine, lambda share: tell(int(_TRACED * share), _DONE))
    plans = _Plans(engine, samples)
    # Some plans turn out dominated by others: round a few more than wanted.
    deadline = _deadlines(plans, engine, math.ceil(points * _SURPLUS))
    plans.add_single_clocks(0.0)
    plans.add(deadline, lambda share: tell(int(_TRACED + (_DONE - _TRACED) * share), _DONE))
    frontier = plans.frontier(points)
    tell(_DONE, _DONE)
    return frontier, tuple(engine.certificate(proof.edge, proof.through) for proof in plans.proofs)


def solve_deadline(problem: Problem, deadline_s: float, *, progress: Progress | None = None) -> Point:
    """The cheapest plan we can find that ends by a deadline; beyond T*, the T* plan.

    Raises:
        Infeasible: the deadline is shorter than T_min.
        InvalidProblem: the deadline is not a positive finite number, or the precedence has a cycle.
    """
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise InvalidProblem(f"deadline_s must be a positive finite number, not {deadline_s}")
    tell = progress or _silent
    tell(0, _DONE)
    engine = Engine(problem)
    t_min_s = _fastest_s(engine)
    if deadline_s < t_min_s:
        raise Infeasible(deadline_s, t_min_s)
    # Rounded up to ticks, T_min may pass the deadline by a hair: then the fastest plan is the only one.
    makespan = math.floor((deadline_s - problem.overhead_s) / engine.tables.tick_s)
    makespan = min(max(makespan, int(engine.fastest)), int(engine.slowest))
    samples = trace(engine, lambda share: tell(int(_TRACED * share), _DONE), only=makespan)
    plans = _Plans(engine, samples, exact=True)
    # A plan for a slightly shorter deadline sometimes turns out cheaper.
    shorter = np.floor(makespan - (makespan - engine.fastest) * _SHORTER)
    # A plan may end in time though its durations, rounded up to ticks, do not: less than a tick for each instruction
    # and delay on a path. Plans made for that little more are kept where the exact simulation lets them pass.
    longer = makespan + 2.0 * len(engine.graph.levels)
    plans.add_single_clocks(makespan)
    plans.add(np.unique(np.append(shorter, longer)), lambda _share: None)
    frontier = plans.frontier()
    tell(_DONE, _DONE)
    return frontier[frontier.lookup(deadline_s)]


def _silent(_done: int, _total: int) -> None:
    """No one listens."""


def _fastest_s(engine: Engine) -> float:
    """T_min: every instruction at its fastest option."""
    choice = engine.tables.row[engine.table_of, 0][engine.graph.rank]
    return float(np.asarray(Simulator(engine.problem).run(choice).iteration_time_s))


class _Plans:
    """Rounded plans, re-simulated; collects candidates and keeps the frontier."""

    def __init__(self, engine: Engine, samples: list[Sample], *, exact: bool = False) -> None:
        """Prepare; ``exact``: a plan that ends before its deadline has not done well because its own bound is near."""
        self._engine, self._exact = engine, exact
        self._rounder = Rounder(engine.tables, engine.graph, engine.table_of)
        self._simulator = Simulator(engine.problem)
        self._columns: list[Index] = []  # kept for `_best_by`, on small graphs only
        self._choice: list[Choice] = []
        self._time_s: list[Floats] = []
        self._energy_j: list[Floats] = []
        self._learn(samples)

    def _learn(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.proofs = sorted([*samples, *self._engine.mixed(samples)], key=lambda s: -s.price)
        # Only optimal flows determine a schedule; the rhythm's are rounded, so those in between serve as well.
        flows = self.proofs if self._engine.steady else samples
        duration, makespan = self._engine.schedules(flows)
        finish = self._engine.graph.finish(duration)[:-1]
        order = np.argsort(makespan, kind="stable")
        through = np.stack([s.through for s in flows], axis=1)[self._engine.graph.order].astype(np.float64)
        self.curve = Curve((finish - duration)[:, order], finish[:, order], through[:, order], makespan[order])

    def bound_j(self, time_s: Floats) -> Floats:
        """The best proven bound on iteration energy."""
        return iteration_bound(self._engine.problem, [s.bound for s in self.proofs], time_s)

    def add(self, deadline: Floats, report: Callable[[float], None]) -> None:
        """Round for these deadlines (ticks), a few at a time; where the result is poor, look closer."""
        n = self._engine.graph.n
        size = max(_CELLS // n, 1)
        large = n * len(deadline) > _LARGE
        gaps = []
        for begin in range(0, len(deadline), size):
            self._round(deadline[begin : begin + size], _NEAR[:1] if large else _NEAR, quick=large)
            gaps.append(self._gap(deadline[begin : begin + size]))
            report(min(begin + size, len(deadline)) / len(deadline))
        if large:
            return
        gap = np.concatenate(gaps)
        for worst in (_GOOD_GAP, DEFAULT_GAP):
            poor = np.flatnonzero(gap > worst)
            if len(poor):
                self._learn(self._engine.refine(self.samples, deadline[poor]))
                self._round(deadline[poor], _WIDE)
                gap[poor] = np.minimum(gap[poor], self._gap(deadline[poor]))
        if n > _SMALL:
            return
        if self._exact:  # the last two are one deadline: it deserves every trial, from several plans
            starts = [self._cheapest(end, _STARTS) for end in deadline[-2:].tolist()]
            target = np.repeat(deadline[-2:], [start.shape[1] for start in starts])
            best, tries, rounds = np.concatenate(starts, axis=1), n, _LONG
        else:
            target, tries, rounds = deadline[gap > _GOOD_GAP], min(n, _TRIES), _ROUNDS
            best = self._best_by(target)
        size = max(_CELLS // (n * tries), 1)
        for begin in range(0, best.shape[1], size):
            part = slice(begin, begin + size)
            self._keep(exchange(self._rounder, best[:, part], target[part], tries, rounds))

    def add_single_clocks(self, deadline: float) -> None:
        """Every plan with one clock for all, what it leaves unused given away: so no such plan beats ours."""
        engine = self._engine
        clocks = np.unique(np.concatenate([o.frequency_mhz for o in engine.problem.options]))
        if len(clocks) * engine.graph.n > _LARGE:
            return
        tables = engine.tables
        position = np.empty((len(tables.size), len(clocks)), dtype=np.intp)
        for k, options in enumerate(engine.problem.options):
            nearest = np.abs(options.frequency_mhz[:, None] - clocks).argmin(axis=0)
            efficient_s = tables.time_s[k, : tables.size[k]]
            position[k] = np.maximum(efficient_s.searchsorted(options.time_s[nearest], side="right") - 1, 0)
        columns = position[engine.table_of]
        limit = np.where(self._rounder.makespan(columns) <= deadline, deadline, 0.0)
        self._keep(improve(self._rounder, columns, limit))

    def _best_by(self, deadline: Floats) -> Index:
        """The cheapest plan so far for each deadline, as columns."""
        columns = np.concatenate(self._columns, axis=1)
        makespan, energy = self._rounder.makespan(columns), self._rounder.energy_j(columns)
        fits = makespan[:, None] <= deadline
        return columns[:, np.where(fits, energy[:, None], np.inf).argmin(axis=0)]

    def _cheapest(self, deadline: float, count: int) -> Index:
        """Different plans that meet a deadline, as columns, the cheapest first; fewer if there are not as many."""
        columns = np.concatenate(self._columns, axis=1)
        columns = columns[:, self._rounder.makespan(columns) <= deadline]
        _, first = np.unique(self._rounder.energy_j(columns), return_index=True)
        return columns[:, first[:count]]

    def _round(self, deadline: Floats, spans: list[tuple[int, int]], *, quick: bool = False) -> None:
        self._keep(round_plans(self._rounder, self.curve, deadline, spans, quick=quick))

    def _keep(self, columns: Index) -> None:
        engine = self._engine
        if engine.graph.n <= _SMALL:
            self._columns.append(columns)
        choice = engine.tables.row[engine.table_of[:, None], columns][engine.graph.rank].T.astype(np.int32)
        time_s, energy_j = self._simulator.totals(choice)
        self._choice.append(choice)
        self._time_s.append(np.atleast_1d(time_s))
        self._energy_j.append(np.atleast_1d(energy_j))

    def _gap(self, deadline: Floats) -> Floats:
        """How far the last plans are from the bound at their own time, or at their deadline (``exact``)."""
        problem = self._engine.problem
        time_s, energy_j = self._time_s[-1], self._energy_j[-1]
        if self._exact:
            end_s = np.maximum(deadline * self._engine.tables.tick_s + problem.overhead_s, time_s)
            energy_j = energy_j + problem.blocking_power_w * problem.stages * (end_s - time_s)
            time_s = end_s
        gap: Floats = energy_j / self.bound_j(time_s) - 1.0
        return gap

    def frontier(self, points: int | None = None) -> Frontier:
        """The plans that no other dominates; at most ``points``, the worst proven left out first, never two
        neighbours.
        """
        problem = self._engine.problem
        time_s, energy_j = np.concatenate(self._time_s), np.concatenate(self._energy_j)
        choice = np.concatenate(self._choice)
        effective = energy_j - problem.blocking_power_w * problem.stages * time_s
        order = np.lexsort((effective, time_s))
        best = np.minimum.accumulate(effective[order])
        kept = order[np.append(True, best[1:] < best[:-1])]
        bound = np.minimum(self.bound_j(time_s[kept]), energy_j[kept])
        gap = energy_j[kept] / bound - 1.0
        if points is not None and len(kept) > points:
            chosen = _thin(gap, points)
            kept, bound, gap = kept[chosen], bound[chosen], gap[chosen]
        clocks = np.zeros((len(problem.options), max(len(o.frequency_mhz) for o in problem.options)), dtype=np.uint16)
        for row, options in zip(clocks, problem.options, strict=True):
            row[: len(options.frequency_mhz)] = options.frequency_mhz
        frequency = clocks[problem.option_of, choice[kept]]
        return Frontier(
            time_s=time_s[kept],
            energy_j=energy_j[kept],
            energy_lower_bound_j=bound,
            statuses=tuple(verdict(g) for g in gap.tolist()),
            frequencies_mhz=frequency,
            stage_offset=problem.stage_offset,
            clock_changes=clock_changes(frequency, problem.stage_offset),
            blocking_power_w=problem.blocking_power_w,
        )


def _thin(gap: Floats, points: int) -> Index:
    """Which ``points`` to keep: both ends, and no two neighbours dropped unless more than every other must go."""
    keep = np.ones(len(gap), dtype=bool)
    for apart in (True, False):
        for i in np.argsort(-gap[1:-1], kind="stable") + 1:
            if keep.sum() <= points:
                break
            if keep[i] and not (apart and not (keep[i - 1] and keep[i + 1])):
                keep[i] = False
    return np.flatnonzero(keep)


def _deadlines(plans: _Plans, engine: Engine, points: int) -> Floats:
    """Makespans in ticks, T_min first, spread evenly over the curve; time and energy count alike."""
    time = np.unique(np.append(plans.curve.makespan, engine.fastest))
    seconds = time * engine.tables.tick_s + engine.problem.overhead_s
    blocking_w = engine.problem.blocking_power_w * engine.problem.stages
    energy = plans.bound_j(seconds) - blocking_w * seconds
    width, height = time[-1] - time[0], energy[0] - energy[-1]
    if width <= 0 or points == 1:
        return time[:1]
    along = (time - time[0]) / width + (energy[0] - energy) / max(height, 1e-300)
    even: Floats = np.interp(np.linspace(0.0, along[-1], points), along, time)
    return np.floor(even)
