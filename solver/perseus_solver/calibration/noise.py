"""Measure how much durations scatter while nothing is wrong.

An instruction is compared with itself in other iterations of the same plan, because clocks differ from plan to plan
and, within one, from microbatch to microbatch. So only plans that ran at least twice count. Spreads are relative and
robust (median absolute deviation).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_core.instruction import InstructionKind
from perseus_solver.calibration.trace import Trace
from perseus_solver.kinds import SIGMA_PER_MAD, Floats
from perseus_solver.stragglers import stage_pace

_CONFIDENCE = 0.95
_RESAMPLES = 400
_TAIL = 99.0
"""Percentile of the deviations at which the tail is measured."""
_NORMAL_AT_TAIL = 2.5758
"""The two-sided 99 % quantile of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Relative spread of one kind of instruction of one stage: standard deviations in percent, with 95 % intervals.

    Attributes:
        stage, kind: what was measured.
        instruction_percent: of single instructions around the median of their iteration; with its interval.
        iteration_percent: of the median of an iteration, from one iteration to the next; with its interval.
    """

    stage: int
    kind: InstructionKind
    instruction_percent: float
    instruction_low_percent: float
    instruction_high_percent: float
    iteration_percent: float
    iteration_low_percent: float
    iteration_high_percent: float


def instruction_noise(trace: Trace) -> tuple[Noise, ...]:
    """Return the noise of every kind of instruction of every stage.

    Args:
        trace: measured iterations.

    Returns:
        Empty if no plan ran twice.
    """
    trace, unshrunk = _repeated(trace)
    if not trace.plan.size:
        return ()
    schedule = trace.schedule
    ratio = trace.duration_s / median_durations_s(trace)
    noises = []
    for stage in range(schedule.stages):
        of_stage = schedule.stage == stage
        for kind in np.unique(schedule.kind[of_stage]).tolist():
            ratios = ratio[:, of_stage & (schedule.kind == kind)]
            middle = np.median(ratios, axis=1)
            within = np.median(np.abs(ratios / middle[:, None] - 1), axis=1) * unshrunk
            between = np.abs(middle - 1) * unshrunk
            noises.append(Noise(stage, InstructionKind(kind), *_band(within, trace.plan), *_band(between, trace.plan)))
    return tuple(noises)


def stage_noise(trace: Trace) -> tuple[float, ...] | None:
    """Return the standard deviation of each stage's pace from one iteration to the next.

    The tails are heavier than normal, so the spread is the larger of what the median and what the 99th percentile give.

    Args:
        trace: measured iterations.

    Returns:
        A share for each stage, for `Thresholds.from_noise`; None if no plan ran twice.
    """
    trace, unshrunk = _repeated(trace)
    if not trace.plan.size:
        return None
    pace = stage_pace(trace.duration_s, median_durations_s(trace), trace.schedule.stage_offset)
    apart = np.abs(pace - 1) * unshrunk[:, None]
    middle = SIGMA_PER_MAD * np.median(apart, axis=0)
    tail = np.percentile(apart, _TAIL, axis=0) / _NORMAL_AT_TAIL
    return tuple(np.maximum(middle, tail).tolist())


def median_durations_s(trace: Trace) -> Floats:
    """Return the median of each instruction under the plan of its iteration.

    Args:
        trace: measured iterations.

    Returns:
        float[iterations, instructions], seconds.
    """
    median = np.empty_like(trace.duration_s)
    for plan in np.unique(trace.plan):
        of_plan = trace.plan == plan
        median[of_plan] = np.median(trace.duration_s[of_plan], axis=0)
    return median


def _repeated(trace: Trace) -> tuple[Trace, Floats]:
    """Return the iterations of plans that ran n ≥ 2 times, and √(n / (n − 1)) for each.

    Deviations from a plan's own median are smaller than those from the true one by that factor.
    """
    _, which, counts = np.unique(trace.plan, return_inverse=True, return_counts=True)
    count = counts[which]
    chosen = count > 1
    return trace.select(chosen), np.sqrt(count[chosen] / (count[chosen] - 1))


def _band(deviation: Floats, plan: npt.NDArray[np.integer]) -> tuple[float, float, float]:
    """Return the spread in percent from absolute deviations of iterations, and its 95 % interval by resampling plans.

    The seed is fixed, so that the same run gives the same result.
    """
    spread = np.array([100 * SIGMA_PER_MAD * np.median(deviation[plan == one]) for one in np.unique(plan)])
    draws = np.random.default_rng(0).integers(0, spread.size, size=(_RESAMPLES, spread.size))
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(np.median(spread[draws], axis=1), [tail, 100 - tail])
    return float(np.median(spread)), float(low), float(high)
