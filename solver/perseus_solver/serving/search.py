"""The models of times that explain rows of steps best, and the others that explain them nearly as well.

For a given knee, plateau and crossing the model is linear, and its parameters follow by least squares of relative
errors. These three are searched by a population that cools down (sequential Monte Carlo): members are chosen anew by
how well they explain the rows, and each then tries to move by a part of the difference of two others (ter Braak 2006),
so that steps fit narrow valleys and flat directions alike. When it is cold it is a sample of what explains the rows as
well as chance allows: the draws, each with linear parameters from a repetition of the experiment. So an interval is
wide where, and only where, rows do not say.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from perseus_solver.kinds import Floats
from perseus_solver.serving.least_squares import non_negative
from perseus_solver.serving.model import StepModel
from perseus_solver.serving.windows import Columns

PARAMETERS: Final = 9
_LINEAR: Final = 6
_MEMBERS: Final = 80
"""With 80 draws, the second of each end bounds an interval of 95 %."""
_COOLING: Final = 40
_AGAIN: Final = 12
"""Generations of the first search, of each further one, which begins where the last ended, and before draws are
taken: with half as many, fits of the tests' models still end in the same valleys."""
_STRIDE: Final = 1.2
"""Of a difference at most: around 2.38 / √(2 · 3), ter Braak's for three parameters, and shorter."""
_JITTER: Final = 1e-4
"""Of the whole range: what keeps a population from collapsing."""
_AT_ONCE: Final = 100_000
"""Rows times members in memory at once: 4 MiB."""
_FURTHEST: Final = 8.0
"""Crossings that are tried, over the most tokens of a step: beyond the first, all are alike."""


