"""Policies that size pools, side by side on the same weeks: what serves each pool in each minute.

All of them know the limits and the fitted steps of the engines, and the classes of requests without an error. What they
know of the load differs: the week itself (hindsight, and the one number that is provisioned for a peak), the weeks
before, or what has been seen until now. No policy keeps spare replicas unless it is asked for.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
from tests.bench.serving_pools.fluid import FluidPool
from tests.bench.serving_pools.service import WEEK_MIN, Service

from perseus_sim.serving.canary import complete_fit, ladder
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.machine_steps import BOOST_DELAY_S, BOOST_MHZ
from perseus_solver.kinds import Floats, Index
from perseus_solver.serving.planner import (
    FittedSteps,
    Forecaster,
    LatencyLimits,
    OperatingPoint,
    PlanRequest,
    PoolLoad,
    ReplicaModel,
    RequestClass,
    Variant,
    plan,
)

EPOCH_MIN: Final = 15
AHEAD: Final = 16
"""Epochs that are planned at once: four hours, longer than any start takes to pay."""
START_S: Final = 420.0
"""A cold instance of a 70B model: six to eight minutes."""
PARALLEL: Final = (2, 4, 8)
RARE: Final = 0.02
"""Share of requests below which a class is served with the next longer one: a pool of its own would be idle."""
QUANTILE: Final = 0.985
"""Of the requests, those in epochs whose heaviest minute is to be borne. A week of another seed than the bench's says:
with 0.98 conversations get 98.7 %, and it costs 2 % less."""
BORNE: Final = 0.5
"""Attainment at which the planner's bound is a twentieth of first tokens late, and engines show a tenth."""

Pool = tuple[str, ...]
"""Classes that one pool serves."""


class ClockPolicy(enum.Enum):
    """How a policy sets clocks."""

    HIGHEST = "Highest"
    SINGLE = "Single"
    """One clock for all steps, every 195 MHz: DynamoLLM's."""
    LAW = "Law"
    """A floor, and a boost while prompts wait: the agent's."""


@dataclass(frozen=True)
class PoolSchedule:
    """What serves a pool.

    Attributes:
        gpus: int[minutes], of a replica.
        replicas: int[minutes], that serve.
        starts: of replicas, by their GPUs.
    """

    gpus: Index
    replicas: Index
    starts: dict[int, int]


