"""Plans of replicas: what they keep, what they refuse, and that nothing cheaper was missed on small problems."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from perseus_solver.errors import InvalidProblem
from perseus_solver.serving.planner import (
    OperatingPoint,
    PlanRequest,
    PoolLoad,
    ReplicaPlan,
    Tariff,
    TooFewGpus,
    Variant,
    plan,
)

KWH = 3.6e6


def variant(gpus: int, draw: random.Random, start_j: float) -> Variant:
    """A variant with three clocks; faster ones carry more and draw more."""
    points = []
    for step in range(3):
        most = gpus * (1.0 + 0.5 * step) * draw.uniform(0.8, 1.2)
        idle_w, busy_w = 100.0 * gpus * (1 + 0.2 * step), 400.0 * gpus * (1 + 0.6 * step)
        watts = (idle_w, idle_w + 0.6 * busy_w, idle_w + busy_w)
        points.append(OperatingPoint(900 + 300 * step, (0.0, 0.5 * most, most), watts))
    return Variant(gpus, tuple(points), start_s=600.0, start_j=start_j)


def request(seed: int, pools: int = 1, **changes: object) -> PlanRequest:
    """A small problem: four epochs, two variants, one to three replicas."""
    draw = random.Random(seed)
    loads = []
    for number in range(pools):
        variants = tuple(variant(gpus, draw, draw.choice((0.0, 4e5, 3e6))) for gpus in (1, 2))
        expected = tuple(draw.choice((0.0, 0.5, 1.5, 3.0)) * draw.uniform(0.8, 1.2) for _ in range(4))
        loads.append(PoolLoad(f"pool-{number}", variants, expected, tuple(1.2 * load for load in expected)))
    return replace(PlanRequest(tuple(loads), 3600.0, spare=draw.choice((0, 1))), **changes)  # type: ignore[arg-type]


def days(asked: PlanRequest, pool: PoolLoad) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to serve a pool that keeps its load and its minimum up time: (variant, replicas) by epoch."""
    choices = []
    for upper in pool.upper:
        kept = [(0, 0)] if upper == 0.0 else []
        for place, one in enumerate(pool.variants):
            fewest = max(1, asked.fewest_replicas(one, upper))
            kept += [(place, count) for count in range(fewest, asked.most_replicas(pool, one) + 1)]
        choices.append(kept)
    for day in itertools.product(*choices):
        if all(starts <= serving for starts, serving in up_rules(asked, pool, day)):
            yield day


def up_rules(asked: PlanRequest, pool: PoolLoad, day: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """For each variant and epoch: replicas started in the last epochs, and those that serve."""
    for place in range(len(pool.variants)):
        serving = [0, *(count if chosen == place else 0 for chosen, count in day)]
        starts = [max(0, after - before) for before, after in itertools.pairwise(serving)]
        for epoch in range(len(day)):
            yield sum(starts[max(0, epoch + 1 - asked.min_up) : epoch + 1]), serving[epoch + 1]


def cost(asked: PlanRequest, pool: PoolLoad, day: tuple[tuple[int, int], ...]) -> float:
    """What a day costs, clock by clock."""
    total, before = 0.0, (0, 0)
    for epoch, (place, count) in enumerate(day):
        one = pool.variants[place]
        factor = asked.tariff.factor(epoch) / KWH
        share = pool.expected[epoch] / max(1, count)
        drawn = [count * watts_at(point, share) for point in one.points if share <= point.most_load]
        if not drawn:
            return math.inf
        starts = max(0, count - (before[1] if before[0] == place else 0))
        earlier = asked.tariff.factor(max(0, epoch - 1)) / KWH
        gpu_s = one.gpus * (count * asked.epoch_s + starts * one.start_s)
        total += min(drawn) * asked.epoch_s * factor + starts * one.start_j * earlier
        total += gpu_s * asked.tariff.per_gpu_hour / 3600.0
        before = place, count
    return total


def watts_at(point: OperatingPoint, load: float) -> float:
    """Between two loads in proportion."""
    for (low, low_w), (high, high_w) in itertools.pairwise(zip(point.loads, point.watts, strict=True)):
        if load <= high:
            return low_w + (high_w - low_w) * (load - low) / (high - low)
    return point.watts[-1]


def gpus_by_epoch(done: ReplicaPlan) -> list[int]:
    """GPUs that serve, and those that start for the next epoch."""
    pools = list(done.choices.values())
    used = [sum(day[epoch].gpus * day[epoch].replicas for day in pools) for epoch in range(len(pools[0]))]
    for epoch in range(len(used) - 1):
        used[epoch] += sum(day[epoch + 1].gpus * day[epoch + 1].starts for day in pools)
    return used


@pytest.mark.parametrize("min_up", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_cheaper_among_all_days(seed: int, min_up: int) -> None:
    asked = request(seed, min_up=min_up)
    done = plan(asked)
    pool = asked.pools[0]
    best = min(cost(asked, pool, day) for day in days(asked, pool))
    assert done.cost == pytest.approx(best, rel=1e-9)
    assert done.bound == pytest.approx(best, rel=1e-8)
    day = tuple(
        (0 if not one.gpus else [each.gpus for each in pool.variants].index(one.gpus), one.replicas)
        for one in done.choices["pool-0"]
    )
    assert day in set(days(asked, pool))
    assert cost(asked, pool, day) == pytest.approx(done.cost, rel=1e-9)


@pytest.mark.parametrize("tariff", [Tariff((0.1, 0.4, 0.4, 0.1)), Tariff(per_gpu_hour=2.0), Tariff((0.0,) * 4, 1.0)])
def test_money_is_least_where_money_is_asked_for(tariff: Tariff) -> None:
    for seed in range(6):
        asked = request(seed, tariff=tariff)
        best = min(cost(asked, asked.pools[0], day) for day in days(asked, asked.pools[0]))
        assert plan(asked).cost == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 7])
