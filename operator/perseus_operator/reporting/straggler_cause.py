"""Why a pipeline is slow, as far as anybody says so: its GPUs, or telemetry by what is slow and what is not. Pure.

Called by ``status``. A cause is told, never acted on: a straggler is waited for whatever slows it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from perseus_operator.planning.node import Rank
from perseus_operator.planning.state import JobState


class Cause(StrEnum):
    """What slows a pipeline."""

    THERMAL = "Thermal"
    """A GPU has lowered its clock because of heat."""
    POWER = "Power"
    """Somebody has pulled a power brake, or a GPU is at its power limit where those of other pipelines are not."""
    CLOCK = "Clock"
    """A GPU runs another clock than it was told, for another reason or for none that it gives."""
    COMMUNICATION = "Communication"
    """No stage computes slowly: the time goes between instructions."""
    UNKNOWN = "Unknown"


_BY_KIND: Final = {
    "THERMAL_SLOWDOWN": Cause.THERMAL,
    "POWER_BRAKE": Cause.POWER,
    "POWER_CAP": Cause.POWER,
    "HARDWARE_SLOWDOWN": Cause.CLOCK,
    "DRIFT": Cause.CLOCK,
    "FOREIGN_WRITE": Cause.CLOCK,
}
"""By kind of GPU event. Of several causes the first in the order of ``Cause`` is said: heat and power lower clocks."""


def cause(state: JobState, pipeline: int) -> Cause:
    """Why a slow pipeline is slow."""
    said = {_BY_KIND[kind] for _, kind, _ in events(state, pipeline) if kind in _BY_KIND}
    for known in Cause:
        if known in said:
            return known
    slow = pipeline in state.detector.slowdowns and not state.detector.stages.get(pipeline)
    return Cause.COMMUNICATION if slow and pipeline in state.detector.paced else Cause.UNKNOWN


def events(state: JobState, pipeline: int) -> list[tuple[Rank, str, str]]:
    """What GPUs of a pipeline say about themselves: rank, kind and node. Many healthy ones are at their power limit;
    that says something only where the same stage of no other pipeline is at its own.
    """
    active = [
        (rank, kind, node.name)
        for node in state.nodes.values()
        for gpu, kind in sorted(node.gpu_events)
        for rank in node.ranks.values()
        if rank.gpu_uuid == gpu
    ]
    capped = {(rank.dp, rank.stage) for rank, kind, _ in active if kind == "POWER_CAP"}
    return [
        (rank, kind, node)
        for rank, kind, node in active
        if rank.dp == pipeline
        and not (kind == "POWER_CAP" and any(s == rank.stage and p != pipeline for p, s in capped))
    ]
