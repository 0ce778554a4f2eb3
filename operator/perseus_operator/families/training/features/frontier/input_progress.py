"""What has been read of a job's profile and schedule, and when they are to be read again.

Fields are read everywhere and changed only here, by one named method for each event: a read is requested, starts and
ends; a profile is accepted or forgotten; a schedule is accepted, rejected, outdated or forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perseus_operator.api.conditions import Explanation
from perseus_operator.api.job import JobSpec

_OF_PHASES: Final = frozenset("0123456789S,\n")


@dataclass
class InputProgress:
    """The inputs of a frontier that come from other objects or from the ranks. A ``*_fault`` is None without one."""

    profile_digest: str | None = None
    """Of the last profile that could be read."""
    profile_gpu: str = ""
    """Model of the GPUs on which it was measured; empty: not known."""
    measured_power_mw: int | None = None
    """Blocking power stored with the profile; the spec's takes precedence."""
    profile_fault: Explanation | None = None
    schedule_csv: str | None = None
    """A custom schedule; None: not known yet, or the schedule has a name."""
    of_phases: bool = False
    """Whether all that the custom schedule has are steps, each a phase of the iteration."""
    schedule_fault: Explanation | None = None
    read_at_s: float | None = None
    """When profile and schedule were last read (monotonic); None: read them now."""
    reading: bool = False

    def schedule_known(self, spec: JobSpec | None) -> bool:
        """Whether it is known what the pipelines of a job with this spec run."""
        return self.schedule_csv is not None or (spec is not None and spec.pipeline.is_named)

    def read_requested(self) -> None:
        """Read profile and schedule again, now."""
        self.read_at_s = None

    def read_started(self) -> None:
        """Profile and schedule are being read."""
        self.reading = True

    def read_ended(self, *, at_s: float | None, profile_fault: Explanation | None = None) -> None:
        """The read has an outcome.

        Args:
            at_s: when (monotonic); None: the spec was edited meanwhile, so what was read does not count.
            profile_fault: why there is no usable profile.
        """
        self.reading = False
        if at_s is not None:
            self.read_at_s, self.profile_fault = at_s, profile_fault

    def profile_accepted(self, digest: str, measured_power_mw: int | None, *, gpu_model: str) -> None:
        """A usable profile was read, and what is stored with it."""
        self.profile_digest, self.measured_power_mw, self.profile_gpu = digest, measured_power_mw, gpu_model

    def profile_forgotten(self) -> None:
        """The profile says nothing about what is to be planned now."""
        self.profile_digest = None
        self.read_requested()

    def schedule_accepted(self, schedule_csv: str) -> None:
        """It is known what the pipelines run."""
        self.schedule_csv, self.schedule_fault = schedule_csv, None
        self.of_phases = set(schedule_csv) <= _OF_PHASES

    def schedule_rejected(self, fault: Explanation) -> None:
        """There is no usable schedule; one accepted before stays."""
        self.schedule_fault = fault

    def schedule_outdated(self) -> None:
        """What the pipelines run is no longer known."""
        self.schedule_csv = None

    def schedule_forgotten(self) -> None:
        """What was wrong with the schedule says nothing about what is to be planned now, either."""
        self.schedule_outdated()
        self.schedule_fault = None
