"""The plans that a job should run: of all grains, rehearsed, and none dominated by another.

Plans of every grain come into question. All are rehearsed with few samples, those that are far from the best are
dropped, and the rest is rehearsed with many. For the times that are wanted in particular, a search then improves the
best plan (`perseus_solver.rehearsal.refinement`). The result is a frontier as any other, but of times that are kept
with a confidence and of expected energies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perseus_core.grain import Grain
from perseus_core.hardware import Hardware
from perseus_core.marks import MarkSource
from perseus_solver.certify import Bound, deadline_bound, iteration_bound
from perseus_solver.errors import InvalidProblem
from perseus_solver.frontier import Planner, Progress
from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frequencies, Frontier, Point, Rehearsed, status_of
from perseus_solver.rehearsal.execution import Executor
from perseus_solver.rehearsal.grains import group_of, grouped_plans
from perseus_solver.rehearsal.outcome import SAMPLES, Rehearsal, plans_as_asked, rehearse
from perseus_solver.rehearsal.refinement import Refinement
from perseus_solver.switching import clock_changes, reduce_clock_changes

DEFAULT_CONFIDENCE = 0.95
"""Share of the iterations that keep a plan's time."""
_POINTS = 100
"""Points of the frontier from which plans are chosen."""
_TIMES = 12
"""Times between T_min and T* for which plans of each coarser grain are made; they lie closer at the fast end."""
_SHORTER = np.array([0.0, 0.0005, 0.001, 0.002, 0.005, 0.01])
"""Shares by which plans are made for shorter times than those that are wanted in particular: rehearsed, they take
longer.
"""
_SOLVED = 32
"""Plans with a clock for every instruction that are rehearsed."""
_LOSSES = (0.002, 0.01)
"""Shares of the energy for which clock changes are saved: with little latency the first is worth it, with more both."""
_PARTS = (1, 3)
"""Into how many segments the lead and the tail of a stage are cut. At T_min of GPT-3 with 8 microbatches, one segment
keeps a quarter of the savings and three keep more than four fifths.
"""
_EARLY = (1, 3)
"""Instructions by which plans of segments raise clocks early in variants of them. Raises are few, so this takes little
energy, and a change with a long tail of latency delays nothing.
"""
_SCREENED = 8
"""Samples in the first rehearsal."""
_NEAR = 0.003
"""Share of the energy by which a plan may seem worse than another in the first rehearsal and stay. On GPT-3 with the
latencies of an H100 the energies of both rehearsals differ by less than 0.1 %, but times decide, too.
"""
_WORTH = 0.001
"""Share of the energy that a plan must save to set clocks more finely than one that is no slower. Rehearsals differ by
as much, and each change that is not made cannot come late.
"""
_FINALISTS = 96
"""Plans that are rehearsed with many samples."""
_LATE = (0.0, 0.006, 0.02)
"""Shares by which the plans are late from which a search begins, until the best is close to what is proven: where
changes take long, the best of the grains may be far from better plans, and one that is late near them.
"""
_CLOSE = 0.05
"""Share of the energy above the proven bound within which a plan is close."""


@dataclass(frozen=True, slots=True, eq=False)
class _Candidates:
    """Plans and their grains."""

    frequencies_mhz: Frequencies
    grains: tuple[Grain, ...]

    def __len__(self) -> int:
        return len(self.grains)

    def select(self, rows: Index) -> _Candidates:
        return _Candidates(self.frequencies_mhz[rows], tuple(self.grains[row] for row in rows.tolist()))

    def as_asked(self, executor: Executor, hardware: Hardware, rehearsal: Rehearsal) -> _Candidates:
        return replace(self, frequencies_mhz=plans_as_asked(executor, self.frequencies_mhz, hardware, rehearsal))

    def and_finest(self, frequencies_mhz: Frequencies) -> _Candidates:
        plans = np.concatenate([self.frequencies_mhz, frequencies_mhz])
        return _Candidates(plans, self.grains + (Grain.INSTRUCTION,) * len(frequencies_mhz))


