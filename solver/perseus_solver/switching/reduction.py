"""Changes of clock in a plan, and plans that need fewer of them for a bounded amount of energy.

A GPU keeps its clock until told otherwise; iterations follow each other, so the last instruction's clock meets the
first's. Constant-time instructions (frequency 0) leave the clock as it is. A change is asked for when the instruction
before has ended, so waiting hides its latency; what is not hidden delays the instruction.

`calm` searches in three steps. Plans whose stages run long at one clock (``runs``) end when they please; two plans that
end before and after a deadline are spliced into one that meets it (``splice``); what is left of the permitted loss
goes into smoothing (``smoothing``). All are re-simulated with their latencies. Called by the CLI and the operator;
``frontier`` counts changes here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats, Ints
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import DEFAULT_GAP, Frequencies, Frontier, Point, status_of
from perseus_solver.model.simulator import Simulator
from perseus_solver.switching.runs import CUTS, Clocks, Index, Runs
from perseus_solver.switching.smoothing import Smoother
from perseus_solver.switching.splice import HAIR, Candidates, Deadlines, join

DEFAULT_LOSS = 2e-3
"""Share of the iteration energy that may be given up for fewer changes."""
_CELLS = 20_000_000
"""Instructions × plans held at once: some 500 MiB."""
_BASES, _RATIOS, _SHARES = 5, 80, 8
"""Plans that are stretched, to so many lengths each; in how many steps the runs of all others are merged."""
_HALVINGS = 6
"""Bisection steps, on a scale of powers of two, on the price of a change in the last step."""


@dataclass(frozen=True, slots=True)
class Switching:
    """What one change of clock costs on a GPU model.

    Attributes:
        cost_j: energy of the change itself, joules.
        latency_s: how long the clock takes to settle, seconds; what waiting does not hide of it delays the next
            instruction, at blocking power.
    """

    cost_j: float = 0.0
    latency_s: float = 0.0


def clock_changes(frequencies_mhz: Frequencies, stage_offset: Ints) -> Ints:
    """Changes per iteration, summed over the stages, for plans [points, n]."""
    total = np.zeros(len(frequencies_mhz), dtype=np.int32)
    for begin, end in zip(stage_offset[:-1].tolist(), stage_offset[1:].tolist(), strict=True):
        plan = frequencies_mhz[:, begin:end]
        # Whether an instruction sets a clock is the same in every plan: constant-time ones have one option only.
        plan = plan[:, (plan != 0).any(axis=0)]
        if plan.shape[1]:
            total += (plan != np.roll(plan, 1, axis=1)).sum(axis=1, dtype=np.int32)
    return total


def reduce_clock_changes(
    problem: Problem, frontier: Frontier, switching: Switching | None = None, *, loss: float = DEFAULT_LOSS
) -> Frontier:
    """The frontier with plans of far fewer clock changes.

    For every time of the frontier, the plan of fewest changes found that ends no later and takes at most ``loss`` more
    energy than the cheapest. Times and energies include what switching costs; with a latency, times that no plan keeps
    are left out. Points that another comes to dominate are dropped.

    Raises:
        InvalidProblem: ``loss`` or a cost is negative or not finite.
    """
    search = _Search(problem, frontier.frequencies_mhz, switching or Switching(), loss)
    return _rebuilt(problem, frontier, search.run(frontier.time_s), frontier, loss)


def reduce_clock_changes_of_point(
    problem: Problem,
    frontier: Frontier,
    point: Point,
    deadline_s: float,
    switching: Switching | None = None,
    *,
    loss: float = DEFAULT_LOSS,
) -> Point:
    """The same for one deadline, where ``point`` is the plan to beat and ``frontier`` lends ideas.

    If switching takes so long that no plan keeps the deadline, the fastest found.

    Raises:
        InvalidProblem: ``loss`` or a cost is negative or not finite.
    """
    plans = np.concatenate([frontier.frequencies_mhz, point.frequencies_mhz[None]])
    search = _Search(problem, plans, switching or Switching(), loss)
    found = search.run(np.array([max(deadline_s, search.fastest_s)]))
    order = np.argsort(np.append(frontier.time_s, point.iteration_time_s), kind="stable")
    claims = replace(
        frontier,
        time_s=np.append(frontier.time_s, point.iteration_time_s)[order],
        energy_j=np.append(frontier.energy_j, point.energy_j)[order],
        energy_lower_bound_j=np.append(frontier.energy_lower_bound_j, point.energy_lower_bound_j)[order],
    )
    return _rebuilt(problem, frontier, found, claims, loss)[0]


class _Search:
    """Candidates of one problem, measured with their switches."""

    def __init__(self, problem: Problem, frequencies_mhz: Frequencies, switching: Switching, loss: float) -> None:
        for name, value in (("loss", loss), ("cost_j", switching.cost_j), ("latency_s", switching.latency_s)):
            if not (np.isfinite(value) and value >= 0):
                raise InvalidProblem(f"{name} must be a finite number, zero or more, not {value}")
        self._problem, self._switching, self._loss = problem, switching, loss
        self._simulator = Simulator(problem)
        self._clocks = Clocks(problem)
        self._plans = np.searchsorted(self._clocks.mhz, frequencies_mhz).astype(np.intp)
        self._room = max(_CELLS // max(problem.instructions, 1), 2)
        self._blocking_w = problem.blocking_power_w * problem.stages
        self._pool = self._measured(self._ideas())
        self.fastest_s = float(self._pool.time_s.min())

    def _measured(self, plans: Index) -> Candidates:
        """Exact figures with latencies; only as many timetables at a time as fit."""
        clocks, switching = self._clocks, self._switching
        parts = []
        for begin in range(0, len(plans), self._room):
            part = plans[begin : begin + self._room]
            duration = clocks.duration_s(part)
            changes = clocks.changed(part).sum(axis=1)
            end = self._simulator.end_s(duration, self._pause_s(part))
            time = end.max(axis=1) + self._problem.overhead_s
            energy = clocks.energy_j[clocks.option_of, part].sum(axis=1) + switching.cost_j * changes
            parts.append(Candidates(part, end - duration, end, time, energy, changes))
        return join(parts)

    def _pause_s(self, plans: Index) -> Floats | None:
        if self._switching.latency_s == 0:
            return None
        return np.where(self._clocks.changed(plans), self._switching.latency_s, 0.0)

    def _ideas(self) -> Index:
        """The plans themselves, and with long runs at one clock: some stretched to many lengths, all with the runs
        merged that cost least by it.
        """
        plans, clocks = self._plans, self._clocks
        changes = clocks.changed(plans).sum(axis=1)
        time = clocks.duration_s(plans)
        end = self._simulator.end_s(time).max(axis=1)
        if not changes.any():
            return plans
        each = max(self._room - len(plans), 0) // (2 * len(CUTS))  # so many fit, of either sort for each cut
        bases = np.unique(np.linspace(0, len(plans) - 1, _BASES).astype(int)).tolist()
        lengths = np.linspace(0.99 * end.min(), end.max(), min(_RATIOS, each // len(bases)))
        some = plans[:: math.ceil(len(plans) * _SHARES / max(each, 1))]
        ideas = [plans]
        for cut in CUTS if each >= _SHARES else ():
            runs = Runs(clocks, *cut)
            ideas += [runs.stretched(plans[base], lengths / end[base]) for base in bases]
            ideas += runs.merged(some, np.arange(1, _SHARES + 1) / _SHARES)
        return np.concatenate(ideas)

    def run(self, deadline_s: Floats) -> Candidates:
        """The best plan for each deadline that can be kept, in order."""
        deadlines = Deadlines.of(self._pool, deadline_s, self._blocking_w, self._loss)
        best = deadlines.search(self._pool, self._measured)
        return self._smoothed(best, deadlines)

    def _smoothed(self, best: Candidates, deadlines: Deadlines) -> Candidates:
        room = np.maximum(deadlines.limit_j - best.energy_j, 0.0)
        smoother = Smoother(self._clocks, best.plan)
        low, high = np.full(len(room), -16.0), np.zeros(len(room))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            tried = self._measured(smoother.plan(room * np.exp2(middle) + self._switching.cost_j))
            fits = deadlines.keeps(tried)
            best = best.where_fewer(tried, fits)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return best


def _rebuilt(problem: Problem, frontier: Frontier, found: Candidates, claims: Frontier, loss: float) -> Frontier:
    """A frontier of these plans; ``claims`` says what is proven at which time."""
    blocking_w = problem.blocking_power_w * problem.stages
    order = np.lexsort((found.energy_j, found.time_s))
    cheapest = np.minimum.accumulate(found.energy_j[order])
    kept = order[np.append(True, cheapest[1:] < cheapest[:-1])]
    time_s = found.time_s[kept]
    energy_j = found.energy_j[kept] + blocking_w * time_s
    # What is proven for a time holds for every plan that is no later; for later ones, the least of every instruction.
    least = np.array([(o.energy_j - problem.blocking_power_w * o.time_s).min() for o in problem.options])
    proven = np.append(claims.energy_lower_bound_j - blocking_w * claims.time_s, least[problem.option_of].sum())
    at = claims.time_s.searchsorted(time_s * (1 - HAIR))
    bound = np.minimum(proven[at] + blocking_w * time_s, energy_j)
    frequencies = Clocks(problem).mhz[found.plan[kept]].astype(np.uint16)
    return replace(
        frontier,
        time_s=time_s,
        energy_j=energy_j,
        energy_lower_bound_j=bound,
        statuses=tuple(status_of(gap, DEFAULT_GAP + loss) for gap in (energy_j / bound - 1.0).tolist()),
        frequencies_mhz=frequencies,
        clock_changes=clock_changes(frequencies, frontier.stage_offset),
    )
