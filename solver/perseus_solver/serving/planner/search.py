"""The cheapest numbers of replicas of one pool, epoch by epoch, with a proof.

Without a minimum up time the pool is a dynamic programme over (variant, replicas). Its transitions need no table of all
pairs: stopping costs nothing, so the best of fewer replicas is a running minimum from below; each start costs the same,
so the best of more is one from above, of costs with the starts added. An epoch takes work in proportion to its states,
whatever the curves look like.

What that programme says of the rest of the day is never too much when replicas must also stay up. So it guides a search
(A*) over (variant, replicas, recent starts) that is exact: what it takes up first at the end of the day is the optimum,
and hardly anything else is looked at where the minimum up time does not bind. The search is bounded; where it is
stopped, the least of what it has still to look at is a bound of every plan.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from perseus_solver.kinds import Floats
from perseus_solver.serving.planner.costs import PoolCosts

MOST_EXPANDED: Final = 3_000
"""States that one search looks at: a second, at most."""
_SAME: Final = 1e-12
"""Relative difference below which costs are the same."""


class State(NamedTuple):
    """What serves a pool in an epoch."""

    variant: int
    replicas: int
    recent: tuple[int, ...] = ()
    """Started for this epoch, for the one before, …: as many as a minimum up time still binds."""

    @property
    def bound_up(self) -> int:
        """Replicas that may not stop yet."""
        return sum(self.recent)


@dataclass(frozen=True, slots=True)
class Path:
    """A pool's plan.

    Attributes:
        states: by epoch; empty: there is none.
        cost: of the states and of their starts; infinite: there is none.
        bound: no path costs less.
        expanded: states that the search looked at.
    """

    states: tuple[State, ...]
    cost: float
    bound: float
    expanded: int = 0


def to_go(costs: PoolCosts) -> Floats:
    """Return what an epoch and all later ones cost at least, without a minimum up time.

    Args:
        costs: of the pool.

    Returns:
        float[epochs + 1, variants, replicas + 1]: the rest of the day from an epoch on, after so many replicas in the
        epoch before.
    """
    epochs, variants, states = costs.run.shape
    rest = np.zeros((epochs + 1, variants, states))
    for epoch in reversed(range(epochs)):
        total = costs.run[epoch] + rest[epoch + 1]
        starts = costs.start[epoch][:, None] * costs.counts
        fewer = np.minimum.accumulate(total, axis=1)
        more = np.minimum.accumulate((total + starts)[:, ::-1], axis=1)[:, ::-1] - starts
        rest[epoch] = np.minimum(np.minimum(fewer, more), (total + starts).min())
    return rest


def least(costs: PoolCosts, room: Floats | None = None, most_expanded: int = MOST_EXPANDED) -> Path:
    """Return the cheapest path of a pool.

    Args:
        costs: of the pool.
        room: float[epochs], GPUs that the pool may have; None: any number.
        most_expanded: states that are looked at; with fewer the path may not be the best, and its bound says so.
    """
    return _Search(costs, room).solve(most_expanded)


def relaxed(costs: PoolCosts) -> tuple[Path, Floats]:
    """Return the path that is cheapest without a minimum up time, and GPUs that it has in each epoch.

    Its cost bounds every path of the pool.
    """
    search = _Search(costs, None)
    states = search.dive(bound=False)
    return Path(tuple(states), search.first, search.first), gpus_of(costs, states)


def gpus_of(costs: PoolCosts, states: list[State] | tuple[State, ...]) -> Floats:
    """Return the GPUs that states have in each epoch, those that start for the next one included."""
    used = np.array([costs.gpus[state.variant] * state.replicas for state in states], float)
    for epoch in range(1, len(states)):
        used[epoch - 1] += costs.gpus[states[epoch].variant] * started(states[epoch - 1], states[epoch])
    return used


def started(before: State, after: State) -> int:
    """Return how many replicas must start between two states."""
    kept = before.replicas if before.variant == after.variant else 0
    return max(0, after.replicas - kept)


class _Search:
    def __init__(self, costs: PoolCosts, room: Floats | None) -> None:
        self._costs, self._room = costs, room
        self._rest = to_go(costs)
        # What ran before the plan has served long enough to be stopped.
        self._origin = origin(costs)._replace(recent=(0,) * (costs.min_up - 1))
        self.first = float(self._rest[0, self._origin.variant, self._origin.replicas])

    def solve(self, most_expanded: int) -> Path:
        """Search, with the path of a dive as what is to be beaten."""
        if not math.isfinite(self.first):
            return Path((), math.inf, math.inf)
        best = self.dive()
        cost = self._cost(best) if best else math.inf
        if cost <= self.first * (1.0 + _SAME):
            return Path(tuple(best), cost, min(self.first, cost))
        return self._improved(best, cost, most_expanded)

    def dive(self, *, bound: bool = True) -> list[State]:
        """Return the path that takes in each epoch what looks best then; empty: it ends where no load is carried.

        Args:
            bound: whether replicas that were started must stay up.
        """
        state, states = self._origin, list[State]()
        for epoch in range(len(self._costs.run)):
            total = self._totals(epoch, state if bound else state._replace(recent=()))
            place = int(np.argmin(total))
            if not math.isfinite(total.flat[place]):
                return []
            state = self._after(state, *divmod(place, total.shape[1]))
            states.append(state)
        return states

    def _improved(self, best: list[State], cost: float, most_expanded: int) -> Path:
        order, epochs = count(), len(self._costs.run)
        reached: dict[tuple[int, State], float] = {(0, self._origin): 0.0}
        parents: dict[tuple[int, State], State] = {}
        heap = [(self.first, 0, next(order), self._origin)]
        expanded, bound = 0, cost
        while heap:
            least_cost, minus_epoch, _, state = heapq.heappop(heap)
            epoch = -minus_epoch
            if least_cost >= cost * (1.0 - _SAME) or expanded == most_expanded:
                bound = min(cost, least_cost)
                break
            if epoch == epochs:
                best, cost = self._traced(parents, state), least_cost
                bound = cost
                break
            spent = reached[epoch, state]
            expanded += 1
            total = self._totals(epoch, state)
            for place in np.flatnonzero(spent + total < cost * (1.0 - _SAME)):
                variant, replicas = divmod(int(place), total.shape[1])
                after = self._after(state, variant, replicas)
                paid = spent + float(total.flat[place] - self._rest[epoch + 1, variant, replicas])
                if paid < reached.get((epoch + 1, after), math.inf):
                    reached[epoch + 1, after] = paid
                    parents[epoch + 1, after] = state
                    heapq.heappush(heap, (spent + float(total.flat[place]), -epoch - 1, next(order), after))
        return Path(tuple(best), cost, bound, expanded)

    def _totals(self, epoch: int, state: State) -> Floats:
        """Return float[variants, replicas + 1]: cost of each next state and of the rest; infinite: not permitted."""
        costs, counts = self._costs, self._costs.counts
        starts = np.tile(counts, (len(costs.gpus), 1))
        starts[state.variant] = np.maximum(0, counts - state.replicas)
        total: Floats = costs.run[epoch] + self._rest[epoch + 1] + costs.start[epoch][:, None] * starts
        if up := state.bound_up:
            total[np.arange(len(costs.gpus)) != state.variant] = np.inf
            total[state.variant, :up] = np.inf
        if self._room is not None:
            total[costs.gpus[:, None] * counts > self._room[epoch] + 1e-9] = np.inf
            if epoch:
                serving = costs.gpus[state.variant] * state.replicas
                total[serving + costs.gpus[:, None] * starts > self._room[epoch - 1] + 1e-9] = np.inf
        return total

    def _after(self, state: State, variant: int, replicas: int) -> State:
        recent = state.recent
        if recent:
            recent = (started(state, State(variant, replicas)), *recent[:-1])
        return State(variant, replicas, recent)

    def _cost(self, states: list[State]) -> float:
        return path_cost(self._costs, self._origin, states)

    def _traced(self, parents: dict[tuple[int, State], State], last: State) -> list[State]:
        states = [last]
        for epoch in range(len(self._costs.run), 1, -1):
            states.append(parents[epoch, states[-1]])
        return states[::-1]


def path_cost(costs: PoolCosts, before: State, states: list[State] | tuple[State, ...]) -> float:
    """Return what states cost, with their starts, after what ran before."""
    total = 0.0
    for epoch, state in enumerate(states):
        total += float(costs.run[epoch, state.variant, state.replicas])
        total += float(costs.start[epoch, state.variant]) * started(before, state)
        before = state
    return total


def origin(costs: PoolCosts) -> State:
    """Return what runs before the first epoch."""
    variant = int(np.argmax(costs.running))
    return State(variant, int(costs.running[variant]))
