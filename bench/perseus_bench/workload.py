"""What computes while clocks change: equal work items, one after another, without a gap.

The reported clock is no proof of speed; how long equal items take is. ``perseus_bench.cuda`` implements it
with PyTorch in a process of its own, ``perseus_sim.gpus`` for simulated GPUs; ``workload_choice`` opens one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from perseus_agent.errors import AgentError


class WorkItem(NamedTuple):
    """One item, in the device's time (``Device.now_us``)."""

    begin_us: float
    duration_us: float


class WorkloadFailed(AgentError):
    """The workload has ended by itself or does not answer."""


class Workload(Protocol):
    """Equal work items on one GPU. Every method may raise ``WorkloadFailed``."""

    @property
    def name(self) -> str:
        """What computes, for the report."""

    def start(self, items: int | None = None) -> None:
        """Begin to compute.

        Args:
            items: how many items; None: until ``finish``.
        """

    def completed(self) -> int:
        """Items completed since ``start``."""

    def finish(self) -> Sequence[WorkItem]:
        """End the work: at once, or after the number of items given to ``start``.

        Returns:
            The items since ``start``, in order.
        """

    def close(self) -> None:
        """Free the GPU."""
