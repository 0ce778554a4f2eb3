"""How much measured durations scatter while nothing is wrong. Called by `calibrate` and the straggler benchmark.

Spreads are robust (median absolute deviation) and relative, in per cent, taken within each plan, because clocks
differ between plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_solver.calibration.trace import Trace
from perseus_solver.problem import Floats, Kind
from perseus_solver.stragglers import stage_pace

_NORMAL_FROM_MAD = 1.4826  # standard deviation of a normal law over its median absolute deviation
_CONFIDENCE = 0.95
_RESAMPLES = 400
_TAIL = 99.0
_NORMAL_AT_TAIL = 2.5758  # two-sided 99 % of a normal law


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative spread of one instruction of one stage, standard deviations in per cent; low … high are 95 %.

    ``instruction``: from one microbatch to the next. ``iteration``: of the iteration's median, from one iteration to
    the next; None where every plan ran for one iteration only.
    """

    stage: int
    kind: Kind
    instruction_percent: float
    instruction_low_percent: float
    instruction_high_percent: float
    iteration_percent: float | None
    iteration_low_percent: float | None
    iteration_high_percent: float | None


def instruction_noise(trace: Trace) -> tuple[Noise, ...]:
    """Noise of every instruction of every stage."""
    schedule = trace.schedule
    found = []
    for stage in range(schedule.stages):
        own = schedule.stage == stage
        for kind in np.unique(schedule.kind[own]).tolist():
            durations = trace.duration_s[:, own & (schedule.kind == kind)]
            typical = np.median(durations, axis=1)
            within = 100 * np.median(np.abs(durations / typical[:, None] - 1), axis=1) * _NORMAL_FROM_MAD
            between = 100 * _NORMAL_FROM_MAD * np.abs(_relative_to_plan(typical, trace.plan))
            repeated = _count_of(trace.plan) > 1
            spread = _median_band(within, trace.plan)
            again = _median_band(between[repeated], trace.plan[repeated]) if repeated.any() else (None, None, None)
            found.append(Noise(stage, Kind(kind), *spread, *again))
    return tuple(found)


def stage_noise(trace: Trace) -> tuple[float, ...] | None:
    """Standard deviation of each stage's pace from one iteration to the next, as a share; what `stragglers` asks for.

    None if every plan ran for one iteration only. The tails are heavier than normal, so the spread is the larger of
    what the middle and what the 99th percentile say.
    """
    repeated = _count_of(trace.plan) > 1
    if not repeated.any():
        return None
    pace = stage_pace(trace.duration_s, usual_durations_s(trace), trace.schedule.stage_offset)
    apart = np.abs(np.stack([_relative_to_plan(column, trace.plan) for column in pace.T], axis=1))[repeated]
    middle = _NORMAL_FROM_MAD * np.median(apart, axis=0)
    tail = np.percentile(apart, _TAIL, axis=0) / _NORMAL_AT_TAIL
    return tuple(np.maximum(middle, tail).tolist())


def usual_durations_s(trace: Trace) -> Floats:
    """[iterations, instructions]: median under the plan of each (stage, chunk, kind), as a profile would have it."""
    schedule = trace.schedule
    key = (schedule.stage * schedule.chunks + schedule.chunk) * (max(Kind) + 1) + schedule.kind
    usual = np.empty_like(trace.duration_s)
    for plan in np.unique(trace.plan):
        mine = trace.plan == plan
        for code in np.unique(key):
            usual[np.ix_(mine, key == code)] = np.median(trace.duration_s[np.ix_(mine, key == code)])
    return usual


def _relative_to_plan(values: Floats, plan: npt.NDArray[np.integer]) -> Floats:
    """Deviation of each value from its plan's median; √(n / (n − 1)) undoes the shrinking that this brings."""
    out = np.zeros_like(values)
    for one in np.unique(plan):
        mine = plan == one
        n = int(mine.sum())
        out[mine] = (values[mine] / np.median(values[mine]) - 1) * np.sqrt(n / max(n - 1, 1))
    return out


def _count_of(plan: npt.NDArray[np.integer]) -> npt.NDArray[np.intp]:
    _, which, counts = np.unique(plan, return_inverse=True, return_counts=True)
    count: npt.NDArray[np.intp] = counts[which]
    return count


def _median_band(values: Floats, plan: npt.NDArray[np.integer]) -> tuple[float, float, float]:
    """Median, and its 95 % band by drawing plans again and again; the seed is fixed so that results can be compared."""
    medians = np.array([np.median(values[plan == one]) for one in np.unique(plan)])
    draws = np.random.default_rng(0).integers(0, medians.size, size=(_RESAMPLES, medians.size))
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(np.median(medians[draws], axis=1), [tail, 100 - tail])
    return float(np.median(medians)), float(low), float(high)
