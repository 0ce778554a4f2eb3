"""Requests of one kind, and what they were promised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perseus_solver.errors import InvalidProblem

_PROMPTS: Final = 8
"""Lengths of prompts, and of answers, that stand for all."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests of one kind.

    Attributes:
        prompt_tokens: computed of a prompt, mean.
        output_tokens: of an answer, mean.
        kv_tokens: whose keys and values a request that decodes reads in a step, mean.
        prompt_scv: squared coefficient of variation of the prompts' tokens.
        arrival_scv: of the times between arrivals; 1: they come independently of each other.
        prompts: tokens of prompts that are equally frequent; empty: the mean stands for all.
        outputs: tokens of answers that are equally frequent; empty: the mean stands for all.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    prompt_tokens: float
    output_tokens: float
    kv_tokens: float
    prompt_scv: float = 1.0
    arrival_scv: float = 1.0
    prompts: tuple[float, ...] = ()
    outputs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("prompt_tokens", 1.0, 1e7),
            ("output_tokens", 1.0, 1e7),
            ("kv_tokens", 0.0, 1e9),
            ("prompt_scv", 0.0, 1e4),
            ("arrival_scv", 0.0, 1e4),
        ):
            if not least <= getattr(self, name) <= most:
                raise InvalidProblem(f"{name} must be from {least:g} to {most:,.0f}, not {getattr(self, name)!r}")

    @classmethod
    def seen(cls, prompts: Sequence[int], outputs: Sequence[int], arrival_scv: float = 1.0) -> RequestClass:
        """Return the class of requests that were seen: tokens of each prompt and of its answer.

        >>> requests = RequestClass.seen([100, 300], [10, 30])
        >>> requests.prompt_tokens, requests.output_tokens, requests.kv_tokens, requests.prompt_scv
        (200.0, 20.0, 262.5, 0.25)
        """
        if not prompts or len(prompts) != len(outputs):
            raise InvalidProblem("prompts and outputs must be as many, and at least one")
        prompt, output = np.array(prompts, float), np.array(outputs, float)
        # Of the requests that decode at a moment, long answers are more than of those that arrive.
        kv_tokens = float((output * (prompt + output / 2)).mean() / output.mean())
        scv = float(prompt.var() / prompt.mean() ** 2)
        middles = (np.arange(_PROMPTS) + 0.5) / _PROMPTS
        typical = [tuple(map(float, np.quantile(tokens, middles))) for tokens in (prompt, output)]
        return cls(float(prompt.mean()), float(output.mean()), kv_tokens, scv, arrival_scv, *typical)

    @classmethod
    def exponential(cls, prompt_tokens: float, output_tokens: float) -> RequestClass:
        """Return the class of requests of which means are known: lengths are taken as exponential."""
        middles = -np.log1p(-(np.arange(_PROMPTS) + 0.5) / _PROMPTS)
        prompts, outputs = (
            tuple(map(float, np.maximum(1.0, mean * middles))) for mean in (prompt_tokens, output_tokens)
        )
        return cls(prompt_tokens, output_tokens, prompt_tokens + output_tokens, 1.0, 1.0, prompts, outputs)


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """What requests were promised.

    Attributes:
        first_token_s: of the time to the first token.
        undisturbed: instead, where that is longer, so many times what the prompt takes alone at the highest clock.
        per_token_s: of a request's mean time between tokens.
        attainment: share of the requests that shall keep both.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    first_token_s: float
    undisturbed: float
    per_token_s: float
    attainment: float = 0.99

    def __post_init__(self) -> None:
        for name, most in (("first_token_s", 3_600.0), ("per_token_s", 3_600.0)):
            if not 0.0 < getattr(self, name) <= most:
                raise InvalidProblem(f"{name} must be more than 0 and at most {most:g}, not {getattr(self, name)!r}")
        if not 0.0 <= self.undisturbed < math.inf:
            raise InvalidProblem(f"undisturbed must be at least 0 and finite, not {self.undisturbed!r}")
        if not 0.0 < self.attainment < 1.0:
            raise InvalidProblem(f"attainment must be between 0 and 1, not {self.attainment!r}")
