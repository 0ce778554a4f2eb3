"""All plans found so far, with their exact figures and bounds, and the ways to find better ones.

Relaxed timetables are rounded where they end by themselves (``rounding``). Of the plans that result, those on the lower
convex hull are searched for better ones (``recreate``) and mixed for all deadlines, in turn, as often as the budget of
work allows. Every plan is simulated exactly before it counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from perseus_solver.certify import deadline_bound, iteration_bound
from perseus_solver.kinds import SAME_TIME, Floats, Index, latest_s
from perseus_solver.model.result import Frontier, Point, status_of
from perseus_solver.model.simulator import Choice, Simulator
from perseus_solver.relaxation.curve import Engine, Sample
from perseus_solver.relaxation.tables import lower_hull, undominated
from perseus_solver.search.cuts import Cuts
from perseus_solver.search.placement import chosen
from perseus_solver.search.recreate import SWEEPS as RECREATE_SWEEPS
from perseus_solver.search.recreate import Recreate
from perseus_solver.search.rounding import Curve, Rounder, improve, round_plans, sweeps
from perseus_solver.switching import clock_changes

Columns = npt.NDArray[np.int16]

_CELLS = 4_000_000
"""Instructions × plans swept at once, a few hundred megabytes of work arrays."""
_WORK, _WORK_ONE = 3e7, 5e6
"""The budgets of work, whatever the size of the graph: instructions × plans × sweeps. Along the frontier it is about
two seconds. A larger graph gets fewer turns, never less than one mixture for each deadline.
"""
_TURNS = 4
"""Turns after which plans hardly improve."""
_NEAREST, _NEAR = [(0, 0)], [(0, 0), (1, 1)]
"""Spans that are tried where plans are mixed, and for relaxed timetables; see `round_plans`."""
_FORTH, _BACK, _BOTH = (False,), (True,), (False, True)
_SEARCHED = 0.25
"""Share of the deadlines, those with the largest gaps, that are searched, and mixed from relaxed timetables."""
_STARTS, _TRIES, _ROUNDS = 2, 8, 8
"""A search begins at so many plans for each deadline, with so many trials in a round, and so many rounds."""
_SEARCH_LAST, _SEARCH_ONE, _REFINED = (6, 8, 30), (4, 16, 24), 2
"""The same for the worst deadlines, with what the turns leave of the budget, and for a single deadline; and how many
prices are solved for its bound.
"""
_MIDDLE = 2_000
"""Instructions of the largest graphs of which parts are moved for a single deadline."""
_MOVED, _MOVED_ROWS = 4, 3_072
"""Plans of which parts are moved, and their instructions: the second best may lead further than the best."""


class Pool:
    """Rounded plans, a column each, with their exact figures.

    Attributes:
        samples: the samples of the relaxed frontier.
        proofs: the samples and the mixtures between them.
        curve: the relaxed timetables that are rounded.
    """

    def __init__(self, engine: Engine, samples: list[Sample]) -> None:
        """Prepare the pool.

        Args:
            engine: the problem.
            samples: samples of its relaxed frontier.
        """
        self._engine = engine
        self._rounder = Rounder(engine.tables, engine.graph, engine.table_of, engine.kind)
        self._simulator = Simulator(engine.problem)
        self._columns: list[Columns] = []
        self._improved: list[float] = []
        self._left = 0.0
        self._makespan_ticks, self._time_s, self._energy_j, self._effective_j = (np.zeros(0) for _ in range(4))
        self._use_samples(samples)

    def _use_samples(self, samples: list[Sample]) -> None:
        """Replace the samples, and the timetables and proofs that follow from them."""
        self.samples = samples
        self.proofs = sorted([*samples, *self._engine.mixed(samples)], key=lambda s: -s.price)
        flows = self.proofs
        duration_ticks, makespan_ticks = self._engine.timetables(flows)
        finish_ticks = self._engine.graph.finish_ticks(duration_ticks)[:-1]
        order = np.argsort(makespan_ticks, kind="stable")
        through = np.stack([s.through[self._engine.alike] for s in flows], axis=1).astype(np.float64)
        self.curve = Curve(
            (finish_ticks - duration_ticks)[:, order], finish_ticks[:, order], through[:, order], makespan_ticks[order]
        )

    def best_by(self, deadline_s: float) -> Point:
        """Return the plan of least energy among those in time, with what is proven of all plans in time."""
        problem = self._engine.problem
        in_time = np.flatnonzero(self._time_s <= latest_s(deadline_s))
        best = in_time[np.lexsort((self._time_s[in_time], self._energy_j[in_time]))[:1]]
        bounds = [s.bound for s in self.proofs]
        bound_j = deadline_bound(problem, bounds, np.array([max(deadline_s, float(self._time_s[best[0]]))]))
        if problem.instructions == 1:  # every option can be tried, which proves more than a mixture of them
            time_s, energy_j = self._simulator.totals(np.arange(len(problem.options[0].time_s))[:, None])
            bound_j = np.maximum(bound_j, energy_j[time_s <= latest_s(deadline_s)].min())
        return self._as_frontier(best, np.minimum(bound_j, self._energy_j[best]))[0]

    def bound_j(self, time_s: Floats) -> Floats:
        """Return the best proven bound on the iteration energy at each iteration time in seconds."""
        return iteration_bound(self._engine.problem, [s.bound for s in self.proofs], time_s)

    def add(self, deadline_ticks: Floats, report: Callable[[float], None]) -> None:
        """Make plans for these deadlines, as good as the budget of work allows.

        Args:
            deadline_ticks: float[deadlines].
            report: called with the share of the work that is done.
        """
        own_ticks = np.unique(np.append(np.floor(self.curve.makespan_ticks), self._engine.fastest_ticks))
        thorough = self._engine.graph.n * len(own_ticks) * sweeps(_NEAR, _BOTH) <= _WORK / 2
        spans, ways = (_NEAR, _BOTH) if thorough else (_NEAREST, _BACK)
        self._left = _WORK
        self._round(self.curve, own_ticks, spans, ways)
        self._left = max(self._left, self._engine.graph.n * len(deadline_ticks) * sweeps(_NEAREST, _BACK))
        self._improve_all(deadline_ticks, _TURNS, report)

    def _improve_all(self, deadline_ticks: Floats, turns: int, report: Callable[[float], None]) -> None:
        """Search plans and mix them for these deadlines, in turn, while the budget lasts."""
        self._round(self._plans(corners=True), self._worst(deadline_ticks), _NEAREST, _BACK)
        self._round(self._plans(corners=True), self._worst(deadline_ticks), _NEAREST, _FORTH)
        self._round(self.curve, self._worst(deadline_ticks, _SEARCHED), _NEAR, _BOTH)
        for turn in range(turns):
            report(turn / turns)
            self._recreate(self._makespan_ticks[self._best(corners=True)])
            self._recreate(self._worst(deadline_ticks, _SEARCHED))
            for ways in (_BACK, _FORTH):
                self._round(self._plans(corners=True), self._worst(deadline_ticks), _NEAREST, ways)
                self._round(self._plans(), self._worst(deadline_ticks), [(turn, turn)], ways)
        self._recreate(self._worst(deadline_ticks), *_SEARCH_LAST)

    def _worst(self, deadline_ticks: Floats, share: float = 1.0) -> Floats:
        """Return a share of the deadlines, those with the largest gaps first."""
        order = np.argsort(-self._gap(deadline_ticks), kind="stable")
        worst: Floats = deadline_ticks[order[: math.ceil(share * len(order))]]
        return worst

    def improve_at(self, end_ticks: float, around_ticks: Floats) -> None:
        """Improve the plans for a single deadline, with all that is too much work along the whole frontier.

        Args:
            end_ticks: the deadline.
            around_ticks: float[deadlines], near it, for which plans are made as well: a plan for a slightly shorter
                deadline is sometimes cheaper.
        """
        if any(abs(end_ticks - known) <= SAME_TIME * end_ticks for known in self._improved):
            return
        self._improved.append(end_ticks)
        end = np.array([end_ticks])
        samples = self.samples
        for _ in range(_REFINED):
            samples = self._engine.refine(samples, end)
        self._use_samples(samples)
        self._left = _WORK_ONE
        self._round(self.curve, around_ticks, _NEAR, _BOTH)
        self._improve_all(around_ticks, 1, lambda _share: None)
        self._store(improve(self._rounder, self._select(self._cheapest(self._makespan_ticks <= end_ticks, 8)), end))
        self._left = _WORK_ONE
        self._recreate(end, *_SEARCH_ONE)
        if self._engine.graph.n <= _MIDDLE:
            self._move_at(end_ticks)

    def _move_at(self, deadline_ticks: float) -> None:
        """Move whole parts of the timetable for one deadline.

        It starts from the cheapest plans in time, and from those that are slightly late and the cheapest for their
        time.
        """
        engine, cuts = self._engine, Cuts(self._rounder)
        starts = min(max(_MOVED_ROWS // engine.graph.n, 1), _MOVED)
        cheapest = self._cheapest(self._makespan_ticks <= deadline_ticks, starts)
        reach_ticks = cuts.reach(self._select(cheapest[:1])[:, 0])
        for which in cheapest[:, None]:
            self._improve(cuts, which, deadline_ticks)
        late_ticks = self._makespan_ticks - deadline_ticks
        near = np.flatnonzero((late_ticks > 0) & (late_ticks <= reach_ticks))
        price_j = self._price_w(deadline_ticks) * engine.tables.tick_s
        _, first = np.unique(self._effective_j[near] + price_j * late_ticks[near], return_index=True)
        for which in near[first[:starts], None]:
            self._improve(cuts, which, deadline_ticks)

    def _improve(self, cuts: Cuts, which: Index, deadline_ticks: float) -> None:
        """Try moves on one of the plans."""
        plan = cuts.shortened(self._select(which)[:, 0], deadline_ticks)
        if plan is not None:
            self._store(cuts.improved(plan, deadline_ticks)[:, None])

    def _price_w(self, deadline_ticks: float) -> float:
        """Return what a second less costs around a deadline, in watts, according to the bounds."""
        problem, tick_s = self._engine.problem, self._engine.tables.tick_s
        left, right, _ = self.curve.around(np.array([deadline_ticks]))
        ends_s = self.curve.makespan_ticks[[left[0], right[0]]] * tick_s + problem.overhead_s
        effective_j = self.bound_j(ends_s) - problem.blocking_power_w * problem.stages * ends_s
        return max(0.0, float(effective_j[0] - effective_j[1]) / max(float(ends_s[1] - ends_s[0]), tick_s))

    def add_single_clocks(self) -> None:
        """Add every plan with one clock for all, its slack distributed, so that no such plan beats the result."""
        engine = self._engine
        clocks = np.unique(np.concatenate([o.frequency_mhz for o in engine.problem.options]))
        tables = engine.tables
        position = np.empty((len(tables.size), len(clocks)), dtype=np.intp)
        for k, options in enumerate(engine.problem.options):
            nearest = np.abs(options.frequency_mhz[:, None] - clocks).argmin(axis=0)
            efficient_s = tables.time_s[k, : tables.size[k]]
            position[k] = np.maximum(efficient_s.searchsorted(options.time_s[nearest], side="right") - 1, 0)
        size = max(_CELLS // engine.graph.n, 1)
        for begin in range(0, len(clocks), size):
            columns = position[engine.table_of, begin : begin + size]
            self._store(improve(self._rounder, columns, np.zeros(columns.shape[1])))

    def _round(
        self, curve: Curve, deadline_ticks: Floats, spans: list[tuple[int, int]], ways: tuple[bool, ...]
    ) -> None:
        """Mix timetables of the curve for the first of these deadlines, as many as the budget allows."""
        deadline_ticks = self._affordable(deadline_ticks, sweeps(spans, ways))
        size = max(_CELLS // self._engine.graph.n, 1)
        for begin in range(0, len(deadline_ticks), size):
            self._store(round_plans(self._rounder, curve, deadline_ticks[begin : begin + size], spans, ways=ways))

    def _affordable(self, deadline_ticks: Floats, sweeps_each: int) -> Floats:
        """Return the first deadlines, as many as what is left of the budget pays for, and spend it."""
        work = self._engine.graph.n * sweeps_each
        found = deadline_ticks[: max(int(self._left // work), 0)]
        self._left -= work * len(found)
        return found

    def _best(self, *, corners: bool = False) -> Index:
        """Return the plans that no other dominates, in ticks; with ``corners``, those on the lower convex hull."""
        order = np.lexsort((self._effective_j, self._makespan_ticks))
        least = np.minimum.accumulate(self._effective_j[order])
        kept: Index = order[np.append(True, least[1:] < least[:-1])]
        return kept[lower_hull(self._makespan_ticks[kept], self._effective_j[kept])] if corners else kept

    def _plans(self, *, corners: bool = False) -> Curve:
        """Return the best plans as timetables, to be mixed like relaxed ones."""
        return self._rounder.curve(self._select(self._best(corners=corners)), self.curve)

    def _recreate(
        self, deadline_ticks: Floats, starts: int = _STARTS, tries: int = _TRIES, rounds: int = _ROUNDS
    ) -> None:
        """Search from the cheapest plans for the first of these deadlines, as many as the budget allows."""
        deadline_ticks = self._affordable(deadline_ticks, starts * tries * rounds * RECREATE_SWEEPS)
        if not len(deadline_ticks):
            return
        ends: list[float] = deadline_ticks.tolist()
        starting = [self._cheapest(self._makespan_ticks <= end_ticks, starts) for end_ticks in ends]
        target_ticks = np.repeat(deadline_ticks, [len(start) for start in starting])
        columns, through = self._select(np.concatenate(starting)), self.curve.through_at(target_ticks)
        graph, problem = self._engine.graph, self._engine.problem
        stage = np.repeat(np.arange(problem.stages), np.diff(problem.stage_offset))
        search = Recreate(self._rounder, stage[graph.order])
        size = max(_CELLS // (graph.n * tries), 1)
        for begin in range(0, len(target_ticks), size):
            part = slice(begin, begin + size)
            self._store(search.run(columns[:, part], target_ticks[part], through[:, part], tries, rounds))

    def _cheapest(self, fitting: npt.NDArray[np.bool_], count: int) -> Index:
        """Return distinct plans of those that fit, the cheapest first; fewer if there are not as many."""
        fits = np.flatnonzero(fitting)
        _, first = np.unique(self._effective_j[fits], return_index=True)
        return fits[first[:count]]

    def _select(self, which: Index) -> Index:
        """Return the choices of these plans, int[n, plans]."""
        if len(self._columns) > 1:
            self._columns = [np.concatenate(self._columns, axis=1)]
        return self._columns[0][:, which].astype(np.intp)

    def _store(self, columns: Index) -> None:
        """Simulate plans and add them to the pool."""
        rounder = self._rounder
        time_s, energy_j = self._simulator.totals(self._choice(columns))
        self._columns.append(columns.astype(np.int16))
        self._makespan_ticks = np.append(self._makespan_ticks, rounder.makespan_ticks(columns))
        self._effective_j = np.append(self._effective_j, rounder.energy_j(columns))
        self._time_s, self._energy_j = np.append(self._time_s, time_s), np.append(self._energy_j, energy_j)

    def _choice(self, columns: npt.NDArray[np.signedinteger]) -> Choice:
        """Return positions in the problem's options, int[plans, n]."""
        engine = self._engine
        row: Choice = engine.tables.row[engine.table_of[:, None], columns][engine.graph.rank].T.astype(np.int32)
        return row

    def _gap(self, deadline_ticks: Floats) -> Floats:
        """Return the gap of the best plan for each deadline, at the deadline, waiting until then included."""
        problem = self._engine.problem
        plans = self._best()
        best = plans[np.searchsorted(self._makespan_ticks[plans], deadline_ticks, side="right") - 1]
        time_s, energy_j = self._time_s[best], self._energy_j[best]
        end_s = np.maximum(deadline_ticks * self._engine.tables.tick_s + problem.overhead_s, time_s)
        energy_j = energy_j + problem.blocking_power_w * problem.stages * (end_s - time_s)
        gap: Floats = energy_j / self.bound_j(end_s) - 1.0
        return gap

    def frontier(self, points: int | None = None) -> Frontier:
        """Return the plans that no other dominates, at most ``points`` of them."""
        problem = self._engine.problem
        time_s, energy_j = self._time_s, self._energy_j
        # Up to least energy no plan is dearer than an earlier one; beyond, only pipelines that wait anyway go on.
        kept = undominated(time_s, energy_j)
        effective_j = energy_j - problem.blocking_power_w * problem.stages * time_s
        later = np.flatnonzero((time_s > time_s[kept[-1]]) & (effective_j < effective_j[kept[-1]]))
        later = later[undominated(time_s[later], effective_j[later])]
        kept = np.append(kept, later[time_s[later] > latest_s(float(time_s[kept[-1]]))])
        bound = np.minimum(self.bound_j(time_s[kept]), energy_j[kept])
        if points is not None:
            waiting_w = problem.blocking_power_w * problem.stages
            stay = chosen(time_s[kept], energy_j[kept], bound, waiting_w, points)
            kept, bound = kept[stay], bound[stay]
        return self._as_frontier(kept, bound)

    def _as_frontier(self, kept: Index, bound_j: Floats) -> Frontier:
        """Return these plans, by increasing time, with the bounds given."""
        problem = self._engine.problem
        time_s, energy_j = self._time_s[kept], self._energy_j[kept]
        frequency = problem.frequencies_of(self._choice(self._select(kept)))
        return Frontier(
            time_s=time_s,
            energy_j=energy_j,
            energy_lower_bound_j=bound_j,
            statuses=tuple(status_of(g) for g in (energy_j / bound_j - 1.0).tolist()),
            frequencies_mhz=frequency,
            stage_offset=problem.stage_offset,
            clock_changes=clock_changes(frequency, problem.stage_offset),
            blocking_power_w=problem.blocking_power_w,
        )
