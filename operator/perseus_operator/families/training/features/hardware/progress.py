"""How far the hardware of a job is known, and what its plans are rehearsed under.

Fields are read everywhere and changed only here, by one named method for each event: iterations are observed, a stored
latency is read with the profile, a description is adopted or restored, the training starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from perseus_operator.families.training.features.hardware.hardware import Described, JobHardware, scatter
from perseus_operator.nodes.gpu import StoredLatency
from perseus_operator.nodes.iterations import JobIteration

_SCATTERS: Final = 32
"""Estimates of scatter that are made; their median counts."""


@dataclass
class HardwareProgress:
    """What is measured, and what is in use."""

    in_use: JobHardware | None = None
    """What plans are rehearsed under; None: the GPUs are not known yet."""
    described: Described = field(default_factory=Described)
    """What the GPUs say of themselves."""
    stored: StoredLatency | None = None
    """Measured by an earlier job, and read with the profile."""
    scatters: list[float] = field(default_factory=list)
    """Estimates of how much durations scatter, relative."""
    pipeline: tuple[int, tuple[Sequence[int], ...]] | None = None
    """Number and durations of the last iteration of one pipeline, kept to compare the next with."""

    def iteration_observed(self, iteration: JobIteration) -> None:
        """A typical iteration was complete. Two in a row at default clocks say how much durations scatter.

        Under a plan they scatter with its clock changes, too: then plans would change with what they cause themselves.
        """
        before, self.pipeline = self.pipeline, None
        planned = any(point is not None for point in iteration.points.values())
        if planned or not iteration.stages_us or len(self.scatters) >= _SCATTERS:
            return
        number, stages_us = iteration.iteration, iteration.stages_us[min(iteration.stages_us)]
        noise = scatter(before[1], stages_us) if before is not None and before[0] == number - 1 else None
        if noise is not None:
            self.scatters.append(noise)
        self.pipeline = number, stages_us

    def latency_read(self, stored: StoredLatency | None) -> None:
        """The profile was read, with this latency; None: none is stored with it."""
        self.stored = stored

    def adopted(self, hardware: JobHardware | None) -> None:
        """Rehearse plans under this description from now on."""
        self.in_use = hardware

    def restarted(self) -> None:
        """The training starts again: its iterations cannot be compared with those before."""
        self.pipeline = None
        self.scatters.clear()

    @property
    def noise(self) -> float | None:
        """Relative standard deviation of an instruction's duration; None: not known yet."""
        if self.scatters:
            return median(self.scatters)
        return self.in_use.noise if self.in_use is not None else None
