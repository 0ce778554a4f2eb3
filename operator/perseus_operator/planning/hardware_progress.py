"""How far the hardware of a job is known, and what its plans are rehearsed under.

Fields are read everywhere and changed only here, by one named method for each event: iterations are observed, a stored
latency is read with the profile, a description is adopted or restored, the training starts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from perseus_operator.planning.gpu import StoredLatency
from perseus_operator.planning.hardware import Hardware, scatter
from perseus_operator.planning.iterations import JobIteration

_SCATTERS: Final = 32
"""Estimates of scatter that are kept; their median counts."""
_ENOUGH_SCATTERS: Final = 8
_EVERY: Final = 8
"""Iterations from one estimate to the next: each compares every instruction of a pipeline with the iteration before."""


@dataclass
class HardwareProgress:
    """What is measured, and what is in use."""

    in_use: Hardware | None = None
    """What plans are rehearsed under; None: the GPUs are not known yet."""
    stored: StoredLatency | None = None
    """Measured by an earlier job, and read with the profile."""
    scatters: deque[float] = field(default_factory=lambda: deque(maxlen=_SCATTERS))
    """Estimates of how much durations scatter, relative."""
    pipeline: tuple[int, int | None, tuple[Sequence[int], ...]] | None = None
    """Of the last iteration of one pipeline, kept to compare the next with: its number, point and durations."""

    def iteration_observed(self, iteration: JobIteration) -> None:
        """A typical iteration was complete. Every few of them, two in a row say how much durations scatter."""
        if not iteration.stages_us:
            return
        dp = min(iteration.stages_us)
        number, point, stages_us = iteration.iteration, iteration.points.get(dp), iteration.stages_us[dp]
        before, self.pipeline = self.pipeline, None
        if before is not None and before[:2] == (number - 1, point):
            found = scatter(before[2], stages_us)
            if found is not None:
                self.scatters.append(found)
        elif number % _EVERY == 0:
            self.pipeline = number, point, stages_us

    def latency_read(self, stored: StoredLatency | None) -> None:
        """The profile was read, with this latency; None: none is stored with it."""
        self.stored = stored

    def adopted(self, hardware: Hardware | None) -> None:
        """Rehearse plans under this description from now on."""
        self.in_use = hardware

    def restarted(self) -> None:
        """The training starts again: its iterations cannot be compared with those before."""
        self.pipeline = None
        self.scatters.clear()

    @property
    def noise(self) -> float | None:
        """Relative standard deviation of an instruction's duration; None: not measured yet."""
        return median(self.scatters) if len(self.scatters) >= _ENOUGH_SCATTERS else None
