"""The clock of a lease: what it locks GPUs at while no plan wants another, and what the agent says of it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class RestingClock:
    """What a lease locks all GPUs of the job's pods at while no plan wants a clock."""

    mhz: int = 0
    """0: their default clocks; with ``keep_s`` above 0 what the lease before it had, since it is not known yet."""
    keep_s: int = 0
    """How long it stays after the lease has run out, because no operator renews it."""


DEFAULT_CLOCKS: Final = RestingClock()


@dataclass(frozen=True)
class LeasedGpu:
    """A GPU of a lease that was acquired with a clock, as its agent reports it."""

    uuid: str
    """Empty: the pod has none, or ``fault`` says why none is known."""
    pod_uid: str
    applied_mhz: int
    """Locked by the agent; 0: default clocks."""
    fault: str
    """Why it is not the lease's clock; empty: it is, or is about to be."""


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
