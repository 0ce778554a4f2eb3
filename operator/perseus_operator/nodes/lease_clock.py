"""What an agent says about the clock of a lease."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from perseus_core.leases import LeasedGpu


@dataclass(frozen=True)
class LeaseClock:
    """What an agent says about the clock of a lease."""

    mhz: int
    gpus: tuple[LeasedGpu, ...]

    @property
    def faulty(self) -> bool:
        """Whether a GPU cannot be locked at it."""
        return any(gpu.fault for gpu in self.gpus)

    def holds(self, mhz: int, pod_uids: Set[str]) -> bool:
        """Whether it is this clock, and all GPUs of every one of these pods are locked at it."""
        locked = all(gpu.applied_mhz == mhz for gpu in self.gpus if gpu.uuid or gpu.fault)
        return self.mhz == mhz and locked and {gpu.pod_uid for gpu in self.gpus} >= pod_uids
