"""The best plans found so far, with their exact figures and bounds, and the ways to find better ones.

Relaxed timetables are rounded where they end by themselves (``rounding``), and of the plans that result those on the
lower convex hull are mixed for all deadlines. Then plans are searched for better ones (``descent``) and mixed where the
steps between them are widest, in turn, as often as the budget of work allows. Plans that another dominates are dropped.
Figures that leave this module are those of the exact simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from perseus_solver.certify import deadline_bound, iteration_bound
from perseus_solver.kinds import SAME_TIME, Floats, Index, latest_s, looked_up
from perseus_solver.model.deployed import step_gaps
from perseus_solver.model.result import Frontier, Point, status_of
from perseus_solver.model.simulator import Choice, Simulator
from perseus_solver.relaxation.curve import Engine
from perseus_solver.relaxation.samples import NOTHING_J, Sample
from perseus_solver.relaxation.tables import lower_hull, undominated
from perseus_solver.search.descent import SWEEPS, Descent
from perseus_solver.search.placement import chosen, distance
from perseus_solver.search.rounding import round_plans, work
from perseus_solver.search.sweeps import Curve, Plans, Sweeps
from perseus_solver.switching import clock_changes

_CELLS = 4_000_000
"""Instructions × plans stored at once, which bounds memory."""
_WORK, _WORK_ONE = 1.2e8, 1e7
"""The budgets of work, whatever the size of the graph: instructions × plans × sweeps. Along the frontier it is about a
second, flows included. A larger graph gets fewer turns, never less than a plan of each relaxed timetable and two
mixtures for each deadline.
"""
_FLOW, _LEAST, _LEAST_BESIDE = 400, 1 / 3, 3 / 10
"""A flow counts as so many sweeps; and what flows leave at least, as shares of the budget and of what they take."""
_OWN_SHARE = 0.8
"""Relaxed timetables are rounded both ways if that takes at most so much of the budget, otherwise one way. Of large
graphs each of them must still become a plan.
"""
_TURNS, _TURNS_ONE, _LEAST_SHARE = 32, 1, 0.1
"""Turns at most, along the frontier and for a single deadline; and the smallest share of the deadlines that a turn is
worth beginning for.
"""
_NEAREST, _NEAR = [(0, 0)], [(0, 0), (1, 1)]
"""Spans that are tried where plans are mixed, and for a single deadline; see `round_plans`."""
_SPREAD = 4
"""Plans are mixed with neighbours less than so many further than the nearest, in turn."""
_FORTH, _BACK, _BOTH = (False,), (True,), (False, True)
_MOST_TRIES = 8
"""Trials for each deadline in a turn, at most; large graphs get fewer."""
_DEEP_TRIES, _DEEP_ROUNDS, _MOST_ROUNDS = 8, 32, 400
"""Where the gap is worst, plans are searched in so many rounds of so many trials, with as much work as all others; for
a single deadline in as many rounds as the budget allows, within a limit.
"""
_SHUFFLED = 0.3
"""How much chance there is in which steps are the worst; without any, those that nothing improves would be searched
again and again.
"""
_ALIKE = 2e-3
"""The worth of time is the average over all flows, each with a weight that falls by e where its bound is lower by this
share of the energy. One flow of many that are optimal puts all worth on few instructions.
"""


class Pool:
    """Rounded plans that no other dominates, by increasing makespan in ticks, a line each, with their exact figures.

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
        self._sweeps = Sweeps(engine.tables, engine.graph, engine.table_of, engine.kind)
        self._simulator = Simulator(engine.problem)
        self._descent = Descent(self._sweeps)
        self._random = np.random.default_rng(0)
        self._waiting_w = engine.problem.blocking_power_w * engine.problem.stages
        self._plans: Plans = np.zeros((0, engine.graph.n), dtype=np.int16)
        self._improved: list[float] = []
        self._left = 0.0
        # By the exact simulator, once they are asked for.
        self._exact_s, self._exact_j = np.zeros(0), np.zeros(0)
        self._makespan_ticks, self._effective_j = np.zeros(0), np.zeros(0)
        self._use_samples(samples)

    def _use_samples(self, samples: list[Sample]) -> None:
        """Replace the samples, and the timetables and proofs that follow from them."""
        self.samples = samples
        self.proofs = sorted([*samples, *self._engine.relaxation.mixed(samples)], key=lambda s: -s.price)
        duration_ticks, makespan_ticks = self._engine.timetables(self.proofs)
        finish_ticks = self._engine.graph.finish_ticks(duration_ticks)[:-1]
        order = np.argsort(makespan_ticks, kind="stable")
        through = self._through_of(self.proofs)
        start_ticks = (finish_ticks - duration_ticks).T
        self.curve = Curve(start_ticks[order], finish_ticks.T[order], through[order], makespan_ticks[order])
        self._worth = self._averaged(makespan_ticks[order], self._through_of(samples))

    def _through_of(self, samples: list[Sample]) -> Floats:
        """Return the flows of samples through each kind of row, float[samples, kinds], on average."""
        order, kind = self._engine.graph.order, self._engine.kind
        return np.stack([np.bincount(kind, weights=s.through[order]) for s in samples]) / np.bincount(kind)

    def best_by(self, deadline_s: float) -> Point:
        """Return the plan of least energy among those in time, with what is proven of all plans in time."""
        problem = self._engine.problem
        time_s, energy_j = self._exact()
        in_time = np.flatnonzero(time_s <= latest_s(deadline_s))
        best = in_time[np.lexsort((time_s[in_time], energy_j[in_time]))[:1]]
        bounds = [s.bound for s in self.proofs]
        bound_j = deadline_bound(problem, bounds, np.array([max(deadline_s, float(time_s[best[0]]))]))
        if problem.instructions == 1:  # every option can be tried, which proves more than a mixture of them
            each_s, each_j = self._simulator.totals(np.arange(len(problem.options[0].time_s))[:, None])
            bound_j = np.maximum(bound_j, each_j[each_s <= latest_s(deadline_s)].min())
        return self._as_frontier(best, np.minimum(bound_j, energy_j[best]))[0]

    def _through(self, deadline_ticks: Floats) -> Floats:
        """Return what time is worth at each kind of row, float[deadlines, kinds], units of flow."""
        made_ticks = self.curve.makespan_ticks
        after = np.searchsorted(made_ticks, deadline_ticks).clip(1, max(len(made_ticks) - 1, 1))
        nearest = after - (
            2.0 * deadline_ticks < made_ticks[after - 1] + made_ticks[after.clip(max=len(made_ticks) - 1)]
        )
        worth: Floats = self._worth[nearest]
        return worth

    def _averaged(self, makespan_ticks: Floats, flows: Floats) -> Floats:
        """Return the flows through each kind of row on average over those that are nearly the best at each makespan."""
        problem = self._engine.problem
        seconds = makespan_ticks * self._engine.tables.tick_s
        lines = np.array([(sample.bound.constant_j, sample.bound.price_w) for sample in self.samples])
        value_j = lines[:, :1] - lines[:, 1:] * seconds
        best_j = value_j.max(axis=0)
        energy_j = best_j + problem.blocking_power_w * problem.stages * seconds
        weight = np.exp((value_j - best_j) / np.maximum(_ALIKE * energy_j, NOTHING_J))
        average: Floats = np.einsum("sd,sk->dk", weight / weight.sum(axis=0), flows)  # BLAS would start threads
        return average

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
        own_cells = float(self._engine.graph.n * len(own_ticks))
        flows = _FLOW * self._engine.relaxation.rows * len(self.samples)
        budget = max(_WORK - flows, _LEAST * _WORK, _LEAST_BESIDE * flows)
        ways = _BOTH if own_cells * work(_NEAREST, _BOTH) <= _OWN_SHARE * budget else _BACK
        self._left = max(budget, own_cells * work(_NEAREST, ways))
        self._round(self.curve, own_ticks, _NEAREST, ways)
        self._left = max(self._left, 2.0 * self._engine.graph.n * len(deadline_ticks) * work(_NEAREST, _BACK))
        for ways in (_BACK, _FORTH):
            self._round(self._corners(deadline_ticks), deadline_ticks, _NEAREST, ways)
        self._improve_all(deadline_ticks, _TURNS, report)

    def _improve_all(self, deadline_ticks: Floats, turns: int, report: Callable[[float], None]) -> None:
        """Search plans, and mix them between these deadlines, while the budget lasts."""
        trial = self._engine.graph.n * len(deadline_ticks) * SWEEPS
        tries = min(max(int(self._left / (2 * turns * trial)), 1), _MOST_TRIES)
        worst = max(len(deadline_ticks) * tries // (_DEEP_TRIES * _DEEP_ROUNDS), 1)
        for turn in range(turns):
            report(turn / turns)
            if self._left < _LEAST_SHARE * tries * trial:
                break
            self._search(self._worst(deadline_ticks), tries)
            self._search(self._worst_steps(deadline_ticks, worst), _DEEP_TRIES, _DEEP_ROUNDS)
            one, other = (_BACK, _FORTH) if turn % 2 else (_FORTH, _BACK)
            between_ticks = self._between(deadline_ticks)
            self._round(self._corners(between_ticks), between_ticks, _NEAREST, one)
            between_ticks = self._between(deadline_ticks)
            self._round(self._neighbours(between_ticks, turn % _SPREAD), between_ticks, _NEAREST, other)

    def _worst(self, deadline_ticks: Floats) -> Floats:
        """Return the deadlines, those with the largest gaps first."""
        worst: Floats = deadline_ticks[np.argsort(-self._gap(deadline_ticks), kind="stable")]
        return worst

    def _worst_steps(self, deadline_ticks: Floats, count: int) -> Floats:
        """Return the ends of so many steps between plans around these deadlines, those with the largest gaps."""
        time_s, energy_j = self._nearly(slice(None))
        bound_j = np.minimum(self.bound_j(time_s), energy_j)
        gaps = step_gaps(time_s, energy_j, bound_j, self._waiting_w)[:-1]
        gaps *= self._random.random(len(gaps)) ** _SHUFFLED
        ends_ticks = self._makespan_ticks[1:] - 1.0
        gaps[(ends_ticks < deadline_ticks.min()) | (ends_ticks > deadline_ticks.max())] = -1.0
        worst: Floats = ends_ticks[np.argsort(-gaps, kind="stable")[:count]]
        return worst

    def improve_at(self, end_ticks: float, around_ticks: Floats) -> None:
        """Improve the plans for a single deadline, with all that is too much work along the whole frontier.

        Args:
            end_ticks: the deadline.
            around_ticks: float[deadlines], near it, for which plans are made as well: a plan for a slightly shorter
                deadline is sometimes cheaper.
        """
        if any(abs(end_ticks - improved_ticks) <= SAME_TIME * end_ticks for improved_ticks in self._improved):
            return
        self._improved.append(end_ticks)
        end = np.array([float(end_ticks)])
        self._use_samples(self._engine.relaxation.near(self.samples, end_ticks * self._engine.tables.tick_s))
        self._left = _WORK_ONE
        self._round(self.curve, around_ticks, _NEAR, _BOTH)
        self._improve_all(around_ticks, _TURNS_ONE, lambda _share: None)
        once = self._engine.graph.n * _DEEP_TRIES * SWEEPS
        rounds = min(max(int(_WORK_ONE // once), 1), _MOST_ROUNDS)
        self._left = float(once * rounds)
        self._search(end, _DEEP_TRIES, rounds)

    def add_single_clocks(self) -> None:
        """Add every plan with one clock for all, its slack distributed, so that no such plan beats the result."""
        engine = self._engine
        clocks = np.unique(np.concatenate([o.frequency_mhz for o in engine.problem.options]))
        tables = engine.tables
        position = np.empty((len(tables.size), len(clocks)), dtype=np.int16)
        for k, options in enumerate(engine.problem.options):
            nearest = np.abs(options.frequency_mhz[:, None] - clocks).argmin(axis=0)
            efficient_s = tables.time_s[k, : tables.size[k]]
            position[k] = np.maximum(efficient_s.searchsorted(options.time_s[nearest], side="right") - 1, 0)
        for part in self._parts(len(clocks)):
            plans = np.ascontiguousarray(position[engine.table_of, part].T)
            self._store(self._sweeps.improved(plans, np.zeros(len(plans))))

    def _round(
        self, curve: Curve, deadline_ticks: Floats, spans: list[tuple[int, int]], ways: tuple[bool, ...]
    ) -> None:
        """Mix timetables of the curve for the first of these deadlines, as many as the budget allows."""
        deadline_ticks = self._affordable(deadline_ticks, work(spans, ways))
        for part in self._parts(len(deadline_ticks)):
            some_ticks = deadline_ticks[part]
            self._store(round_plans(self._sweeps, curve, some_ticks, spans, self._through(some_ticks), ways=ways))

    def _parts(self, count: int) -> Iterator[slice]:
        """Yield so many plans in parts that fit into memory."""
        size = max(_CELLS // self._engine.graph.n, 1)
        for begin in range(0, count, size):
            yield slice(begin, min(begin + size, count))

    def _affordable(self, deadline_ticks: Floats, sweeps_each: int) -> Floats:
        """Return the first deadlines, as many as what is left of the budget pays for, and spend it."""
        each = self._engine.graph.n * sweeps_each
        affordable_ticks = deadline_ticks[: max(int(self._left // each), 0)]
        self._left -= each * len(affordable_ticks)
        return affordable_ticks

    def _between(self, deadline_ticks: Floats) -> Floats:
        """Return the middles of the steps between plans that lose most, as many as these deadlines, around them."""
        first, end = np.searchsorted(self._makespan_ticks, (deadline_ticks.min(), deadline_ticks.max()), side="right")
        around = slice(max(first - 1, 0), end)
        at_ticks = self._makespan_ticks[around]
        if len(at_ticks) < 2:
            return deadline_ticks
        lost = np.diff(distance(*self._nearly(around), self._waiting_w))
        widest = np.argsort(-lost, kind="stable")[: len(deadline_ticks)]
        middle_ticks: Floats = np.floor((at_ticks[:-1] + at_ticks[1:])[widest] / 2.0)
        return middle_ticks

    def _corners(self, deadline_ticks: Floats) -> Curve:
        """Return the corners of the lower convex hull of all plans around these deadlines, to be mixed."""
        return self._around(deadline_ticks, lower_hull(self._makespan_ticks, self._effective_j))

    def _neighbours(self, deadline_ticks: Floats, further: int) -> Curve:
        """Return the plans around these deadlines, so many further than the nearest, to be mixed."""
        return self._around(deadline_ticks, np.arange(len(self._makespan_ticks)), further)

    def _around(self, deadline_ticks: Floats, plans: Index, further: int = 0) -> Curve:
        """Return those of some plans that are around these deadlines, as timetables like relaxed ones."""
        before = np.searchsorted(self._makespan_ticks[plans], deadline_ticks, side="right") - 1
        around = np.concatenate((before - further, before + 1 + further))
        which = plans[np.unique(np.clip(around, 0, len(plans) - 1))]
        makespan_ticks = self._makespan_ticks[which]
        return Curve(*self._sweeps.timetables(self._plans[which]), self._through(makespan_ticks), makespan_ticks)

    def _search(self, deadline_ticks: Floats, tries: int, rounds: int = 1) -> None:
        """Search from the best plan for each of the first of these deadlines, as many as the budget allows."""
        deadline_ticks = self._affordable(deadline_ticks, tries * rounds * SWEEPS)
        for part in self._parts(len(deadline_ticks)):
            some_ticks = deadline_ticks[part]
            last = np.searchsorted(self._makespan_ticks, some_ticks, side="right") - 1
            self._store(self._descent.run(self._plans[last], some_ticks, self._through(some_ticks), tries, rounds))

    def _store(self, plans: Plans) -> None:
        """Add plans, and drop all that another dominates, in ticks."""
        stored = len(self._plans)
        makespan_ticks, effective_j = map(
            np.append, (self._makespan_ticks, self._effective_j), self._sweeps.totals(plans)
        )
        order = np.lexsort((effective_j, makespan_ticks))
        least_j = np.minimum.accumulate(effective_j[order])
        kept = order[np.append(True, least_j[1:] < least_j[:-1])]
        if (kept < stored).all():
            return
        unknown = np.full(len(plans), np.nan)
        self._plans = np.concatenate((self._plans, plans))[kept]
        self._makespan_ticks, self._effective_j = makespan_ticks[kept], effective_j[kept]
        self._exact_s, self._exact_j = (np.append(a, unknown)[kept] for a in (self._exact_s, self._exact_j))

    def _nearly(self, plans: Index | slice) -> tuple[Floats, Floats]:
        """Return times in seconds and energies in joules of plans, as ticks tell them: the search needs no more."""
        time_s = self._makespan_ticks[plans] * self._engine.tables.tick_s + self._engine.problem.overhead_s
        return time_s, self._effective_j[plans] + self._waiting_w * time_s

    def _exact(self) -> tuple[Floats, Floats]:
        """Return the same of all plans, from the profile."""
        unknown = np.flatnonzero(np.isnan(self._exact_s))
        for part in self._parts(len(unknown)):
            some = unknown[part]
            self._exact_s[some], self._exact_j[some] = self._simulator.totals(self._choice(self._plans[some]))
        return self._exact_s, self._exact_j

    def _choice(self, plans: Plans) -> Choice:
        """Return positions in the problem's options, int[plans, n]."""
        engine = self._engine
        return looked_up(engine.tables.row.astype(np.int32), engine.problem.option_of, plans[:, engine.graph.rank])

    def _gap(self, deadline_ticks: Floats) -> Floats:
        """Return the gap of the best plan for each deadline, at the deadline, waiting until then included."""
        best = np.searchsorted(self._makespan_ticks, deadline_ticks, side="right") - 1
        time_s, energy_j = self._nearly(best)
        end_s = np.maximum(deadline_ticks * self._engine.tables.tick_s + self._engine.problem.overhead_s, time_s)
        energy_j = energy_j + self._waiting_w * (end_s - time_s)
        gap: Floats = energy_j / self.bound_j(end_s) - 1.0
        return gap

    def frontier(self, points: int | None = None) -> Frontier:
        """Return the plans that no other dominates, at most ``points`` of them."""
        time_s, energy_j = self._exact()
        # Up to least energy no plan is dearer than an earlier one; beyond, only pipelines that wait anyway go on.
        kept = undominated(time_s, energy_j)
        effective_j = energy_j - self._waiting_w * time_s
        later = np.flatnonzero((time_s > time_s[kept[-1]]) & (effective_j < effective_j[kept[-1]]))
        later = later[undominated(time_s[later], effective_j[later])]
        kept = np.append(kept, later[time_s[later] > latest_s(float(time_s[kept[-1]]))])
        bound = np.minimum(self.bound_j(time_s[kept]), energy_j[kept])
        if points is not None:
            stay = chosen(time_s[kept], energy_j[kept], bound, self._waiting_w, points)
            kept, bound = kept[stay], bound[stay]
        return self._as_frontier(kept, bound)

    def _as_frontier(self, kept: Index, bound_j: Floats) -> Frontier:
        """Return these plans, by increasing time, with the bounds given."""
        problem = self._engine.problem
        time_s, energy_j = self._exact_s[kept], self._exact_j[kept]
        parts = (self._choice(self._plans[kept[part]]) for part in self._parts(len(kept)))
        frequency = np.concatenate([problem.frequencies_of(part) for part in parts])
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
