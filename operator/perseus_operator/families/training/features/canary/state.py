"""How far a job in mode Canary is: the plan on one pipeline first, then on all, or on none; see ``canary_planner``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perseus_core.units import ratio_from_share
from perseus_operator.api.job import JobSpec, Mode
from perseus_operator.api.status import CanaryStatus
from perseus_operator.api.stored import parse_stored
from perseus_operator.objects.formatting import exact_percent


class Phase(StrEnum):
    """How far the canary is."""

    TESTING = "Testing"
    PASSED = "Passed"
    FAILED = "Failed"


@dataclass(frozen=True)
class Canary:
    """What came of it so far; both shares are means."""

    phase: Phase = Phase.TESTING
    saved: float | None = None
    slowdown: float | None = None
    why: str = ""
    """Why it failed, or was too slow in the latest attempt."""
    slow_attempts: int = 0
    """In which iterations were slower than planned."""
    resume_at: int = 0
    """The iteration before which the plan is not tried again; an operator that has restarted tries at once."""


@dataclass(frozen=True)
class JudgeCanary:
    """The canary has ended, or an attempt has."""

    verdict: Canary


def canary_to_status(canary: Canary, spec: JobSpec) -> CanaryStatus | None:
    """For the status; None: the mode is another."""
    if spec.mode is not Mode.CANARY:
        return None
    return CanaryStatus(
        phase=canary.phase.value,
        saved=None if canary.saved is None else exact_percent(canary.saved),
        slowdown=None if canary.slowdown is None else exact_percent(canary.slowdown),
        slow_attempts=canary.slow_attempts or None,
        message=canary.why or None,
    )


def canary_from_status(written: object) -> Canary:
    """As an earlier operator has stored it; else one that begins."""
    stored = parse_stored(CanaryStatus, written)
    if stored is None or stored.phase not in tuple(Phase):
        return Canary()
    saved, slowdown = stored.saved, stored.slowdown
    return Canary(
        Phase(stored.phase),
        None if saved is None else ratio_from_share(saved),
        None if slowdown is None else ratio_from_share(slowdown),
        stored.message or "",
        stored.slow_attempts or 0,
    )
