"""The end of a job: whether it has finished, and when its PerseusJob is to be deleted.

Fields are read everywhere and changed only here, by one named method for each event: pods are observed, the deletion is
asked for, and what an earlier operator stored is restored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from perseus_operator.api.conditions import ConditionType
from perseus_operator.api.job import WorkSpec
from perseus_operator.api.stored import stored_items


@dataclass
class JobEnd:
    """What is known of the end."""

    finished_at_s: float | None = None
    """When all pods had succeeded (wall clock); None: they run, or are to come."""
    ask_again_at_s: float = 0.0
    """When the PerseusJob may be deleted again, should it still be there (monotonic)."""

    def pods_observed(self, *, running: bool, finished_at_s: float | None) -> None:
        """The job's pods were observed; new ones begin another run.

        Args:
            running: whether any runs.
            finished_at_s: now (wall clock), if all have succeeded; None: not so, or they have been deleted since.
        """
        if running and self.finished_at_s is not None:
            self.finished_at_s = None
        elif not running and self.finished_at_s is None:
            self.finished_at_s = finished_at_s

    def deletion_asked(self, again_at_s: float) -> None:
        """The PerseusJob is being deleted; if it is still there then, ask again (monotonic)."""
        self.ask_again_at_s = again_at_s

    def restored(self, status: Mapping[str, Any]) -> None:
        """An earlier operator stored this status."""
        self.finished_at_s = _finished_at_s(status)


def next_deletion(end: JobEnd, spec: WorkSpec, *, now_s: float, wall_s: float) -> tuple[bool, float]:
    """Whether to delete the PerseusJob now, and otherwise when to look again (monotonic).

    Args:
        end: of the job.
        spec: of the job.
        now_s: monotonic.
        wall_s: the same moment by the wall clock, in seconds since 1970.
    """
    ttl_s = spec.ttl_seconds_after_finished
    if ttl_s is None or end.finished_at_s is None:
        return False, math.inf
    due_s = max(now_s + end.finished_at_s + ttl_s - wall_s, end.ask_again_at_s)
    return (True, math.inf) if due_s <= now_s else (False, due_s)


def _finished_at_s(status: Mapping[str, Any]) -> float | None:
    """When the job finished, in seconds since 1970; None: it has not."""
    conditions = stored_items(status.get("conditions"))
    finished = next((each for each in conditions if each.get("type") == ConditionType.FINISHED), {})
    if finished.get("status") != "True":
        return None
    try:
        return datetime.fromisoformat(str(finished.get("lastTransitionTime"))).timestamp()
    except ValueError:  # not as an operator writes it: the pods will say it again, if they are there
        return None
