"""What a pool draws, and how many of its requests keep their limits, minute by minute, each taken as steady.

Times and watts are the simulated machine's own, not those of a fitted model. What is late follows from the queue of
prompts as the planner bounds it, times what the engines of `perseus_sim.serving.fleet` show on top. A pool that is
offered more than it can compute keeps the rest for the next minute; until that is served, every request is late. A
week of requests cannot be served one by one in the simulator; a test compares minutes with its engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perseus_sim.serving.machine import Machine
from perseus_sim.serving.machine_steps import MachineSteps
from perseus_solver.kinds import Bools, Floats, Index
from perseus_solver.serving.planner import LatencyLimits, OperatingPoint, ReplicaModel, RequestClass, Steady

LATE_FACTOR: Final = 2.0
"""First tokens that are late in the engines over those by the planner's queue: 1.6 to 2.2."""
_GRID: Final = 161
_MOST: Final = 1.25
"""Of the load at which prompts take all of the time: beyond, nothing changes."""


@dataclass(frozen=True)
class Minutes:
    """What came of a pool: float[minutes] each."""

    joules: Floats
    requests: Floats
    late: Floats
    """Requests that missed a limit."""


class FluidPool:
    """Replicas of one variant that serve requests of one class.

    Args:
        machine: of each replica.
        requests: of what kind.
        limits: what they were promised.
        points: by the clocks of steps without and with prompts, as the policy knows them. It takes those of fewest
            watts that keep the limits at the load, and the highest clocks where none do.
    """

    def __init__(
        self,
        machine: Machine,
        requests: RequestClass,
        limits: LatencyLimits,
        points: dict[tuple[int, int], OperatingPoint],
    ) -> None:
        highest_mhz = machine.clocks_mhz[-1]
        steps = MachineSteps(machine, 0.5 * requests.prompt_tokens * (1.0 + requests.prompt_scv))
        self._replica = ReplicaModel(machine.parallel, steps, highest_mhz, machine.kv_capacity)
        self._requests, self._limits = requests, limits
        self._points = points
        self._pairs = tuple(points)
        self._highest = (highest_mhz, highest_mhz)
        self._full = self._full_load()
        self._loads = self._full * _MOST * np.linspace(0.0, 1.0, _GRID)
        self._steady = {
            pair: self._replica.steady(requests, limits, self._loads, *pair) for pair in {*self._pairs, self._highest}
        }

    def serve(self, loads: Floats, replicas: Index) -> Minutes:
        """Serve a load.

        Args:
            loads: float[minutes], requests a second of the pool.
            replicas: int[minutes] that serve; where none do, all requests are late.
        """
        offered, behind = self._offered(loads, replicas)
        share = offered / np.maximum(1, replicas)
        watts, late = np.zeros_like(loads), np.ones_like(loads)
        chosen = self._chosen(share, replicas)
        for place, pair in enumerate([*self._pairs, self._highest]):
            mask = (chosen == place) & (replicas > 0)
            if mask.any():
                watts[mask] = np.interp(share[mask], self._loads, self._steady[pair].watts)
                late[mask] = self._late(self._steady[pair], share[mask], replicas[mask])
        late[behind] = 1.0
        return Minutes(60.0 * replicas * watts, 60.0 * loads, 60.0 * loads * np.where(loads > 0.0, late, 0.0))

    def _offered(self, loads: Floats, replicas: Index) -> tuple[Floats, Bools]:
        """Return what is offered with what is left of the minute before, and in which minutes something was left."""
        most, offered, behind, left = self._full * replicas, loads.copy(), np.zeros(len(loads), dtype=bool), 0.0
        for minute in np.flatnonzero(loads > 0.98 * most):
            behind[minute] = True
            left += loads[minute] - most[minute]
            after = minute + 1
            while left > 0.0 and after < len(loads) and loads[after] <= 0.98 * most[after]:
                behind[after] = True
                taken = min(left, most[after] - loads[after])
                offered[after] += taken
                left -= taken
                after += 1
            left = max(0.0, left)
        return offered, behind

    def _chosen(self, share: Floats, replicas: Index) -> Index:
        """Return which pair of clocks serves each minute; the last stands for the highest clocks."""
        best = np.full(len(share), np.inf)
        chosen = np.full(len(share), len(self._pairs))
        for place, pair in enumerate(self._pairs):
            point = self._points[pair]
            carried = np.array(point.carried or (point.most_load,))[np.clip(replicas, 1, len(point.carried) or 1) - 1]
            watts = np.where(share <= carried, np.interp(share, point.loads, point.watts), np.inf)
            better = watts < best
            best, chosen = np.where(better, watts, best), np.where(better, place, chosen)
        return chosen

    def _late(self, steady: Steady, share: Floats, replicas: Index) -> Floats:
        """Return the share of requests that miss a limit."""
        missed = np.ones_like(share)
        for count in np.unique(replicas):
            mask = replicas == count
            first = np.minimum(1.0, LATE_FACTOR * self._replica.late_share(self._requests, self._limits, steady, count))
            # A mean between the margin and the limit is above the limit for some requests, and beyond it for most.
            token = np.clip((steady.per_token_s / self._limits.per_token_s - 0.9) / 0.15, 0.0, 1.0)
            full = np.clip((steady.running * self._requests.kv_tokens / self._replica.kv_capacity - 0.85) / 0.1, 0, 1)
            full = np.maximum(full, np.clip((steady.running / self._replica.most_running - 0.85) / 0.1, 0.0, 1.0))
            missed[mask] = np.interp(
                share[mask],
                self._loads,
                np.minimum(1.0, np.maximum(np.maximum(first, token), full) + steady.slow_share),
            )
        return missed

    def _full_load(self) -> float:
        """Return the requests a second at which prompts take all of a replica's time, or its memory is full."""
        low, high = 0.0, 1e4
        for _ in range(50):
            middle = (low + high) / 2.0
            one = self._replica.steady(self._requests, self._limits, np.array([middle]), *self._highest)
            kept = one.prompt_share[0] < 1.0 and one.running[0] < self._replica.most_running
            kept = kept and one.running[0] * self._requests.kv_tokens < self._replica.kv_capacity
            low, high = (middle, high) if kept else (low, middle)
        return low
