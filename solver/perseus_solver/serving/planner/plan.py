"""Replicas, parallelism and clocks of all pools for a day, with a bound on what any plan could save beyond.

Pools share nothing but GPUs. Where there are enough, each is searched by itself, and the plan is the best there is.
Where there are not, each GPU gets a price in each epoch at which pools want no more than there are. At any prices, the
pools' cheapest paths less the price of all GPUs cost no more than the best plan (Lagrange): the highest such sum is the
bound. Plans come from the other side: one pool after another takes the best of what the others leave, until none finds
a better one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perseus_solver.errors import SolverError
from perseus_solver.kinds import Floats
from perseus_solver.serving.planner.costs import PoolCosts, pool_costs
from perseus_solver.serving.planner.problem import PlanRequest, PoolChoice, PoolLoad, ReplicaPlan
from perseus_solver.serving.planner.search import Path, gpus_of, least, origin, relaxed, started

_ROUNDS: Final = 80
"""Of prices: twice as many move the bound of the tests' problems by less than a thousandth."""
_SETTLING: Final = 100
"""States that a search looks at while pools share GPUs."""
_PASSES: Final = 4
"""Over all pools, at most; the second seldom finds anything."""
_PRESSES: Final = 24
"""Doublings of the price of a GPU that is not there: from a mean GPU's to more than anything costs."""
_ENOUGH: Final = 1e-4
"""Gap at which prices are searched no longer."""


class TooFewGpus(SolverError):
    """There are fewer GPUs than the load needs, or than was found a plan for; the message says which."""


@dataclass(frozen=True, slots=True)
class _Bound:
    cost: float
    prices: Floats


def plan(request: PlanRequest) -> ReplicaPlan:
    """Return the plan of least cost that is found, and its bound.

    Args:
        request: pools, load and tariff.

    Returns:
        The plan; without a limit of GPUs, and where the search of no pool is cut short, the best there is.

    Raises:
        TooFewGpus: they do not suffice.

    >>> from perseus_solver.serving.planner.problem import OperatingPoint, Variant
    >>> points = (OperatingPoint(900, (0.0, 2.0), (500.0, 900.0)), OperatingPoint(1980, (0.0, 3.0), (500.0, 1800.0)))
    >>> pool = PoolLoad("chat", (Variant(4, points, start_j=2e5),), expected=(1.0, 5.0), upper=(1.5, 5.5))
    >>> done = plan(PlanRequest((pool,), epoch_s=3600.0))
    >>> [(choice.replicas, choice.clock_mhz) for choice in done.choices["chat"]], round(done.gap, 6)
    ([(2, 900), (3, 900)], 0.0)
    """
    costs = [pool_costs(request, pool) for pool in request.pools]
    paths = [least(one) for one in costs]
    bound = math.fsum(path.bound for path in paths)
    expanded = sum(path.expanded for path in paths)
    if request.gpus is not None and _gpus(costs, paths).max() > request.gpus:
        _check_fewest(request, costs)
        paths, bound = _within(request, costs, bound)
    choices = {
        pool.name: _choices(request, pool, one, path)
        for pool, one, path in zip(request.pools, costs, paths, strict=True)
    }
    return ReplicaPlan(choices, math.fsum(path.cost for path in paths), bound, expanded)


def _gpus(costs: Sequence[PoolCosts], paths: Sequence[Path]) -> Floats:
    """Return the GPUs of all paths in each epoch."""
    used: Floats = np.sum([gpus_of(one, path.states) for one, path in zip(costs, paths, strict=True)], axis=0)
    return used


def _check_fewest(request: PlanRequest, costs: Sequence[PoolCosts]) -> None:
    needed = np.sum([_fewest_gpus(one) for one in costs], axis=0)
    epoch = int(np.argmax(needed))
    if needed[epoch] > (request.gpus or 0):
        raise TooFewGpus(
            f"the load of epoch {epoch} needs {needed[epoch]:.0f} GPUs at least, and there are {request.gpus}: "
            "give more GPUs, less headroom or fewer pools"
        )


def _fewest_gpus(costs: PoolCosts) -> Floats:
    """Return the GPUs that carry each epoch's load at least."""
    gpus = np.where(np.isfinite(costs.run), costs.gpus[:, None] * costs.counts, np.inf)
    fewest: Floats = gpus.min(axis=(1, 2))
    return fewest


