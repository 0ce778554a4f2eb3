"""What hindsight finds: the clocks that one would have set, had one known every request before it came.

A beam search in the simulator itself. At the begin of each step every engine that is kept goes on at each clock of a
ladder, as a copy of its own; clocks change at once. Of engines that have as much left to compute, the one of least
energy is kept; of the others, those whose energy so far and the price of what is left are least; and those that follow
the clocks of a guide, such as a law that is to be beaten. What comes out was run, so it is a bound on the optimum from
above, as the linear programme of ``clairvoyant.py`` is one from below. How far it is from the optimum is not known: a
wider beam finds more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from perseus_sim.serving.engine import Engine, Served
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.objective import Objective
from perseus_sim.serving.requests import Request

_NONE: Final = "no engine of the beam keeps the limits: they cannot be kept, or it is too narrow"


@dataclass(frozen=True)
class Beam:
    """How hindsight searches.

    Attributes:
        clocks_mhz: among which it chooses.
        step_s: how long each clock holds at least.
        width: engines that are kept at each of the prices.
        prompt_j: what a token of a prompt that is left will take, in joules; a guess that only ranks.
        token_j: likewise a token to be generated.
        prices: by which both are multiplied: where much will be due at once, what is left costs more.
        alike_tokens: engines whose tokens left to compute differ by less have as much left.
    """

    clocks_mhz: Sequence[int]
    step_s: float
    width: int
    prompt_j: float
    token_j: float
    prices: Sequence[float] = (0.5, 1.0, 2.0, 4.0, 64.0)
    alike_tokens: int = 4


@dataclass(frozen=True)
class Outcome:
    """The energy that was found, in joules, and how many requests missed a limit."""

    joules: float
    misses: int


class Hindsight:
    """The search for one replica.

    Args:
        machine: what steps take.
        requests: in the order of arrival; a few minutes of them.
        objective: the limits.
        misses: how many requests may miss one.
    """

    def __init__(self, machine: Machine, requests: Sequence[Request], objective: Objective, misses: int) -> None:
        self._machine, self._requests, self._objective, self._misses = machine, requests, objective, misses

    def search(self, beam: Beam, guides: Sequence[Sequence[int]] = (), tail_s: float = 30.0) -> Outcome:
        """Search.

        Args:
            beam: how.
            guides: each the clocks of all steps, in MHz, from which the search departs; the last one holds on.
            tail_s: how long energy counts after the last arrival.

        Raises:
            RuntimeError: no engine of the beam kept the limits.
        """
        requests = self._requests
        engines = [(0, Engine(self._machine, beam.clocks_mhz[-1]))]
        followers = [engines[0] for _ in guides]
        begin, end_s = 0, requests[-1].arrival_s + tail_s
        for number in range(math.ceil(end_s / beam.step_s)):
            until_s = min((number + 1) * beam.step_s, end_s)
            end = begin
            while end < len(requests) and requests[end].arrival_s < until_s:
                end += 1
            grown = (self._grow(one, mhz, requests[begin:end], until_s) for one in engines for mhz in beam.clocks_mhz)
            engines = self._keep(beam, grown)
            followers = [
                self._grow(one, guide[min(number, len(guide) - 1)], requests[begin:end], until_s)
                for one, guide in zip(followers, guides, strict=True)
            ]
            engines += [one for one in followers if one[0] <= self._misses]
            if not engines:
                raise RuntimeError(_NONE)
            begin = end
        served = [(misses + engine.outstanding, engine.joules) for misses, engine in engines]
        kept = [(joules, misses) for misses, joules in served if misses <= self._misses]
        if not kept:
            raise RuntimeError(_NONE)
        return Outcome(*min(kept))

    def _grow(
        self, parent: tuple[int, Engine], clock_mhz: int, arrivals: Sequence[Request], until_s: float
    ) -> tuple[int, Engine]:
        misses, engine = parent[0], parent[1].copy()
        engine.set_clocks(clock_mhz, clock_mhz)
        for one in arrivals:
            engine.advance(one.arrival_s)
            engine.submit(one)
        engine.advance(until_s)
        misses += sum(self._is_late(one) for one in engine.started)
        misses += sum(self._objective.token_share(one) > 1 and not self._is_late(one) for one in engine.finished)
        engine.started, engine.finished = [], []
        return misses, engine

    def _is_late(self, served: Served) -> bool:
        return self._objective.first_token_share(served, self._machine) > 1

    def _keep(self, beam: Beam, grown: Iterator[tuple[int, Engine]]) -> list[tuple[int, Engine]]:
        best: dict[tuple[int, int, int], tuple[float, float, int, Engine]] = {}
        for misses, engine in grown:
            due = sum(self._overdue(one, engine.now_s) for one in engine.waiting)
            if misses + due > self._misses:
                continue
            left = sum(tokens for _, tokens in engine.unfinished())
            key = misses + due, engine.backlog // beam.alike_tokens, left // beam.alike_tokens
            left_j = beam.prompt_j * engine.backlog + beam.token_j * left
            if key not in best or engine.joules + left_j < sum(best[key][:2]):
                best[key] = engine.joules, left_j, misses, engine
        kept: dict[int, tuple[int, Engine]] = {}
        for late in range(self._misses + 1):
            of_these = [entry for key, entry in best.items() if key[0] == late]
            for price in beam.prices:
                ranked = heapq.nsmallest(beam.width, of_these, key=lambda entry: entry[0] + price * entry[1])
                kept.update((id(engine), (misses, engine)) for _, _, misses, engine in ranked)
        return list(kept.values())

    def _overdue(self, served: Served, now_s: float) -> bool:
        limit_s = self._objective.first_token_limit_s(served.request, self._machine)
        return math.isnan(served.first_token_s) and now_s > served.request.arrival_s + limit_s
