"""How far the calibration of a job has got, and how good the latest one is.

Fields are read everywhere and changed only here, by one named method for each event: iterations are recorded, a
calibration starts, ends with a result or a failure, a stored one is restored, a new profile makes the record void, and
another program all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from perseus_operator.api.conditions import Explanation
from perseus_operator.solving.view import CalibrationQuality


@dataclass
class CalibrationProgress:
    """Iterations recorded, the calibration that runs, and the one in use."""

    recorded: int = 0
    """Iterations to calibrate from."""
    recorded_since_start: int = 0
    """Iterations recorded since a calibration was last started."""
    started: bool = False
    running: bool = False
    quality: CalibrationQuality | None = None
    """Of the latest calibration."""
    digest_in_use: str = ""
    """Digest of the calibration to plan with; empty: none."""
    fault: Explanation | None = None
    """Why the latest calibration failed or could not be restored."""
    programs: int = 0
    """How often another program has come: what is made for the one before is not adopted."""

    def iteration_recorded(self, recorded: int) -> None:
        """One more iteration is recorded; ``recorded`` are kept in all."""
        self.recorded = recorded
        self.recorded_since_start += 1

    def record_discarded(self) -> None:
        """The profile changed: recorded iterations explain nothing any more. The calibration in use stays."""
        self.recorded, self.recorded_since_start, self.started = 0, 0, False

    def forgotten(self) -> None:
        """Another program runs: nothing that was recorded or made says anything about it."""
        self.record_discarded()
        self.quality, self.digest_in_use, self.fault = None, "", None
        self.programs += 1

    def run_started(self) -> None:
        """A worker calibrates."""
        self.running, self.started, self.recorded_since_start = True, True, 0

    def run_ended(self) -> None:
        """The worker has ended, whatever came of it."""
        self.running = False

    def calibrated(self, quality: CalibrationQuality) -> None:
        """A calibration was made or restored."""
        self.quality, self.fault = quality, None

    def adopted(self, digest: str) -> None:
        """Plan with this calibration from now on."""
        self.digest_in_use = digest

    def failed(self, fault: Explanation) -> None:
        """No calibration came of it; the one in use stays."""
        self.fault = fault
