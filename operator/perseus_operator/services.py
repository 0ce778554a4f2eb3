"""What all runners share: doors, numbers and clocks, given to them by ``__main__`` or by a test. No behaviour."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from perseus_operator.agents import AgentPool
from perseus_operator.kube import Kube
from perseus_operator.library import Library
from perseus_operator.metrics import Metrics
from perseus_operator.planner import Limits
from perseus_operator.solving import SolverPool

BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses after one failure, two, ...; the last one repeats."""


@dataclass(frozen=True)
class Services:
    """What all runners share."""

    kube: Kube
    agents: AgentPool
    solver: SolverPool
    metrics: Metrics
    epoch: int
    limits: Limits
    status_interval_s: float = 5.0
    release_timeout_s: float = 10.0
    library: Library = field(default_factory=Library)
    monotonic_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