def test_with_few_gpus_the_bound_and_the_plan_enclose_the_best(seed: int) -> None:
    asked = request(seed, pools=2, min_up=1 + seed % 2)
    free = max(gpus_by_epoch(plan(asked)))
    least = min(
        (
            total
            for both in itertools.product(*(list(days(asked, pool)) for pool in asked.pools))
            if max(used(asked, both)) <= free - 1
            and (total := sum(cost(asked, pool, day) for pool, day in zip(asked.pools, both, strict=True))) < math.inf
        ),
        default=math.inf,
    )
    try:
        done = plan(replace(asked, gpus=free - 1))
    except TooFewGpus:
        assert least == math.inf
        return
    assert max(gpus_by_epoch(done)) <= free - 1
    assert done.bound <= least * (1 + 1e-9)
    assert least <= done.cost * (1 + 1e-9)
    assert done.gap <= 0.1


def used(asked: PlanRequest, both: tuple[tuple[tuple[int, int], ...], ...]) -> list[int]:
    """GPUs of two days in each epoch, those that start for the next one included."""
    found = [0] * asked.epochs
    for pool, day in zip(asked.pools, both, strict=True):
        for epoch, (place, count) in enumerate(day):
            found[epoch] += pool.variants[place].gpus * count
            if epoch:
                before = day[epoch - 1]
                kept = before[1] if before[0] == place else 0
                found[epoch - 1] += pool.variants[place].gpus * max(0, count - kept)
    return found


def test_what_already_runs_need_not_start() -> None:
    asked = request(3, spare=1)
    pool = replace(asked.pools[0], expected=(1.5,) * 4, upper=(1.8,) * 4)
    cold = plan(replace(asked, pools=(pool,)))
    first = cold.choices["pool-0"][0]
    running = tuple(first.replicas if one.gpus == first.gpus else 0 for one in pool.variants)
    warm = plan(replace(asked, pools=(replace(pool, running=running),)))
    assert warm.choices["pool-0"][0].starts == 0
    assert warm.cost <= cold.cost


def test_fewer_gpus_than_the_load_needs_are_refused_with_the_epoch_and_the_number() -> None:
    with pytest.raises(TooFewGpus, match=r"the load of epoch \d needs \d+ GPUs at least, and there are 1"):
        plan(request(0, gpus=1, spare=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch_s": 60.0}, "epoch_s must be at least the longest start_s, 600, not 60.0"),
        ({"min_up": 0}, "min_up must be from 1 to 64, not 0"),
        ({"spare": -1}, "spare must be from 0 to 16, not -1"),
        ({"tariff": Tariff((1.0,))}, r"tariff.per_kwh must be one for each of 4 epochs, not 1"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        request(0, **changes)


@pytest.mark.parametrize(
    ("expected", "upper", "message"),
    [
        ((1.0, math.nan), (2.0, 2.0), "pool chat: expected of epoch 1 must be at least 0 and finite, not nan"),
        ((1.0, 1.0), (2.0, 0.5), "pool chat: upper of epoch 1 must be at least expected, not 0.5"),
        ((1.0,), (2.0, 2.0), "pool chat: upper must be as long as expected, not 2"),
    ],
)
def test_a_load_that_cannot_be_is_refused_by_name(
    expected: tuple[float, ...], upper: tuple[float, ...], message: str
) -> None:
    with pytest.raises(InvalidProblem, match=message):
        PoolLoad("chat", (variant(1, random.Random(0), 0.0),), expected, upper)
