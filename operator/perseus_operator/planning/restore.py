"""What an operator that comes after takes from a PerseusJob's status: what was measured, and what was held back.

Called by the job's runner at its first sight of the job. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perseus_operator.planning import bound_guard
from perseus_operator.planning.iterations import Measured
from perseus_operator.planning.state import JobState


def recall(state: JobState, written: Mapping[str, Any], *, now_s: float, wall_s: float) -> None:
    """Baseline and guard outlive a restart: a plan that broke its bound is not tried again at once."""
    baseline = written.get("baseline")
    if isinstance(baseline, Mapping):
        state.baseline = Measured(
            int(baseline["iterationTimeMicroseconds"]),
            baseline.get("energyMillijoules"),
            int(baseline.get("iterations", 1)),
        )
    held = written.get("guard")
    if isinstance(held, Mapping):
        state.guard = bound_guard.recalled(held, now_s=now_s, wall_s=wall_s)
