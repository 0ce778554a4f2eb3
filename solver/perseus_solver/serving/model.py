"""What a step of an engine takes, in seconds and joules, as a function of its clock and its load.

With x = clock over the highest, a step that gives one token to each of n sequences, whose keys and values are KV
tokens, and computes T prompt tokens takes

    host + launch / x + max(weights · k, token · (n + T) · F / min(f, plateau)) + kv_token · KV · k
         + (sequence + sampling / x) · n

k = max(1, knee / f): below the knee the clock no longer keeps the memory busy. Matrix products wait for whichever takes
longer, the weights or the operations; above the plateau the power limit holds the operations. All parameters are at
least 0, so a step never takes longer at a higher clock, nor less at a greater load. Tables and their checks rest on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats

MOST_MHZ = 10_000
MOST_DRAWS = 256


@dataclass(frozen=True, slots=True)
class StepModel:
    """How long steps take.

    Attributes:
        highest_mhz: the GPU's highest clock, F.
        host_s: of each step, at any clock and load.
        launch_s: of each step at the highest clock; in proportion to 1 / clock. What a kernel takes beside bytes and
            operations, which no load changes.
        weights_s: for reading all weights, at or above the knee.
        token_s: for the operations of one token at the highest clock, without a plateau.
        kv_token_s: for reading the keys and values of one token, at or above the knee.
        sequence_s: for each sequence that decodes, at any clock.
        sampling_s: for each sequence that decodes, at the highest clock; in proportion to 1 / clock.
        knee_mhz: below, bytes take longer in proportion to 1 / clock.
        plateau_mhz: above, operations take no shorter; None: they follow the clock up to the highest.

    Raises:
        InvalidProblem: a parameter is out of range.
    """

    highest_mhz: int
    host_s: float
    launch_s: float
    weights_s: float
    token_s: float
    kv_token_s: float
    sequence_s: float
    sampling_s: float
    knee_mhz: float
    plateau_mhz: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            require(0.0 <= getattr(self, field.name) < math.inf, field.name, "at least 0 and finite", self)
        require(0 < self.highest_mhz <= MOST_MHZ, "highest_mhz", f"from 1 to {MOST_MHZ}", self)
        require(self.plateau_mhz is None or 0.0 < self.plateau_mhz < math.inf, "plateau_mhz", "positive", self)

    def step_s(self, clock_mhz: float, running: float, kv_tokens: float, prompt_tokens: float = 0.0) -> float:
        """Return how long a step takes, in seconds.

        Args:
            clock_mhz: at which it runs.
            running: sequences that decode.
            kv_tokens: tokens whose keys and values those read.
            prompt_tokens: tokens of prompts that it computes.
        """
        time_s = self.steps_s(*(np.array(value, float) for value in (clock_mhz, running, kv_tokens, prompt_tokens)))
        return float(time_s)

    def steps_s(self, clock_mhz: Floats, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
        """Return how long steps take, in seconds: as `step_s`, for arrays whose shapes fit each other."""
        return _steps_s(self, clock_mhz, running, kv_tokens, prompt_tokens)


class _Parameters:
    """The parameters of models, each as one column."""

    def __init__(self, models: Sequence[StepModel]) -> None:
        for field in fields(StepModel):
            values = [getattr(model, field.name) for model in models]
            column = np.array([math.inf if value is None else value for value in values])
            setattr(self, field.name, column[:, np.newaxis])


def _steps_s(model: Any, clock_mhz: Floats, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
    """Return how long steps take by one model, or by many."""
    slower = np.maximum(1.0, model.knee_mhz / clock_mhz)
    products_mhz = clock_mhz if model.plateau_mhz is None else np.minimum(clock_mhz, model.plateau_mhz)
    operations_s = model.token_s * (running + prompt_tokens) * model.highest_mhz / products_mhz
    times_s: Floats = (
        (model.host_s + model.sequence_s * running)
        + (model.launch_s + model.sampling_s * running) * model.highest_mhz / clock_mhz
        + np.maximum(model.weights_s * slower, operations_s)
        + model.kv_token_s * kv_tokens * slower
    )
    return times_s


@dataclass(frozen=True, slots=True)
class StepModels:
    """The model that explains what was seen best, and others that explain it as well.

    Attributes:
        best: the estimate.
        draws: models drawn in proportion to how well they explain it; none: the estimate is taken as exact.

    Raises:
        InvalidProblem: too many draws, or one of another GPU.
    """

    best: StepModel
    draws: tuple[StepModel, ...] = ()

    def __post_init__(self) -> None:
        if len(self.draws) > MOST_DRAWS:
            raise InvalidProblem(f"draws must be at most {MOST_DRAWS}, not {len(self.draws)}")
        if any(draw.highest_mhz != self.best.highest_mhz for draw in self.draws):
            raise InvalidProblem("draws must have the highest_mhz of best")

    def each_s(self, clock_mhz: Floats, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
        """Return how long steps take by each model, in seconds: a row for each, the estimate first.

        Args:
            clock_mhz, running, kv_tokens, prompt_tokens: of the steps, one-dimensional and of one length.
        """
        return _steps_s(_Parameters((self.best, *self.draws)), clock_mhz, running, kv_tokens, prompt_tokens)

    def upper_s(self, clock_mhz: Floats, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
        """Return the upper end of the 95 % interval of steps' times, in seconds; never below the estimate."""
        return self.interval_s(clock_mhz, running, kv_tokens, prompt_tokens)[1]

    def interval_s(
        self, clock_mhz: Floats, running: Floats, kv_tokens: Floats, prompt_tokens: Floats
    ) -> tuple[Floats, Floats]:
        """Return both ends of the 95 % interval of steps' times, in seconds; the estimate is always within."""
        best = self.best.steps_s(clock_mhz, running, kv_tokens, prompt_tokens)
        if not self.draws:
            return best, best
        drawn = [draw.steps_s(clock_mhz, running, kv_tokens, prompt_tokens) for draw in self.draws]
        low, high = interval_of(np.array(drawn))
        return np.minimum(low, best), np.maximum(high, best)


