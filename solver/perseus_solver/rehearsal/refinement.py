"""Improve a plan where changes take time: slow or speed up parts of it, and keep what the rehearsal likes.

Grains decide beforehand which instructions share a clock. What a change costs depends on where it stands: before a wait
it is free, on the critical path it may delay every GPU of a node. So the best of the grains is improved by a search. In
each round some runs of instructions with one clock, or parts of them, get another one; all these plans are rehearsed,
and as many of the moves that help as help together are made. Each round draws other random numbers, so that a plan is
not fitted to the luck of one draw.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frequencies
from perseus_solver.rehearsal.execution import Executor
from perseus_solver.rehearsal.hardware import Hardware
from perseus_solver.rehearsal.outcome import SAMPLES, rehearse

_STEPS = (8, 4, 2, 1)
"""Supported clocks by which a run moves, by round; a run may always take over the clock of a neighbour."""
_ROUNDS = 8
_SAMPLES = 24
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
"""Share by which plans are made faster than wanted: chosen among many by few samples, they look better than so."""


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

    def plans(self, clocks_mhz: Frequencies, seed: int) -> Frequencies:
        """Return better plans than one.

        Args:
            clocks_mhz: uint16[n], the plan to begin with.
            seed: of the random numbers.

        Returns:
            uint16[plans, n], the plan after each round that improved it, the last one best; none if no round did.
        """
        random, problem = np.random.default_rng(seed), self.executor.problem
        plan, found = clocks_mhz, []
        for number in range(_ROUNDS):
            moves = _moves(problem, plan, _STEPS[min(number, len(_STEPS) - 1)])
            most = max(_WORK // problem.instructions, 1)
            if len(moves) > most:
                moves = [moves[k] for k in random.choice(len(moves), most, replace=False).tolist()]
            plans = np.stack([plan, *(_moved(plan, move) for move in moves)])
            cost = self._cost(plans, _SAMPLES, seed + 2 * number + 1)
            better = [moves[k] for k in np.argsort(cost[1:], kind="stable").tolist() if cost[1 + k] < cost[0]]
            together = np.stack([plan, *_together(plan, better[:_TOGETHER])])
            best = int(self._cost(together, SAMPLES, seed + 2 * number + 2).argmin())
            if best > 0:
                plan = together[best]
                found.append(plan)
        return np.stack(found) if found else np.empty((0, len(clocks_mhz)), dtype=clocks_mhz.dtype)

    def _cost(self, plans: Frequencies, samples: int, seed: int) -> Floats:
        """Return the expected energy of plans, more for late ones; only differences between plans mean anything."""
        found = rehearse(self.executor, plans, self.hardware, samples=samples, steady=False, seed=seed)
        limit_s = (1 - _RESERVE) * self.wanted_s
        late = np.maximum(found.time_kept_s(self.confidence) / limit_s - 1.0, 0.0)
        cost: Floats = found.mean_energy_j * (1.0 + _LATE * late)
        return cost


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