def _within(request: PlanRequest, costs: Sequence[PoolCosts], free: float) -> tuple[list[Path], float]:
    """Return paths that share the GPUs, and a bound of all such paths.

    Args:
        request: with a limit of GPUs.
        costs: of each pool.
        free: the bound without the limit.
    """
    gpus = float(request.gpus or 0)
    target = 1.02 * free  # what bounds are stepped towards, until there is a plan
    best: list[Path] = []
    bound = _Bound(free, np.zeros(request.epochs))
    for attempt in range(2):
        bound = _priced(costs, gpus, bound, target)
        paths = _shared(costs, gpus, bound.prices)
        if paths and (not best or _total(paths) < _total(best)):
            best, target = paths, _total(paths)
        if best and _total(best) <= bound.cost * (1.0 + _ENOUGH):
            break
        if not best:
            target *= 1.0 + 0.1 * (attempt + 1)
    if not best:
        raise TooFewGpus(
            f"no plan was found for {request.gpus} GPUs, though each epoch by itself has enough: starts need GPUs in "
            "the epoch before; give more GPUs, less headroom or fewer pools"
        )
    return best, min(bound.cost, _total(best))


def _total(paths: Sequence[Path]) -> float:
    return math.fsum(path.cost for path in paths)


def _priced(costs: Sequence[PoolCosts], gpus: float, best: _Bound, target: float) -> _Bound:
    """Return the highest bound that is found, and its prices, by steps along what pools want beyond what there is."""
    prices, stride, since = best.prices, 1.0, 0
    for _ in range(_ROUNDS):
        done = [relaxed(one.priced(prices)) for one in costs]
        wanted = np.sum([used for _, used in done], axis=0) - gpus
        value = math.fsum(path.cost for path, _ in done) - gpus * float(prices.sum())
        if value > best.cost:
            best, since = _Bound(value, prices), 0
        else:
            since += 1
        if since == 5:
            stride, since, prices = stride / 2.0, 0, best.prices
            continue
        ahead = np.where((prices > 0.0) | (wanted > 0.0), wanted, 0.0)
        if not ahead.any() or value >= target:
            break
        prices = np.maximum(0.0, prices + stride * (target - value) / float(ahead @ ahead) * ahead)
    return best


def _shared(costs: Sequence[PoolCosts], gpus: float, prices: Floats) -> list[Path]:
    """Return paths that share the GPUs; empty: none were found.

    They begin at prices of all GPUs. While there are too few, each pool in turn answers to a rising price of those that
    it has beyond what the others leave; then each takes the best of what the others leave.
    """
    paths = [least(one.priced(prices), most_expanded=0) for one in costs]
    used = [gpus_of(one, path.states) for one, path in zip(costs, paths, strict=True)]
    price = sum(path.cost for path in paths) / max(1.0, float(np.sum(used)))
    for _ in range(_PRESSES):
        if np.sum(used, axis=0).max() <= gpus + 1e-9:
            return _settled(costs, gpus, used)
        for place, one in enumerate(costs):
            room = gpus - np.sum(used, axis=0) + used[place]
            used[place] = gpus_of(one, least(one.pressed(room, price), most_expanded=0).states)
        price *= 2.0
    return []


def _settled(costs: Sequence[PoolCosts], gpus: float, used: list[Floats]) -> list[Path]:
    """Return paths of which none alone could be better, from GPUs that suffice."""
    paths: list[Path] = [Path((), math.inf, 0.0)] * len(costs)
    before = math.inf
    for _ in range(_PASSES):
        for place, one in enumerate(costs):
            room = gpus - np.sum(used, axis=0) + used[place]
            path = least(one, room, most_expanded=_SETTLING)
            if path.cost < paths[place].cost:
                paths[place], used[place] = path, gpus_of(one, path.states)
            elif not paths[place].states:
                return []
        now = _total(paths)
        if now >= before * (1.0 - 1e-9):
            break
        before = now
    return paths


def _choices(request: PlanRequest, pool: PoolLoad, costs: PoolCosts, path: Path) -> tuple[PoolChoice, ...]:
    before, choices = origin(costs), []
    for epoch, state in enumerate(path.states):
        variant = pool.variants[state.variant]
        at = epoch, state.variant, state.replicas
        starts = started(before, state)
        choices.append(
            PoolChoice(
                gpus=variant.gpus if state.replicas else 0,
                replicas=state.replicas,
                starts=starts,
                clock_mhz=variant.points[costs.point[at]].clock_mhz if state.replicas else 0,
                joules=float(costs.watts[at]) * request.epoch_s + variant.start_j * starts,
            )
        )
        before = state
    return tuple(choices)
