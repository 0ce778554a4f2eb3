"""The clock of a lease: what an operator asks an agent to lock GPUs at while no plan wants another clock, and what the
agent answers about each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class RestingClock:
    """What a lease locks all GPUs of the job's pods at, with or without a process, while no plan wants a clock."""

    mhz: int = 0
    """0: their default clocks; with ``keep_s`` above 0 what the lease before it had, since it is not known yet."""
    keep_s: float = 0
    """How long it stays after the lease has run out, because no operator renews it."""


NO_RESTING_CLOCK: Final = RestingClock()


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