@dataclass
class World:
    """A service on machines of one kind.

    Attributes:
        service: its requests.
        limits: what they were promised.
        machines: by GPUs of a replica.
    """

    service: Service
    limits: LatencyLimits
    machines: dict[int, Machine]
    _points: dict[tuple[Pool, int, ClockPolicy], dict[tuple[int, int], OperatingPoint]] = field(default_factory=dict)
    _fluids: dict[tuple[Pool, int, ClockPolicy], FluidPool] = field(default_factory=dict)

    @cached_property
    def fitted(self) -> dict[int, ReplicaModel]:
        """Replicas whose steps were fitted to what a canary shows, by their GPUs."""
        models = {}
        for gpus, machine in self.machines.items():
            result = complete_fit(machine)
            if result.models is None or result.watts is None:
                continue
            steps = FittedSteps(result.models.best, result.watts)
            models[gpus] = ReplicaModel(gpus, steps, machine.clocks_mhz[-1], machine.kv_capacity)
        return models

    def points(self, pool: Pool, gpus: int, clocks: ClockPolicy) -> dict[tuple[int, int], OperatingPoint]:
        """Return the operating points of a pool, by the clocks of steps without and with prompts.

        Args:
            pool: its classes.
            gpus: of a replica.
            clocks: that a policy sets.
        """
        key = pool, gpus, clocks
        if key not in self._points:
            requests, replica, machine = self.service.request_class(pool), self.fitted[gpus], self.machines[gpus]
            by_clocks: dict[tuple[int, int], OperatingPoint] = {}
            for low, high in _pairs(machine, replica, requests, clocks):
                points = replica.points(requests, self.limits, (low,), (high,)[: high > low])
                if len(points) == 1 + (high > low):
                    by_clocks[low, high] = points[-1]
            self._points[key] = by_clocks
        return self._points[key]

    def fluid(self, pool: Pool, gpus: int, clocks: ClockPolicy) -> FluidPool:
        """Return the replicas that serve a pool."""
        key = pool, gpus, clocks
        if key not in self._fluids:
            requests, points = self.service.request_class(pool), self.points(pool, gpus, clocks)
            self._fluids[key] = FluidPool(self.machines[gpus], requests, self.limits, points)
        return self._fluids[key]

    def variants(self, pool: Pool, parallel: Sequence[int], clocks: ClockPolicy) -> tuple[Variant, ...]:
        """Return what may serve a pool, of those that keep the limits at all."""
        points = {gpus: tuple(self.points(pool, gpus, clocks).values()) for gpus in parallel}
        return tuple(Variant(gpus, kept, START_S, self.start_j(gpus)) for gpus, kept in points.items() if kept)

    def levels(self, pool: Pool, variant: Variant) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return what 1, 2, … replicas carry within the limits, and bear before a tenth of the requests are late."""
        counts = np.arange(1, 65)
        carried = np.max([point.carried_by_each(counts) for point in variant.points], axis=0)
        requests, highest_mhz = self.service.request_class(pool), self.machines[variant.gpus].clocks_mhz[-1]
        limits = replace(self.limits, attainment=BORNE)
        (point,) = self.fitted[variant.gpus].points(requests, limits, (highest_mhz,))
        return tuple(carried.tolist()), tuple(np.maximum(carried, point.carried_by_each(counts)).tolist())

    def start_j(self, gpus: int) -> float:
        """Return what a start draws: GPUs at their resting watts, at the highest clock."""
        machine = self.machines[gpus]
        return START_S * machine.costs(machine.clocks_mhz[-1]).idle_w


def _pairs(
    machine: Machine, replica: ReplicaModel, requests: RequestClass, clocks: ClockPolicy
) -> list[tuple[int, int]]:
    """Return the clocks that a policy sets, of steps without and with prompts."""
    highest_mhz = machine.clocks_mhz[-1]
    if clocks is ClockPolicy.HIGHEST:
        return [(highest_mhz, highest_mhz)]
    if clocks is ClockPolicy.SINGLE:
        return [(mhz, mhz) for mhz in machine.clocks_mhz if mhz >= 795 and (highest_mhz - mhz) % 195 == 0]
    floors = [*ladder(machine)[::2], highest_mhz]
    return [(low, replica.raised_mhz(requests, low, BOOST_MHZ, BOOST_DELAY_S)) for low in floors]


def merged(service: Service) -> tuple[Pool, ...]:
    """Return DynamoLLM's pools: a class each, rare ones with the next longer one."""
    pools: list[Pool] = []
    waiting: list[str] = []
    for name in sorted(service.shares, key=lambda one: ["SML".index(letter) for letter in one]):
        waiting.append(name)
        if sum(service.shares[one] for one in waiting) >= RARE:
            pools.append(tuple(waiting))
            waiting = []
    if waiting:
        pools[-1] = (*pools[-1], *waiting)
    return tuple(pools)


def splits(service: Service) -> dict[str, tuple[Pool, ...]]:
    """Return the ways to split a service into pools that are compared."""
    names = list(service.shares)
    by_prompt = tuple(tuple(name for name in names if name[0] == letter) for letter in "SML")
    by_output = tuple(tuple(name for name in names if name[1] == letter) for letter in "SML")
    return {
        "one pool": (tuple(names),),
        "by prompt": tuple(pool for pool in by_prompt if pool),
        "by answer": tuple(pool for pool in by_output if pool),
        "by both": merged(service),
    }


def pool_load(loads: dict[str, Floats], pool: Pool) -> Floats:
    """Return the load of a pool, float[minutes]."""
    total: Floats = np.sum([loads[name] for name in pool], axis=0)
    return total


def epochs_of(load: Floats) -> tuple[Floats, Floats]:
    """Return the mean and the heaviest minute of each epoch."""
    by_epoch = load.reshape(-1, EPOCH_MIN)
    return by_epoch.mean(axis=1), by_epoch.max(axis=1)


def peak(world: World, load: Floats, pool: Pool, gpus: int) -> PoolSchedule:
    """Return as many replicas, all the time, as the heaviest minute needs: what is provisioned for a peak."""
    (variant,) = world.variants(pool, (gpus,), ClockPolicy.HIGHEST)
    count = variant.fewest(float(load.max()))
    return PoolSchedule(np.full(len(load), gpus), np.full(len(load), count), {})


