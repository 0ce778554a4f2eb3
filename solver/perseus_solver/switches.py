"""Changes of clock in a plan, and plans that need fewer of them.

A GPU keeps its clock until told otherwise; iterations follow each other, so the last instruction's clock meets the
first's. Constant-time instructions (frequency 0) leave the clock as it is. `calm` trades a bounded amount of energy
for fewer changes; it never makes an instruction slower than planned, so no plan gets later. Called by ``frontier``,
the CLI and the operator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from perseus_solver.errors import InvalidProblem
from perseus_solver.problem import Floats, Ints, Problem
from perseus_solver.result import Frequencies, Frontier, verdict
from perseus_solver.simulate import Simulator

Index = npt.NDArray[np.intp]

DEFAULT_LOSS = 2e-3
"""Share of the iteration energy that `calm` may give up."""
_CELLS = 100_000_000
"""Positions × stages × clocks × plans walked at once, a byte each."""
_HALVINGS = 12
"""Bisection steps on the price of a change: finds it to 2^-12 of its range, far finer than plans differ."""


@dataclass(frozen=True, slots=True)
class Switching:
    """What one change of clock costs on a GPU model.

    Attributes:
        cost_j: energy of the change itself, joules.
        latency_s: how long the clock takes to settle, seconds; the GPU is taken to wait meanwhile, at blocking power.
    """

    cost_j: float = 0.0
    latency_s: float = 0.0

    def price_j(self, blocking_power_w: float) -> float:
        """Joules a change."""
        return self.cost_j + blocking_power_w * self.latency_s


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


def calm(
    problem: Problem, frontier: Frontier, switching: Switching | None = None, *, loss: float = DEFAULT_LOSS
) -> Frontier:
    """The frontier's plans with far fewer clock changes, each at most ``loss`` dearer and never later.

    Each stage's clocks are the cheapest sequence when a change has a price: what a change costs, or more, as much as
    the permitted loss can pay. Points that another comes to dominate are dropped.

    Raises:
        InvalidProblem: ``loss`` or a cost is negative or not finite.
    """
    switching = switching or Switching()
    for name, value in (("loss", loss), ("cost_j", switching.cost_j), ("latency_s", switching.latency_s)):
        if not (np.isfinite(value) and value >= 0):
            raise InvalidProblem(f"{name} must be a finite number, zero or more, not {value}")
    smoother = _Smoother(problem, frontier.frequencies_mhz)
    floor_j = switching.price_j(problem.blocking_power_w)
    budget_j = loss * frontier.energy_j
    low = np.full(len(frontier), floor_j)
    high = np.maximum(low, budget_j)  # one change cannot be worth more than all we may give up
    best = smoother.plan(low)
    # The price of a change itself may already spend more than the permitted loss: then fewer changes are not worth it.
    kept = (smoother.effective_j(best) - smoother.planned_j <= budget_j)[:, None]
    best = np.where(kept, best, frontier.frequencies_mhz)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        plan = smoother.plan(middle)
        affordable = smoother.effective_j(plan) - smoother.planned_j <= budget_j
        calmer = clock_changes(plan, frontier.stage_offset) <= clock_changes(best, frontier.stage_offset)
        best = np.where((affordable & calmer)[:, None], plan, best)
        low, high = np.where(affordable, middle, low), np.where(affordable, high, middle)
    return _rebuilt(problem, frontier, best, budget_j)


def _rebuilt(problem: Problem, frontier: Frontier, plans: Frequencies, budget_j: Floats) -> Frontier:
    simulator = Simulator(problem)
    time_s, energy_j = simulator.totals(simulator.choice_of(plans))
    # A plan over budget after all (it got earlier: less time to wait, but no less than planned) stays as it was.
    blocking_w = problem.blocking_power_w * problem.stages
    effective = energy_j - blocking_w * time_s
    over = effective > frontier.effective_energy_j + budget_j
    plans = np.where(over[:, None], frontier.frequencies_mhz, plans)
    time_s, energy_j = np.where(over, frontier.time_s, time_s), np.where(over, frontier.energy_j, energy_j)
    # The bound on effective energy holds for every plan that is no later.
    bound = frontier.energy_lower_bound_j - blocking_w * (frontier.time_s - time_s)
    effective = energy_j - blocking_w * time_s
    order = np.lexsort((effective, time_s))
    best = np.minimum.accumulate(effective[order])
    kept = order[np.append(True, best[1:] < best[:-1])]
    return replace(
        frontier,
        time_s=time_s[kept],
        energy_j=energy_j[kept],
        energy_lower_bound_j=bound[kept],
        statuses=tuple(verdict(gap) for gap in (energy_j[kept] / bound[kept] - 1.0).tolist()),
        frequencies_mhz=plans[kept],
        clock_changes=clock_changes(plans[kept], frontier.stage_offset),
    )


class _Smoother:
    """Cheapest clock sequences of all stages and plans at once: arrays [position, points, stages, clocks]."""

    def __init__(self, problem: Problem, plans: Frequencies) -> None:
        clocks = np.unique(np.concatenate([o.frequency_mhz for o in problem.options]))
        self._clocks = clocks[clocks > 0]
        time = np.full((len(problem.options), len(self._clocks)), np.inf)
        energy = np.full_like(time, np.inf)
        for k, options in enumerate(problem.options):
            sets = options.frequency_mhz > 0
            at = np.searchsorted(self._clocks, options.frequency_mhz[sets])
            time[k, at] = options.time_s[sets]
            energy[k, at] = options.energy_j[sets] - problem.blocking_power_w * options.time_s[sets]
        self._time, self._energy = time, energy
        self._option_of, self._plans = problem.option_of, plans
        # Only instructions that set a clock take part; stages are padded to the longest.
        setting = (plans != 0).any(axis=0)
        own = [
            np.flatnonzero(setting[b:e]) + b
            for b, e in zip(problem.stage_offset[:-1].tolist(), problem.stage_offset[1:].tolist(), strict=True)
        ]
        self._seat = np.full((max(map(len, own)), len(own)), -1, dtype=np.intp)
        for stage, rows in enumerate(own):
            self._seat[: len(rows), stage] = rows
        self.planned_j = self.effective_j(plans)

    def effective_j(self, plans: Frequencies) -> Floats:
        """Σ (e − P_blk·t) over the instructions that set a clock."""
        rows = self._seat[self._seat >= 0]
        at = np.searchsorted(self._clocks, plans[:, rows])
        total: Floats = self._energy[self._option_of[rows], at].sum(axis=1)
        return total

    def plan(self, price_j: Floats) -> Frequencies:
        """The cheapest plans in which no instruction is slower than planned, for a price of a change (one a point)."""
        size = max(_CELLS // (self._seat.size * len(self._clocks)), 1)
        parts = [slice(begin, begin + size) for begin in range(0, len(self._plans), size)]
        return np.concatenate([self._plan(self._plans[part], price_j[part]) for part in parts])

    def _plan(self, plans: Frequencies, price_j: Floats) -> Frequencies:
        # The ring is cut at the first instruction. Where an open sequence ends is where the closed one should begin.
        open_end = self._walk(plans, price_j, None)[0]
        _, chosen = self._walk(plans, price_j, open_end)
        calmed = plans.copy()
        at = self._seat >= 0
        calmed[:, self._seat[at]] = self._clocks[chosen[at]].T
        return calmed

    def _walk(self, plans: Frequencies, price_j: Floats, before: Index | None) -> tuple[Index, Index]:
        """Viterbi over positions: (last clock [points, stages], clock [position, stages, points])."""
        positions, stages = self._seat.shape
        points, clocks = len(plans), len(self._clocks)
        price = price_j[:, None, None]
        stays = np.empty((positions, points, stages, clocks), dtype=np.bool_)
        source = np.empty((positions, points, stages), dtype=np.intp)
        value = np.zeros((points, stages, clocks))
        if before is not None:
            value += np.where(np.arange(clocks) == before[:, :, None], 0.0, price)
        for i, rows in enumerate(self._seat):
            source[i] = value.argmin(axis=2)
            other = np.take_along_axis(value, source[i][:, :, None], axis=2) + price
            stays[i] = value <= other
            option = self._option_of[rows]
            planned = np.searchsorted(self._clocks, plans[:, rows])
            planned = np.minimum(planned, clocks - 1)
            within = self._time[option] <= self._time[option, planned][:, :, None]
            cost = np.where(within, self._energy[option], np.inf)
            value = np.minimum(value, other) + np.where((rows >= 0)[:, None], cost, 0.0)
        here = value.argmin(axis=2)
        last = here
        chosen = np.empty((positions, stages, points), dtype=np.intp)
        for i in range(positions - 1, -1, -1):
            chosen[i] = here.T
            stay = np.take_along_axis(stays[i], here[:, :, None], axis=2)[:, :, 0]
            here = np.where(stay, here, source[i])
        return last, chosen
