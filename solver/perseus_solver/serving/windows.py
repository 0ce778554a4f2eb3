"""What is seen of an engine in about a second at one clock, and the columns that a model is fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats, Index
from perseus_solver.serving.model import MOST_MHZ, StepModel, require

MOST_WINDOWS: Final = 4_000
"""More than an hour of one replica; what is older says nothing that these do not."""
SEVERAL: Final = 3
"""Rows of a cell from which on one can be an outlier, and the cell is judged."""


@dataclass(frozen=True, slots=True)
class Window:
    """About a second of one engine at one clock, from the end of a step to the end of a step.

    Attributes:
        clock_mhz: the clock in force; the highest where none is locked.
        seconds: how long it is.
        running: sequences that decode, mean over the steps.
        kv_tokens: tokens whose keys and values those read, mean over the steps.
        steps: that computed no prompt.
        step_s: their mean time; 0 without any.
        prompt_steps: that computed tokens of prompts.
        prompt_step_s: their mean time; 0 without any.
        prompt_tokens: that they computed, all together.
        watts: mean of all GPUs of the instance together; None: not measured.
        reached_mhz: the mean clock that was measured, where it was.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    clock_mhz: int
    seconds: float
    running: float
    kv_tokens: float
    steps: int
    step_s: float
    prompt_steps: int = 0
    prompt_step_s: float = 0.0
    prompt_tokens: int = 0
    watts: float | None = None
    reached_mhz: int | None = None

    def __post_init__(self) -> None:
        require(0 < self.clock_mhz <= MOST_MHZ, "clock_mhz", f"from 1 to {MOST_MHZ}", self)
        require(0.0 < self.seconds <= 3600.0, "seconds", "more than 0 and at most 3,600", self)
        require(0.0 <= self.running <= 65_536, "running", "from 0 to 65,536", self)
        require(0.0 <= self.kv_tokens <= 1e9, "kv_tokens", "from 0 to 1,000,000,000", self)
        for steps, step_s in (("steps", "step_s"), ("prompt_steps", "prompt_step_s")):
            count = getattr(self, steps)
            require(0 <= count <= 10**7, steps, "from 0 to 10,000,000", self)
            low, high = (1e-6, 60.0) if count else (0.0, 0.0)
            rule = f"from 0.000001 to 60 with {steps}, 0 without"
            require(low <= getattr(self, step_s) <= high, step_s, rule, self)
        require(self.steps + self.prompt_steps > 0, "steps", "at least 1 together with prompt_steps", self)
        low, high = (1, 10**9) if self.prompt_steps else (0, 0)
        rule = "from 1 to 1,000,000,000 with prompt_steps, 0 without"
        require(low <= self.prompt_tokens <= high, "prompt_tokens", rule, self)
        require(self.watts is None or 0.0 < self.watts <= 1e6, "watts", "more than 0 and at most 1,000,000", self)
        reached = self.reached_mhz
        require(reached is None or 0 < reached <= MOST_MHZ, "reached_mhz", f"from 1 to {MOST_MHZ}", self)


class Columns:
    """Steps as arrays, float[rows] each: a row for the steps of a window without prompts, one for those with.

    Args:
        windows: at most `MOST_WINDOWS`.
        highest_mhz: the GPU's highest clock.

    Raises:
        InvalidProblem: too many windows, or a clock that no GPU has.
    """

    def __init__(self, windows: Sequence[Window], highest_mhz: int) -> None:
        if len(windows) > MOST_WINDOWS:
            raise InvalidProblem(f"windows must be at most {MOST_WINDOWS:,}, not {len(windows):,}")
        if not 0 < highest_mhz <= MOST_MHZ:
            raise InvalidProblem(f"highest_mhz must be from 1 to {MOST_MHZ}, not {highest_mhz!r}")
        self.highest_mhz = highest_mhz
        rows = [(w, w.step_s, 0.0) for w in windows if w.steps]
        rows += [(w, w.prompt_step_s, w.prompt_tokens / w.prompt_steps) for w in windows if w.prompt_steps]
        self.in_force_mhz = np.array([w.clock_mhz for w, _, _ in rows], float)
        self.clock_mhz = np.array([ran_mhz(w) for w, _, _ in rows], float)
        self.running = np.array([w.running for w, _, _ in rows], float)
        self.kv_tokens = np.array([w.kv_tokens for w, _, _ in rows], float)
        self.step_s = np.array([step_s for _, step_s, _ in rows], float)
        self.prompt_tokens = np.array([tokens for _, _, tokens in rows], float)

    def cells(self) -> Index:
        """Return which rows have about the same clock and load, within a factor of two: a number for each.

        Rows that are alone so far are taken together with others of the same clock and sequences, and those that still
        are, with others of the same sequences: a model that explains them all is right for each such group, too.
        """
        prompt = self.prompt_tokens > 0.0
        running, kv_tokens, chunk = (
            np.floor(np.log2(load + 1.0)) for load in (self.running, self.kv_tokens, self.prompt_tokens)
        )
        nothing = np.zeros_like(running)
        cells = np.zeros(len(running), dtype=np.intp)
        left = np.arange(len(running))
        for kinds in (
            (self.in_force_mhz, running, kv_tokens, chunk),
            (self.in_force_mhz, running, nothing, prompt),
            (nothing, running, nothing, prompt),
        ):
            numbers = np.unique(np.stack(kinds, axis=1)[left], axis=0, return_inverse=True)[1].reshape(-1)
            cells[left] = numbers + cells.max(initial=0) + 1
            left = left[np.bincount(numbers)[numbers] < SEVERAL]
        renumbered: Index = np.unique(cells, return_inverse=True)[1].reshape(-1)
        return renumbered

    def errors(self, model: StepModel) -> Floats:
        """Return float[rows]: by what share each took longer than a model says."""
        fitted_s = model.steps_s(self.clock_mhz, self.running, self.kv_tokens, self.prompt_tokens)
        shares: Floats = self.step_s / np.maximum(fitted_s, 1e-9) - 1.0
        return shares

    def design(self, points: Floats) -> Floats:
        """Return float[points, rows, 6]: what the parameters of a `StepModel` that count in proportion multiply.

        Args:
            points: float[points, 3], the knee of the memory and the plateau of the operations, MHz, and the tokens
                whose operations take as long at the highest clock as reading the weights does. With these the longer of
                the two is ``token_s`` times something known.
        """
        knee_mhz, plateau_mhz, crossing = points.T[:, :, None]
        launch = self.highest_mhz / self.clock_mhz
        slower = np.maximum(1.0, knee_mhz / self.clock_mhz)
        operations = self.highest_mhz / np.minimum(self.clock_mhz, plateau_mhz)
        factors = np.empty((*slower.shape, 6))
        factors[..., 0], factors[..., 1], factors[..., 4] = 1.0, launch, self.running
        factors[..., 2] = np.maximum(crossing * slower, (self.running + self.prompt_tokens) * operations)
        factors[..., 3] = self.kv_tokens * slower
        factors[..., 5] = launch * self.running
        return factors


def ran_mhz(window: Window) -> int:
    """Return the clock that a window ran at: what was measured, where heat or power held it below that in force."""
    return min(window.clock_mhz, window.reached_mhz or window.clock_mhz)
