"""The cheapest numbers of replicas of one pool, epoch by epoch, with a proof.

Without a minimum up time the pool is a dynamic programme over (variant, replicas). Its transitions need no table of all
pairs: stopping costs nothing, so the best of fewer replicas is a running minimum from below; each start costs the same,
so the best of more is one from above, of costs with the starts added. An epoch takes work in proportion to its states,
whatever the curves look like.

A minimum up time says that no more were started in the last epochs than serve now. Such a rule gets a price, too: each
start pays for the epochs in which it must stay, each replica that serves is paid for. What the programme then says of
the rest of the day is never too much (Lagrange), and for convex costs of one variant nothing is missing at the right
prices, since the rules are differences of sums. It guides a search (A*) over (variant, replicas, recent starts), which
is exact: what it takes up first at the end of the day is the optimum. The search is bounded; where it is stopped, the
least of what it has still to look at is a bound of every plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from perseus_solver.kinds import Floats
from perseus_solver.serving.planner.costs import PoolCosts

MOST_EXPANDED: Final = 2_000
"""States that one search looks at: half a second, at most."""
_ROUNDS: Final = 60
"""Of prices of staying up."""
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
    if room is not None:
        costs = costs.within(room)
    plain = _Search(costs, room, np.zeros(costs.run.shape[:2]))
    first = plain.path(plain.dive())
    if first.cost <= plain.first * (1.0 + _SAME) or not math.isfinite(plain.first):
        return Path(first.states, first.cost, min(plain.first, first.cost))
    guided, path = _guided(costs, room, first)
    return guided.improved(path, most_expanded) if most_expanded else path


def relaxed(costs: PoolCosts) -> tuple[Path, Floats]:
    """Return the path that is cheapest without a minimum up time, and GPUs that it has in each epoch.

    Its cost bounds every path of the pool.
    """
    search = _Search(costs, None, np.zeros(costs.run.shape[:2]))
    states = search.dive(bound=False)
    return Path(tuple(states), search.first, search.first), gpus_of(costs, states)


def gpus_of(costs: PoolCosts, states: Sequence[State]) -> Floats:
    """Return the GPUs that states have in each epoch, those that start for the next one included."""
    used = np.array([costs.gpus[state.variant] * state.replicas for state in states], float)
    for epoch in range(1, len(states)):
        used[epoch - 1] += costs.gpus[states[epoch].variant] * started(states[epoch - 1], states[epoch])
    return used


def started(before: State, after: State) -> int:
    """Return how many replicas must start between two states."""
    kept = before.replicas if before.variant == after.variant else 0
    return max(0, after.replicas - kept)


def origin(costs: PoolCosts) -> State:
    """Return what runs before the first epoch; it has served long enough to be stopped."""
    variant = int(np.argmax(costs.running))
    return State(variant, int(costs.running[variant]), (0,) * (costs.min_up - 1))


def path_cost(costs: PoolCosts, states: Sequence[State]) -> float:
    """Return what states cost, with their starts."""
    total, before = 0.0, origin(costs)
    for epoch, state in enumerate(states):
        total += float(costs.run[epoch, state.variant, state.replicas])
        total += float(costs.start[epoch, state.variant]) * started(before, state)
        before = state
    return total


def _guided(costs: PoolCosts, room: Floats | None, best: Path) -> tuple[_Search, Path]:
    """Return the search with the best prices of staying up that are found, and the best path on the way.

    Prices are stepped along what a path without the rules breaks, towards the cost of the best path.
    """
    prices, stride, since = np.zeros(costs.run.shape[:2]), 1.0, 0
    top = _Search(costs, room, prices)
    for _ in range(_ROUNDS):
        search = _Search(costs, room, prices)
        if search.first > top.first:
            top, since = search, 0
            path = search.path(search.dive())
            best = path if path.cost < best.cost else best
        else:
            since += 1
        if top.first >= best.cost * (1.0 - 1e-6):
            break
        if since == 4:
            stride, since, search = stride / 2.0, 0, top
        ahead = search.broken()
        ahead = np.where((search.prices > 0.0) | (ahead > 0.0), ahead, 0.0)
        if not ahead.any():
            break
        # Where no path is known yet, a bit above what is certain.
        aim = best.cost if math.isfinite(best.cost) else top.first + 0.05 * abs(top.first)
        step = stride * (aim - search.first) / float((ahead * ahead).sum())
        prices = np.maximum(0.0, search.prices + step * ahead)
    return top, best


class _Search:
    """A pool's states, and what the rest of the day costs at least from each of them.

    Args:
        costs: of the pool; infinite where GPUs do not suffice.
        room: float[epochs], GPUs that it may have.
        prices: float[epochs, variants], of a replica that must stay up.
    """

    def __init__(self, costs: PoolCosts, room: Floats | None, prices: Floats) -> None:
        self._costs, self._room, self.prices = costs, room, prices
        self._origin = origin(costs)
        epochs = len(costs.run)
        self._paid = np.concatenate([np.zeros((1, prices.shape[1])), np.cumsum(prices, axis=0)])
        ends = np.minimum(epochs, np.arange(epochs) + costs.min_up)
        self._priced = costs.changed(
            costs.run - prices[:, :, None] * costs.counts if prices.any() else costs.run,
            costs.start + self._paid[ends] - self._paid[:epochs],
        )
        self._rest = to_go(self._priced)
        self.first = float(self._rest[0, self._origin.variant, self._origin.replicas])

    def path(self, states: list[State]) -> Path:
        """Return states as a path, bounded by what the whole day costs at least."""
        cost = path_cost(self._costs, states) if states else math.inf
        return Path(tuple(states), cost, min(self.first, cost))

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

    def broken(self) -> Floats:
        """Return float[epochs, variants]: by how many replicas the path without the rules breaks each."""
        states, epochs = self.dive(bound=False), len(self._costs.run)
        serving, starts = np.zeros((2, epochs, len(self._costs.gpus)))
        before = self._origin
        for epoch, state in enumerate(states):
            serving[epoch, state.variant] = state.replicas
            starts[epoch, state.variant] = started(before, state)
            before = state
        total = np.concatenate([np.zeros((1, starts.shape[1])), np.cumsum(starts, axis=0)])
        since = np.maximum(0, np.arange(1, epochs + 1) - self._costs.min_up)
        broken: Floats = total[1:] - total[since] - serving
        return broken

    def improved(self, best: Path, most_expanded: int) -> Path:
        """Return the cheapest path, or the best that so many states show."""
        order, epochs, cost = count(), len(self._costs.run), best.cost
        reached: dict[tuple[int, State], float] = {(0, self._origin): 0.0}
        parents: dict[tuple[int, State], State] = {}
        heap = [(self.first, 0, next(order), self._origin)]
        expanded = 0
        while heap:
            least_cost, minus_epoch, _, state = heapq.heappop(heap)
            epoch = -minus_epoch
            if least_cost >= cost * (1.0 - 1e-9) or expanded == most_expanded:
                return Path(best.states, cost, min(cost, max(self.first, least_cost)), expanded)
            if epoch == epochs:
                return Path(self._traced(parents, state), reached[epoch, state], reached[epoch, state], expanded)
            expanded += 1
            spent, totals = reached[epoch, state], self._totals(epoch, state)
            for place in np.flatnonzero(spent + totals < cost * (1.0 - 1e-9)):
                after = self._after(state, *divmod(int(place), totals.shape[1]))
                paid = spent + float(self._costs.run[epoch, after.variant, after.replicas])
                paid += float(self._costs.start[epoch, after.variant]) * started(state, after)
                if paid < reached.get((epoch + 1, after), math.inf):
                    reached[epoch + 1, after] = paid
                    parents[epoch + 1, after] = state
                    at_least = paid + float(self._rest[epoch + 1, after.variant, after.replicas])
                    at_least += self._owed(epoch + 1, after)
                    heapq.heappush(heap, (at_least, -epoch - 1, next(order), after))
        return Path(best.states, cost, cost, expanded)

    def _totals(self, epoch: int, state: State) -> Floats:
        """Return float[variants, replicas + 1]: at least the cost of each next state and of the rest of the day.

        Infinite: not permitted.
        """
        costs, counts = self._costs, self._costs.counts
        starts = np.tile(counts, (len(costs.gpus), 1))
        starts[state.variant] = np.maximum(0, counts - state.replicas)
        total: Floats = self._priced.run[epoch] + self._rest[epoch + 1] + self._priced.start[epoch][:, None] * starts
        if up := state.bound_up:
            total[np.arange(len(costs.gpus)) != state.variant] = np.inf
            total[state.variant, :up] = np.inf
            total += self._owed(epoch, state)
        if self._room is not None and epoch:
            serving = costs.gpus[state.variant] * state.replicas
            others = np.arange(len(costs.gpus)) != state.variant
            overlap = serving + costs.gpus[:, None] * counts > self._room[epoch - 1] + 1e-9
            total[others[:, None] & overlap & (counts > 0)] = np.inf
        return total

    def _owed(self, epoch: int, state: State) -> float:
        """Return what recent starts still pay for staying up, from an epoch on."""
        paid, last = self._paid[:, state.variant], len(self._paid) - 1
        left = len(state.recent)
        return sum(
            number * float(paid[min(last, epoch + left - age)] - paid[epoch]) for age, number in enumerate(state.recent)
        )

    def _after(self, state: State, variant: int, replicas: int) -> State:
        recent = state.recent
        if recent:
            recent = (started(state, State(variant, replicas)), *recent[:-1])
        return State(variant, replicas, recent)

    def _traced(self, parents: dict[tuple[int, State], State], last: State) -> tuple[State, ...]:
        states = [last]
        for epoch in range(len(self._costs.run), 1, -1):
            states.append(parents[epoch, states[-1]])
        return tuple(states[::-1])
