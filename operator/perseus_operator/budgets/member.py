"""A job as a member of a PowerBudget: what it draws, and what a watt is worth to it.

Every family says this of its jobs. What users wrote is bounded by the GPUs on which agents found processes of the job:
nothing draws more than their power limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perseus_operator.budgets.allocation import Claim
from perseus_operator.budgets.reading import Reading
from perseus_operator.nodes.gpu import UNKNOWN_BOARD_W
from perseus_operator.nodes.job_nodes import JobNodes


@dataclass(frozen=True)
class Member:
    """A selected job that draws power; with neither ``claim`` nor ``drawn_w`` it is not known how much."""

    job: str
    priority: int
    claim: Claim | None = None
    drawn_w: float | None = None
    """Mean power of a job whose clocks are not set."""
    held_w: float = math.inf
    """What the GPUs that the job holds can draw by their power limits; infinite: it is not known yet."""
    follows_w: float | None = None
    """The share that another replica, which serves the job, acts on; None: it has none, or this one serves it."""
    gpus: int = 0
    """GPUs that agents found for the job."""
    reading: Reading | None = None
    """What was measured of its energy; None: the replica that serves it does not say."""


def held_limits_w(nodes: JobNodes) -> dict[str, float]:
    """The power limit of every GPU that agents found for the job, by UUID."""
    limits_w = {}
    for node in nodes.values():
        for uuid in node.gpu_uuids:
            gpu = node.gpus.get(uuid)
            limit_w = None if gpu is None else gpu.max_power_w
            limits_w[uuid] = UNKNOWN_BOARD_W if limit_w is None else limit_w
    return limits_w
