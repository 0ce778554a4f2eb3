"""From measured iterations to a calibration: choose the plans to fit, fit them, and measure the error on the others."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from perseus_solver.calibration import fit
from perseus_solver.calibration.confidence import profile_intervals
from perseus_solver.calibration.model import Calibration, Delay, Estimate, Parameters, Quality
from perseus_solver.calibration.noise import instruction_noise, median_durations_s, stage_noise
from perseus_solver.calibration.replay import Replay
from perseus_solver.calibration.trace import Trace
from perseus_solver.errors import InvalidTrace
from perseus_solver.kinds import Floats

LIMIT_PERCENT = 1.0
"""Nine of ten iterations must be predicted within this percentage for the model to explain a run. A replay without
delays is off by 1.3 to 6.8 % on published runs, so a model with a larger error has not found the delays.
"""
_NINE_OF_TEN = 0.9
MIN_PLANS = 2
"""Fewer fitted plans say nothing about other plans."""
MIN_ITERATIONS = 6
"""With fewer fitted iterations, two parameters and an outlier already fit anything."""
_MISSED = 0.005
"""Share of undisturbed iterations that may exceed the allowance."""
_UPPER = 1.645
"""One-sided 95 % quantile of a normal distribution; the mean of n exponentials has the standard error mean / √n."""
_DISTURBED = 10.0
"""An iteration whose excess is more than this many median excesses was disturbed (checkpoint, evaluation) and does not
count for the allowance.
"""


def calibrate(
    trace: Trace,
    *,
    train_fraction: float | None = 0.33,
    limit_percent: float = LIMIT_PERCENT,
    planned_s: Floats | None = None,
) -> Calibration:
    """Fit delays and overhead on some of the plans, and measure the error of the predictions on the others.

    Args:
        trace: measured iterations. Where one plan ran throughout, give every few iterations a plan number of their own.
        train_fraction: share of the plans to fit, evenly spread over the order in which they ran, rounded down to whole
            plans; more, up to half, where those ran too few iterations. None: fit all, where no error on other plans is
            needed; the error is then that of the fitted iterations.
        limit_percent: the error, in percent of the measured time, within which nine of ten iterations must be
            predicted.
        planned_s: float[iterations, instructions], seconds that plan and profile give each instruction, for the
            allowance. None: not known, so the median under the same plan is used, which makes the allowance too small
            where a plan ran only a few iterations.

    Returns:
        The calibration. If the model does not explain the run, it has no parameters.

    Raises:
        InvalidTrace: too few plans or iterations, or ``planned_s`` does not fit the trace.
    """
    fitted = chosen_iterations(trace, train_fraction)
    replay = Replay(trace.schedule)
    train = trace.select(fitted)
    delays = fit.Fit(replay, train.duration_s, train.iteration_time_s).best()
    verdict = _judged(
        trace,
        replay,
        delays,
        fitted=fitted,
        heldout=None if train_fraction is None else ~fitted,
        limit_percent=limit_percent,
        planned_s=planned_s,
    )
    if not verdict.explains:
        return verdict.calibration
    return replace(
        verdict.calibration, parameters=_with_intervals(replay, train, delays, verdict.calibration.quality.plans_fitted)
    )


def verified(
    claimed: Calibration,
    trace: Trace,
    *,
    train_fraction: float = 0.33,
    limit_percent: float = LIMIT_PERCENT,
    planned_s: Floats | None = None,
) -> Calibration:
    """Judge delays that somebody else claims to have fitted as `calibrate` judges its own: only the fit, which takes
    nearly all of the time, is not made again.

    Args:
        claimed: its delays and their intervals are used, and nothing else of it.
        trace, train_fraction, limit_percent, planned_s: as in `calibrate`.

    Returns:
        What the trace says of these delays. If they do not explain the run, or are none, it has no parameters.

    Raises:
        InvalidCalibration: it is of another pipeline.
        InvalidTrace: as `calibrate`.
    """
    fitted, replay = chosen_iterations(trace, train_fraction), Replay(trace.schedule)
    parameters = claimed.parameters
    delays = _delays_of(claimed, replay) if parameters else fit.FittedDelays(np.zeros(replay.parameters), 0.0)
    verdict = _judged(
        trace, replay, delays, fitted=fitted, heldout=~fitted, limit_percent=limit_percent, planned_s=planned_s
    )
    if parameters is None or not verdict.explains:
        return verdict.calibration
    neighbours = {*replay.pairs, *((stage, stage) for stage in range(replay.schedule.stages))}
    kept = replace(
        parameters,
        edges=tuple(delay for delay in parameters.edges if (delay.from_stage, delay.to_stage) in neighbours),
        gaps=tuple(delay for delay in parameters.gaps if (delay.from_stage, delay.to_stage) in neighbours),
    )
    return replace(verdict.calibration, parameters=kept)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Everything about some delays but the delays, and whether they explain the run."""

    calibration: Calibration
    explains: bool


