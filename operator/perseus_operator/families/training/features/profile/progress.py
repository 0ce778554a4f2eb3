"""How far the measurement of a job's profile has got.

Fields are read everywhere and changed only here, by one named method for each event: a sweep begins or is restored,
readings come in and are stored, the profile is stored, a stored profile ends the sweep, or the profile is found stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perseus_operator.api.conditions import Explanation
from perseus_operator.families.training.features.profile.drift import DRIFT_REST, Drift
from perseus_operator.families.training.features.profile.sweep import Sweep


@dataclass
class ProfilingProgress:
    """The sweep of a job, what of it is stored, and whether the profile in use still fits."""

    sweep: Sweep | None = None
    """The latest sweep, begun by this operator or an earlier one."""
    iterations_counted: int = 0
    """Iterations measured at the sweep's current clock."""
    rejection: str = ""
    """Why the latest iteration could not be measured; empty: it could."""
    readings_stored: int = 0
    """Readings, of all rounds, that are stored in the cluster."""
    profile_stored: bool = False
    """The measured profile is stored and waits to be read back."""
    writing: bool = False
    retry_at_s: float = 0.0
    failures: int = 0
    fault: Explanation | None = None
    """Why no profile can be measured; until the spec's profile changes."""
    drift: Drift = field(default_factory=Drift)
    stale_profile: str = ""
    """Digest of the profile that no longer fits; empty: none."""
    stale_reason: str = ""
    """What showed that, in a sentence."""
    remeasurements: int = 0
    """How often a stale profile was measured again."""
    summary: str = ""
    """What the last sweep measured, in a sentence."""

    def spec_changed(self) -> None:
        """The spec names another profile: what was impossible may be possible now."""
        self.fault, self.profile_stored, self.retry_at_s, self.summary = None, False, 0.0, ""

    def sweep_begun(self, sweep: Sweep) -> None:
        """Measure this sweep from now on."""
        self.sweep, self.readings_stored, self.profile_stored = sweep, 0, False

    def sweep_restored(self, sweep: Sweep) -> None:
        """Go on with a sweep that an earlier operator began."""
        self.sweep, self.readings_stored, self.stale_profile = sweep, sweep.measured, sweep.replaces

    def iteration_measured(self, sweep: Sweep, *, counted: int, rejection: str) -> None:
        """An iteration was measured, or rejected for a reason.

        Args:
            sweep: with the time spent, and with one more reading if the clock is finished.
            counted: iterations measured at the current clock.
            rejection: why the iteration does not count; empty: it does.
        """
        self.sweep, self.iterations_counted, self.rejection = sweep, counted, rejection

    def write_started(self) -> None:
        """The sweep or the profile is being written to the cluster."""
        self.writing = True

    def write_ended(self) -> None:
        """The write has an outcome."""
        self.writing = False

    def readings_written(self, readings: int) -> None:
        """So many readings of the sweep are stored."""
        self.readings_stored, self.failures = readings, 0

    def profile_written(self) -> None:
        """The profile is stored."""
        self.profile_stored, self.failures = True, 0

    def write_failed(self, *, retry_at_s: float) -> None:
        """The cluster did not take it; no write is planned before ``retry_at_s``."""
        self.retry_at_s = retry_at_s
        self.failures += 1

    def failed(self, fault: Explanation) -> None:
        """No profile can be measured."""
        self.fault = fault

    def iteration_compared(self, paces: Mapping[int, Sequence[float]]) -> bool:
        """A typical iteration was compared with the profile; whether the profile no longer fits.

        Args:
            paces: measured time divided by planned time of each stage, by pipeline.
        """
        self.drift = self.drift.observe(paces)
        return self.drift.persistent

    def profile_outdated(self, digest: str) -> None:
        """Measure the profile again: instructions persistently take another time."""
        off = self.drift.pace - 1
        direction = "more" if off > 0 else "less"
        self.stale_reason = f"Stage {self.drift.stage} takes {abs(off):.0%} {direction} time than profiled. "
        self.stale_profile = digest
        self.drift = Drift()

    def sweep_ended(self, summary: str) -> None:
        """A profile was read that ends the sweep; after each remeasurement drift must persist twice as long.

        Args:
            summary: what the sweep measured; empty: the profile is another job's, and the last summary stays.
        """
        self.remeasurements += bool(self.stale_profile)
        self.drift = Drift(rest=DRIFT_REST * 2**self.remeasurements if self.remeasurements else 0)
        self.sweep, self.profile_stored, self.stale_profile, self.stale_reason = None, False, "", ""
        self.readings_stored = 0
        if summary:
            self.summary = summary
