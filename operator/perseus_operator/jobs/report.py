"""What is reported of one job: its conditions, its figures, the plan in force, and what has happened to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perseus_core.evidence import Evidence
from perseus_operator.api.conditions import Condition
from perseus_operator.api.power_status import PowerSmoothingStatus
from perseus_operator.api.serving.status import PoolFigures
from perseus_operator.api.status import StatusFigures
from perseus_operator.jobs.events import JobEvent
from perseus_operator.jobs.pools.figures import PoolState
from perseus_operator.nodes.gpu import PowerSmoothing
from perseus_operator.nodes.iterations import Measured
from perseus_operator.solving.view import CalibrationQuality


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """One job as its family describes it.

    Attributes:
        conditions: all of them, ``Ready`` last.
        figures: of the status.
        measured: iterations under the plan in force; None: not measured yet.
        planned_slowdown: by how much iterations are slowed on purpose, relative to the fastest plan.
        announces: whether the slowdown is the wanted plan's, and is to be announced in an annotation.
        in_force: whether some agent follows a plan, wanted now or earlier; else nothing is announced.
        stragglers: number of slow pipelines.
        quality: of the latest calibration.
        evidence: how clocks followed plans lately.
        pool: what the series of a ServingPool say; None: it is none.
        curve: time (µs) and energy (mJ) of one iteration at each point of the frontier.
        plan: the plan that all agents follow; empty: none.
        plan_event: builds the event about that plan.
        changes: builds the events about what a new status leaves out, from the stored one and the new one.
        events: that have happened since the last report.
    """

    conditions: Sequence[Condition]
    figures: StatusFigures | PoolFigures
    measured: Measured | None = None
    planned_slowdown: float = 1.0
    announces: bool = False
    in_force: bool = False
    stragglers: int = 0
    quality: CalibrationQuality | None = None
    evidence: Evidence = field(default_factory=Evidence)
    pool: PoolState | None = None
    curve: Sequence[tuple[int, int]] = ()
    plan: Mapping[int, int] = field(default_factory=dict)
    plan_event: Callable[[], JobEvent] | None = None
    changes: Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[JobEvent]] | None = None
    events: Sequence[JobEvent] = ()


def smoothing_to_status(smoothing: PowerSmoothing) -> PowerSmoothingStatus | None:
    """Format what power smoothing keeps the GPUs of a job or pool at; None: no GPU is smoothed."""
    if not smoothing.gpus:
        return None
    return PowerSmoothingStatus(
        gpus=smoothing.gpus,
        floor_watts=smoothing.floor_w,
        secondary_floor_watts=smoothing.secondary_floor_w or None,
    )
