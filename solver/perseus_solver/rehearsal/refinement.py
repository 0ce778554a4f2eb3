"""Improve a plan where changes take time: slow or speed up parts of it, and keep what the rehearsal likes.

Grains decide beforehand which instructions share a clock. What a change costs depends on where it stands: before a wait
it is free, on the critical path it may delay every GPU of a node. So the best of the grains is improved by a search. In
each round some runs of instructions with one clock, or parts of them, get another one; all these plans are rehearsed,
and as many of the moves that help as help together are made. Where no move helps without making the iteration late,
time is offered at a price: the iteration may become longer, and the rounds after it bring it back in time. Each round
draws other random numbers, so that a plan is not fitted to the luck of one draw.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from perseus_core.hardware import Hardware
from perseus_solver.kinds import Floats
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frequencies
from perseus_solver.rehearsal.execution import Executor
from perseus_solver.rehearsal.outcome import Rehearsal, plans_as_asked, rehearse

_STEPS = (8, 4, 2, 1)
"""Supported clocks by which a run moves: in the first rounds, and at random with the shares below in all others. A run
may always take over the clock of a neighbour. Where changes are worth much to be made at all, small steps find none.
"""
_STEP_SHARES = (0.4, 0.3, 0.2, 0.1)
_ROUNDS = 32
_IDLE = 3
"""Rounds in a row that gain next to nothing after which time is offered; each draws other moves and other samples."""
_PRICES = (2.0, 1.0, 0.5)
"""At which time is offered, as shares of the energy for each share of the time, until the plan gets better by it. After
the last one in vain the search ends. Plans of no slowdown trade one share for about two, slower ones for less.
"""
_OFFERED = 12
"""Moves at most that are made while time is offered."""
_GAIN = 2e-4
"""Share of the energy that is next to nothing: a tenth of what the moves of a good round save."""
_LAST = 4
"""Of the plans found, those that are kept: the last is the best by a few samples, and may be late by more."""
_SAMPLES, _SAMPLES_TOGETHER = 24, 128
"""Samples of each move; plans of several moves have more, since one of them is kept."""
_WORK = 160 * 64
"""Plans times instructions that are rehearsed in a round. With four stages and eight microbatches that is every move;
with a hundred microbatches a few, but there the plans of the grains already keep nearly all savings.
"""
_TOGETHER = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 26, 32, 40)
"""Numbers of moves of a round that are tried together."""
_LATE = 5.0
"""What lateness costs: this share of the energy for each share of the time. No plan saves as much by being late."""
_RESERVE = 0.001
"""Share by which plans are made faster than wanted at least, at first: chosen among many by few samples, they look
better than they are. By how much is seen as they are found.
"""
_SURE = 2e-4
"""Share by which a plan that is found must be faster than wanted: another draw of its samples differs by as much."""
_SAMPLES_FOUND, _MOST_SAMPLES = 512, 4096
"""Samples that judge a plan that was found: of a job of many pipelines more, up to so many."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Instructions that follow each other on a stage, and their new clock."""

    low: int
    high: int
    clock_mhz: int


@dataclass(frozen=True, slots=True)
class _Terms:
    """What time costs in a round; ``price`` None: nothing until ``limit_s``, and much after it."""

    limit_s: float
    price: float | None

    def cost(self, energy_j: Floats, time_s: Floats) -> Floats:
        """Return what plans cost. Only differences between plans mean anything."""
        late = time_s / self.limit_s - 1.0
        return energy_j * (1.0 + (_LATE * np.maximum(late, 0.0) if self.price is None else self.price * late))


