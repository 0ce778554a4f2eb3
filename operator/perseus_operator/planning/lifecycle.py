"""The end of a job: whether it has finished, with what result, and when its PerseusJob is to be deleted.

Fields are read everywhere and changed only here, by one named method for each event: pods are observed, a plan is
measured, the deletion is asked for, and what an earlier operator stored is restored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perseus_operator.api.job import JobSpec
from perseus_operator.planning.iterations import Measured


@dataclass
class JobEnd:
    """What is known of the end, and what a finished job reports."""

    finished_at_s: float | None = None
    """When all pods had succeeded (wall clock); None: they run, or are to come."""
    result: Measured | None = None
    """Iterations under the latest plan in force."""
    ask_again_at_s: float = 0.0
    """When the PerseusJob may be deleted again, should it still be there (monotonic)."""

    def pods_observed(self, *, running: bool, finished_at_s: float | None) -> None:
        """The job's pods were observed; new ones begin another run.

        Args:
            running: whether any runs.
            finished_at_s: now (wall clock), if all have succeeded; None: not so, or they have been deleted since.
        """
        if running and self.finished_at_s is not None:
            self.finished_at_s = self.result = None
        elif not running and self.finished_at_s is None:
            self.finished_at_s = finished_at_s

    def plan_measured(self, measured: Measured) -> None:
        """Iterations under the plan in force were measured."""
        self.result = measured

    def deletion_asked(self, again_at_s: float) -> None:
        """The PerseusJob is being deleted; if it is still there then, ask again (monotonic)."""
        self.ask_again_at_s = again_at_s

    def restored(self, finished_at_s: float | None, result: Measured | None) -> None:
        """An earlier operator stored these in the status; None: it stored none."""
        self.finished_at_s, self.result = finished_at_s, result


@dataclass(frozen=True)
class DeleteJob:
    """Delete the PerseusJob: its ``ttlSecondsAfterFinished`` is over."""


def next_deletion(end: JobEnd, spec: JobSpec, *, now_s: float, wall_s: float) -> tuple[DeleteJob | None, float]:
    """Whether to delete the PerseusJob now, and otherwise when to look again (monotonic).

    Args:
        end: of the job.
        spec: of the job.
        now_s: monotonic.
        wall_s: the same moment by the wall clock, in seconds since 1970.
    """
    ttl_s = spec.ttl_seconds_after_finished
    if ttl_s is None or end.finished_at_s is None:
        return None, math.inf
    due_s = max(now_s + end.finished_at_s + ttl_s - wall_s, end.ask_again_at_s)
    return (DeleteJob(), math.inf) if due_s <= now_s else (None, due_s)
