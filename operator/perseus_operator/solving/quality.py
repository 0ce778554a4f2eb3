"""How well a calibrated model explains a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CalibrationQuality:
    """Whether a calibrated model explains the run, and how well. Errors and allowance are ratios, not per cents."""

    digest: str
    explains: bool
    reason: str
    heldout_error: float | None
    """Mean error over iterations that were not used for fitting."""
    uncalibrated_error: float
    """Mean error of the model without calibration."""
    iterations: int
    allowance: float
    """Nearly all iterations stay within this share above what is planned."""