def hindsight(
    world: World,
    loads: dict[str, Floats],
    pools: Sequence[Pool],
    parallel: Sequence[int],
    clocks: ClockPolicy,
    *,
    spare: int = 0,
) -> tuple[dict[Pool, PoolSchedule], float]:
    """Return the plan of least energy with the load known, and the share by which there may be a better one."""
    asked = []
    for pool in pools:
        mean, heaviest = epochs_of(pool_load(loads, pool))
        variants = world.variants(pool, parallel, clocks)
        asked.append(PoolLoad("/".join(pool), variants, tuple(mean.tolist()), tuple(heaviest.tolist())))
    done = plan(PlanRequest(tuple(asked), 60.0 * EPOCH_MIN, spare=spare))
    schedules = {}
    for pool, one in zip(pools, asked, strict=True):
        choices = done.choices[one.name]
        starts: dict[int, int] = {}
        for choice in choices[1:]:
            starts[choice.gpus] = starts.get(choice.gpus, 0) + choice.starts
        schedules[pool] = _by_minute([(choice.gpus, choice.replicas) for choice in choices], starts)
    return schedules, done.gap


def forecast(
    world: World,
    loads: dict[str, Floats],
    pools: Sequence[Pool],
    parallel: Sequence[int],
    clocks: ClockPolicy,
    *,
    quantile: float = QUANTILE,
    spare: int = 0,
    watch: Callable[[Pool, Forecaster], object] = lambda _pool, _forecaster: None,
) -> dict[Pool, PoolSchedule]:
    """Return what the planner orders, epoch after epoch, from forecasts; the last week of the loads counts.

    What starts is ordered an epoch ahead, so a plan is of the epoch after the one that begins.

    Args:
        world: the service.
        loads: of each class, weeks of it.
        pools: its classes.
        parallel: GPUs of a replica to choose from.
        clocks: to choose from.
        quantile: of the requests, those in epochs whose heaviest minute is to be borne: the headroom.
        spare: replicas of each pool that may be lost.
        watch: gets the forecaster of each pool in the end.
    """
    means, peaks, forecasters, variants, levels = {}, {}, {}, {}, {}
    for pool in pools:
        means[pool], peaks[pool] = epochs_of(pool_load(loads, pool))
        forecasters[pool] = Forecaster(60.0 * EPOCH_MIN, quantile)
        variants[pool] = world.variants(pool, parallel, clocks)
        levels[pool] = {one.gpus: world.levels(pool, one) for one in variants[pool]}
    count = len(next(iter(means.values())))
    week = WEEK_MIN // EPOCH_MIN
    chosen: dict[Pool, list[tuple[int, int]]] = {pool: [] for pool in pools}
    starts: dict[Pool, dict[int, int]] = {pool: {} for pool in pools}
    for epoch in range(count):  # those before are seen, this one begins
        asked = []
        for pool in pools:
            serving = chosen[pool][-1] if chosen[pool] else (0, 0)
            if epoch < count - 2 * week:  # no forecast of so long ago would count any more
                continue
            forecasts = forecasters[pool].forecast(1 + AHEAD, *levels[pool].get(serving[0], ()))
            if epoch < count - week - 1:
                continue
            running = tuple(serving[1] if one.gpus == serving[0] else 0 for one in variants[pool])
            expected, upper = zip(*((one.expected, one.upper) for one in forecasts[1:]), strict=True)
            asked.append(PoolLoad("/".join(pool), variants[pool], expected, upper, running))
        if asked and epoch < count - 1:
            choices = plan(PlanRequest(tuple(asked), 60.0 * EPOCH_MIN, spare=spare)).choices
            for pool, one in zip(pools, asked, strict=True):
                first = choices[one.name][0]
                if chosen[pool]:
                    starts[pool][first.gpus] = starts[pool].get(first.gpus, 0) + first.starts
                chosen[pool].append((first.gpus, first.replicas))
        for pool in pools:
            forecasters[pool].seen(float(means[pool][epoch]), float(peaks[pool][epoch]))
    for pool in pools:
        watch(pool, forecasters[pool])
    return {pool: _by_minute(chosen[pool], starts[pool]) for pool in pools}


