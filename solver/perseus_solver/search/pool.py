"""All plans found so far, with their exact figures and bounds, and the ways to find better ones.

For each deadline relaxed timetables are rounded (``rounding``). Where that leaves a gap, more prices are solved, more
mixtures are tried, plans are spliced with their neighbours, and small graphs are searched (``recreate``). Every plan is
simulated exactly before it counts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from perseus_solver.certify import deadline_bound, iteration_bound
from perseus_solver.kinds import Floats, Index, latest_s
from perseus_solver.model.result import DEFAULT_GAP, Frontier, Point, status_of
from perseus_solver.model.simulator import Choice, Simulator
from perseus_solver.relaxation.curve import Engine, Sample
from perseus_solver.relaxation.tables import lower_hull, undominated
from perseus_solver.search.cuts import Cuts
from perseus_solver.search.placement import chosen
from perseus_solver.search.recreate import Recreate
from perseus_solver.search.rounding import Curve, Rounder, improve, round_plans
from perseus_solver.switching import clock_changes

Columns = npt.NDArray[np.int16]

_GOOD_GAP = 1e-3
"""Plans within this gap are not improved further."""
_CELLS, _LARGE = 4_000_000, 2_000_000
"""Instructions × plans rounded at once, a few hundred megabytes of work arrays. If there are more than `_LARGE` in all,
there are two passes: relaxed timetables alone, then mixtures of the best plans that result.
"""
_NEAR = [(0, 0), (1, 1)]
_WIDE = [(2, 2), (0, 1), (1, 0), (4, 4), (0, 3), (3, 0), (0, 6), (6, 0), (7, 7)]
"""Spans tried for every deadline (`_NEAR`), and where the result is poor; see `round_plans`."""
_FORTH, _BACK, _BOTH = (False,), (True,), (False, True)
_SPLICES = [(True, _BOTH, [(0, 0)]), (False, _FORTH, [(0, 0), (1, 1)]), (False, _BOTH, [(0, 0), (2, 2)])]
"""The passes that mix plans with plans: whether only those on the convex hull, their directions and spans. Each pass
may use what the one before found.
"""
_SMALL, _MIDDLE = 400, 2_000
"""Instructions of the largest graphs that are searched: for all deadlines, and for a single one."""
_MOVED, _MOVED_ROWS = 4, 3_072
"""Plans for a single deadline of which parts are moved, and their instructions: the second best may lead further than
the best.
"""
_WORST = 24
"""Largest number of deadlines of a frontier for which parts of the timetable are moved."""
_SEARCH = ((_GOOD_GAP, 2, 16, 10), (2 * _GOOD_GAP, 6, 8, 30), (2.5 * _GOOD_GAP, 12, 16, 30))
_SEARCH_SMALL, _SEARCH_MIDDLE = (6, 16, 30), (1, 32, 12)
_REFINED = 3
_WORK = 4e6
"""Passes of the search: for gaps above this, from so many plans, with so many trials in a round, and so many rounds.
`_SEARCH` is for the whole frontier; the others, without a gap, are for a single deadline on a small graph or a larger
one. `_REFINED` prices are solved for its bound. `_WORK` is the budget of a pass along the frontier, whatever the size
of the graph: instructions × plans × trials × rounds, about a second.
"""


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
        self._makespan_ticks, self._time_s, self._energy_j, self._effective_j = (np.zeros(0) for _ in range(4))
        self._use_samples(samples)

    def _use_samples(self, samples: list[Sample]) -> None:
        """Replace the samples, and the timetables and proofs that follow from them."""
        self.samples = samples
        self.proofs = sorted([*samples, *self._engine.mixed(samples)], key=lambda s: -s.price)
        # Only optimal flows determine a timetable. Those of circulations are rounded, so mixtures serve as well.
        flows = self.proofs if self._engine.steady else samples
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
        return self._as_frontier(best, np.minimum(bound_j, self._energy_j[best]))[0]

    def bound_j(self, time_s: Floats) -> Floats:
        """Return the best proven bound on the iteration energy at each iteration time in seconds."""
        return iteration_bound(self._engine.problem, [s.bound for s in self.proofs], time_s)

    def add(self, deadline_ticks: Floats, report: Callable[[float], None]) -> None:
        """Round for these deadlines, a few at a time; where the result is poor, solve more prices and mix more plans.

        Args:
            deadline_ticks: float[deadlines].
            report: called with the share of the work that is done.
        """
        n = self._engine.graph.n
        if n * len(deadline_ticks) > _LARGE:
            # Relaxed timetables are rounded best at their own ends.
            self._round(self.curve, np.unique(np.floor(self.curve.makespan_ticks)), _NEAR[:1], ways=_BACK)
            report(1 / 3)
            self._round(
                self._plans(corners=True),
                deadline_ticks,
                _NEAR[:1],
                ways=_BACK,
                report=lambda s: report((1 + 2 * s) / 3),
            )
            return
        self._round(self.curve, deadline_ticks, _NEAR, report=report)
        for worst in (_GOOD_GAP, DEFAULT_GAP):
            poor = deadline_ticks[self._gap(deadline_ticks) > worst]
            if len(poor):
                self._use_samples(self._engine.refine(self.samples, poor))
                self._round(self.curve, poor, _WIDE, ways=_FORTH)
        for corners, ways, spans in _SPLICES:
            poor = deadline_ticks[self._gap(deadline_ticks) > _GOOD_GAP]
            if len(poor):
                self._round(self._plans(corners=corners), poor, spans, ways=ways)

    def search(self, deadline_ticks: Floats) -> None:
        """Search from the cheapest plans for the deadlines whose gaps are largest, as many as the work allows."""
        for good, starts, tries, rounds in _SEARCH:
            gap = self._gap(deadline_ticks)
            most = int(_WORK // (self._engine.graph.n * starts * tries * rounds))
            worst = np.argsort(-gap, kind="stable")[:most]
            self._recreate(deadline_ticks[worst[gap[worst] > good]], starts, tries, rounds)

    def improve_at(self, end_ticks: float, around_ticks: Floats) -> None:
        """Improve the plans for a single deadline, with all that is too much work along the whole frontier.

        Args:
            end_ticks: the deadline.
            around_ticks: float[deadlines], near it, for which plans are made as well: a plan for a slightly shorter
                deadline is sometimes cheaper.
        """
        n, end = self._engine.graph.n, np.array([end_ticks])
        for _ in range(_REFINED):
            self._use_samples(self._engine.refine(self.samples, end))
        self.add(around_ticks, lambda _share: None)
        self._store(improve(self._rounder, self._select(self._cheapest(self._makespan_ticks <= end_ticks, 8)), end))
        if n <= _MIDDLE:
            self._recreate(end, *(_SEARCH_SMALL if n <= _SMALL else _SEARCH_MIDDLE))
            self._move_at(end_ticks)

    def move(self, deadline_ticks: Floats) -> None:
        """Move whole parts of the timetable, by minimum cuts, where the gaps of the cheapest plans are largest."""
        if self._engine.graph.n > _MIDDLE:
            return
        gap = self._gap(deadline_ticks)
        worst = np.argsort(-gap, kind="stable")[:_WORST]
        cuts = Cuts(self._rounder)
        for end_ticks in deadline_ticks[worst[gap[worst] > 2 * _GOOD_GAP]].tolist():
            self._improve(cuts, self._cheapest(self._makespan_ticks <= end_ticks, 1), end_ticks)

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
        if len(clocks) * engine.graph.n > _LARGE:
            return
        tables = engine.tables
        position = np.empty((len(tables.size), len(clocks)), dtype=np.intp)
        for k, options in enumerate(engine.problem.options):
            nearest = np.abs(options.frequency_mhz[:, None] - clocks).argmin(axis=0)
            efficient_s = tables.time_s[k, : tables.size[k]]
            position[k] = np.maximum(efficient_s.searchsorted(options.time_s[nearest], side="right") - 1, 0)
        columns = position[engine.table_of]
        self._store(improve(self._rounder, columns, np.zeros(len(clocks))))

    def _round(
        self,
        curve: Curve,
        deadline_ticks: Floats,
        spans: list[tuple[int, int]],
        *,
        ways: tuple[bool, ...] = _BOTH,
        report: Callable[[float], None] = lambda _share: None,
    ) -> None:
        """Mix timetables of the curve, for a few deadlines at a time."""
        size = max(_CELLS // self._engine.graph.n, 1)
        for begin in range(0, len(deadline_ticks), size):
            self._store(round_plans(self._rounder, curve, deadline_ticks[begin : begin + size], spans, ways=ways))
            report(min(begin + size, len(deadline_ticks)) / len(deadline_ticks))

    def _plans(self, *, corners: bool = False) -> Curve:
        """Return the plans that no other dominates as timetables, to be mixed like relaxed ones.

        With ``corners``, only those on the lower convex hull.
        """
        order = np.lexsort((self._effective_j, self._makespan_ticks))
        least = np.minimum.accumulate(self._effective_j[order])
        kept = order[np.append(True, least[1:] < least[:-1])]
        if corners:
            kept = kept[lower_hull(self._makespan_ticks[kept], self._effective_j[kept])]
        return self._rounder.curve(self._select(kept), self.curve)

    def _recreate(self, deadline_ticks: Floats, starts: int, tries: int, rounds: int) -> None:
        """Search from the cheapest plans for these deadlines."""
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
        ends: list[float] = deadline_ticks.tolist()
        best = np.array([self._cheapest(self._makespan_ticks <= end_ticks, 1)[0] for end_ticks in ends], dtype=np.intp)
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
        clocks = np.zeros((len(problem.options), max(len(o.frequency_mhz) for o in problem.options)), dtype=np.uint16)
        for row, options in zip(clocks, problem.options, strict=True):
            row[: len(options.frequency_mhz)] = options.frequency_mhz
        frequency = clocks[problem.option_of, self._choice(self._select(kept))]
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
