"""One simulated engine: continuous batching, chunked prefill, a KV cache with preemption, prefix hits.

An iteration computes one token of every sequence that decodes, and as many tokens of waiting prompts as its budget of
tokens leaves, first come, first served. A prompt is admitted when the keys and values of all of it fit. Where there is
less memory than the next tokens need, the request that was admitted last gives its own back, and computes what it had
once more; a request that is alone keeps it, however long it is. An engine is never idle while it has a request. What it
says of itself, it says at the end of an iteration, as real ones do: a prompt that came meanwhile is not in it.

The clock may change within an iteration; the part that is left then takes what it takes at the new clock.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from perseus_sim.serving.machine import Machine, Step
from perseus_sim.serving.requests import Request

MAX_SEQUENCES: Final = 256
MAX_TOKENS: Final = 512
"""Of one iteration. vLLM's defaults of a server on H100s are 1,024 sequences and 8,192 tokens; who has promised a time
between tokens takes fewer, since all sequences wait for the prompt's part."""
_WAITING: Final = -1
_PREFILLING: Final = -2


@dataclass(slots=True)
class Served:
    """A request in the engine: what it got, and when."""

    request: Request
    prompt_left: int
    """Tokens of the prompt to be computed; after a preemption also those that were generated."""
    generated: int = 0
    first_token_s: float = math.nan
    end_s: float = math.nan
    admitted: int = _WAITING
    """The iteration from which on it decodes, or that it waits, or that its prompt is being computed."""

    def copy(self) -> Served:
        """Return the same, to be served by itself."""
        return Served(self.request, self.prompt_left, self.generated, self.first_token_s, self.end_s, self.admitted)

    @property
    def per_token_s(self) -> float:
        """Mean time between its tokens; 0 for a single token."""
        more = self.request.output_tokens - 1
        return (self.end_s - self.first_token_s) / more if more else 0.0


class Load(NamedTuple):
    """What an engine says when an iteration begins, as its scheduler has just arranged it.

    As vLLM with asynchronous scheduling, its default: the statistics that come with the tokens of an iteration are
    already those of the next. What arrives meanwhile is not in them.
    """

    waiting: int = 0
    """Requests of which no token of the prompt was computed."""
    prefilling: int = 0
    """Requests of which the prompt is being computed."""
    running: int = 0
    """Requests that decode."""
    kv_tokens: int = 0
    prompt_tokens: int = 0
    """Computed in the iteration that begins."""