def dynamollm(world: World, loads: dict[str, Floats]) -> dict[Pool, PoolSchedule]:
    """Return what DynamoLLM's managers order, as the paper describes them, in the last week of the loads.

    The cluster manager gives each pool, every half hour, the GPUs for the heaviest load of the same half hour of the
    weeks before, in the parallelism of least energy. The pool manager, every five minutes, splits them into replicas of
    the parallelism that costs least at the load just seen. Both are as good as they can be: starts are in time, and
    another parallelism costs nothing.
    """
    schedules = {}
    for pool in merged(world.service):
        load = pool_load(loads, pool)
        week, before = load[-WEEK_MIN:], load[:-WEEK_MIN].reshape(-1, WEEK_MIN).max(axis=0)
        variants = world.variants(pool, PARALLEL, ClockPolicy.SINGLE)
        gpus, replicas = np.zeros((2, WEEK_MIN), dtype=np.intp)
        starts: dict[int, int] = {}
        given = 0
        for begin in range(0, WEEK_MIN, 30):
            heaviest = float(before[begin : begin + 30].max())
            best = min(variants, key=lambda one: _watts(one, one.fewest(heaviest), heaviest))
            now = best.gpus * best.fewest(heaviest)
            if begin and now > given:
                starts[best.gpus] = starts.get(best.gpus, 0) + -(-(now - given) // best.gpus)
            given = now
            for at in range(begin, begin + 30, 5):
                seen = float(week[max(0, at - 5) : max(5, at)].max())
                split = min(
                    (one for one in variants if given // one.gpus),
                    key=lambda one: (one.fewest(seen) > given // one.gpus, _watts(one, given // one.gpus, seen)),
                )
                gpus[at : at + 5], replicas[at : at + 5] = split.gpus, given // split.gpus
        schedules[pool] = PoolSchedule(gpus, replicas, starts)
    return schedules


def _watts(variant: Variant, replicas: int, load: float) -> float:
    """Return what replicas draw at the cheapest clock that carries a load, or at the most they carry."""
    kept = [point for point in variant.points if load <= point.carried_by(replicas) * (1.0 + 1e-9)]
    share = load / max(1, replicas)
    drawn = [float(np.interp(share, point.loads, point.watts)) for point in kept or variant.points]
    return replicas * (min(drawn) if kept else max(drawn))


def _by_minute(choices: Sequence[tuple[int, int]], starts: dict[int, int]) -> PoolSchedule:
    gpus, replicas = (np.repeat(np.array(column, dtype=np.intp), EPOCH_MIN) for column in zip(*choices, strict=True))
    return PoolSchedule(gpus, replicas, {size: count for size, count in starts.items() if count})


@dataclass(frozen=True)
class Week:
    """What came of a policy in a week.

    Attributes:
        joules: of all GPUs, starts included.
        attainment_percent: of the requests.
        gpu_hours: of GPUs that serve.
        starts: of replicas.
        churn_percent: epochs in which a pool's replicas change, of all pools' epochs.
        watts: float[minutes], of all GPUs.
    """

    joules: float
    attainment_percent: float
    gpu_hours: float
    starts: int
    churn_percent: float
    watts: Floats


def served(world: World, loads: dict[str, Floats], schedules: dict[Pool, PoolSchedule], clocks: ClockPolicy) -> Week:
    """Serve the last week of the loads as schedules say."""
    joules, requests, late, gpu_min, starts = 0.0, 0.0, 0.0, 0.0, 0
    watts, changed, epochs = np.zeros(WEEK_MIN), 0, 0
    for pool, schedule in schedules.items():
        load = pool_load(loads, pool)[-WEEK_MIN:]
        for gpus in np.unique(schedule.gpus[schedule.gpus > 0]):
            mask = schedule.gpus == gpus
            fluid = world.fluid(pool, int(gpus), clocks)
            done = fluid.serve(np.where(mask, load, 0.0), np.where(mask, schedule.replicas, 0))
            watts += done.joules / 60.0
            joules += float(done.joules.sum())
            late += float(done.late.sum())
        requests += 60.0 * float(load.sum())
        late += 60.0 * float(load[schedule.gpus == 0].sum())
        gpu_min += float((schedule.gpus * schedule.replicas).sum())
        joules += sum(count * world.start_j(gpus) for gpus, count in schedule.starts.items())
        starts += sum(schedule.starts.values())
        by_epoch = (schedule.gpus * 10_000 + schedule.replicas)[::EPOCH_MIN]
        changed += int((np.diff(by_epoch) != 0).sum())
        epochs += len(by_epoch) - 1
    return Week(joules, 100.0 * (1.0 - late / requests), gpu_min / 60.0, starts, 100.0 * changed / epochs, watts)
