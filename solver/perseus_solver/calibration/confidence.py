"""Intervals: how far each delay can move before the model explains the iterations noticeably worse.

The intervals are those of the profile likelihood. With Laplace errors the likelihood ratio of two fits is (mean error /
best mean error)^n, and twice its logarithm follows χ² with one degree of freedom. n counts plans, because the
iterations of one plan have a common error. Each end of an interval moves one parameter as far as possible while all
others follow. Hence a parameter of which only a sum with others is determined gets a wide interval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perseus_solver.calibration.fit import FittedDelays
from perseus_solver.calibration.linear_program import SCALE, minimise
from perseus_solver.calibration.replay import Replay
from perseus_solver.calibration.trace import Trace
from perseus_solver.kinds import Floats

_CHI2_95 = 3.841
"""95th percentile of χ² with one degree of freedom."""
_ROUNDS = 3
"""Linearisations at most for each end of an interval."""
_LEAST_GAIN = 0.01
"""A round that gains less than this share of the gain predicted is the last."""
_HALVINGS = 3
"""Bisection steps on the way to the furthest allowed point."""
_SHORTEST = 1e-4
"""Share of a step below which the search for an allowed point ends."""
_MOVE_PENALTY = 0.25
"""Cost of moving all other parameters as far as the one of interest. It is less than what is gained, so that they
follow where they must and stay where they need not move.
"""
_NO_ERROR = 1e-6
"""Relative error below which clocks with a resolution of microseconds cannot measure an iteration of a second."""


def profile_intervals(replay: Replay, trace: Trace, best: FittedDelays, units: int) -> tuple[Floats, Floats]:
    """Return the 95 % interval of each delay and, last, of the overhead.

    Args:
        replay: the graph of the schedule.
        trace: the fitted iterations.
        best: the estimate.
        units: number of independent groups of iterations (plans).

    Returns:
        ``(low, high)``, float[delays + 1] each, seconds.
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
                gained = abs(float(moved[j] - here[j])) > _LEAST_GAIN * abs(float(there[j] - at[j]))
                here = moved
                if not gained or moved is there:
                    break
                bare_s, counts = replay.crossings(duration_s, here[:-1])
            end[j] = here[j]
    # Where every path has equally many steps, as in 1F1B, all delays may grow at the expense of the overhead without
    # any effect. The steps above are too short to find that.
    steps = crossed.sum(axis=1)
    if steps.size and steps.min() == steps.max() > 0:
        traded = _as_far_as(allows, at, np.append(best.delay_s + best.overhead_s / steps[0], 0.0))
        low, high = np.minimum(low, traded), np.maximum(high, traded)
    return np.minimum(low, at), np.maximum(high, at)


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """The model linearised at one point.

    Attributes:
        here: float[delays + 1], parameters in seconds, the overhead last.
        makespan_s: float[iterations], the makespans there.
        crossed: float[iterations, delays], how often critical paths cross each delay.
        time_s: float[iterations], measured.
        allowed: largest mean relative error allowed.
    """

    here: Floats
    makespan_s: Floats
    crossed: Floats
    time_s: Floats
    allowed: float


def _furthest(model: _Linear, j: int, sign: float) -> Floats:
    """Return the point at which parameter j is least (sign 1) or largest (−1) with the mean error allowed.

    The columns of the linear programme are each parameter's increase, its decrease, and the residuals. The other
    parameters move only as far as that helps, measured by their effect on the iteration. No parameter may exceed the
    iteration itself, which bounds those that no path crosses.
    """
    here, time_s = model.here, model.time_s
    n, count = time_s.size, here.size
    per_ms = 1 / time_s[:, None]
    gradient = np.hstack([model.crossed, np.ones((n, 1))])
    effect = gradient.mean(axis=0)
    residual = np.hstack([gradient * per_ms, -gradient * per_ms, np.eye(n), -np.eye(n)])
    target = (time_s - model.makespan_s - here[-1]) / time_s * SCALE
    mean = np.concatenate([np.zeros(2 * count), np.full(2 * n, 1 / n)])
    penalty = _MOVE_PENALTY * np.maximum(effect, _LEAST_GAIN) / float(effect.sum())
    cost = np.concatenate([penalty, penalty, np.zeros(2 * n)])
    cost[j], cost[count + j] = sign, -sign
    solution = minimise(
        cost=cost,
        rows=np.vstack([residual, mean]),
        row_low=np.append(target, 0.0),
        row_high=np.append(target, model.allowed * SCALE),
        low=np.zeros(cost.size),
        high=np.concatenate([np.full(count, float(np.median(time_s)) * SCALE), here * SCALE, np.full(2 * n, np.inf)]),
    )
    furthest: Floats = here + (solution[:count] - solution[count : 2 * count]) / SCALE
    return furthest


def _as_far_as(allows: Callable[[Floats], bool], here: Floats, there: Floats) -> Floats:
    """Return the furthest allowed point on the way to ``there``: back by quarters, then forward by bisection."""
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
