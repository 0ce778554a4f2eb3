"""What all runners share: clients, metrics, limits and clocks. Built once by ``__main__``, or by a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from perseus_operator.clients.agents.client import AgentPool
from perseus_operator.clients.kube.interface import Kube
from perseus_operator.jobs.limits import Limits
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.pace import Pace
from perseus_operator.replicas.epochs import Epochs
from perseus_operator.solving.cache import SolveCache
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.slots import FairSlots

BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses after one failure, two, ...; the last one repeats."""


def backoff_s(failures: int) -> float:
    """The pause before the next attempt, in seconds, after so many failures before the latest one."""
    return BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]


class ProfileGrants(Protocol):
    """Which profiles of another namespace a job may read, by an administrator's grant."""

    async def shared_namespace(self, energy_class: str, namespace: str) -> str | None:
        """Return the namespace whose PerseusProfiles the jobs of a class may read; None: none.

        Args:
            energy_class: as the PerseusJob is labelled; anyone who may write it may have written that.
            namespace: of the PerseusJob.

        Raises:
            KubeError: it is not known whether the class is for that namespace.
        """
        ...


@dataclass(frozen=True)
class Services:
    """What all runners share."""

    kube: Kube
    agents: AgentPool
    solver: SolverPool
    metrics: Metrics
    epochs: Epochs
    limits: Limits
    grants: ProfileGrants | None = None
    """None: no EnergyClasses are served, so nothing is granted."""
    namespaces: Sequence[str] = ()
    """That this operator serves; none: all."""
    resource_slices: bool = False
    """Whether ResourceSlices may be read."""
    status_interval_s: float = 5.0
    release_timeout_s: float = 10.0
    cache: SolveCache = field(default_factory=SolveCache)
    figures_pace: Pace = field(default_factory=lambda: Pace(10.0))
    """Of status writes that only update measured figures: with hundreds of jobs each waits longer."""
    looks_pace: Pace = field(default_factory=lambda: Pace(50.0))
    """Of reconciliations for which nothing is urgent; each takes one or two milliseconds, all a tenth of a core."""
    turns: FairSlots = field(default_factory=lambda: FairSlots(1))
    """Of reconciliations, by namespace: one in each turn of the event loop. If hundreds of jobs reconciled in the same
    turn, whatever takes several turns, such as observing an edited job, would wait for all of them."""
    fits: FairSlots = field(default_factory=lambda: FairSlots(1))
    """Turns to fit a model of engines, in a thread: a second of a core, for one pool at a time."""
    monotonic_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
