"""Two plans in one: where neither meets a deadline well, follow the slower up to some moment and the faster from there.

Timetables that keep the order form a lattice: the earlier, or the later, of two, one of them shifted, keeps it too. So
a splice ends at its deadline, with energy and changes near the average of the two plans, weighted by time; that makes a
plan of few changes reach any time, and use up any loss that is permitted. Called by ``switches``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Floats
from perseus_solver.switching.runs import Index

_ROUNDS = 5
"""Splices of splices: what one round finds, the next may use."""
_AIMS = (1.1, 1.0, 0.9, 0.75, 0.5, 0.25)
"""Shares of the permitted loss that pairs of plans are chosen for: the average is not exactly what a splice takes."""
_WEIGHTS = 16
"""Prices of a change for which plans are kept as candidates for pairs."""
HAIR = 1e-12
"""Relative: simulated sums are compared with themselves in another order."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Plans, a row each: clocks, start and end of instructions; iteration time, effective energy, clock changes."""

    plan: Index
    start_s: Floats
    end_s: Floats
    time_s: Floats
    energy_j: Floats
    changes: Index

    def __len__(self) -> int:
        return len(self.time_s)

    def pick(self, which: Index) -> Candidates:
        """Some of them."""
        return Candidates(*(getattr(self, name)[which] for name in self.__slots__))

    def where_fewer(self, other: Candidates, allowed: npt.NDArray[np.bool_]) -> Candidates:
        """Row by row the other where it is allowed and changes less often, or as often for less energy."""
        fewer = (other.changes < self.changes) | ((other.changes == self.changes) & (other.energy_j < self.energy_j))
        return join([self, other]).pick(np.arange(len(self)) + len(self) * (allowed & fewer))


def join(parts: list[Candidates]) -> Candidates:
    """All of them."""
    if len(parts) == 1:
        return parts[0]
    return Candidates(*(np.concatenate([getattr(p, name) for p in parts]) for name in Candidates.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class Deadlines:
    """When plans must end and what they may take: ``limit_j`` is the cheapest plan's effective energy and the loss."""

    time_s: Floats
    cheapest: Index
    limit_j: Floats
    loss_j: Floats

    @classmethod
    def of(cls, pool: Candidates, time_s: Floats, blocking_w: float, loss: float) -> Deadlines:
        """Those deadlines that a plan of the pool keeps."""
        order = np.argsort(pool.time_s, kind="stable")
        energy = pool.energy_j[order]
        best = np.minimum.accumulate(energy)
        first = np.maximum.accumulate(np.where(energy == best, np.arange(len(energy)), 0))
        until = pool.time_s[order].searchsorted(time_s * (1 + HAIR), side="right")
        kept = until > 0
        time_s, cheapest = time_s[kept], order[first[until[kept] - 1]]
        loss_j = loss * (pool.energy_j[cheapest] + blocking_w * time_s)
        return cls(time_s, cheapest, pool.energy_j[cheapest] + loss_j, loss_j)

    def keeps(self, plans: Candidates) -> npt.NDArray[np.bool_]:
        """Row by row, whether a plan meets its deadline and its limit."""
        in_time = plans.time_s <= self.time_s * (1 + HAIR)
        return in_time & (plans.energy_j <= self.limit_j + HAIR * np.abs(self.limit_j))

    def search(self, pool: Candidates, measure: Callable[[Index], Candidates]) -> Candidates:
        """The plan of fewest changes found for each."""
        best = pool.pick(self.cheapest)
        price = self.loss_j.max(initial=0.0) / max(int(best.changes.max(initial=0)), 1)
        weights = np.append(0.0, price * np.geomspace(0.05, 50.0, _WEIGHTS))
        for _ in range(_ROUNDS):
            corners = [_lower_hull(pool.time_s, pool.energy_j + weight * pool.changes) for weight in weights]
            pool = join([pool.pick(np.unique(np.concatenate(corners))), best])
            pairs = [self._pairs(pool, k) for k in range(len(self.time_s))]
            for aim in range(len(_AIMS)):
                fast, slow = np.array([pair[aim] for pair in pairs]).T
                for spliced in _splices(pool, fast, slow, self.time_s):
                    tried = measure(spliced)
                    best = best.where_fewer(tried, self.keeps(tried))
        return best

    def _pairs(self, pool: Candidates, k: int) -> list[tuple[int, int]]:
        """For each aim, the two plans whose average has fewest changes: one keeps the deadline, one is no earlier."""
        time_s = self.time_s[k]
        fast = np.flatnonzero(pool.time_s <= time_s * (1 + HAIR))
        slow = np.flatnonzero(pool.time_s >= time_s)
        if not len(slow):
            slow = fast
        apart = np.maximum(pool.time_s[slow] - pool.time_s[fast][:, None], HAIR * time_s)
        share = np.clip((time_s - pool.time_s[fast])[:, None] / apart, 0.0, 1.0)
        energy = _between(pool.energy_j, fast, slow, share)
        changes = _between(pool.changes.astype(np.float64), fast, slow, share)
        pairs = []
        for aim in _AIMS:
            within = energy <= self.limit_j[k] - (1.0 - aim) * self.loss_j[k]
            at = int(np.where(within, changes, np.inf).argmin())
            pairs.append((int(fast[at // len(slow)]), int(slow[at % len(slow)])))
        return pairs


def _between(values: Floats, fast: Index, slow: Index, share: Floats) -> Floats:
    mean: Floats = values[fast][:, None] * (1.0 - share) + values[slow] * share
    return mean


def _splices(pool: Candidates, fast: Index, slow: Index, time_s: Floats) -> tuple[Index, Index]:
    """Slow first, and fast first."""
    a, b = pool.pick(fast), pool.pick(slow)
    behind = np.maximum(time_s - a.time_s, 0.0)[:, None]
    ahead = np.maximum(b.time_s - time_s, 0.0)[:, None]
    return (
        np.where(b.end_s <= a.end_s + behind, b.plan, a.plan),
        np.where(a.start_s >= b.start_s - ahead, a.plan, b.plan),
    )


def _lower_hull(time_s: Floats, value: Floats) -> Index:
    """Corners of the lower convex hull, as far as values fall in time."""
    order = np.lexsort((value, time_s))
    lowest = np.minimum.accumulate(value[order])
    order = order[np.append(True, lowest[1:] < lowest[:-1])]
    corners: list[int] = []
    t, v = time_s.tolist(), value.tolist()
    for i in order.tolist():
        while len(corners) > 1:
            p, q = corners[-2:]
            if (v[q] - v[p]) * (t[i] - t[p]) < (v[i] - v[p]) * (t[q] - t[p]):
                break
            corners.pop()
        corners.append(i)
    return np.array(corners, dtype=np.intp)
