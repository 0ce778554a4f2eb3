"""What no law of clocks can save more than: a linear programme that knows every request before it comes.

It chooses, for each second and each clock, how many iterations run and how many tokens they compute, and pays the
machine's own times and energies. Everything that binds a real engine is left out or loosened: clocks change at once,
as often as one likes, also within an iteration; a second's work may be spread over it; requests differ by their
deadlines only; as many as the controller missed may be late. What is kept: no work before its request, none after its
deadline; no more sequences in an iteration than there are requests; no rest while a request is certainly there; all
work of a second takes no more than a second. So the optimum is a lower bound on the energy of every controller with
these misses, and the solver's dual is its certificate. For one replica: several could also share their requests better,
which is no matter of clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ortools.linear_solver import pywraplp

from perseus_sim.serving.machine import Machine, Step
from perseus_sim.serving.objective import Objective
from perseus_sim.serving.requests import Request

_UNIT: Final = 1_000.0
"""Tokens are counted in thousands: numbers of one size keep the solver exact."""


@dataclass(frozen=True)
class Bound:
    """The least energy, in joules, from the first second to the last, and the seconds that it counts."""

    joules: float
    seconds: float


def least_energy(
    machine: Machine,
    requests: Sequence[Request],
    objective: Objective,
    misses: int,
    clocks_mhz: Sequence[int],
    *,
    tail_s: float = 30.0,
    bin_s: float = 1.0,
) -> Bound:
    """Bound the energy of one replica from below.

    Args:
        machine: what steps take.
        requests: in the order of arrival; a few minutes of them.
        objective: the limits that all but ``misses`` requests keep.
        misses: how many requests may be late.
        clocks_mhz: among which it chooses.
        tail_s: how long energy counts after the last arrival.
        bin_s: length of what is planned at a time.

    Raises:
        RuntimeError: there is no solution: the requests cannot be served.
    """
    problem = _Problem(machine, requests, objective, misses, clocks_mhz, bin_s)
    return _Programme(problem, math.ceil((requests[-1].arrival_s + tail_s) / bin_s)).solve()


@dataclass(frozen=True)
class _Problem:
    machine: Machine
    requests: Sequence[Request]
    objective: Objective
    misses: int
    clocks_mhz: Sequence[int]
    bin_s: float


class _Programme:
    def __init__(self, problem: _Problem, bins: int) -> None:
        machine, requests, objective, misses = problem.machine, problem.requests, problem.objective, problem.misses
        self._machine, self._requests = machine, requests
        self._bins, self._bin_s = bins, problem.bin_s
        self._costs = [machine.costs(mhz) for mhz in problem.clocks_mhz]
        self._solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        self._misses = misses
        self._late = [self._solver.NumVar(0.0, 1.0, "") for _ in requests]
        self._solver.Add(sum(self._late) <= misses)
        self._first_due = [one.arrival_s + objective.first_token_limit_s(one, machine) for one in requests]
        self._last_due = [
            due + (one.output_tokens - 1) * objective.per_token_s
            for due, one in zip(self._first_due, requests, strict=True)
        ]
        self._energy: list[Any] = []

    def solve(self) -> Bound:
        """Solve it."""
        requests, solver = self._requests, self._solver
        prompts = [max(1, one.prompt_tokens - one.cached_tokens) / _UNIT for one in requests]
        pairs = [
            1e-6 * own * _UNIT * (one.cached_tokens + 0.5 * own * _UNIT)
            for own, one in zip(prompts, requests, strict=True)
        ]
        decoded = [(one.output_tokens - 1) / _UNIT for one in requests]
        read = [1e-6 * (one.output_tokens - 1) * (one.prompt_tokens + 0.5 * one.output_tokens) for one in requests]
        work = [self._bin(index) for index in range(self._bins)]
        sums = [self._running(column) for column in zip(*work, strict=True)]
        due = (self._first_due, self._first_due, self._last_due, self._last_due)
        for done, amounts, due_s in zip(sums, (prompts, pairs, decoded, read), due, strict=True):
            self._in_time(done, amounts, due_s)
        solver.Minimize(sum(self._energy))
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            raise RuntimeError("the clairvoyant programme has no solution: the requests cannot be served in their time")
        return Bound(solver.Objective().Value(), self._bins * self._bin_s)

    def _running(self, column: Sequence[Any]) -> list[Any]:
        """Variables that hold the running sums of a column: expressions of them would grow with every bin."""
        sums: list[Any] = []
        for part in column:
            total = self._solver.NumVar(0.0, self._solver.infinity(), "")
            self._solver.Add(total == (sums[-1] if sums else 0.0) + part)
            sums.append(total)
        return sums

    def _bin(self, index: int) -> tuple[Any, Any, Any, Any]:
        """Add what runs in one bin; returns the prompts' tokens and pairs, the tokens decoded and the tokens read."""
        solver, bin_s = self._solver, self._bin_s
        begin_s, end_s = index * bin_s, (index + 1) * bin_s
        present = self._misses + sum(
            one.arrival_s < end_s and due > begin_s for one, due in zip(self._requests, self._last_due, strict=True)
        )
        totals: list[list[Any]] = [[], [], [], []]
        busy = []
        for costs in self._costs:
            iterations, prompt, pair, token, kv, product_s = (
                solver.NumVar(0.0, solver.infinity(), "") for _ in range(6)
            )
            solver.Add(token * _UNIT <= iterations * present)
            solver.Add(product_s >= costs.weights_s * iterations)
            solver.Add(product_s >= costs.token_s * _UNIT * (prompt + token))
            seconds = (
                costs.step_s * iterations
                + costs.reduce_s * _UNIT * (prompt + token)
                + product_s
                + costs.kv_s * 1e6 * kv
                + costs.pair_s * 1e6 * pair
                + costs.sample_s * _UNIT * token
            )
            self._energy.append(
                costs.active_w * seconds
                + costs.weights_j * iterations
                + costs.kv_j * 1e6 * kv
                + costs.decode_j * _UNIT * token
                + costs.token_j * _UNIT * prompt
                + costs.pair_j * 1e6 * pair
                + costs.sample_j * _UNIT * token
            )
            busy.append(seconds)
            for total, part in zip(totals, (prompt, pair, token, kv), strict=True):
                total.append(part)
        rest = solver.NumVar(0.0, max(0.0, bin_s - self._certain_s(begin_s, end_s)), "")
        solver.Add(sum(busy) + rest == bin_s)
        self._energy.append(min(costs.idle_w for costs in self._costs) * rest)
        return sum(totals[0]), sum(totals[1]), sum(totals[2]), sum(totals[3])

    def _in_time(self, done: Sequence[Any], amounts: Sequence[float], due: Sequence[float]) -> None:
        """Nothing before its request, all but what is late by its deadline, everything by the end."""
        for index, so_far in enumerate(done):
            end_s = (index + 1) * self._bin_s
            come = sum(amount for one, amount in zip(self._requests, amounts, strict=True) if one.arrival_s < end_s)
            self._solver.Add(so_far <= come)
            gone = [number for number, due_s in enumerate(due) if due_s <= end_s]
            if gone:
                self._solver.Add(so_far >= sum(amounts[number] * (1 - self._late[number]) for number in gone))
        self._solver.Add(done[-1] >= sum(amounts) - 1e-6)

    def _certain_s(self, begin_s: float, end_s: float) -> float:
        """How long in a bin an engine surely has a request, however fast it runs: it never rests then."""
        spans = sorted(
            (one.arrival_s, one.arrival_s + self._quickest_s(one)) for one in self._requests if one.arrival_s < end_s
        )
        covered, reached = 0.0, begin_s
        for start_s, stop_s in spans:
            until_s = min(stop_s, end_s)
            if until_s > reached:
                covered += until_s - max(start_s, reached)
                reached = until_s
        return covered

    def _quickest_s(self, request: Request) -> float:
        """How long a request takes alone on the fastest machine."""
        tokens = max(1, request.prompt_tokens - request.cached_tokens)
        prompt = Step(0, 0, tokens, tokens * (request.cached_tokens + 0.5 * tokens), 1)
        token = Step(1, request.prompt_tokens, 0, 0.0, 0)
        fastest = self._machine.costs(self._machine.clocks_mhz[-1])
        more = request.output_tokens - 1
        return self._machine.seconds(fastest, prompt) + more * self._machine.seconds(fastest, token)
