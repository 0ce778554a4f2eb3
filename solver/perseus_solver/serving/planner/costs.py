"""What it costs to run so many replicas of each variant of a pool in each epoch, over all clocks.

A clock can be changed within a tenth of a second, so clocks do not couple epochs: for a number of replicas the cheapest
clock that carries their load is taken here, once. What is left to be searched are numbers of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.serving.planner.problem import JOULES_OF_A_KWH, PlanRequest, PoolLoad, Variant


@dataclass(frozen=True, slots=True)
class PoolCosts:
    """A pool's problem, without its clocks.

    Attributes:
        run: float[epochs, variants, replicas + 1], cost of an epoch; infinite: the load is not carried.
        start: float[epochs, variants], cost of one replica that is started in the epoch before and serves from this on.
        gpus: int[variants], of a replica.
        running: replicas of each variant before the first epoch.
        min_up: epochs that a replica serves at least.
        point: int[epochs, variants, replicas + 1], the operating point of least cost.
        watts: float, as ``point``: what all replicas draw.
    """

    run: Floats
    start: Floats
    gpus: Index
    running: Index
    min_up: int
    point: Index
    watts: Floats

    @property
    def counts(self) -> Index:
        """0, 1, … up to the most replicas."""
        return np.arange(self.run.shape[2])

    def changed(self, run: Floats, start: Floats) -> PoolCosts:
        """Return the problem with other costs."""
        return replace(self, run=run, start=start)

    def priced(self, prices: Floats) -> PoolCosts:
        """Return the problem in which each GPU costs so much more: float[epochs]."""
        # What starts for the first epoch has its GPUs before the plan begins, where nothing limits them.
        before = np.concatenate([[0.0], prices[:-1]])
        each = self.gpus[:, None] * self.counts
        return self.changed(self.run + prices[:, None, None] * each, self.start + before[:, None] * self.gpus)

    def within(self, room: Floats) -> PoolCosts:
        """Return the problem with so many GPUs in each epoch."""
        return self.changed(np.where(self._beyond(room) > 1e-9, np.inf, self.run), self.start)

    def pressed(self, room: Floats, price: float) -> PoolCosts:
        """Return the problem in which each GPU beyond so many has a price."""
        return self.changed(self.run + price * self._beyond(room), self.start)

    def _beyond(self, room: Floats) -> Floats:
        # Replicas that start have their GPUs in the epoch before, so their number must fit into both.
        both = np.minimum(room, np.concatenate([room[:1], room[:-1]]))
        beyond: Floats = np.maximum(0.0, self.gpus[:, None] * self.counts - both[:, None, None])
        return beyond


def pool_costs(request: PlanRequest, pool: PoolLoad) -> PoolCosts:
    """Return the costs of a pool."""
    epochs, most = request.epochs, max(request.most_replicas(pool, one) for one in pool.variants)
    factor = np.array([request.tariff.factor(epoch) for epoch in range(epochs)]) / JOULES_OF_A_KWH
    per_gpu_s = request.tariff.per_gpu_hour / 3600.0
    counts, gpus = np.arange(most + 1), np.array([one.gpus for one in pool.variants])
    watts = np.full((epochs, len(pool.variants), most + 1), np.inf)
    point = np.zeros(watts.shape, dtype=np.intp)
    for place, variant in enumerate(pool.variants):
        watts[:, place], point[:, place] = _least_watts(request, pool, variant, counts)
    carried = np.isfinite(watts)
    run = np.where(carried, watts, 0.0) * request.epoch_s * factor[:, None, None]
    run = np.where(carried, run + per_gpu_s * request.epoch_s * gpus[:, None] * counts, np.inf)
    before = np.concatenate([factor[:1], factor[:-1]])
    start_j, start_s = (np.array([getattr(one, name) for one in pool.variants]) for name in ("start_j", "start_s"))
    start = before[:, None] * start_j + per_gpu_s * gpus * start_s
    running = np.array(pool.running or (0,) * len(gpus), dtype=np.intp)
    return PoolCosts(run, start, gpus, running, request.min_up, point, watts)


def _least_watts(request: PlanRequest, pool: PoolLoad, variant: Variant, counts: Index) -> tuple[Floats, Index]:
    """Return what replicas draw at the best point, float[epochs, counts], and which point that is."""
    expected = np.array(pool.expected)[:, None]
    share = expected / np.maximum(counts, 1)
    carried_by = [point.carried_by_each(counts) for point in variant.points]
    drawn = np.stack(
        [
            np.where(expected <= most * (1.0 + 1e-9), np.interp(share, point.loads, point.watts), np.inf)
            for point, most in zip(variant.points, carried_by, strict=True)
        ]
    )
    chosen = np.argmin(drawn, axis=0)
    each = np.take_along_axis(drawn, chosen[None], axis=0)[0]
    upper = np.array(pool.upper)[:, None]
    fewest = np.searchsorted(np.max(carried_by, axis=0), upper * (1.0 - 1e-9)) + request.spare * (upper > 0.0)
    carried = (counts >= fewest) & (counts <= request.most_replicas(pool, variant)) & np.isfinite(each)
    return np.where(carried, counts * np.where(carried, each, 0.0), np.inf), chosen
