"""Collect telemetry of a running job for calibration: bounded, with no clock and no I/O.

Each addition is one iteration of the whole job, with the durations of its slowest pipeline, because the iteration
waited for the computations of that one.
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
"""Iterations stored; the oldest are dropped. The time of a fit grows more than linearly with them, and the latest
describe the job best.
"""
BLOCK = 4
"""Consecutive iterations of one plan that are held out together, because neighbours in time have a common error. A
longer stretch is cut into blocks of this many, so that a run of one plan can be calibrated too.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Iteration:
    plan: int
    iteration_time_s: float
    duration_s: Floats


class Recorder:
    """The latest iterations of one job under one schedule.

    Attributes:
        schedule: what every iteration runs.
    """

    def __init__(self, schedule: Schedule, most: int = MOST_ITERATIONS) -> None:
        """Create an empty recorder that stores at most ``most`` iterations."""
        self.schedule = schedule
        self._iterations: deque[_Iteration] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._iterations)

    def add(self, *, plan: int, iteration_time_s: float, stages: Sequence[Sequence[float] | Floats]) -> None:
        """Add one iteration.

        Args:
            plan: number of the plan on the slowest pipeline, such as the index of the frontier's point.
            iteration_time_s: seconds from the start of the job's iteration to the start of the next.
            stages: for each stage of the slowest pipeline its durations in schedule order, seconds; of tensor-parallel
                ranks the longest of each instruction.

        Raises:
            InvalidTrace: these are not the durations of the schedule; nothing is added.
        """
        wanted = np.diff(self.schedule.stage_offset).tolist()
        if [len(durations) for durations in stages] != wanted:
            raise InvalidTrace(
                f"stages must have {wanted} durations, one for each instruction of schedule {self.schedule.name}, "
                f"not {[len(durations) for durations in stages]}"
            )
        duration_s = np.concatenate([np.asarray(durations, dtype=np.float64) for durations in stages])
        Trace(self.schedule, np.zeros(1, dtype=np.int32), duration_s[None], np.array([iteration_time_s]))
        self._iterations.append(_Iteration(plan, iteration_time_s, duration_s))

    def trace(self) -> Trace:
        """Return all stored iterations, in blocks of consecutive iterations of one plan; see `BLOCK`.

        Raises:
            InvalidTrace: nothing was added yet.
        """
        if not self._iterations:
            raise InvalidTrace("no iteration was recorded yet")
        block, length, before = -1, 0, None
        blocks = []
        for one in self._iterations:
            if one.plan != before or length == BLOCK:
                block, length, before = block + 1, 0, one.plan
            blocks.append(block)
            length += 1
        return Trace(
            self.schedule,
            np.array(blocks, dtype=np.int32),
            np.stack([one.duration_s for one in self._iterations]),
            np.array([one.iteration_time_s for one in self._iterations]),
        )