@dataclass(frozen=True, slots=True)
class WattModel:
    """What the GPUs of an instance draw.

    In a step of t seconds that would read memory for m seconds at full rate:

        joules = (idle + clock · x · v²) · t + (byte + die · v²) · m + sequence · n · v² + token · T · u²

    v = max(x, floor): above the floor the voltage follows the clock; u is v where the power limit holds it, at the
    plateau of the operations.

    Attributes:
        highest_mhz: the GPU's highest clock, F.
        idle_w: at any clock.
        clock_w: what switches with every cycle, at the highest clock.
        byte_w: of reading memory at full rate, at any clock.
        die_w: the part of reading that is on the die, at the highest clock.
        sequence_j: of one sequence that decodes, at the highest clock.
        token_j: of one token of a prompt, at the highest clock.
        floor_mhz: below, the voltage no longer falls.

    Raises:
        InvalidProblem: a parameter is out of range.
    """

    highest_mhz: int
    idle_w: float
    clock_w: float
    byte_w: float
    die_w: float
    sequence_j: float
    token_j: float
    floor_mhz: float

    def __post_init__(self) -> None:
        for field in fields(self):
            require(0.0 <= getattr(self, field.name) < math.inf, field.name, "at least 0 and finite", self)
        require(0 < self.highest_mhz <= MOST_MHZ, "highest_mhz", f"from 1 to {MOST_MHZ}", self)

    def joules(
        self, model: StepModel, clock_mhz: float, running: float, kv_tokens: float, prompt_tokens: float = 0.0
    ) -> float:
        """Return the joules of a step whose time a model says; arguments as of `StepModel.step_s`."""
        load = (np.array(value, float) for value in (clock_mhz, running, kv_tokens, prompt_tokens))
        return float(self.joules_of(model, *load))

    def joules_of(
        self, model: StepModel, clock_mhz: Floats, running: Floats, kv_tokens: Floats, prompt_tokens: Floats
    ) -> Floats:
        """Return the joules of steps: as `joules`, for arrays whose shapes fit each other."""
        products_mhz = np.minimum(clock_mhz, model.plateau_mhz or self.highest_mhz)
        voltage2, held2 = (
            np.maximum(mhz, self.floor_mhz) ** 2 / self.highest_mhz**2 for mhz in (clock_mhz, products_mhz)
        )
        energy_j: Floats = (
            self.resting_w(clock_mhz) * model.steps_s(clock_mhz, running, kv_tokens, prompt_tokens)
            + (self.byte_w + self.die_w * voltage2) * (model.weights_s + model.kv_token_s * kv_tokens)
            + self.sequence_j * running * voltage2
            + self.token_j * prompt_tokens * held2
        )
        return energy_j

    def resting_w(self, clock_mhz: Floats) -> Floats:
        """Return what the GPUs draw at clocks between two steps, and without any."""
        voltage2 = np.maximum(clock_mhz, self.floor_mhz) ** 2 / self.highest_mhz**2
        power_w: Floats = self.idle_w + self.clock_w * clock_mhz / self.highest_mhz * voltage2
        return power_w


def interval_of(drawn: Floats) -> tuple[Floats, Floats]:
    """Return both ends of the 95 % interval of values along the first axis: two of the values themselves."""
    ordered = np.sort(drawn, axis=0)
    last = upper_rank(len(ordered))
    return ordered[len(ordered) - 1 - last], ordered[last]


def upper_rank(count: int) -> int:
    """Return which of so many drawn values, in ascending order, one more would be above in 2.5 % of cases."""
    return min(count, math.ceil(0.975 * (count + 1))) - 1


def require(kept: bool, name: str, rule: str, instance: object) -> None:
    """Refuse a value of a dataclass that breaks a rule.

    Raises:
        InvalidProblem: it does; the message names the field and the rule.
    """
    if not kept:
        raise InvalidProblem(f"{name} must be {rule}, not {getattr(instance, name)!r}")
