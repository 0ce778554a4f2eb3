"""Plans that keep a deadline although instructions scatter: in 95 % of the iterations, say. Clocks change at once.

A plan for a deadline makes many paths equally long. The slowest of them decides, so an iteration under scatter is
nearly always late, while one with all clocks at their maximum hardly is. How late is not derived but sampled: plans run
many iterations, all plans the same ones. Plans for somewhat shorter times, and plans with room where stages wait for
each other, are the starting points. Where such a plan is late, those clocks are raised that shorten the late iterations
most for the energy. The cheapest plan that keeps the deadline is judged on iterations that took no part in finding it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from perseus_solver.errors import InvalidProblem
from perseus_solver.frontier import Planner
from perseus_solver.kinds import Floats, Index, latest_s
from perseus_solver.model.point import Point, status_of
from perseus_solver.model.simulator import Simulator
from perseus_solver.rehearsal.scatter import Scatter
from perseus_solver.relaxation.tables import efficient
from perseus_solver.switching import clock_changes

_SEARCHED, _JUDGED = 400, 2_000
"""Iterations in which plans are looked for, and others in which the result is judged."""
_MARGIN = 1.0
"""Standard errors by which more iterations must keep the deadline while looking, so that the judgement confirms it."""
_ROOMS = (0.0, 1.0, 2.0, 4.0)
"""Room between stages in starting points, in standard deviations of a typical instruction. More is tried only where
less does not keep the deadline, within some tenths of a percent of what all clocks at their maximum keep.
"""
_SHORTER = (0.0, 0.5, 0.7, 0.85, 1.0)
"""Shares of what the fastest plan is late, by which starting points are for shorter times than the deadline."""
_ROUNDS = 400
"""Steps in which clocks are raised; more raise all of them."""
_AT_ONCE = 1 << 22
"""Instructions over all iterations that are simulated at once: about 100 MiB of arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class RobustPlan:
    """A plan, and what it does under scatter.

    Attributes:
        point: the plan; times, energy and gap are those without scatter, the gap to plans that need not be robust.
        deadline_s: what was asked for, seconds.
        time_s: float[iterations], sampled iteration times in increasing order, seconds.
        mean_energy_j: expected energy of an iteration, joules.
    """

    point: Point
    deadline_s: float
    time_s: Floats
    mean_energy_j: float

    @property
    def kept(self) -> float:
        """Share of the iterations that end by the deadline."""
        return float(np.searchsorted(self.time_s, latest_s(self.deadline_s), side="right") / len(self.time_s))

    def time_kept_s(self, confidence: float) -> float:
        """Return the iteration time that is kept with a probability, seconds."""
        return float(np.quantile(self.time_s, confidence))