class Engine:
    """One replica.

    Args:
        machine: what steps take.
        clock_mhz: at the begin.
    """

    def __init__(self, machine: Machine, clock_mhz: int) -> None:
        self.machine = machine
        self.now_s = 0.0
        self.joules = 0.0
        self.busy_s = 0.0
        self.iterations = 0
        self.preempted = 0
        self.finished: list[Served] = []
        self.started: list[Served] = []
        """Requests that got their first token, in that order."""
        self.load = Load()
        self.waiting: deque[Served] = deque()
        self._decoding: list[tuple[int, int, Served]] = []  # by the iteration that ends them
        self._order = 0
        self._kv = self._backlog = 0
        self._slowest_mhz = clock_mhz
        self._costs = self._watt_costs = machine.costs(clock_mhz)
        self._step: Step | None = None
        self._prefilled: list[Served] = []
        self._done = 0.0
        self._end_s = math.inf
        self._seconds = self._step_joules = 0.0

    @property
    def outstanding(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self._prefilled) + len(self._decoding)

    @property
    def backlog(self) -> int:
        """Tokens of prompts that are still to be computed."""
        return self._backlog

    @property
    def decoding(self) -> list[Served]:
        """Sequences that decode, in no order."""
        return [served for _, _, served in self._decoding]

    @property
    def step(self) -> Step | None:
        """What the iteration computes; None: the engine is idle."""
        return self._step

    @property
    def ends_s(self) -> float:
        """When the iteration ends at the clock that holds now; infinite if the engine is idle."""
        return self._end_s

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values are kept."""
        return self._kv

    def unfinished(self) -> Iterator[tuple[Served, int]]:
        """Requests that wait or run, each with how many tokens of its answer are to come."""
        for served in chain(self.waiting, self._prefilled):
            yield served, served.request.output_tokens - served.generated
        for last, _, served in self._decoding:
            yield served, last - self.iterations

    def copy(self) -> Engine:
        """Return an engine in the same state, which goes on by itself."""
        twin = copy(self)
        twin.finished, twin.started = [*self.finished], [*self.started]
        twin.waiting = deque(one.copy() for one in self.waiting)
        twin._prefilled = [one.copy() for one in self._prefilled]
        twin._decoding = [(last, order, one.copy()) for last, order, one in self._decoding]
        return twin

    def submit(self, request: Request) -> None:
        """Take a request that arrives now."""
        served = Served(request, max(1, request.prompt_tokens - request.cached_tokens))
        self._backlog += served.prompt_left
        self.waiting.append(served)
        if self._step is None:
            self._begin()

    def set_clocks(self, slowest_mhz: int, fastest_mhz: int) -> None:
        """From now on: the clocks of its slowest GPU, which the others wait for, and of its fastest, whose power it is.

        Power between the two is thus never taken for less than it is.
        """
        self._slowest_mhz = slowest_mhz
        self._costs = self.machine.costs(slowest_mhz)
        self._watt_costs = self.machine.costs(fastest_mhz)
        self._price()

    def advance(self, until_s: float) -> None:
        """Run until a moment."""
        while self._end_s <= until_s:
            self._finish()
        self._pass(until_s)

    def _pass(self, until_s: float) -> None:
        """Let time pass in which no iteration ends."""
        passed_s = until_s - self.now_s
        if self._step is None:
            self.joules += self._watt_costs.idle_w * passed_s
        else:
            share = passed_s / self._seconds
            self._done += share
            self.joules += share * self._step_joules
            self.busy_s += passed_s
        self.now_s = until_s

    def _price(self) -> None:
        """Say when the iteration ends at the clock that holds now."""
        if self._step is not None:
            self._seconds = self.machine.seconds(self._costs, self._step)
            self._step_joules = self.machine.joules(self._watt_costs, self._step, self._seconds)
            if self._step_joules > self.machine.power_limit_w * self._seconds:
                self._throttle(self._step)
            self._end_s = self.now_s + (1 - self._done) * self._seconds

    def _throttle(self, step: Step) -> None:
        """Let the power limit lower the clocks, as far as this iteration needs it."""
        machine = self.machine
        seconds, joules = machine.seconds, machine.joules
        clocks = machine.curves.clocks_mhz

        def draws_too_much(mhz: int) -> bool:
            costs = machine.costs(mhz)
            step_s = seconds(costs, step)
            return joules(costs, step, step_s) > machine.power_limit_w * step_s

        lower = clocks[: bisect_left(clocks, self._slowest_mhz)]
        kept = bisect_left(lower, True, key=draws_too_much)
        costs = machine.costs(lower[max(0, kept - 1)] if lower else self._slowest_mhz)
        self._seconds = seconds(costs, step)
        self._step_joules = joules(costs, step, self._seconds)

    def _finish(self) -> None:
        self._pass(self._end_s)
        self._backlog -= self.load.prompt_tokens
        now_s = self.now_s
        self.iterations += 1
        decoding = self._decoding
        self._kv += len(decoding)
        while decoding and decoding[0][0] <= self.iterations:
            served = heapq.heappop(decoding)[2]
            self._end(served)
        for served in self._prefilled:
            if math.isnan(served.first_token_s):
                served.first_token_s = now_s
                self.started.append(served)
            served.generated += 1
            self._kv += 1
            left = served.request.output_tokens - served.generated
            if left:
                self._order += 1
                served.admitted = self.iterations
                heapq.heappush(decoding, (self.iterations + left, self._order, served))
            else:
                self._end(served)
        self._begin()

    def _end(self, served: Served) -> None:
        served.end_s = self.now_s
        served.generated = served.request.output_tokens
        self._kv -= served.request.prompt_tokens + served.request.output_tokens
        self.finished.append(served)

    def _begin(self) -> None:
        """Begin the next iteration, if there is something to do."""
        decoding, waiting = self._decoding, self.waiting
        self._prefilled = []
        self._make_room()
        prompt_tokens, pairs = 0, 0.0
        if waiting:
            budget = MAX_TOKENS - len(decoding)
            places = MAX_SEQUENCES - len(decoding)
            room = self.machine.kv_capacity - self._kv - len(decoding)
            while waiting and budget > 0 and places > 0:
                served = waiting[0]
                left = served.prompt_left
                kept = served.request.prompt_tokens + served.generated
                chunk = min(left, budget)
                if served.admitted == _WAITING and kept + 1 > room and (decoding or self._prefilled):
                    break
                first = kept - left
                if served.admitted == _WAITING:
                    served.admitted = _PREFILLING
                    self._kv += first
                    room -= first
                served.prompt_left -= chunk
                self._kv += chunk
                room -= chunk
                budget -= chunk
                prompt_tokens += chunk
                pairs += chunk * (first + 0.5 * chunk)
                if served.prompt_left:
                    break
                waiting.popleft()
                self._prefilled.append(served)
                room -= 1  # for its first token
                places -= 1
        if not decoding and not prompt_tokens:
            self._step, self._end_s, self.load = None, math.inf, Load()
            return
        partly = int(bool(waiting) and waiting[0].admitted == _PREFILLING)
        waiting_requests, prefilling = len(waiting) - partly, len(self._prefilled) + partly
        kv_tokens = self._kv - prompt_tokens
        self._step = Step(len(decoding), kv_tokens if decoding else 0, prompt_tokens, pairs, len(self._prefilled))
        self.load = Load(waiting_requests, prefilling, len(decoding), self._kv, prompt_tokens)
        self._done = 0.0
        self._price()

    def _make_room(self) -> None:
        """Take the memory of who was admitted last until the next tokens of the others fit; one alone keeps its own."""
        decoding, waiting, capacity = self._decoding, self.waiting, self.machine.kv_capacity
        if decoding and waiting and waiting[0].admitted == _PREFILLING:
            served = waiting[0]
            chunk = min(served.prompt_left, MAX_TOKENS - len(decoding))
            if self._kv + len(decoding) + chunk + 1 > capacity:
                computed = served.request.prompt_tokens + served.generated - served.prompt_left
                self._kv -= computed
                served.prompt_left += computed
                self._backlog += computed
                served.admitted = _WAITING
                self.preempted += 1
        while len(decoding) > 1 and self._kv + len(decoding) > capacity:
            self._preempt()

    def _preempt(self) -> None:
        """Let the sequence that was admitted last wait, first in the queue, to compute again what it had."""
        last = max(self._decoding, key=lambda entry: entry[1])
        self._decoding.remove(last)
        heapq.heapify(self._decoding)
        served = last[2]
        served.generated = served.request.output_tokens - (last[0] - self.iterations)
        self._kv -= served.request.prompt_tokens + served.generated
        served.prompt_left = served.request.prompt_tokens + served.generated
        served.admitted = _WAITING
        self._backlog += served.prompt_left
        self.preempted += 1
        self.waiting.appendleft(served)
