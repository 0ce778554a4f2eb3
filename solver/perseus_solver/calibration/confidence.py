"""How far each delay may be moved before the model explains the iterations noticeably worse: profile likelihood
intervals.

With Laplace errors the likelihood ratio of two fits is (mean error / best mean error)^n, and twice its logarithm
follows χ² with one degree of freedom; n counts plans, because the iterations of one plan err together. Each end of an
interval moves one parameter as far as it goes while all others follow. So a parameter of which only a sum with others
is determined gets a wide interval. Called by `calibrate`; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perseus_solver.calibration.fit import Parameters
from perseus_solver.calibration.linear_program import minimise
from perseus_solver.calibration.replay import Replay
from perseus_solver.calibration.trace import Trace
from perseus_solver.kinds import Floats

_CHI2_95 = 3.841
_ROUNDS = 3
_WORTH = 0.01
"""A round that gains less than this share of what was hoped for is the last."""
_HALVINGS = 3
_SHORTEST = 1e-4
"""Share of an iteration below which moving a delay is not worth following."""
_RELUCTANCE = 0.25
"""What it costs to move all other parameters as far as the one asked about: less than is gained, so that they follow
where they must, and stay where they need not."""
_NO_ERROR = 1e-6
"""Relative error below which clocks in microseconds cannot measure an iteration of a second."""


def profile_intervals(replay: Replay, trace: Trace, best: Parameters, units: int) -> tuple[Floats, Floats]:
    """95 % interval of each delay and, last, of the overhead: (low, high) in seconds.

    ``units``: how many independent groups of iterations there are.
    """
    duration_s, time_s = trace.duration_s, trace.iteration_time_s
    makespan_s, crossed = replay.crossings(duration_s, best.delay_s)
    error = float(np.mean(np.abs(makespan_s + best.overhead_s - time_s) / time_s))
    allowed = max(error, _NO_ERROR) * (1 + _CHI2_95 / (2 * units))
    at = np.append(best.delay_s, best.overhead_s)
    low, high = at.copy(), at.copy()

    def allows(point: Floats) -> bool:
        predicted_s = replay.time_s(duration_s, point[:-1]) + point[-1]
        return bool(np.mean(np.abs(predicted_s - time_s) / time_s) <= allowed)

    for j in range(at.size):
        for end, sign in ((low, 1.0), (high, -1.0)):
            here, bare_s, counts = at, makespan_s, crossed
            for _ in range(_ROUNDS):
                there = _furthest(_Linear(here, bare_s, counts, time_s, allowed), j, sign)
                moved = _as_far_as(allows, here, there)
                gained = abs(float(moved[j] - here[j])) > _WORTH * abs(float(there[j] - at[j]))
                here = moved
                if not gained or moved is there:
                    break
                bare_s, counts = replay.crossings(duration_s, here[:-1])
            end[j] = here[j]
    # Where every path has equally many steps, as in 1F1B, all delays may grow at the expense of the overhead with no
    # difference whatever; too long a way to be found by steps.
    steps = crossed.sum(axis=1)
    if steps.size and steps.min() == steps.max() > 0:
        traded = _as_far_as(allows, at, np.append(best.delay_s + best.overhead_s / steps[0], 0.0))
        low, high = np.minimum(low, traded), np.maximum(high, traded)
    return np.minimum(low, at), np.maximum(high, at)


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """The model as it looks from one point: parameters (the overhead last), makespans and crossings there."""

    here: Floats
    makespan_s: Floats
    crossed: Floats
    time_s: Floats
    allowed: float


def _furthest(model: _Linear, j: int, sign: float) -> Floats:
    """Where parameter j is least (sign 1) or largest (−1) with the mean error allowed, as seen from here.

    Columns are each parameter's way up, its way down, and residuals. The others move only as far as that helps,
    measured by what they do to the iteration. Nothing may exceed the iteration itself, which bounds what no path
    crosses.
    """
    here, time_s = model.here, model.time_s
    n, count = time_s.size, here.size
    per_ms = 1 / time_s[:, None]
    gradient = np.hstack([model.crossed, np.ones((n, 1))])
    effect = gradient.mean(axis=0)
    residual = np.hstack([gradient * per_ms, -gradient * per_ms, np.eye(n), -np.eye(n)])
    target = (time_s - model.makespan_s - here[-1]) / time_s * 1e3
    mean = np.concatenate([np.zeros(2 * count), np.full(2 * n, 1 / n)])
    reluctance = _RELUCTANCE * np.maximum(effect, _WORTH) / float(effect.sum())
    cost = np.concatenate([reluctance, reluctance, np.zeros(2 * n)])
    cost[j], cost[count + j] = sign, -sign
    solution = minimise(
        cost=cost,
        rows=np.vstack([residual, mean]),
        row_low=np.append(target, 0.0),
        row_high=np.append(target, model.allowed * 1e3),
        low=np.zeros(cost.size),
        high=np.concatenate([np.full(count, float(np.median(time_s)) * 1e3), here * 1e3, np.full(2 * n, np.inf)]),
    )
    furthest: Floats = here + (solution[:count] - solution[count : 2 * count]) / 1e3
    return furthest


def _as_far_as(allows: Callable[[Floats], bool], here: Floats, there: Floats) -> Floats:
    """The furthest allowed point on the way, which starts allowed: back by quarters, then forth by bisection."""
    if allows(there):
        return there
    low, high = 0.25, 1.0
    while not allows(here + low * (there - here)):
        low, high = low / 4, low
        if low < _SHORTEST:
            return here
    for _ in range(_HALVINGS):
        step = (low + high) / 2
        low, high = (step, high) if allows(here + step * (there - here)) else (low, step)
    moved: Floats = here + low * (there - here)
    return moved
