"""Why a pipeline is slow, as far as its GPUs report it or telemetry shows what is slow and what is not.

A cause is reported and never acted on: the other pipelines wait for a straggler whatever slows it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from perseus_operator.families.training.features.stragglers.detector import StragglerDetector
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.node import Rank


class StragglerCause(StrEnum):
    """What slows a pipeline."""

    THERMAL = "Thermal"
    """A GPU has lowered its clock because of heat."""
    POWER = "Power"
    """A power brake is active, or a GPU is at its power limit where those of other pipelines are not."""
    CLOCK = "Clock"
    """A GPU runs at another clock than the one that was set, for another reason or for none that it reports."""
    COMMUNICATION = "Communication"
    """No stage computes slowly: the time goes between instructions."""
    UNKNOWN = "Unknown"


_BY_KIND: Final = {
    "THERMAL_SLOWDOWN": StragglerCause.THERMAL,
    "POWER_BRAKE": StragglerCause.POWER,
    "POWER_CAP": StragglerCause.POWER,
    "BOARD_LIMIT": StragglerCause.POWER,
    "HARDWARE_SLOWDOWN": StragglerCause.CLOCK,
    "RELIABILITY": StragglerCause.CLOCK,
    "DRIFT": StragglerCause.CLOCK,
    "FOREIGN_WRITE": StragglerCause.CLOCK,
}
"""By kind of GPU event. Of several the first in the order of ``StragglerCause`` counts: heat and power lower clocks."""

_LIMITS: Final = frozenset({"POWER_CAP", "BOARD_LIMIT", "RELIABILITY"})
"""Kinds that healthy GPUs report at high clocks, too."""


def cause_of(detector: StragglerDetector, nodes: JobNodes, dp: int) -> StragglerCause:
    """Find the most likely cause of a straggler.

    Args:
        detector: of the job.
        nodes: of the job.
        dp: data-parallel rank of the slow pipeline.

    Returns:
        The cause that its GPUs report; else ``COMMUNICATION`` if telemetry shows that no stage is slow; else
        ``UNKNOWN``.
    """
    reported = {_BY_KIND[kind] for _, kind, _ in gpu_events(nodes, dp) if kind in _BY_KIND}
    for cause in StragglerCause:
        if cause in reported:
            return cause
    slow = dp in detector.slowdowns and not detector.stages.get(dp)
    return StragglerCause.COMMUNICATION if slow and dp in detector.paced else StragglerCause.UNKNOWN


def gpu_events(nodes: JobNodes, dp: int) -> list[tuple[Rank, str, str]]:
    """List the events that are active on a pipeline's GPUs.

    Many healthy GPUs are at their power limit, or at another of their board or chip. That counts only where the same
    stage of no other pipeline is at its own.

    Args:
        nodes: of the job.
        dp: data-parallel rank of the pipeline.

    Returns:
        Rank, kind of event and name of the node.
    """
    active = [
        (rank, kind, node.name)
        for node in nodes.values()
        for gpu, kind in sorted(node.gpu_events)
        for rank in node.ranks.values()
        if rank.gpu_uuid == gpu
    ]
    limited = {(rank.dp, rank.stage, kind) for rank, kind, _ in active if kind in _LIMITS}
    return [
        (rank, kind, node)
        for rank, kind, node in active
        if rank.dp == dp
        and not any(other != dp and (stage, what) == (rank.stage, kind) for other, stage, what in limited)
    ]


def slowest_stage(detector: StragglerDetector, dp: int) -> int | None:
    """Return the stage of a pipeline with the largest slowdown; None: telemetry singles out no stage."""
    slowdowns = detector.stages.get(dp)
    return max(slowdowns, key=slowdowns.__getitem__) if slowdowns else None