def _judged(
    trace: Trace,
    replay: Replay,
    delays: fit.FittedDelays,
    *,
    fitted: npt.NDArray[np.bool_],
    heldout: npt.NDArray[np.bool_] | None,
    limit_percent: float,
    planned_s: Floats | None,
) -> _Verdict:
    if planned_s is None:
        planned_s = median_durations_s(trace)
    elif planned_s.shape != trace.duration_s.shape or not (np.isfinite(planned_s) & (planned_s > 0)).all():
        raise InvalidTrace(f"planned_s must be positive and of shape {list(trace.duration_s.shape)}")
    judged = np.ones_like(fitted) if heldout is None else heldout
    error = _percent(delays.predict_s(replay, trace.duration_s), trace.iteration_time_s)
    bare = _percent(replay.time_s(trace.duration_s, np.zeros(replay.parameters)), trace.iteration_time_s)
    others = None if heldout is None else error[heldout]
    quality = Quality(
        plans_fitted=int(np.unique(trace.plan[fitted]).size),
        plans_heldout=0 if heldout is None else int(np.unique(trace.plan[heldout]).size),
        iterations_fitted=int(fitted.sum()),
        iterations_heldout=0 if others is None else others.size,
        fitted_mape_percent=float(error[fitted].mean()),
        heldout_mape_percent=None if others is None else float(others.mean()),
        heldout_median_percent=None if others is None else float(np.median(others)),
        heldout_max_percent=None if others is None else float(others.max()),
        replay_mape_percent=float(bare[judged].mean()),
    )
    reach = float(np.quantile(error[judged], _NINE_OF_TEN))
    calibration = Calibration(
        schedule=trace.schedule.name,
        stages=trace.schedule.stages,
        microbatches=trace.schedule.microbatches,
        chunks=trace.schedule.chunks,
        reason=f"nine of ten iterations lie within {reach:.3g} % of the prediction; the limit is {limit_percent:g} %",
        parameters=None,
        quality=quality,
        noise=instruction_noise(trace),
        stage_noise=stage_noise(trace),
        allowance=_allowance(trace, delays.predict_s(replay, planned_s)),
    )
    return _Verdict(calibration, reach <= limit_percent)


def predict_s(calibration: Calibration, trace: Trace) -> Floats:
    """Predict iteration times from measured computations.

    Args:
        calibration: gives the delays and the overhead.
        trace: gives the computations; its iteration times are not used.

    Returns:
        float[iterations], seconds.

    Raises:
        InvalidCalibration: the calibration does not explain its run, or is of another pipeline.
    """
    replay = Replay(trace.schedule)
    return _delays_of(calibration, replay).predict_s(replay, trace.duration_s)


def replay_s(trace: Trace) -> Floats:
    """Predict iteration times from the graph of the schedule alone, without delays.

    Args:
        trace: gives the computations; its iteration times are not used.

    Returns:
        float[iterations], seconds.
    """
    replay = Replay(trace.schedule)
    return replay.time_s(trace.duration_s, np.zeros(replay.parameters))


