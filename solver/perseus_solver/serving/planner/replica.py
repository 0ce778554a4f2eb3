"""What one replica carries within its limits at each clock, and draws, from the models of its steps.

A replica that is offered so many requests a second spends a share of its time on steps with prompts, another on steps
without, and rests where no request is there. Prompts are computed at the boost, tokens at the floor, as the agent's law
does (`perseus_solver.serving.table`); a policy with one clock for both gives the same for both. How many requests
decode at once follows from the tokens that are due (Little), and everything else from that.

Loads that cannot keep the limits are refused by bounds: of the time per token, with a margin for what varies between
requests; of the memory and the number of requests, with three standard deviations of a Poisson number; and of the wait
for the first token, of which the mean is that of a queue with measured moments (Kingman) and the tail exponential. They
refuse; what is chosen is for a simulation, and then for the pool's own measurements, to confirm. Behind a router that
knows the backlog of each replica, a prompt waits only where all are busy (Erlang), so each of many carries more than
one alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from perseus_solver.kinds import Bools, Floats
from perseus_solver.serving.model import StepModel, WattModel
from perseus_solver.serving.planner.problem import OperatingPoint
from perseus_solver.serving.planner.requests import LatencyLimits, RequestClass

PER_TOKEN_MARGIN: Final = 0.85
"""Of the limit, for the mean time per token: 1 of 100 requests has a sixth more."""
LATE_SHARE: Final = 0.1
"""Of the requests that may miss their limits, those whose first token may be late by the bound. Engines show up to
twice as many, and the rest is for bursts: with 0.25 a week costs 2 % less and misses 0.2 points more."""
KV_FULL: Final = 0.9
_MOST_PROMPTS: Final = 0.95
"""Of the time: beyond, queues have no end."""
_LOADS: Final = 17
"""Between which watts are taken in proportion."""
_HALVINGS: Final = 24
_POOLED: Final = 16
"""Replicas up to which each more lets all of them carry more; of so many, all but the last tenth is used."""
_DEVIATIONS: Final = 3.0

_Parts = tuple[Floats, Floats, Floats, Floats]


class EngineSteps(Protocol):
    """What steps take: a fitted model, or a machine that is given."""

    def seconds(self, clock_mhz: float, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
        """Return seconds of steps; arguments as of `StepModel.steps_s`."""

    def joules(self, clock_mhz: float, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
        """Return joules of steps, of all GPUs of the replica."""

    def resting_w(self, clock_mhz: float) -> float:
        """Return watts without a step."""


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Steps by models that were fitted to an engine."""

    model: StepModel
    watts: WattModel

    def seconds(self, clock_mhz: float, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
        """Return seconds of steps."""
        return self.model.steps_s(np.full_like(running, clock_mhz), running, kv_tokens, prompt_tokens)

    def joules(self, clock_mhz: float, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
        """Return joules of steps."""
        return self.watts.joules_of(self.model, np.full_like(running, clock_mhz), running, kv_tokens, prompt_tokens)

    def resting_w(self, clock_mhz: float) -> float:
        """Return watts without a step."""
        return float(self.watts.resting_w(np.array(clock_mhz, float)))


@dataclass(frozen=True, slots=True)
class Steady:
    """A replica under constant loads; arrays of the loads' shape.

    Attributes:
        running: requests that decode at once, mean; infinite: they become more and more.
        per_token_s: time between the tokens of a request, mean.
        slow_share: of the requests whose own mean is above the limit.
        prompt_share: of the time, for steps with prompts.
        service_s: that a replica spends on a mean prompt.
        token_s: of a step without prompts.
        watts: of all GPUs, mean.
        kept: whether the limits are kept.
    """

    running: Floats
    per_token_s: Floats
    slow_share: Floats
    prompt_share: Floats
    service_s: Floats
    token_s: Floats
    watts: Floats
    kept: Bools


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """An engine on so many GPUs.

    Attributes:
        gpus: it runs on.
        steps: what its steps take.
        highest_mhz: the GPUs' highest clock.
        kv_capacity: tokens whose keys and values fit into its memory.
        most_running: requests that it decodes at once.
        step_tokens: of one step at most, those that decode included.
    """

    gpus: int
    steps: EngineSteps
    highest_mhz: int
    kv_capacity: int
    most_running: int = 256
    step_tokens: int = 512

    def steady(
        self, requests: RequestClass, limits: LatencyLimits, loads: Floats, floor_mhz: int, boost_mhz: int
    ) -> Steady:
        """Return what constant loads do.

        Args:
            requests: of what kind.
            limits: what they were promised.
            loads: float[n], requests a second.
            floor_mhz: the clock of steps without prompts.
            boost_mhz: the clock of steps with them.
        """
        low, high = np.zeros_like(loads), np.full_like(loads, 4.0 * self.most_running)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = self._tokens_s(requests, loads, middle, floor_mhz, boost_mhz) >= (
                loads * max(0.0, requests.output_tokens - 1.0)
            )
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        running = high
        parts = chunk, prompt_s, token_s, rests = self._parts(requests, running, floor_mhz, boost_mhz)
        kv_tokens = running * requests.kv_tokens
        service_s = requests.prompt_tokens / chunk * prompt_s
        prompt_share = np.minimum(1.0, loads * service_s)
        together = self._together(running)
        watts = (
            prompt_share * self.steps.joules(boost_mhz, running, kv_tokens, chunk) / prompt_s
            + (1.0 - prompt_share)
            * (1.0 - rests)
            * self.steps.joules(floor_mhz, together, together * requests.kv_tokens, np.zeros_like(loads))
            / token_s
            + (1.0 - prompt_share) * rests * self.steps.resting_w(floor_mhz)
        )
        due = loads * max(0.0, requests.output_tokens - 1.0)
        per_token_s = np.where(due > 0.0, running / np.maximum(due, 1e-12), 0.0)
        slow = self._slow_share(requests, limits, loads, per_token_s, parts)
        spread = _DEVIATIONS * np.sqrt(running)
        # Tokens in memory vary with the number of requests, and those with the lengths of each.
        kept = (
            (per_token_s <= PER_TOKEN_MARGIN * limits.per_token_s)
            & (slow <= LATE_SHARE * (1.0 - limits.attainment))
            & ((running + spread) * requests.kv_tokens <= KV_FULL * self.kv_capacity)
            & (running + spread <= self.most_running)
            & (prompt_share < _MOST_PROMPTS)
        )
        return Steady(running, per_token_s, slow, prompt_share, service_s, token_s, watts, kept)

    def points(
        self,
        requests: RequestClass,
        limits: LatencyLimits,
        floors_mhz: Sequence[int],
        boosts_mhz: Sequence[int] = (),
        *,
        routed: bool = True,
    ) -> tuple[OperatingPoint, ...]:
        """Return the operating points of this replica: of each pair of clocks that keeps the limits at any load.

        Args:
            requests: of what kind.
            limits: what they were promised.
            floors_mhz: clocks of steps without prompts.
            boosts_mhz: clocks of steps with prompts, each paired with every floor below; each floor is also its own.
            routed: whether requests go to the replica with the fewest prompts to compute; otherwise to any.
        """
        points = []
        for floor_mhz in floors_mhz:
            for boost_mhz in (floor_mhz, *(mhz for mhz in boosts_mhz if mhz > floor_mhz)):
                most = self._most_load(requests, limits, floor_mhz, boost_mhz)
                carried = self._carried(requests, limits, most, floor_mhz, boost_mhz)[: None if routed else 1]
                if carried and carried[-1] > 0.0:
                    loads = carried[-1] * np.linspace(0.0, 1.0, _LOADS)
                    watts = np.maximum.accumulate(self.steady(requests, limits, loads, floor_mhz, boost_mhz).watts)
                    points.append(OperatingPoint(floor_mhz, tuple(loads.tolist()), tuple(watts.tolist()), carried))
        return tuple(points)

    def raised_mhz(self, requests: RequestClass, floor_mhz: int, boost_mhz: int, delay_s: float) -> int:
        """Return the clock at which prompts take as long as with a boost that comes late.

        Args:
            requests: of what kind.
            floor_mhz: the clock until then.
            boost_mhz: the clock of the rest of the prompt.
            delay_s: from the prompt's begin until the boost is in effect: until a sample shows it, and until the GPUs
                have changed.
        """
        _, prompt_s, _, _ = self._parts(requests, np.zeros(1), floor_mhz, floor_mhz)
        chunk = min(float(self.step_tokens), requests.prompt_tokens)
        before = min(1.0, delay_s / (float(prompt_s[0]) * requests.prompt_tokens / chunk))
        return round(1.0 / (before / floor_mhz + (1.0 - before) / max(floor_mhz, boost_mhz)))

    def _carried(
        self, requests: RequestClass, limits: LatencyLimits, most: float, floor_mhz: int, boost_mhz: int
    ) -> tuple[float, ...]:
        """Return the load of each replica up to which first tokens come in time, where there are 1, 2, …."""
        if most <= 0.0:
            return ()
        loads = most * np.linspace(0.0, 1.0, 129)[1:]
        steady = self.steady(requests, limits, loads, floor_mhz, boost_mhz)
        carried = []
        for replicas in range(1, _POOLED + 1):
            late = self.late_share(requests, limits, steady, replicas)
            kept = late <= LATE_SHARE * (1.0 - limits.attainment)
            first = len(kept) if kept.all() else int(np.argmin(kept))
            carried.append(float(loads[first - 1]) if first else 0.0)
        return tuple(np.maximum.accumulate(carried).tolist())

    def _most_load(self, requests: RequestClass, limits: LatencyLimits, floor_mhz: int, boost_mhz: int) -> float:
        """Return the load up to which all limits are kept, within a thousandth; 0: there is none."""
        low, high = 0.0, 1.0 / max(1e-9, float(self._parts(requests, np.zeros(1), floor_mhz, boost_mhz)[1][0]))
        for _ in range(3):
            loads = low + (high - low) * np.linspace(0.0, 1.0, 33)
            kept = self.steady(requests, limits, loads, floor_mhz, boost_mhz).kept
            first = len(kept) if kept.all() else int(np.argmin(kept))
            if first == 0:
                return 0.0
            low, high = float(loads[first - 1]), float(loads[min(first, len(kept) - 1)])
        return low

    def _parts(self, requests: RequestClass, running: Floats, floor_mhz: int, boost_mhz: int) -> _Parts:
        """Return prompt tokens of a step, seconds of one with them and of one without, and how often none runs."""
        chunk = np.clip(self.step_tokens - running, 1.0, max(1.0, requests.prompt_tokens))
        together = self._together(running)
        prompt_s = self.steps.seconds(boost_mhz, running, running * requests.kv_tokens, chunk)
        token_s = self.steps.seconds(floor_mhz, together, together * requests.kv_tokens, np.zeros_like(running))
        return chunk, prompt_s, token_s, np.exp(-running)

    @staticmethod
    def _together(running: Floats) -> Floats:
        """Return how many decode at once while any does; independent requests are there in a Poisson number."""
        together: Floats = np.where(running > 1e-9, running / -np.expm1(-np.maximum(running, 1e-9)), 1.0)
        return together

    def _tokens_s(
        self, requests: RequestClass, loads: Floats, running: Floats, floor_mhz: int, boost_mhz: int
    ) -> Floats:
        """Return tokens that so many requests get a second."""
        chunk, prompt_s, token_s, _ = self._parts(requests, running, floor_mhz, boost_mhz)
        share = np.minimum(1.0, loads * requests.prompt_tokens / chunk * prompt_s)
        tokens_s: Floats = running * (share / prompt_s + (1.0 - share) / token_s)
        return tokens_s

    def _slow_share(
        self, requests: RequestClass, limits: LatencyLimits, loads: Floats, per_token_s: Floats, parts: _Parts
    ) -> Floats:
        """Return the share of requests that are slowed too much by the prompts of others between their tokens.

        A short answer may meet prompts all the time; a long one meets as many as come in its time, give or take.
        """
        chunk, prompt_s, token_s, _ = parts
        if (prompt_s <= limits.per_token_s).all():
            return np.zeros_like(loads)
        more_s = np.maximum(1e-9, prompt_s - token_s) * requests.prompt_tokens / chunk
        outputs = requests.outputs or (requests.output_tokens,)
        total = np.zeros_like(loads)
        for tokens in outputs:
            steps = max(1.0, tokens - 1.0)
            met = loads * steps * per_token_s
            spread_s = more_s * np.sqrt(np.maximum(1e-12, met * (1.0 + requests.prompt_scv)))
            left_s = steps * (limits.per_token_s - token_s) - met * more_s
            total += [0.5 * math.erfc(value) for value in left_s / (math.sqrt(2.0) * spread_s)]
        slow: Floats = np.where(prompt_s <= limits.per_token_s, 0.0, total / len(outputs))
        return slow

    def late_share(self, requests: RequestClass, limits: LatencyLimits, steady: Steady, replicas: int) -> Floats:
        """Return the share of requests whose first token comes late.

        Args:
            requests: of what kind.
            limits: what they were promised.
            steady: of each of the replicas.
            replicas: behind one router that knows the backlog of each.
        """
        busy = np.minimum(steady.prompt_share, 0.999)
        waits = erlang_c(replicas, replicas * busy)
        scv = (requests.arrival_scv + requests.prompt_scv) / 2.0
        waiting_s = np.maximum(1e-12, steady.service_s * scv / (replicas * (1.0 - busy)))
        total = np.zeros_like(busy)
        prompts = requests.prompts or (requests.prompt_tokens,)
        for tokens in prompts:
            own_s = steady.service_s * tokens / requests.prompt_tokens
            left_s = self.first_token_limit_s(tokens, limits) - own_s - steady.token_s
            total += np.where(left_s > 0.0, waits * np.exp(-np.maximum(0.0, left_s) / waiting_s), 1.0)
        late: Floats = np.where(steady.prompt_share >= 0.999, 1.0, total / len(prompts))
        return late

    def first_token_limit_s(self, prompt_tokens: float, limits: LatencyLimits) -> float:
        """Return the limit of a prompt's first token."""
        one = np.array([0.0]), np.array([0.0]), np.array([prompt_tokens])
        return max(limits.first_token_s, limits.undisturbed * float(self.steps.seconds(self.highest_mhz, *one)[0]))


def erlang_c(servers: int, offered: Floats) -> Floats:
    """Return how often who comes must wait, where so many serve and so many would be busy without an end of them.

    >>> float(erlang_c(1, np.array([0.5]))[0]), round(float(erlang_c(4, np.array([2.0]))[0]), 4)
    (0.5, 0.1739)
    """
    blocked = np.ones_like(offered)
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    busy = np.minimum(offered / servers, 1.0)
    waits: Floats = np.where(busy >= 1.0, 1.0, blocked / np.maximum(1e-12, 1.0 - busy * (1.0 - blocked)))
    return waits
