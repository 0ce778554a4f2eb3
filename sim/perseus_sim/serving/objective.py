"""What users were promised, and how a run kept it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perseus_sim.serving.engine import Served
from perseus_sim.serving.machine import Machine, Step
from perseus_sim.serving.requests import Request


@dataclass(frozen=True)
class Objective:
    """A latency objective.

    Attributes:
        first_token_s: limit of the time to the first token.
        undisturbed: instead, where that is longer, so many times what the prompt takes alone at the default clocks;
            0: never. Source of both: DynamoLLM (HPCA'25), whose limits grow with the class of the prompt.
        per_token_s: limit of a request's mean time between tokens.
        attainment: share of the requests that shall keep both.
    """

    first_token_s: float = 0.25
    undisturbed: float = 5.0
    per_token_s: float = 0.05
    attainment: float = 0.99

    def first_token_limit_s(self, request: Request, machine: Machine) -> float:
        """The limit of one request's time to the first token."""
        tokens = max(1, request.prompt_tokens - request.cached_tokens)
        pairs = tokens * (request.cached_tokens + 0.5 * tokens)
        alone_s = machine.seconds(machine.costs(machine.clocks_mhz[-1]), Step(0, 0, tokens, pairs, 1))
        return max(self.first_token_s, self.undisturbed * alone_s)

    def first_token_share(self, served: Served, machine: Machine) -> float:
        """The time that a request's first token took over its limit; infinite if it has not come."""
        if math.isnan(served.first_token_s):
            return math.inf
        return (served.first_token_s - served.request.arrival_s) / self.first_token_limit_s(served.request, machine)

    def token_share(self, served: Served) -> float:
        """A request's mean time between tokens over the limit; infinite if it has not ended."""
        return math.inf if math.isnan(served.end_s) else served.per_token_s / self.per_token_s


@dataclass(frozen=True)
class Attainment:
    """How requests kept an objective, in percent of all of them."""

    percent: float
    late_first_token_percent: float
    slow_tokens_percent: float


def attainment(served: Sequence[Served], objective: Objective, machine: Machine) -> Attainment:
    """Judge requests that arrived; what has not ended has missed."""
    late = [objective.first_token_share(one, machine) > 1 for one in served]
    slow = [objective.token_share(one) > 1 for one in served]
    percent = 100 / max(1, len(served))
    kept = sum(not (one_late or one_slow) for one_late, one_slow in zip(late, slow, strict=True))
    return Attainment(kept * percent, sum(late) * percent, sum(slow) * percent)
