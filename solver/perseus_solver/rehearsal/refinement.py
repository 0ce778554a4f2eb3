"""Improve a plan where changes take time: slow or speed up parts of it, and keep what the rehearsal likes.

Grains decide beforehand which instructions share a clock. What a change costs depends on where it stands: before a wait
it is free, on the critical path it may delay every GPU of a node. So the best of the grains is improved by a search. In
each round some runs of instructions with one clock, or parts of them, get another one; all these plans are rehearsed,
and as many of the moves that help as help together are made. Each round draws other random numbers, so that a plan is
not fitted to the luck of one draw.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from perseus_solver.kinds import Floats
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frequencies
from perseus_solver.rehearsal.execution import Executor
from perseus_solver.rehearsal.hardware import Hardware
from perseus_solver.rehearsal.outcome import Rehearsal, rehearse

_STEPS = (8, 4, 2, 1)
"""Supported clocks by which a run moves, by round; a run may always take over the clock of a neighbour."""
_ROUNDS = 16
_VAIN = 6
"""Rounds in a row that gain next to nothing after which the search ends; each draws other moves and other samples."""
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
_TOGETHER = 40
"""Moves of a round that are tried together."""
_LATE = 5.0
"""What lateness costs: this share of the energy for each share of the time. No plan saves as much by being late."""
_RESERVE = 0.001
"""Share by which plans are made faster than wanted at least, at first: chosen among many by few samples, they look better
than they are. By how much is seen as they are found.
"""
_SAMPLES_FOUND, _MOST_SAMPLES = 512, 4096
"""Samples that judge a plan that was found: of a job of many pipelines more, up to so many."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Instructions that follow each other on a stage, and their new clock."""

    low: int
    high: int
    clock_mhz: int


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
            uint16[plans, n], the plan after each of the last rounds that improved it, the last one best; none if no
            round did.
        """
        random, problem = np.random.default_rng(seed), self.executor.problem
        _, kept_s = self._cost(clocks_mhz[None], _SAMPLES_TOGETHER, seed, 0.0, steady=True)
        reserve = max(self._excess(clocks_mhz, float(kept_s[0]), seed), _RESERVE)
        plan, found, vain = clocks_mhz, [], 0
        for number in range(_ROUNDS):
            moves = _moves(problem, plan, _STEPS[min(number, len(_STEPS) - 1)])
            most = max(_WORK // problem.instructions, 1)
            if len(moves) > most:
                moves = [moves[k] for k in random.choice(len(moves), most, replace=False).tolist()]
            plans, draws = np.stack([plan, *(_moved(plan, move) for move in moves)]), seed + 3 * number
            cost, _ = self._cost(plans, _SAMPLES, draws, reserve, steady=False)
            better = [moves[k] for k in np.argsort(cost[1:], kind="stable").tolist() if cost[1 + k] < cost[0]]
            together = np.stack([plan, *_together(plan, better[:_TOGETHER])])
            # With agents that know what to expect, as plans will be judged: that decides about the last tenths.
            cost, kept_s = self._cost(together, _SAMPLES_TOGETHER, draws + 1, reserve, steady=True)
            best = int(cost.argmin())
            vain = 0 if cost[best] < (1 - _GAIN) * cost[0] else vain + 1
            if best > 0:
                plan = together[best]
                reserve = (reserve + self._excess(plan, float(kept_s[best]), draws + 2)) / 2
                found.append(plan)
            if vain == _VAIN:
                break
        return np.stack(found[-_LAST:]) if found else np.empty((0, len(clocks_mhz)), dtype=clocks_mhz.dtype)

    def _cost(
        self, plans: Frequencies, samples: int, seed: int, reserve: float, *, steady: bool
    ) -> tuple[Floats, Floats]:
        """Return the expected energy of plans, more for those that are late or have less than the reserve, and the
        times that one pipeline keeps; only differences between plans mean anything. So few samples do not show how
        long the slowest of many pipelines takes: that is for the reserve.
        """
        alone = replace(self.hardware, pipelines=1)
        found = rehearse(self.executor, plans, alone, samples=samples, steady=steady, seed=seed)
        kept_s = found.time_kept_s(self.confidence)
        late = np.maximum(kept_s / ((1 - reserve) * self.wanted_s) - 1.0, 0.0)
        cost: Floats = found.mean_energy_j * (1.0 + _LATE * late)
        return cost, kept_s

    def _excess(self, plan: Frequencies, kept_s: float, seed: int) -> float:
        """Return by what share the job takes longer than one pipeline seemed to: it waits for the slowest, and the best
        of many plans by few samples takes longer than by these.
        """
        found = rehearse(self.executor, plan[None], self.hardware, samples=_SAMPLES_FOUND, seed=seed)
        return max(float(found.time_kept_s(self.confidence)[0]) - kept_s, 0.0) / self.wanted_s


def _moves(problem: Problem, plan: Frequencies, steps: int) -> list[_Move]:
    """Return moves of all runs, of their halves, and of their ends."""
    clocks = [options.frequency_mhz for options in problem.options]
    ladder = [np.sort(own).astype(int).tolist() for own in clocks]
    measured = [frozenset(own) for own in ladder]
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
                own = ladder[int(problem.option_of[begin])]
                at = own.index(int(plan[low]))
                beside = own[max(at - steps, 0)], own[min(at + steps, len(own) - 1)]
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
    made = []
    for move in moves:
        if not taken[move.low : move.high].any():
            taken[move.low : move.high] = True
            plan = _moved(plan, move)
            made.append(plan)
    return made