@dataclass(frozen=True, slots=True, eq=False)
class Refinement:
    """The search for one iteration time.

    Attributes:
        executor: of the problem.
        hardware: what plans meet.
        wanted_s: the iteration time to keep, seconds.
        confidence: share of the iterations that keep it.
    """

    executor: Executor
    hardware: Hardware
    wanted_s: float
    confidence: float

    def judge(self, plans: Frequencies, seed: int) -> Rehearsal:
        """Rehearse plans that were found, so often that what delays one of all pipelines in an iteration is seen."""
        samples = min(max(8 * self.hardware.pipelines, _SAMPLES_FOUND), _MOST_SAMPLES)
        return rehearse(self.executor, plans, self.hardware, samples=samples, seed=seed)

    def plans(self, clocks_mhz: Frequencies, seed: int) -> Frequencies:
        """Return better plans than one.

        Args:
            clocks_mhz: uint16[n], the plan to begin with.
            seed: of the random numbers.

        Returns:
            uint16[plans, n], the last of the plans each of which is in time and was better than all before, the last
            one best; none if there is no better one.
        """
        random = np.random.default_rng(seed)
        plan = best = clocks_mhz
        better: list[Frequencies] = []
        _, time_s = self._measured(best[None], _SAMPLES_TOGETHER, seed)
        reserve = max(self._excess(best, float(time_s[0]), seed), _RESERVE)
        idle = offers = 0
        for number in range(_ROUNDS):
            step = _STEPS[number] if number < len(_STEPS) else int(random.choice(_STEPS, p=_STEP_SHARES))
            price, draws = None, seed + 2 * number
            if idle == _IDLE:
                if offers == len(_PRICES):
                    break
                plan, price, idle, offers = best, _PRICES[offers], 0, offers + 1
            terms = _Terms((1 - reserve) * self.wanted_s, price)
            moves = _moves(self.executor.problem, plan, step)
            tried = np.stack([best, plan, *self._attempts(plan, moves, terms, random)])
            rehearsal, time_s = self._measured(tried, _SAMPLES_TOGETHER, draws)
            cost = terms.cost(rehearsal.mean_energy_j, time_s)
            at = 1 + int(cost[1:].argmin())
            plan = plans_as_asked(self.executor, tried[at : at + 1], self.hardware, rehearsal.of_plan(at))[0]
            if price is not None:
                continue
            gain = 1 - cost[at] / cost[0]
            idle = 0 if gain > _GAIN else idle + 1
            if gain > 0:
                best, expected_s = plan, float(time_s[at])
                excess = self._excess(plan, expected_s, draws + 1)
                if expected_s <= (1 - excess - _SURE) * self.wanted_s:
                    better.append(plan)
                    reserve = (reserve + excess) / 2
                else:
                    reserve = max(reserve, excess) + _SURE
                offers = 0 if gain > _GAIN else offers
        return np.stack(better[-_LAST:]) if better else np.empty((0, len(clocks_mhz)), dtype=clocks_mhz.dtype)

    def _attempts(
        self, plan: Frequencies, moves: list[_Move], terms: _Terms, random: np.random.Generator
    ) -> list[Frequencies]:
        """Return plans with the moves that help: with the best one, with the best two, and so on."""
        most = max(_WORK // self.executor.problem.instructions, 1)
        if len(moves) > most:
            moves = [moves[k] for k in random.choice(len(moves), most, replace=False).tolist()]
        plans = np.stack([plan, *(_moved(plan, move) for move in moves)])
        seed = int(random.integers(1 << 32))
        rehearsal, time_s = self._measured(plans, _SAMPLES, seed, steady=False)
        cost = terms.cost(rehearsal.mean_energy_j, time_s)
        better = [moves[k] for k in np.argsort(cost[1:], kind="stable").tolist() if cost[1 + k] < cost[0]]
        attempts = _together(plan, better[: _TOGETHER[-1] if terms.price is None else _OFFERED])
        return [attempts[count - 1] for count in _TOGETHER if count <= len(attempts)]

    def _measured(
        self, plans: Frequencies, samples: int, seed: int, *, steady: bool = True
    ) -> tuple[Rehearsal, Floats]:
        """Return what becomes of plans, and the times that one pipeline keeps, if these are distributed normally: so
        few samples do not show what happens seldom, nor how long the slowest of many pipelines takes.

        ``steady``: with agents that know what to expect, as plans will be judged. That decides about the last tenths.
        """
        alone = replace(self.hardware, pipelines=1)
        rehearsal = rehearse(self.executor, plans, alone, samples=samples, steady=steady, seed=seed)
        deviations = NormalDist().inv_cdf(self.confidence)
        time_s: Floats = rehearsal.time_s.mean(axis=1) + deviations * rehearsal.time_s.std(axis=1)
        return rehearsal, time_s

    def _excess(self, plan: Frequencies, time_s: float, seed: int) -> float:
        """Return by what share the job takes longer than one pipeline seemed to: it waits for the slowest, and the best
        of many plans by few samples takes longer than by these.
        """
        rehearsal = rehearse(self.executor, plan[None], self.hardware, samples=_SAMPLES_FOUND, seed=seed)
        return max(float(rehearsal.time_kept_s(self.confidence)[0]) - time_s, 0.0) / self.wanted_s


def _moves(problem: Problem, plan: Frequencies, steps: int) -> list[_Move]:
    """Return moves of all runs, of their halves, and of their ends."""
    clocks = [options.frequency_mhz for options in problem.options]
    ladder = [np.sort(table_mhz).astype(int).tolist() for table_mhz in clocks]
    measured = [frozenset(table_mhz) for table_mhz in ladder]
    moves = []
    for first, last in itertools.pairwise(problem.stage_offset.tolist()):
        changes = first + 1 + np.flatnonzero(np.diff(plan[first:last].astype(int)))
        for low, high in itertools.pairwise([first, *changes.tolist(), last]):
            if not plan[low]:
                continue
            neighbours = [int(plan[k]) for k in (low - 1, high) if first <= k < last and plan[k]]
            middle = (low + high) // 2
            parts = {(low, high), (low, middle), (middle, high), (low, low + 1), (high - 1, high)}
            for begin, end in sorted(part for part in parts if part[0] < part[1]):
                table_mhz = ladder[int(problem.option_of[begin])]
                at = table_mhz.index(int(plan[low]))
                beside = table_mhz[max(at - steps, 0)], table_mhz[min(at + steps, len(table_mhz) - 1)]
                tables = set(problem.option_of[begin:end].tolist())
                for clock in {*neighbours, *beside} - {int(plan[low])}:
                    if all(clock in measured[table] for table in tables):
                        moves.append(_Move(begin, end, clock))
    return moves


def _moved(plan: Frequencies, move: _Move) -> Frequencies:
    moved = plan.copy()
    moved[move.low : move.high] = move.clock_mhz
    return moved


def _together(plan: Frequencies, moves: list[_Move]) -> list[Frequencies]:
    """Return plans with the first move, with the first two, and so on; moves that meet an earlier one are left out."""
    taken = np.zeros(len(plan), dtype=np.bool_)
    plans = []
    for move in moves:
        if not taken[move.low : move.high].any():
            taken[move.low : move.high] = True
            plan = _moved(plan, move)
            plans.append(plan)
    return plans