def chosen_iterations(trace: Trace, train_fraction: float | None) -> npt.NDArray[np.bool_]:
    """Return which iterations `calibrate` fits: those of evenly spread plans.

    Args:
        trace: measured iterations.
        train_fraction: share of the plans to fit; None: all. See `calibrate`.

    Returns:
        bool[iterations].

    Raises:
        InvalidTrace: the fraction is out of range, or too few plans or iterations remain.
    """
    plans = np.unique(trace.plan)
    if train_fraction is None:
        count = plans.size
    else:
        if not 0 < train_fraction < 1:
            raise InvalidTrace(f"train_fraction must be more than 0 and less than 1, not {train_fraction:g}")
        count = math.floor(plans.size * train_fraction + 1e-9)
        if plans.size - count < 1 or count < MIN_PLANS:
            raise InvalidTrace(
                f"too few plans: {plans.size}, of which a share of {train_fraction:g} is {count}; "
                f"at least {MIN_PLANS} must be fitted and one held out"
            )
    fitted = _of_spread_plans(trace, plans, count)
    # Where plans were replaced soon, an unlucky third of them ran a few iterations only.
    while fitted.sum() < MIN_ITERATIONS and count + 1 <= plans.size // 2:
        count += 1
        fitted = _of_spread_plans(trace, plans, count)
    if fitted.sum() < MIN_ITERATIONS:
        raise InvalidTrace(f"too few iterations: {int(fitted.sum())} to fit, at least {MIN_ITERATIONS} are needed")
    return fitted


def _of_spread_plans(trace: Trace, plans: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.bool_]:
    """Return which iterations ran one of ``count`` evenly spread plans."""
    return np.isin(trace.plan, plans[[int((k + 0.5) * plans.size / count) for k in range(count)]])


def _delays_of(calibration: Calibration, replay: Replay) -> fit.FittedDelays:
    delay_s, gap_s, overhead_s = calibration.delays_for(replay.schedule)
    return fit.FittedDelays(np.array([*(delay_s[a, b] for a, b in replay.pairs), *gap_s]), overhead_s)


def _percent(predicted_s: Floats, measured_s: Floats) -> Floats:
    error: Floats = 100 * np.abs(predicted_s / measured_s - 1)
    return error


def _with_intervals(replay: Replay, train: Trace, best: fit.FittedDelays, plans: int) -> Parameters:
    low, high = profile_intervals(replay, train, best, plans)
    low = np.maximum(low, 0.0)  # a delay is never negative; the search ends within rounding of zero
    _, crossings = replay.crossings(train.duration_s, best.delay_s)
    crossed = crossings.max(axis=0) > 0
    ends = (*replay.pairs, *((stage, stage) for stage in range(replay.schedule.stages)))
    delays = tuple(
        Delay(a, b, Estimate(float(best.delay_s[j]), float(low[j]), float(high[j])), bool(crossed[j]))
        for j, (a, b) in enumerate(ends)
    )
    links = len(replay.pairs)
    overhead = Estimate(best.overhead_s, float(low[-1]), float(high[-1]))
    return Parameters(overhead, edges=delays[:links], gaps=delays[links:])


def _allowance(trace: Trace, planned_s: Floats) -> float:
    """Return the share by which nearly all iterations stay within the time predicted from planned durations.

    Planned durations do not show that the slowest of many noisy paths determines the iteration, so the allowance is
    measured, not derived. All iterations count, because nothing is fitted here. There are rarely enough iterations to
    observe one in two hundred. Therefore the tail above the median is taken to be exponential, which is heavier than
    normal, with a mean at the upper end of its interval.
    """
    ratio = trace.iteration_time_s / planned_s
    middle = float(np.median(ratio))
    excess = ratio[ratio > middle] - middle
    if excess.size:
        excess = excess[excess <= _DISTURBED * np.median(excess)]
    if not excess.size:
        return max(0.0, middle - 1)
    tail = float(excess.mean()) * (1 + _UPPER / math.sqrt(excess.size)) * math.log(0.5 / _MISSED)
    return max(0.0, middle - 1 + tail)
