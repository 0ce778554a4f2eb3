"""Replay the straggler detector on a recorded run: false alarms, and slow stages found.

The run is replayed as the telemetry of one pipeline beside another that runs the same plans: the iteration that follows
under the same plan. The planned times are taken from the first iteration of each plan alone, as an online profile
would. Then one stage of the first pipeline is made slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.calibration.trace import Trace
from perseus_solver.errors import InvalidTrace
from perseus_solver.kinds import Floats
from perseus_solver.stragglers import Detector, PaceNoise, Straggler, Thresholds, stage_pace

SLOW, HEALTHY = 0, 1
"""Indices of the two pipelines."""
_WARM = 3
"""Healthy iterations before the onset: enough to bring every counter of the detector to its idle state."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Onsets of a slowdown of one factor, over all stages and iterations at which it could begin.

    Attributes:
        onsets: how many were tried.
        found: how many were found within ``confirm`` iterations, with pipeline and stage and nothing else.
        slowdown_error: largest relative error of the slowdown among those found; 0 if none was.
    """

    onsets: int
    found: int
    slowdown_error: float


class DetectorReplay:
    """One recorded run, ready to be replayed.

    Raises:
        InvalidTrace: no plan ran for two iterations, so there is no second pipeline.
    """

    def __init__(self, trace: Trace, thresholds: Thresholds, *, learns: bool = False) -> None:
        """``learns``: the detector measures how much paces scatter, instead of thresholds above all noise."""
        self._thresholds = thresholds
        self._learns = learns
        own, neighbour = [], []
        for plan in np.unique(trace.plan):
            rows = np.flatnonzero(trace.plan == plan)
            if rows.size > 1:
                own.append(rows)
                neighbour.append(np.roll(rows, -1))
        if not own:
            raise InvalidTrace("no plan ran for two iterations, so there is no second pipeline")
        planned_s = _first_of_plan_s(trace)
        pace = stage_pace(trace.duration_s, planned_s, trace.schedule.stage_offset)
        self._own, self._neighbour = pace[np.concatenate(own)], pace[np.concatenate(neighbour)]

    @property
    def iterations(self) -> int:
        """Number of iterations replayed; those of plans that ran only once are not."""
        return len(self._own)

    def false_alarms(self) -> int:
        """Return the number of iterations of the unmodified run after which some stage counts as slow."""
        detector = self._detector()
        return sum(bool(self._step(detector, k, self._own[k])) for k in range(len(self._own)))

    def slow_down(self, factor: float) -> Outcome:
        """Slow down every stage in turn, from every iteration on."""
        last = len(self._own) - self._thresholds.confirm
        onsets, found, worst = 0, 0, 0.0
        for stage in range(self._own.shape[1]):
            for onset in range(_WARM, last + 1):
                seen = self._after_onset(stage, onset, factor)
                onsets += 1
                if [(one.dp, one.stage) for one in seen] == [(SLOW, stage)]:
                    found += 1
                    worst = max(worst, abs(seen[0].slowdown / factor - 1))
        return Outcome(onsets, found, worst)

    def _after_onset(self, stage: int, onset: int, factor: float) -> tuple[Straggler, ...]:
        detector = self._detector()
        seen: tuple[Straggler, ...] = ()
        for k in range(onset - _WARM, onset + self._thresholds.confirm):
            pace = self._own[k].copy()
            if k >= onset:
                pace[stage] *= factor
            seen = self._step(detector, k, pace)
        return seen

    def _detector(self) -> Detector:
        return Detector(self._thresholds, PaceNoise() if self._learns else None)

    def _step(self, detector: Detector, k: int, own: Floats) -> tuple[Straggler, ...]:
        detector.observe({SLOW: own, HEALTHY: self._neighbour[k]})
        return detector.stragglers


def _first_of_plan_s(trace: Trace) -> Floats:
    """Return the durations in the first iteration of the plan in force, float[iterations, instructions]."""
    _, first, which = np.unique(trace.plan, return_index=True, return_inverse=True)
    planned: Floats = trace.duration_s[first[which]]
    return planned
