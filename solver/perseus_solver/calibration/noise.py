"""How much measured durations scatter while nothing is wrong. Called by `calibrate`.

An instruction is compared with itself in other iterations of the same plan, because clocks differ from plan to plan
and, within one, from microbatch to microbatch. So only plans that ran at least twice tell anything. Spreads are
relative and robust (median absolute deviation).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_solver.calibration.trace import Trace
from perseus_solver.kinds import Floats, Kind
from perseus_solver.stragglers import stage_pace

_NORMAL_FROM_MAD = 1.4826  # standard deviation of a normal law over its median absolute deviation
_CONFIDENCE = 0.95
_RESAMPLES = 400
_TAIL = 99.0
_NORMAL_AT_TAIL = 2.5758  # two-sided 99 % of a normal law


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative spread of one instruction of one stage, standard deviations in per cent; low … high are 95 %.

    ``instruction``: of single instructions around their iteration. ``iteration``: of the iteration's median, from one
    iteration to the next.
    """

    stage: int
    kind: Kind
    instruction_percent: float
    instruction_low_percent: float
    instruction_high_percent: float
    iteration_percent: float
    iteration_low_percent: float
    iteration_high_percent: float


def instruction_noise(trace: Trace) -> tuple[Noise, ...]:
    """Noise of every instruction of every stage; empty if no plan ran twice."""
    trace, unshrunk = _repeated(trace)
    if not trace.plan.size:
        return ()
    schedule = trace.schedule
    ratio = trace.duration_s / median_durations_s(trace)
    found = []
    for stage in range(schedule.stages):
        own = schedule.stage == stage
        for kind in np.unique(schedule.kind[own]).tolist():
            mine = ratio[:, own & (schedule.kind == kind)]
            middle = np.median(mine, axis=1)
            within = np.median(np.abs(mine / middle[:, None] - 1), axis=1) * unshrunk
            between = np.abs(middle - 1) * unshrunk
            found.append(Noise(stage, Kind(kind), *_band(within, trace.plan), *_band(between, trace.plan)))
    return tuple(found)


def stage_noise(trace: Trace) -> tuple[float, ...] | None:
    """Standard deviation of each stage's pace from one iteration to the next, as a share; what `stragglers` asks for.

    None if no plan ran twice. The tails are heavier than normal, so the spread is the larger of what the middle and
    what the 99th percentile say.
    """
    trace, unshrunk = _repeated(trace)
    if not trace.plan.size:
        return None
    pace = stage_pace(trace.duration_s, median_durations_s(trace), trace.schedule.stage_offset)
    apart = np.abs(pace - 1) * unshrunk[:, None]
    middle = _NORMAL_FROM_MAD * np.median(apart, axis=0)
    tail = np.percentile(apart, _TAIL, axis=0) / _NORMAL_AT_TAIL
    return tuple(np.maximum(middle, tail).tolist())


def median_durations_s(trace: Trace) -> Floats:
    """[iterations, instructions]: the median of each instruction under the plan in force."""
    usual = np.empty_like(trace.duration_s)
    for plan in np.unique(trace.plan):
        mine = trace.plan == plan
        usual[mine] = np.median(trace.duration_s[mine], axis=0)
    return usual


def _repeated(trace: Trace) -> tuple[Trace, Floats]:
    """Iterations of plans that ran n ≥ 2 times, with √(n / (n − 1)): deviations from one's own median are that much
    smaller than from the truth.
    """
    _, which, counts = np.unique(trace.plan, return_inverse=True, return_counts=True)
    count = counts[which]
    chosen = count > 1
    return trace.select(chosen), np.sqrt(count[chosen] / (count[chosen] - 1))


def _band(deviation: Floats, plan: npt.NDArray[np.integer]) -> tuple[float, float, float]:
    """Spread in per cent from absolute deviations of iterations, and its 95 % band by drawing plans again and again.

    The seed is fixed, so that the same run has the same result.
    """
    spread = np.array([100 * _NORMAL_FROM_MAD * np.median(deviation[plan == one]) for one in np.unique(plan)])
    draws = np.random.default_rng(0).integers(0, spread.size, size=(_RESAMPLES, spread.size))
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(np.median(spread[draws], axis=1), [tail, 100 - tail])
    return float(np.median(spread)), float(low), float(high)
