"""Whether another schedule explains a measured run better than the one that was named.

A trace holds durations, not their order. With enough gaps and delays, a model of the wrong schedule predicts a run
nearly as well as the right one: the public BERT run, which is 1F1B, as GPipe within 0.19 % instead of 0.16 %. So what
is named is compared with all schedules of the same instructions, on plans that none of them was fitted to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.calibration.estimate import calibrate
from perseus_solver.calibration.model import Calibration
from perseus_solver.calibration.trace import Trace
from perseus_solver.errors import InvalidSchedule
from perseus_solver.kinds import Index
from perseus_solver.schedules import SCHEDULES, Schedule, build_schedule

_BETTER, _LEAST_PERCENT = 0.9, 0.02
"""Another schedule explains a run better if its mean error is smaller by this factor and this many percent of the
iteration. Two schedules of one makespan, such as GPipe and 1F1B of equal stages, differ by less.
"""


def calibrate_against_rivals(trace: Trace, *, train_fraction: float) -> Calibration:
    """Calibrate a run whose schedule was named by a person, and compare it with other schedules.

    Args:
        trace: measured iterations.
        train_fraction: share of the plans to fit.

    Returns:
        The calibration; without parameters if it does not explain the run, or if another schedule does so better.

    Raises:
        InvalidTrace: too few plans or iterations.
    """
    named = calibrate(trace, train_fraction=train_fraction)
    if not named.explains:
        return named
    for schedule, columns in _rivals(trace.schedule):
        rival = calibrate(
            replace(trace, schedule=schedule, duration_s=trace.duration_s[:, columns]), train_fraction=train_fraction
        )
        error, other = (c.quality.heldout_mape_percent or 0.0 for c in (named, rival))
        if other < _BETTER * error and error - other > _LEAST_PERCENT:
            reason = (
                f"{schedule.name} explains it better than {trace.schedule.name}: its mean error on plans that were not "
                f"fitted is {other:.3f} % instead of {error:.3f} %"
            )
            return replace(named, parameters=None, reason=reason)
    return named


def _rivals(schedule: Schedule) -> Iterator[tuple[Schedule, Index]]:
    """Yield the other schedules of the same instructions, and where each of theirs is in this one."""
    constants = np.unique(schedule.stage[schedule.kind == InstructionKind.CONSTANT]).tolist()
    instructions, order = _sorted(schedule)
    for name in SCHEDULES:
        if name == schedule.name:
            continue
        try:
            other = build_schedule(
                name,
                stages=schedule.stages,
                microbatches=schedule.microbatches,
                chunks=schedule.chunks if schedule.chunks > 1 else None,
                constants=constants,
            )
        except InvalidSchedule:
            continue
        theirs, their_order = _sorted(other)
        if np.array_equal(instructions, theirs):
            place = np.empty(len(order), dtype=np.intp)
            place[their_order] = order
            yield other, place


def _sorted(schedule: Schedule) -> tuple[np.ndarray, Index]:
    """Return stage, kind, microbatch and chunk of all instructions, int[4, n], sorted, and the sorting order."""
    keys = np.stack([schedule.stage, schedule.kind, schedule.microbatch, schedule.chunk])
    order = np.lexsort(keys)
    return keys[:, order], order