class _Expected(NamedTuple):
    """What rehearsals say of plans, float[plans] each: time kept with the confidence, its median and mean, energy, and
    shares of the computing time below and above the planned clock. They may rest on different numbers of samples.
    """

    kept_s: Floats
    p50_s: Floats
    mean_s: Floats
    energy_j: Floats
    below_share: Floats
    above_share: Floats

    @classmethod
    def of(cls, rehearsal: Rehearsal, confidence: float) -> _Expected:
        kept_s, p50_s, mean_s = rehearsal.time_kept_s(confidence), rehearsal.time_kept_s(0.5), rehearsal.mean_time_s
        return cls(kept_s, p50_s, mean_s, rehearsal.mean_energy_j, rehearsal.below_share, rehearsal.above_share)

    def and_of(self, others: _Expected) -> _Expected:
        return _Expected(*map(np.concatenate, zip(self, others, strict=True)))


def deployable_frontier(
    planner: Planner,
    hardware: Hardware,
    *,
    executor: Executor | None = None,
    points: int = 100,
    confidence: float = DEFAULT_CONFIDENCE,
    times_s: Iterable[float] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Frontier:
    """Return the plans worth deploying on this hardware, with what each is expected to do there.

    Args:
        planner: of the problem.
        hardware: what plans meet.
        executor: of the problem, which knows how its instructions scatter; None: as the hardware says.
        points: the largest number of plans to return.
        confidence: share of the iterations that keep a plan's ``time_s``.
        times_s: iteration times for which plans are wanted in particular, seconds.
        seed: of the random numbers.
        progress: called with (done, total) while the frontier is solved.

    Returns:
        A frontier whose ``rehearsed`` holds grains and figures. Its gaps are those of the expected energy to what is
        proven of every plan that ends by the same time.

    Raises:
        InvalidProblem: ``confidence`` is not between 0 and 1, or ``points`` is not positive.
    """
    if not 0 < confidence < 1:
        raise InvalidProblem(f"confidence must be between 0 and 1, not {confidence}")
    if points < 1:
        raise InvalidProblem(f"points must be 1 or more, not {points}")
    problem, solved = planner.problem, planner.frontier(_POINTS, progress=progress)
    executor = executor or Executor(problem)
    wanted = [max(time_s, solved.t_min_s) for time_s in times_s]
    candidates = _candidates(executor, hardware, solved, np.outer(wanted, 1 - _SHORTER).ravel())
    screened = rehearse(executor, candidates.frequencies_mhz, hardware, samples=_SCREENED, steady=False, seed=seed)
    # All clocks at their maximum are always among the plans: nothing is safer.
    chosen = np.union1d(_promising(problem, screened), [candidates.grains.index(Grain.NONE)])
    candidates = candidates.select(chosen)
    rehearsal = rehearse(executor, candidates.frequencies_mhz, hardware, samples=SAMPLES, seed=seed)
    candidates = candidates.as_asked(executor, hardware, rehearsal)
    expected = _Expected.of(rehearsal, confidence)
    # Where each stage keeps one clock, or has one instruction, the plans of the grains are all there are.
    if hardware.marks is not MarkSource.HOST and problem.instructions > problem.stages:
        for wanted_s in wanted:
            search = Refinement(executor, hardware, wanted_s, confidence)
            least_j = float(deadline_bound(problem, planner.bounds, np.array([wanted_s]))[0])
            candidates, expected = _searched(search, candidates, expected, least_j, seed)
    return _frontier_of(
        executor, planner.bounds, candidates, expected, confidence=confidence, points=points, wanted_s=wanted
    )


def ideal_point(planner: Planner, point: Point) -> Point:
    """Return what a rehearsed plan takes where clocks change at once, with its gap there.

    Args:
        planner: of the problem; it has computed the frontier.
        point: a point of a deployable frontier.

    Raises:
        InvalidProblem: the point was not rehearsed.
    """
    if point.expectation is None:
        raise InvalidProblem("point must be one that was rehearsed")
    time_s, energy_j = point.expectation.ideal_time_s, point.expectation.ideal_energy_j
    bound_j = min(float(iteration_bound(planner.problem, planner.bounds, np.array([time_s]))[0]), energy_j)
    return replace(
        point,
        iteration_time_s=time_s,
        energy_j=energy_j,
        energy_lower_bound_j=bound_j,
        status=status_of(energy_j / bound_j - 1.0),
    )


def _candidates(executor: Executor, hardware: Hardware, solved: Frontier, times_s: Floats) -> _Candidates:
    """Return plans of all grains, from the fastest to the cheapest."""
    problem, simulator = executor.problem, executor.simulator
    plans, grains = [problem.frequencies_of(np.zeros((1, problem.instructions), dtype=np.intp))], [Grain.NONE]
    along = np.linspace(0.0, 1.0, _TIMES) ** 1.5
    wanted_s = np.unique(np.append(solved.t_min_s + along * (solved.t_star_s - solved.t_min_s), times_s))
    groups = [(Grain.STAGE, 1)]
    if hardware.marks is not MarkSource.HOST:  # otherwise each stage keeps one clock, whatever is planned
        groups += [(Grain.SEGMENT, parts) for parts in _PARTS]
        some = _some(solved, times_s)
        fewer = [reduce_clock_changes(problem, some, loss=loss) for loss in _LOSSES]
        for instruction in (some, *fewer):
            plans.append(instruction.frequencies_mhz)
            grains += [Grain.INSTRUCTION] * len(instruction)
    for grain, parts in groups:
        choices = grouped_plans(problem, simulator, group_of(problem, grain, parts), wanted_s)
        variants = [problem.frequencies_of(choices)]
        if grain is Grain.SEGMENT:
            variants += [_raised_early(problem, variants[0], early) for early in _EARLY]
        plans += variants
        grains += [grain] * sum(map(len, variants))
    all_plans = np.concatenate(plans)
    _, first = np.unique(all_plans, axis=0, return_index=True)
    return _Candidates(all_plans, tuple(grains)).select(np.sort(first))


def _some(solved: Frontier, times_s: Floats) -> Frontier:
    """Return a few points of a frontier, evenly spread, and those just before the times that are wanted."""
    rows = np.linspace(0, len(solved) - 1, min(_SOLVED, len(solved))).astype(np.intp)
    rows = np.union1d(rows, [solved.lookup(time_s) for time_s in times_s.tolist()]).astype(np.intp)
    return solved.select(rows.tolist())


def _raised_early(problem: Problem, plans: Frequencies, early: int) -> Frequencies:
    """Return the plans with each raise so many instructions earlier, where these were measured at the clock."""
    raised = plans.copy()
    for _ in range(early):
        following = raised.copy()
        for low, high in itertools.pairwise(problem.stage_offset.tolist()):
            following[:, low:high] = np.roll(raised[:, low:high], -1, axis=1)
        for k, options in enumerate(problem.options):
            alike = problem.option_of == k
            higher = (following[:, alike] > raised[:, alike]) & np.isin(following[:, alike], options.frequency_mhz)
            raised[:, alike] = np.where(higher & (raised[:, alike] > 0), following[:, alike], raised[:, alike])
    return raised


def _promising(problem: Problem, screened: Rehearsal) -> Index:
    """Return the plans that may turn out to be the best for some time, spread over all times."""
    time_s, energy_j = screened.time_s.mean(axis=1), screened.mean_energy_j
    effective_j = energy_j - problem.blocking_power_w * problem.stages * time_s
    order = np.lexsort((effective_j, time_s))
    excess_j = effective_j[order] - np.minimum.accumulate(effective_j[order])
    near = excess_j <= _NEAR * energy_j[order]
    order, excess_j = order[near], excess_j[near]
    # Half of them for all times, and of the others those that seem the best.
    first = _spread(time_s[order], effective_j[order], _FINALISTS // 2)
    ranked = np.argsort(excess_j, kind="stable")
    others = ranked[~np.isin(ranked, first)]
    return np.sort(order[np.append(first, others)[:_FINALISTS]])


def _spread(time_s: Floats, effective_j: Floats, most: int, wanted_s: Sequence[float] = ()) -> Index:
    """Return so many plans, or fewer, that little energy is lost over all times by the absence of the others.

    Args:
        time_s: float[plans], ascending.
        effective_j: float[plans].
        most: how many plans to return.
        wanted_s: times for which the best plan stays.

    Returns:
        int[≤ most], ascending: of the plans that are cheaper than all before them, those that are left when the one
        whose absence loses least is left out again and again. The first and the last stay.
    """
    lowest_j = np.minimum.accumulate(effective_j)
    kept = np.flatnonzero(np.append(True, lowest_j[1:] < lowest_j[:-1]))
    stay = kept[np.maximum(np.searchsorted(time_s[kept], wanted_s, side="right") - 1, 0)]
    while len(kept) > max(most, 2):
        saved_j, lasts_s = -np.diff(effective_j[kept])[:-1], np.diff(time_s[kept])[1:]
        lost = np.where(np.isin(kept[1:-1], stay), np.inf, saved_j * lasts_s)
        kept = np.delete(kept, 1 + int(lost.argmin()))
    return kept[:most]


def _worth_their_changes(energy_j: Floats, effective_j: Floats, grains: Sequence[Grain]) -> Index:
    """Return the plans that save more than `_WORTH` over every coarser plan that is no slower: up to least energy for
    the iteration alone, after it for a pipeline that waits for a straggler.

    Args:
        energy_j: float[plans], fastest plan first.
        effective_j: float[plans], less what the same time costs in waiting.
        grains: of the plans.
    """
    finest_first = [*Grain]
    coarseness = np.array([finest_first.index(grain) for grain in grains])
    alone = np.arange(len(grains)) <= energy_j.argmin()
    worth = np.ones(len(grains), dtype=bool)
    for level in range(len(finest_first)):
        for of_job, own_j in ((True, energy_j), (False, effective_j)):
            coarser_j = np.minimum.accumulate(np.where(coarseness > level, own_j, np.inf))
            worth &= (coarseness != level) | (alone != of_job) | (own_j < coarser_j - _WORTH * energy_j)
    return np.flatnonzero(worth)


def _searched(
    search: Refinement, candidates: _Candidates, expected: _Expected, least_j: float, seed: int
) -> tuple[_Candidates, _Expected]:
    """Return the plans with those that a search finds, from one start after the other until the best that is in time
    is close to ``least_j``, which is proven of all that are.
    """
    wanted_s = search.wanted_s
    for late in _LATE:
        start = _best_within(expected, (1 + late) * wanted_s)
        plans = search.plans(candidates.frequencies_mhz[start], seed + start)
        if len(plans):
            judged = search.judge(plans, seed)
            expected = expected.and_of(_Expected.of(judged, search.confidence))
            candidates = candidates.and_finest(plans_as_asked(search.executor, plans, search.hardware, judged))
        if expected.energy_j[_best_within(expected, wanted_s)] < (1 + _CLOSE) * least_j:
            break
    return candidates, expected


def _best_within(expected: _Expected, wanted_s: float) -> int:
    """Return the plan of least expected energy that keeps a time; if none does, the one that exceeds it least."""
    late = np.maximum(expected.kept_s / wanted_s - 1.0, 0.0)
    return int(np.lexsort((expected.energy_j, late))[0])


def _frontier_of(
    executor: Executor,
    proven: Iterable[Bound],
    candidates: _Candidates,
    expected: _Expected,
    *,
    confidence: float,
    points: int,
    wanted_s: Sequence[float],
) -> Frontier:
    """Return the plans that no other dominates, as a frontier."""
    problem, simulator = executor.problem, executor.simulator
    blocking_w = problem.blocking_power_w * problem.stages
    kept_s, energy_j = expected.kept_s, expected.energy_j
    effective_j = energy_j - blocking_w * kept_s
    order = np.lexsort((effective_j, kept_s))
    order = order[_worth_their_changes(energy_j[order], effective_j[order], [candidates.grains[row] for row in order])]
    rows = order[_spread(kept_s[order], effective_j[order], points, wanted_s)]
    plans = candidates.frequencies_mhz[rows]
    ideal_s, ideal_j = simulator.totals(simulator.choice_of(plans))
    # The execution mixes clocks within instructions, for which the bound holds as well: it is one of the relaxation.
    # Its lines hold for the mean of all samples, and for every later time: up to least energy for the iteration alone,
    # after it for a pipeline that waits.
    mean_s = expected.mean_s[rows]
    deadline_s = np.maximum(kept_s[rows], mean_s)
    waiting_j = iteration_bound(problem, proven, deadline_s) - blocking_w * (deadline_s - mean_s)
    bound_j = np.minimum(np.maximum(deadline_bound(problem, proven, deadline_s), waiting_j), energy_j[rows])
    return Frontier(
        time_s=kept_s[rows],
        energy_j=energy_j[rows],
        energy_lower_bound_j=bound_j,
        statuses=tuple(status_of(gap) for gap in (energy_j[rows] / bound_j - 1.0).tolist()),
        frequencies_mhz=plans,
        stage_offset=problem.stage_offset,
        clock_changes=clock_changes(plans, problem.stage_offset),
        blocking_power_w=problem.blocking_power_w,
        rehearsed=Rehearsed(
            confidence=confidence,
            grains=tuple(candidates.grains[row] for row in rows.tolist()),
            p50_s=expected.p50_s[rows],
            ideal_time_s=ideal_s,
            ideal_energy_j=ideal_j,
            below_share=expected.below_share[rows],
            above_share=expected.above_share[rows],
        ),
    )