def plan_robustly(planner: Planner, deadline_s: float, scatter: Scatter, *, confidence: float = 0.95) -> RobustPlan:
    """Return a plan of little energy that ends by a deadline in most iterations.

    Args:
        planner: of the problem.
        deadline_s: longest iteration time allowed, seconds, overhead included.
        scatter: how much the times of its instructions scatter.
        confidence: the share of the iterations that must end by then.

    Returns:
        The cheapest plan found; where none is found, the fastest, which keeps the deadline most often.

    Raises:
        Infeasible: even without scatter no plan is this fast.
        InvalidProblem: ``confidence`` is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise InvalidProblem(f"confidence must be between 0 and 1, not {confidence}")
    ideal = planner.plan(deadline_s)
    search = _Search(planner, scatter, deadline_s)
    wanted = confidence + _MARGIN * np.sqrt(confidence * (1 - confidence) / _SEARCHED)
    aimed = min(wanted, 1 - 1 / _SEARCHED)
    fastest = search.judged(ideal, search.fastest)
    # Nothing ends earlier in any iteration, so nothing keeps the deadline more often.
    for room in _ROOMS if fastest.kept >= confidence else ():
        for plan in sorted(search.repaired(room, aimed), key=search.energy_j):
            judged = search.judged(ideal, plan)
            if judged.kept >= confidence:
                return judged
    return fastest


def sampled_times_s(simulator: Simulator, choice: Index, share: Floats) -> Floats:
    """Return the iteration times of a plan under scatter, float[iterations] in seconds.

    Args:
        simulator: of the problem.
        choice: int[n], the plan as positions in the options.
        share: float[iterations, n], by what each instruction takes longer.
    """
    duration_s = simulator.duration_s(choice)
    step = max(1, _AT_ONCE // len(choice))
    parts = [simulator.end_s(duration_s * share[k : k + step]).max(axis=1) for k in range(0, len(share), step)]
    return np.concatenate(parts) + simulator.problem.overhead_s


def sampled_iterations_s(simulator: Simulator, choice: Index, scatter: Scatter) -> Floats:
    """Return the times of the iterations in which results are judged, float[iterations] in seconds.

    Args:
        simulator: of the problem.
        choice: int[n], the plan as positions in the options.
        scatter: how much the times of its instructions scatter.
    """
    return sampled_times_s(simulator, choice, _shares(scatter, _JUDGED, seed=1))


def _shares(scatter: Scatter, iterations: int, seed: int) -> Floats:
    return np.ascontiguousarray(scatter.draw(iterations, np.random.default_rng(seed)).T)


class _Search:
    """Plans for one deadline, simulated under the same iterations."""

    def __init__(self, planner: Planner, scatter: Scatter, deadline_s: float) -> None:
        self._planner, self._problem, self._deadline_s = planner, planner.problem, deadline_s
        self._simulator = Simulator(self._problem)
        self._scatter, self._share = scatter, _shares(scatter, _SEARCHED, seed=0)
        rows = [efficient(options, self._problem.blocking_power_w) for options in self._problem.options]
        self._rows = rows
        self.fastest = np.array([row[0] for row in rows], dtype=np.intp)[self._problem.option_of]

    def energy_j(self, choice: Index) -> float:
        """Return the energy of an iteration without scatter, joules."""
        return float(self._simulator.run(choice).energy_j)

    def judged(self, ideal: Point, choice: Index) -> RobustPlan:
        """Return a plan with what it does in iterations that were not searched; ``ideal`` gives the bound."""
        problem, simulator = self._problem, self._simulator
        run = simulator.run(choice)
        frequencies = problem.frequencies_of(choice)
        energy_j = float(run.energy_j)
        bound_j = min(ideal.energy_lower_bound_j, energy_j)
        point = replace(
            ideal,
            iteration_time_s=float(run.iteration_time_s),
            energy_j=energy_j,
            energy_lower_bound_j=bound_j,
            status=status_of(energy_j / bound_j - 1.0),
            frequencies_mhz=frequencies,
            clock_changes=int(clock_changes(frequencies[None], problem.stage_offset)[0]),
        )
        time_s = np.sort(sampled_iterations_s(simulator, choice, self._scatter))
        waiting_w = problem.blocking_power_w * problem.stages
        later_j = waiting_w * (float(time_s.mean()) - point.iteration_time_s)
        return RobustPlan(point, self._deadline_s, time_s, energy_j + later_j)

    def repaired(self, room: float, confidence: float) -> Iterator[Index]:
        """Yield plans that keep the deadline in this share of the searched iterations, from plans with some room."""
        for start in self._starts(room, confidence):
            plan = self._raised(start, confidence)
            if plan is not None:
                yield plan

    def _starts(self, room: float, confidence: float) -> Iterator[Index]:
        """Yield plans with this room between stages, for the deadline and for shorter times."""
        problem, planner = self._problem, self._planner
        if room:
            duration_s = self._simulator.duration_s(self.fastest)
            typical_s = float(np.median(duration_s * np.hypot(self._scatter.instruction, self._scatter.iteration)))
            stage = np.repeat(np.arange(problem.stages), np.diff(problem.stage_offset))
            across = stage[problem.edge_from] != stage[problem.edge_to]
            delay_s = problem.edge_delay_s + np.where(across, room * typical_s, 0.0)
            planner = Planner(replace(problem, edge_delay_s=delay_s))
        frontier = planner.frontier()
        plans = self._simulator.choice_of(frontier.frequencies_mhz[: frontier.least_energy + 1])
        time_s, _ = self._simulator.totals(plans)
        fastest_s = sampled_times_s(self._simulator, plans[0], self._share)
        late_s = float(np.quantile(fastest_s, confidence)) - time_s[0]
        for share in _SHORTER:
            fits = np.flatnonzero(time_s <= latest_s(self._deadline_s - share * late_s))
            yield plans[fits[-1] if fits.size else 0]

    def _raised(self, start: Index, confidence: float) -> Index | None:
        """Raise clocks until the deadline is kept; None: even the highest do not keep it."""
        problem, simulator = self._problem, self._simulator
        place = np.zeros(len(start), dtype=np.intp)  # among the efficient options of each instruction, fastest first
        width = max(len(rows) for rows in self._rows)
        time_s, energy_j = np.zeros((len(self._rows), width)), np.zeros((len(self._rows), width))
        row_of = np.zeros((len(self._rows), width), dtype=np.intp)
        for k, (rows, options) in enumerate(zip(self._rows, problem.options, strict=True)):
            time_s[k, : len(rows)], row_of[k, : len(rows)] = options.time_s[rows], rows
            energy_j[k, : len(rows)] = options.energy_j[rows] - problem.blocking_power_w * options.time_s[rows]
            alike = problem.option_of == k
            slowest = options.time_s[rows].searchsorted(latest_s(1.0) * options.time_s[start[alike]], side="right") - 1
            place[alike] = np.maximum(slowest, 0)
        table = problem.option_of
        for _ in range(_ROUNDS):
            choice: Index = row_of[table, place]
            late_s = sampled_times_s(simulator, choice, self._share)
            excess_s = float(np.quantile(late_s, confidence)) - latest_s(self._deadline_s)
            if excess_s <= 0:
                return choice
            faster = np.maximum(place - 1, 0)
            saved_s = time_s[table, place] - time_s[table, faster]
            cost_j = np.maximum(energy_j[table, faster] - energy_j[table, place], 1e-12)
            saved_s *= self._critical(choice, late_s, confidence)
            best = np.argsort(-saved_s / cost_j, kind="stable")
            best = best[saved_s[best] > 0]
            if not best.size:
                return None
            # Half of what is missing at a time, because other paths become the longest.
            enough = int(np.searchsorted(np.cumsum(saved_s[best]), excess_s / 2)) + 1
            place[best[:enough]] -= 1
        return None

    def _critical(self, choice: Index, late_s: Floats, confidence: float) -> Floats:
        """Return how often each instruction is on the longest path of the iterations around the quantile, float[n]."""
        low, high = np.quantile(late_s, [max(2 * confidence - 1, 0.0), 1.0])
        chosen = self._share[(late_s >= low) & (late_s <= high)]
        duration_s = self._simulator.duration_s(choice) * chosen
        slack_s = self._simulator.slack_s(duration_s)
        critical: Floats = (slack_s <= 1e-9 * late_s.max()).mean(axis=0)
        return critical
