"""Join two plans into one where neither meets a deadline well: follow the slower until some moment, then the faster.

Timetables of one schedule form a lattice: the earlier, or the later, of two timetables, one of them shifted, is a
timetable again. So a spliced plan ends at its deadline, with energy and changes near the average of the two plans,
weighted by time. Hence a plan of few changes can reach any time and use up any permitted loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Floats, Index

_ROUNDS = 5
"""Rounds of splicing; each may use the results of the one before."""
_LOSS_SHARES = (1.1, 1.0, 0.9, 0.75, 0.5, 0.25)
"""Shares of the permitted loss for which pairs of plans are chosen: the average is not exactly what a spliced plan
takes.
"""
_WEIGHTS = 16
"""Prices of a change for which plans are candidates for pairs."""
TOLERANCE = 1e-12
"""Relative difference between the same simulated sum in two orders of addition."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Plans, a row each.

    Attributes:
        plan: int[plans, n], positions of clocks.
        start_s, end_s: float[plans, n], start and end of instructions, seconds.
        time_s: float[plans], iteration time, seconds.
        energy_j: float[plans], effective energy, joules.
        changes: int[plans], clock changes.
    """

    plan: Index
    start_s: Floats
    end_s: Floats
    time_s: Floats
    energy_j: Floats
    changes: Index

    def __len__(self) -> int:
        return len(self.time_s)

    def select(self, which: Index) -> Candidates:
        """Return the plans of these rows."""
        return Candidates(*(getattr(self, name)[which] for name in self.__slots__))

    def where_fewer(self, other: Candidates, allowed: npt.NDArray[np.bool_]) -> Candidates:
        """Take, row by row, the other plan where it is allowed and has fewer changes, or as many for less energy."""
        fewer = (other.changes < self.changes) | ((other.changes == self.changes) & (other.energy_j < self.energy_j))
        return join([self, other]).select(np.arange(len(self)) + len(self) * (allowed & fewer))


def join(parts: list[Candidates]) -> Candidates:
    """Join all plans into one array."""
    if len(parts) == 1:
        return parts[0]
    return Candidates(*(np.concatenate([getattr(p, name) for p in parts]) for name in Candidates.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class Deadlines:
    """When plans must end, and what they may take.

    Attributes:
        time_s: float[deadlines], seconds.
        cheapest: int[deadlines], the cheapest plan that meets each.
        limit_j: float[deadlines], effective energy of that plan plus the permitted loss, joules.
        loss_j: float[deadlines], the permitted loss, joules.
    """

    time_s: Floats
    cheapest: Index
    limit_j: Floats
    loss_j: Floats

    @classmethod
    def of(cls, pool: Candidates, time_s: Floats, blocking_w: float, loss: float) -> Deadlines:
        """Keep those deadlines that some plan meets."""
        order = np.argsort(pool.time_s, kind="stable")
        energy = pool.energy_j[order]
        best = np.minimum.accumulate(energy)
        first = np.maximum.accumulate(np.where(energy == best, np.arange(len(energy)), 0))
        until = pool.time_s[order].searchsorted(time_s * (1 + TOLERANCE), side="right")
        met = until > 0
        time_s, cheapest = time_s[met], order[first[until[met] - 1]]
        loss_j = loss * (pool.energy_j[cheapest] + blocking_w * time_s)
        return cls(time_s, cheapest, pool.energy_j[cheapest] + loss_j, loss_j)

    def met_by(self, plans: Candidates) -> npt.NDArray[np.bool_]:
        """Return, row by row, whether a plan meets its deadline and its energy limit."""
        in_time = plans.time_s <= self.time_s * (1 + TOLERANCE)
        return in_time & (plans.energy_j <= self.limit_j + TOLERANCE * np.abs(self.limit_j))

    def search(self, pool: Candidates, measure: Callable[[Index], Candidates]) -> Candidates:
        """Return the plan of fewest changes found for each deadline."""
        best = pool.select(self.cheapest)
        price = self.loss_j.max(initial=0.0) / max(int(best.changes.max(initial=0)), 1)
        weights = np.append(0.0, price * np.geomspace(0.05, 50.0, _WEIGHTS))
        for _ in range(_ROUNDS):
            corners = [_lower_hull(pool.time_s, pool.energy_j + weight * pool.changes) for weight in weights]
            pool = join([pool.select(np.unique(np.concatenate(corners))), best])
            pairs = [self._pairs(pool, k) for k in range(len(self.time_s))]
            for fast, slow in np.moveaxis(np.array(pairs), 0, 2):
                for spliced in _splices(pool, fast, slow, self.time_s):
                    tried = measure(spliced)
                    best = best.where_fewer(tried, self.met_by(tried))
        return best

    def _pairs(self, pool: Candidates, k: int) -> list[tuple[int, int]]:
        """Return, for each share of the loss, the two plans whose average has fewest changes.

        One plan meets the deadline, the other is no earlier.
        """
        time_s = self.time_s[k]
        fast = np.flatnonzero(pool.time_s <= time_s * (1 + TOLERANCE))
        slow = np.flatnonzero(pool.time_s >= time_s)
        if not len(slow):
            slow = fast
        apart = np.maximum(pool.time_s[slow] - pool.time_s[fast][:, None], TOLERANCE * time_s)
        share = np.clip((time_s - pool.time_s[fast])[:, None] / apart, 0.0, 1.0)
        energy = _between(pool.energy_j, fast, slow, share)
        changes = _between(pool.changes.astype(np.float64), fast, slow, share)
        pairs = []
        for share_of_loss in _LOSS_SHARES:
            within = energy <= self.limit_j[k] - (1.0 - share_of_loss) * self.loss_j[k]
            at = int(np.where(within, changes, np.inf).argmin())
            pairs.append((int(fast[at // len(slow)]), int(slow[at % len(slow)])))
        return pairs


def _between(values: Floats, fast: Index, slow: Index, share: Floats) -> Floats:
    mean: Floats = values[fast][:, None] * (1.0 - share) + values[slow] * share
    return mean


def _splices(pool: Candidates, fast: Index, slow: Index, time_s: Floats) -> tuple[Index, Index]:
    """Return two spliced plans for each pair: slow first, and fast first."""
    a, b = pool.select(fast), pool.select(slow)
    behind = np.maximum(time_s - a.time_s, 0.0)[:, None]
    ahead = np.maximum(b.time_s - time_s, 0.0)[:, None]
    return (
        np.where(b.end_s <= a.end_s + behind, b.plan, a.plan),
        np.where(a.start_s >= b.start_s - ahead, a.plan, b.plan),
    )


def _lower_hull(time_s: Floats, value: Floats) -> Index:
    """Return the corners of the lower convex hull, as far as values decrease with time."""
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
