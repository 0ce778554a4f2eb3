"""The end of a job: when its PerseusJob is to be deleted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perseus_operator.api.job import JobSpec
from perseus_operator.planning.state import JobState


@dataclass(frozen=True)
class DeleteJob:
    """Delete the PerseusJob: its ``ttlSecondsAfterFinished`` is over."""


def next_deletion(state: JobState, spec: JobSpec, *, now_s: float, wall_s: float) -> tuple[DeleteJob | None, float]:
    """Whether to delete the PerseusJob now, and otherwise when to look again (monotonic).

    Args:
        state: of the job.
        spec: of the job.
        now_s: monotonic.
        wall_s: the same moment by the wall clock, in seconds since 1970.
    """
    ttl_s = spec.ttl_seconds_after_finished
    if ttl_s is None or state.finished_at_s is None:
        return None, math.inf
    due_s = max(now_s + state.finished_at_s + ttl_s - wall_s, state.ask_deletion_at_s)
    return (DeleteJob(), math.inf) if due_s <= now_s else (None, due_s)
