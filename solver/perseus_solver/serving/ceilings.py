"""What a replica carries within its limits, and draws at most, while its clock may not go above a ceiling.

The load of a ceiling is bounded as the cells and boosts of a table are (see ``table``): the upper end of the interval
of a step's time stays within ``margin`` of the limit, and prompts that wait are done within half of that of the first
token. A greater load of the same kind has as many tokens in memory, and of prompts, for
each request. Times fall with the clock, so a higher ceiling never carries less; watts of a load rise with it, so no
lower clock draws more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perseus_core.serving import DEFAULT_CLOCKS
from perseus_solver.errors import InvalidProblem
from perseus_solver.serving.table import PROMPTS, TableRequest, prompts_allowed_s, prompts_s

_LOADS: Final = 256
"""Numbers of running requests that are compared: up to 256 every one."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests of an engine have in common, whatever their number.

    Attributes:
        kv_tokens: whose keys and values a request that decodes reads in a step, mean.
        prompt_tokens: computed for each token that is generated, mean.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    kv_tokens: float
    prompt_tokens: float

    def __post_init__(self) -> None:
        for name, most in (("kv_tokens", 1e9), ("prompt_tokens", 1e7)):
            if not 0.0 <= getattr(self, name) <= most:
                raise InvalidProblem(f"{name} must be from 0 to {most:,.0f}, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A highest permitted clock, and what follows from it.

    Attributes:
        clock_mhz: the clock; `DEFAULT_CLOCKS`: any is permitted.
        watts: that the GPUs of the instance draw at most on average, at any load that it carries.
        running: requests that decode at once within their limit, at most.
        prompts: of mean length that may wait at once and still get their first token in time; at most `PROMPTS`.
        tokens_s: tokens that it generates in a second, at most, while it computes the prompts that they need.
    """

    clock_mhz: int
    watts: float
    running: int
    prompts: int
    tokens_s: float


def ceilings(request: TableRequest, mix: Mix) -> tuple[Ceiling, ...]:
    """Return the ceilings worth having, lowest first: each carries more tokens than the one before, for more watts.

    Args:
        request: what the table of the same engine is made for.
        mix: of its requests.

    Returns:
        None of them: not even the highest clock keeps the limit for one request.

    >>> from perseus_solver.serving import StepModel, StepModels, WattModel
    >>> steps = StepModel(1980, 2e-3, 1e-3, 12e-3, 50e-6, 28e-9, 60e-6, 0.0, knee_mhz=1090.0)
    >>> watts = WattModel(1980, 300.0, 190.0, 400.0, 1050.0, 0.2, 0.2, floor_mhz=1100.0)
    >>> limits = {"limit_s": 0.042, "first_token_s": 0.5, "prompt_tokens": 1_000.0}
    >>> request = TableRequest(StepModels(steps), watts, (900, 1305), kv_capacity=500_000, **limits)
    >>> [(each.clock_mhz, each.running, each.prompts) for each in ceilings(request, Mix(1_000.0, 2.0))]
    [(900, 144, 2), (1305, 183, 3), (0, 211, 4)]
    """
    best, clocks = request.steps.best, [*request.usable_mhz, request.steps.best.highest_mhz]
    loads = np.unique(np.linspace(1.0, request.running[-1], _LOADS).round())
    clock_mhz, running = np.meshgrid(np.array(clocks, float), loads, indexing="ij")
    kv_tokens = np.minimum(running * mix.kv_tokens, request.kv_capacity)
    kept = request.steps.upper_s(clock_mhz, running, kv_tokens, np.zeros_like(running)) <= (
        request.margin * request.limit_s
    )
    mixed = clock_mhz, running, kv_tokens, running * mix.prompt_tokens
    step_s = best.steps_s(*mixed)
    watts = np.where(kept, request.watts.joules_of(best, *mixed) / step_s, 0.0).max(axis=1)
    tokens_s = np.where(kept, running / step_s, 0.0).max(axis=1)
    worth: list[Ceiling] = []
    for place, mhz in enumerate(clocks):
        if not kept[place].any() or (worth and tokens_s[place] <= worth[-1].tokens_s):
            continue
        if worth and watts[place] <= worth[-1].watts:
            worth.pop()
        worth.append(
            Ceiling(
                clock_mhz=DEFAULT_CLOCKS if place == len(clocks) - 1 else mhz,
                watts=float(watts[place]),
                running=int(loads[kept[place]].max()),
                prompts=_prompts(request, mhz),
                tokens_s=float(tokens_s[place]),
            )
        )
    return tuple(worth)


def _prompts(request: TableRequest, mhz: int) -> int:
    counts = range(1, PROMPTS + 1)
    return sum(prompts_s(request, mhz, prompts) <= prompts_allowed_s(request, prompts) for prompts in counts)
