"""Count clock changes, and find plans that need fewer of them for a bounded amount of energy.

A GPU stays at its clock until another is set. Iterations follow each other, so the last instruction of a stage precedes
the first of the next iteration. Constant-time instructions (frequency 0) leave the clock as it is. What a change
takes on a GPU is the matter of ``perseus_solver.rehearsal``.

The search has three steps. First, plans whose stages run long at one clock (``runs``), which end at arbitrary times.
Second, two plans that end before and after a deadline are spliced into one that meets it (``splice``). Third, what is
left of the permitted loss is used to smooth the result (``smoothing``). All plans are simulated.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats, Index, Ints, looked_up
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import DEFAULT_GAP, Frequencies, Frontier, Point, status_of
from perseus_solver.model.simulator import Simulator
from perseus_solver.switching.runs import CUTS, Clocks, Runs
from perseus_solver.switching.smoothing import Smoother
from perseus_solver.switching.splice import TOLERANCE, Candidates, Deadlines, join

DEFAULT_LOSS = 2e-3
"""Share of the iteration energy that may be spent to avoid clock changes."""
_CELLS = 20_000_000
"""Instructions × plans in memory at once: about 500 MiB."""
_BASES, _RATIOS, _SHARES = 5, 80, 8
"""Plans that are stretched, lengths for each of them, and steps in which the runs of all other plans are merged."""
_HALVINGS = 6
"""Bisection steps, on a logarithmic scale, on the price of a change in the last step."""


def clock_changes(frequencies_mhz: Frequencies, stage_offset: Ints) -> Ints:
    """Count the clock changes of an iteration, summed over the stages.

    Args:
        frequencies_mhz: uint16[points, n], plans; 0 for constant-time instructions.
        stage_offset: int[stages + 1].

    Returns:
        int32[points].
    """
    total = np.zeros(len(frequencies_mhz), dtype=np.int32)
    for begin, end in zip(stage_offset[:-1].tolist(), stage_offset[1:].tolist(), strict=True):
        plan = frequencies_mhz[:, begin:end]
        # Whether an instruction sets a clock is the same in every plan: constant-time ones have one option only.
        plan = plan[:, (plan != 0).any(axis=0)]
        if plan.shape[1]:
            total += (plan != np.roll(plan, 1, axis=1)).sum(axis=1, dtype=np.int32)
    return total


def reduce_clock_changes(problem: Problem, frontier: Frontier, *, loss: float = DEFAULT_LOSS) -> Frontier:
    """Return a frontier whose plans have far fewer clock changes.

    For every time of the frontier it holds the plan of fewest changes found that ends no later and takes at most
    ``loss`` more energy than the cheapest. Points that another point dominates are dropped.

    Args:
        problem: the problem that was solved.
        frontier: its solution.
        loss: share of the iteration energy that may be spent to avoid changes.

    Raises:
        InvalidProblem: ``loss`` or a cost is negative or not finite.
    """
    search = _Search(problem, frontier.frequencies_mhz, loss)
    return _rebuilt(problem, frontier, search.run(frontier.time_s), frontier, loss)


def reduce_clock_changes_of_point(
    problem: Problem,
    frontier: Frontier,
    point: Point,
    deadline_s: float,
    *,
    loss: float = DEFAULT_LOSS,
) -> Point:
    """Return a plan for one deadline that has far fewer clock changes.

    Args:
        problem: the problem that was solved.
        frontier: its solution, whose plans are further starting points.
        point: the best plan for the deadline regardless of changes.
        deadline_s: longest iteration time allowed, seconds; the point's own time counts if that is longer.
        loss: share of the iteration energy that may be spent to avoid changes.

    Returns:
        The plan of fewest changes found that meets the deadline.

    Raises:
        InvalidProblem: ``loss`` or a cost is negative or not finite.
    """
    plans = np.concatenate([frontier.frequencies_mhz, point.frequencies_mhz[None]])
    candidates = _Search(problem, plans, loss).run(np.array([max(deadline_s, point.iteration_time_s)]))
    order = np.argsort(np.append(frontier.time_s, point.iteration_time_s), kind="stable")
    claims = replace(
        frontier,
        time_s=np.append(frontier.time_s, point.iteration_time_s)[order],
        energy_j=np.append(frontier.energy_j, point.energy_j)[order],
        energy_lower_bound_j=np.append(frontier.energy_lower_bound_j, point.energy_lower_bound_j)[order],
    )
    return _rebuilt(problem, frontier, candidates, claims, loss)[0]


def proven_effective_j(problem: Problem, claims: Frontier, time_s: Floats) -> Floats:
    """Return a proven lower bound on the effective energy of plans that end by given times.

    What is proven for a time holds for every plan that is no later. For later plans, the bound is the sum of the least
    effective energies of all instructions.

    Args:
        problem: the problem.
        claims: a frontier of it whose bounds are proven, without a rehearsal.
        time_s: float[times], seconds, overhead included.

    Returns:
        float[times], joules: energy of an iteration less the blocking power of all stages over the whole of it.
    """
    least = np.array([(o.energy_j - problem.blocking_power_w * o.time_s).min() for o in problem.options])
    blocking_w = problem.blocking_power_w * problem.stages
    proven = np.append(claims.energy_lower_bound_j - blocking_w * claims.time_s, least[problem.option_of].sum())
    return proven[claims.time_s.searchsorted(time_s * (1 - TOLERANCE))]


class _Search:
    """Plans of one problem, simulated."""

    def __init__(self, problem: Problem, frequencies_mhz: Frequencies, loss: float) -> None:
        if not (np.isfinite(loss) and loss >= 0):
            raise InvalidProblem(f"loss must be a finite number, zero or more, not {loss}")
        self._problem, self._loss = problem, loss
        self._simulator = Simulator(problem)
        self._clocks = Clocks(problem)
        self._plans = np.searchsorted(self._clocks.mhz, frequencies_mhz).astype(np.intp)
        self._capacity = max(_CELLS // max(problem.instructions, 1), 2)
        self._blocking_w = problem.blocking_power_w * problem.stages
        # No plan is faster than all clocks at their maximum, which need no change.
        highest = [int(np.searchsorted(self._clocks.mhz, options.frequency_mhz[0])) for options in problem.options]
        maximum = np.array(highest, dtype=np.intp)[problem.option_of]
        self._pool = self._measured(np.concatenate([self._starting_plans(), maximum[None]]))

    def _measured(self, plans: Index) -> Candidates:
        """Simulate plans, as many at a time as fit into memory."""
        clocks = self._clocks
        parts = []
        for begin in range(0, len(plans), self._capacity):
            part = plans[begin : begin + self._capacity]
            duration = clocks.duration_s(part)
            changes = clocks.changed(part).sum(axis=1)
            end = self._simulator.end_s(duration)
            time = end.max(axis=1) + self._problem.overhead_s
            energy = looked_up(clocks.energy_j, clocks.option_of, part).sum(axis=1)
            parts.append(Candidates(part, end - duration, end, time, energy, changes))
        return join(parts)

    def _starting_plans(self) -> Index:
        """Return the given plans, and variants with long runs at one clock.

        Some plans are stretched to many lengths; in all plans those runs are merged that cost least.
        """
        plans, clocks = self._plans, self._clocks
        changes = clocks.changed(plans).sum(axis=1)
        time = clocks.duration_s(plans)
        end = self._simulator.end_s(time).max(axis=1)
        if not changes.any():
            return plans
        each = max(self._capacity - len(plans), 0) // (2 * len(CUTS))  # that many of either kind fit, for each cut
        bases = np.unique(np.linspace(0, len(plans) - 1, _BASES).astype(int)).tolist()
        lengths = np.linspace(0.99 * end.min(), end.max(), min(_RATIOS, each // len(bases)))
        some = plans[:: math.ceil(len(plans) * _SHARES / max(each, 1))]
        starts = [plans]
        for cut in CUTS if each >= _SHARES else ():
            runs = Runs(clocks, *cut)
            starts += [runs.stretched(plans[base], lengths / end[base]) for base in bases]
            starts += runs.merged(some, np.arange(1, _SHARES + 1) / _SHARES)
        return np.concatenate(starts)

    def run(self, deadline_s: Floats) -> Candidates:
        """Return the best plan for each deadline that a plan meets, in order."""
        deadlines = Deadlines.of(self._pool, deadline_s, self._blocking_w, self._loss)
        best = deadlines.search(self._pool, self._measured)
        return self._smoothed(best, deadlines)

    def _smoothed(self, best: Candidates, deadlines: Deadlines) -> Candidates:
        """Use what is left of the permitted loss to smooth the plans."""
        margin_j = np.maximum(deadlines.limit_j - best.energy_j, 0.0)
        smoother = Smoother(self._clocks, best.plan)
        low, high = np.full(len(margin_j), -16.0), np.zeros(len(margin_j))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            tried = self._measured(smoother.plan(margin_j * np.exp2(middle)))
            fits = deadlines.met_by(tried)
            best = best.where_fewer(tried, fits)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return best


def _rebuilt(problem: Problem, frontier: Frontier, candidates: Candidates, claims: Frontier, loss: float) -> Frontier:
    """Return a frontier of these plans; ``claims`` is the frontier whose bounds are proven."""
    blocking_w = problem.blocking_power_w * problem.stages
    order = np.lexsort((candidates.energy_j, candidates.time_s))
    cheapest = np.minimum.accumulate(candidates.energy_j[order])
    chosen = order[np.append(True, cheapest[1:] < cheapest[:-1])]
    time_s = candidates.time_s[chosen]
    energy_j = candidates.energy_j[chosen] + blocking_w * time_s
    bound = np.minimum(proven_effective_j(problem, claims, time_s) + blocking_w * time_s, energy_j)
    frequencies = Clocks(problem).mhz[candidates.plan[chosen]].astype(np.uint16)
    return replace(
        frontier,
        time_s=time_s,
        energy_j=energy_j,
        energy_lower_bound_j=bound,
        statuses=tuple(status_of(gap, DEFAULT_GAP + loss) for gap in (energy_j / bound - 1.0).tolist()),
        frequencies_mhz=frequencies,
        clock_changes=clock_changes(frequencies, frontier.stage_offset),
    )
