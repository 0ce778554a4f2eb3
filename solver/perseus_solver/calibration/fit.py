"""Delays and overhead that explain measured iteration times best: robust, regularised, non-negative.

The model and its equations are in the package's docstring. Called by `calibrate`; knows no files and gives no verdict.

Least absolute relative deviations, so that an iteration disturbed by a checkpoint counts no more than any other. The
makespan is piecewise linear in the delays, and its gradient is the number of times the critical path crosses each of
them. One step solves the linear programme that this gradient gives within a trust region, and is kept only if the
exact objective falls. The objective is not convex, so a grid over two common delays chooses where to begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.calibration.replay import Replay
from perseus_solver.engine.linear import minimise
from perseus_solver.problem import Floats

REGULARISATION = 0.1
"""A delay may differ from its siblings only where that removes, on average over iterations, more than a tenth of what
one more crossing of it would add. So each delay that no critical path sees equals the others, and no iteration is
explained by a whim."""
TIE = 1e-3
"""Share of the regularisation that also pulls the common delays to zero: where only a sum is determined, the overhead
has it."""
_STARTS = 2
_STEPS = 25
_SHORTEST = 1e-3
"""Of the first trust region; steps below it change nothing that is measured."""
_GRID = 8
_NEGLIGIBLE = 1e-7
"""An improvement of the mean relative error below this is none: clocks resolve microseconds in iterations of
seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """Delays as `Replay` orders them, and what every iteration takes in addition; seconds."""

    delay_s: Floats
    overhead_s: float

    def predict_s(self, replay: Replay, duration_s: Floats) -> Floats:
        """Iteration times for given computations, [iterations, instructions]."""
        return replay.time_s(duration_s, self.delay_s) + self.overhead_s


class Fit:
    """Fits one set of iterations."""

    def __init__(self, replay: Replay, duration_s: Floats, time_s: Floats) -> None:
        self._replay = replay
        self._duration_s = duration_s
        self._time_s = time_s
        self._weight = REGULARISATION / float(np.median(time_s))
        links = len(replay.pairs)
        self._kinds = [k for k in (slice(0, links), slice(links, replay.parameters)) if k.stop > k.start]

    def best(self) -> Parameters:
        """From the best of a grid of common delays, as near as the steps get."""
        duration_s, time_s, replay = self._duration_s, self._time_s, self._replay
        none = np.zeros(replay.parameters)
        bare_s, crossed = replay.crossings(duration_s, none)
        missing_s = max(float(np.median(time_s - bare_s)), 0.0)
        # Geometric, down from the delay that alone would explain all that is missing.
        ladders = []
        for kind in self._kinds:
            most = missing_s / max(float(np.median(crossed[:, kind].sum(axis=1))), 1.0)
            ladders.append([0.0, *(most * 0.5**k for k in range(_GRID))])
        if len(ladders) < 2:
            ladders.append([0.0])
        starts = []
        for first in ladders[0]:
            for second in ladders[1]:
                delay_s = none.copy()
                for kind, value in zip(self._kinds, (first, second), strict=False):
                    delay_s[kind] = value
                makespan_s = replay.time_s(duration_s, delay_s)
                start = Parameters(delay_s, max(float(np.median(time_s - makespan_s)), 0.0))
                starts.append((self._objective(start, makespan_s), start))
        starts.sort(key=lambda item: item[0])
        trust_s = missing_s / max(float(np.median(crossed.sum(axis=1))), 1.0)
        found = [self._descend(start, trust_s) for _, start in starts[:_STARTS]]
        return min(found, key=lambda item: item[0])[1]

    def _descend(self, here: Parameters, trust_s: float) -> tuple[float, Parameters]:
        """Steps from a start while the objective falls; the objective reached, and where."""
        makespan_s, crossed = self._replay.crossings(self._duration_s, here.delay_s)
        value = self._objective(here, makespan_s)
        least_s = trust_s * _SHORTEST
        for _ in range(_STEPS):
            if trust_s < least_s:
                break
            there = self._step(here, makespan_s, crossed, trust_s)
            new_makespan_s, new_crossed = self._replay.crossings(self._duration_s, there.delay_s)
            new = self._objective(there, new_makespan_s)
            if new < value - _NEGLIGIBLE:
                here, value, makespan_s, crossed = there, new, new_makespan_s, new_crossed
                trust_s *= 1.5
            else:
                trust_s /= 4
        return value, here

    def _objective(self, parameters: Parameters, makespan_s: Floats) -> float:
        penalty_s = 0.0
        for kind in self._kinds:
            delays = parameters.delay_s[kind]
            common = float(np.median(delays))
            penalty_s += float(np.abs(delays - common).sum()) + TIE * delays.size * common
        error = np.abs(makespan_s + parameters.overhead_s - self._time_s) / self._time_s
        return float(error.mean()) + self._weight * penalty_s

    def _step(self, here: Parameters, makespan_s: Floats, crossed: Floats, trust_s: float) -> Parameters:
        """The linear programme around one point: columns are delays, overhead, common delays, deviations and residuals.

        Times in milliseconds and residuals in per mille, so that numbers are near 1.
        """
        time_s = self._time_s
        count, kinds, n = self._replay.parameters, len(self._kinds), time_s.size
        weight = self._weight  # a share per second is per mille per millisecond
        belongs = np.zeros((count, kinds))
        for j, kind in enumerate(self._kinds):
            belongs[kind, j] = 1
        sizes = belongs.sum(axis=0)
        per_ms = 1 / time_s[:, None]  # one millisecond in per mille of each iteration
        eye, none, ones = np.eye(count), np.zeros((count, 2 * n)), np.ones((n, 1))
        residual = np.hstack([crossed * per_ms, ones * per_ms, np.zeros((n, kinds + count)), np.eye(n), -np.eye(n)])
        target = (time_s - makespan_s + crossed @ here.delay_s) / time_s * 1e3
        above = np.hstack([eye, np.zeros((count, 1)), -belongs, -eye, none])
        below = np.hstack([-eye, np.zeros((count, 1)), belongs, -eye, none])
        free = np.full(1 + kinds + count + 2 * n, np.inf)
        solution = minimise(
            cost=np.concatenate(
                [np.zeros(count + 1), weight * TIE * sizes, np.full(count, weight), np.full(2 * n, 1 / n)]
            ),
            rows=np.vstack([residual, above, below]),
            row_low=np.concatenate([target, np.full(2 * count, -np.inf)]),
            row_high=np.concatenate([target, np.zeros(2 * count)]),
            low=np.concatenate([np.maximum(here.delay_s - trust_s, 0) * 1e3, np.zeros(free.size)]),
            high=np.concatenate([(here.delay_s + trust_s) * 1e3, free]),
        )
        return Parameters(solution[:count] / 1e3, float(solution[count]) / 1e3)
