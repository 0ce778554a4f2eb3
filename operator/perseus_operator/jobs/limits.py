"""What planning must know of the operator's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Times and counts."""

    lease_ttl_s: float = 30.0
    profile_retry_s: float = 5.0
    """How soon to look again for a profile that is missing or invalid."""
    profile_refresh_s: float = 60.0
    """How soon to look whether a valid profile has changed."""
    calibrate_after: int = 40
    """Iterations before the first calibration, and further ones before another attempt where one failed."""
    calibrate_again: int = 100
    """Further iterations before the next one."""