class Search:
    """The fit of times.

    Args:
        columns: the rows.
        variance: float[rows], of each row's relative error; infinite: it does not count.
    """

    def __init__(self, columns: Columns, variance: Floats) -> None:
        self._columns = columns
        self._random = np.random.default_rng(0)  # the same fit of the same rows
        low, high = float(columns.clock_mhz.min()), float(columns.highest_mhz)
        most = float((columns.running + columns.prompt_tokens).max())
        self._low = np.array([min(low, high), min(low, high), 0.0])
        self._high = np.array([high, high, np.log(_FURTHEST * max(2.0, most))])
        self._members = self._low + (self._high - self._low) * self._random.random((_MEMBERS, 3))
        self._temperature = math.inf
        self._weigh(variance)
        self._cool(_COOLING, float(np.median(self._misfits) - self._misfits.min()))

    def again(self, variance: Floats) -> None:
        """Search on, with other variances of the rows."""
        self._temperature = math.inf
        self._weigh(variance)
        self._cool(_AGAIN, float(np.median(self._misfits) - self._misfits.min()))

    def _weigh(self, variance: Floats) -> None:
        self._weights = 1.0 / np.sqrt(variance)
        self._misfits, linear = self._fitted(self._members)
        at = int(np.argmin(self._misfits))
        self._least, self.best = float(self._misfits[at]), self._model(self._members[at], linear[at])

    def _cool(self, generations: int, warmest: float) -> None:
        """Move the population while its temperature, which multiplies variances, falls to that of the rows."""
        counted = int((self._weights > 0.0).sum())
        for temperature in np.geomspace(max(warmest, 1.0), 1.0, generations):
            # Where rows scatter more than their variance says, the last temperature is that of their scatter.
            self._choose(max(float(temperature), self._least / max(1, counted - PARAMETERS)))
            self._move()

    def _choose(self, temperature: float) -> None:
        """Choose the members anew for another temperature: some of them several times, others not."""
        if temperature < self._temperature:
            power = (0.5 / temperature - 0.5 / self._temperature) * (self._misfits - self._misfits.min())
            odds = np.exp(-np.minimum(power, 700.0))
            chosen = self._random.choice(_MEMBERS, _MEMBERS, p=odds / odds.sum())
            self._members, self._misfits = self._members[chosen], self._misfits[chosen]
        self._temperature = temperature

    def _move(self) -> None:
        draw, count = self._random, _MEMBERS
        first = (np.arange(count) + draw.integers(1, count, count)) % count
        second = (np.arange(count) + draw.integers(1, count, count)) % count
        stride = _STRIDE * draw.random((count, 1))
        moved = self._members + stride * (self._members[first] - self._members[second])
        moved += _JITTER * (self._high - self._low) * draw.standard_normal(moved.shape)
        moved = np.where(moved < self._low, 2.0 * self._low - moved, moved)
        moved = np.where(moved > self._high, 2.0 * self._high - moved, moved).clip(self._low, self._high)
        misfits, linear = self._fitted(moved)
        worse = np.minimum((misfits - self._misfits) / (2.0 * self._temperature), 700.0)
        accepted = draw.random(count) < np.exp(-np.maximum(worse, 0.0))
        self._members[accepted], self._misfits[accepted] = moved[accepted], misfits[accepted]
        at = int(np.argmin(misfits))
        if misfits[at] < self._least:
            self._least, self.best = float(misfits[at]), self._model(moved[at], linear[at])

    def _fitted(self, members: Floats) -> tuple[Floats, Floats]:
        """Return the misfit of each member, χ², and its linear parameters."""
        grams, moments = self._normal(members)
        linear = non_negative(grams, moments)
        shortfall = np.einsum("pij,pj->pi", grams, linear) - 2.0 * moments
        return np.einsum("pi,pi->p", linear, shortfall) + float(self._weights @ self._weights), linear

    def _normal(self, members: Floats) -> tuple[Floats, Floats]:
        """Return XᵀX and Xᵀy of each member. A row's y is 1, as errors are relative, times its weight."""
        aim, points = self._weights, members.copy()
        points[:, 2] = np.exp(points[:, 2])
        scale = (aim / self._columns.step_s)[:, None]
        grams, moments = np.empty((len(points), _LINEAR, _LINEAR)), np.empty((len(points), _LINEAR))
        size = max(1, _AT_ONCE // len(aim))
        for first in range(0, len(points), size):
            part = slice(first, first + size)
            design = self._columns.design(points[part]) * scale
            grams[part], moments[part] = design.swapaxes(1, 2) @ design, aim @ design
        return grams, moments

    def _model(self, member: Floats, linear: Floats) -> StepModel:
        knee_mhz, plateau_mhz, crossing = map(float, (*member[:2], np.exp(member[2])))
        host_s, launch_s, token_s, kv_token_s, sequence_s, sampling_s = map(float, linear)
        highest_mhz = self._columns.highest_mhz
        return StepModel(
            highest_mhz=highest_mhz,
            host_s=host_s,
            launch_s=launch_s,
            weights_s=token_s * crossing,
            token_s=token_s,
            kv_token_s=kv_token_s,
            sequence_s=sequence_s,
            sampling_s=sampling_s,
            knee_mhz=knee_mhz,
            plateau_mhz=plateau_mhz if plateau_mhz < highest_mhz else None,
        )

    def errors(self) -> Floats:
        """Return float[rows]: by what share each took longer than the best model says."""
        return self._columns.errors(self.best)

    def draws(self, widened: float) -> tuple[StepModel, ...]:
        """Return models that explain the rows as well as chance allows.

        Args:
            widened: by what factor rows scatter more than their variance says.
        """
        for _ in range(_AGAIN):
            self._choose(widened**2)
            self._move()
        grams, moments = self._normal(self._members)
        values, vectors = np.linalg.eigh(grams)
        noise = np.sqrt(np.maximum(values, 0.0)) * self._random.standard_normal(moments.shape)
        linear = non_negative(grams, moments + widened * np.einsum("pij,pj->pi", vectors, noise))
        return tuple(self._model(member, parameters) for member, parameters in zip(self._members, linear, strict=True))
