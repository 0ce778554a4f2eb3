"""What all runners share: doors, numbers and clocks, given to them by ``__main__`` or by a test. No behaviour."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from perseus_operator.clients.agents import AgentPool
from perseus_operator.clients.kube import Kube
from perseus_operator.planning.planner import Limits
from perseus_operator.reporting.metrics import Metrics
from perseus_operator.solving.cache import Library
from perseus_operator.solving.pool import SolverPool

BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses after one failure, two, ...; the last one repeats."""


class Pace:
    """When each of many may do something that all of them together may do only so often: turns in order of asking."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._free_s = float("-inf")

    def turn_s(self, now_s: float) -> float:
        """The time of the next free turn, which is the asker's now."""
        turn_s = max(now_s, self._free_s)
        self._free_s = turn_s + self._interval_s
        return turn_s


@dataclass(frozen=True)
class Services:
    """What all runners share."""

    kube: Kube
    agents: AgentPool
    solver: SolverPool
    metrics: Metrics
    epoch: int
    newest_epoch: Callable[[], Awaitable[int]]
    """The last that any operator has drawn. Raises KubeError."""
    limits: Limits
    status_interval_s: float = 5.0
    release_timeout_s: float = 10.0
    library: Library = field(default_factory=Library)
    figures: Pace = field(default_factory=lambda: Pace(10.0))
    """Of status writes that only bring measured figures up to date: with hundreds of jobs each waits longer."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """To think. One thought in each turn of the event loop: if hundreds of jobs thought in the same one, whatever takes
    several turns, such as hearing of an edited job, would wait several times for all of them."""
    monotonic_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
