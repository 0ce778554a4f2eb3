"""Telemetry of a running job, kept as far as it takes to calibrate. Fed by the operator; pure, bounded, no clock.

Each addition is one iteration of the whole job, with the durations of its slowest pipeline, since that is the one whose
computations the iteration waited for. What to do with the trace is not decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perseus_solver.calibration.trace import Trace
from perseus_solver.errors import InvalidTrace
from perseus_solver.kinds import Floats
from perseus_solver.schedules import Schedule

MOST_ITERATIONS = 120
"""Kept; the oldest give way. A fit takes longer than linearly in them, and the latest describe the job best."""
BLOCK = 4
"""Consecutive iterations of one plan that are held out together; longer stretches are cut into blocks of this many, so
that a job that runs one plan throughout can be judged too. Neighbours in time err together."""


@dataclass(frozen=True, slots=True, eq=False)
class _Iteration:
    plan: int
    iteration_time_s: float
    duration_s: Floats


class Recorder:
    """The latest iterations of one job under one schedule."""

    def __init__(self, schedule: Schedule, most: int = MOST_ITERATIONS) -> None:
        self.schedule = schedule
        self._kept: deque[_Iteration] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, *, plan: int, iteration_time_s: float, stages: Sequence[Sequence[float]]) -> None:
        """Take in one iteration.

        Args:
            plan: what was in force on the slowest pipeline, such as the index of the frontier's point; any number.
            iteration_time_s: of the job, from its begin to the begin of the next.
            stages: for each stage of the slowest pipeline the durations in schedule order, seconds; of tensor-parallel
                ranks the longest of each instruction.

        Raises:
            InvalidTrace: not the durations of this schedule; nothing is taken in.
        """
        wanted = np.diff(self.schedule.stage_offset).tolist()
        if [len(own) for own in stages] != wanted:
            raise InvalidTrace(
                f"stages must have {wanted} durations, as schedule {self.schedule.name} has instructions, "
                f"not {[len(own) for own in stages]}"
            )
        duration_s = np.concatenate([np.asarray(own, dtype=np.float64) for own in stages])
        Trace(self.schedule, np.zeros(1, dtype=np.int32), duration_s[None], np.array([iteration_time_s]))
        self._kept.append(_Iteration(plan, iteration_time_s, duration_s))

    def trace(self) -> Trace:
        """Everything kept, in blocks of consecutive iterations of one plan; see `BLOCK`.

        Raises:
            InvalidTrace: nothing was added yet.
        """
        if not self._kept:
            raise InvalidTrace("no iteration was recorded yet")
        block, length, before = -1, 0, None
        blocks = []
        for one in self._kept:
            if one.plan != before or length == BLOCK:
                block, length, before = block + 1, 0, one.plan
            blocks.append(block)
            length += 1
        return Trace(
            self.schedule,
            np.array(blocks, dtype=np.int32),
            np.stack([one.duration_s for one in self._kept]),
            np.array([one.iteration_time_s for one in self._kept]),
        )
