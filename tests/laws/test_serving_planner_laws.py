"""Laws of plans of replicas: loads are carried with replicas lost, minimum up times kept, and more never costs less."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perseus_solver.serving.planner import (
    OperatingPoint,
    PlanRequest,
    PoolChoice,
    PoolLoad,
    Tariff,
    TooFewGpus,
    Variant,
    plan,
)

EPOCHS = 6


@st.composite
def variants(draw: st.DrawFn) -> tuple[Variant, ...]:
    """One to three sizes with one to three clocks each; small pools carry less by replica, as queues have it."""
    found = []
    for gpus in sorted(draw(st.sets(st.sampled_from((1, 2, 4)), min_size=1))):
        points = []
        for step in range(draw(st.integers(1, 3))):
            most = gpus * draw(st.floats(0.5, 2.0))
            watts = sorted(draw(st.floats(50.0, 900.0)) * gpus for _ in range(3))
            carried = sorted(draw(st.floats(0.3, 1.0)) * most for _ in range(3))
            points.append(OperatingPoint(900 + step, (0.0, 0.5 * most, most), tuple(watts), tuple(carried)))
        found.append(Variant(gpus, tuple(points), 600.0, draw(st.sampled_from((0.0, 1e5, 2e6)))))
    return tuple(found)


loads = st.lists(st.floats(0.0, 8.0), min_size=EPOCHS, max_size=EPOCHS).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    """One to three pools."""
    pools = []
    for number in range(draw(st.integers(1, 3))):
        expected = draw(loads)
        more = draw(st.floats(1.0, 1.5))
        pools.append(PoolLoad(f"pool-{number}", draw(variants()), expected, tuple(more * load for load in expected)))
    factors = draw(st.sampled_from(((), (1.0, 0.5, 0.0, 2.0, 1.0, 1.0))))
    return PlanRequest(
        tuple(pools),
        draw(st.sampled_from((900.0, 3600.0))),
        Tariff(factors, draw(st.sampled_from((0.0, 0.01)))),
        min_up=draw(st.integers(1, 4)),
        spare=draw(st.integers(0, 2)),
    )


def variant_of(pool: PoolLoad, choice: PoolChoice) -> Variant:
    """The variant that was chosen."""
    return next(one for one in pool.variants if one.gpus == choice.gpus)


@given(requests())
def test_every_load_is_carried_with_the_spare_replicas_lost(asked: PlanRequest) -> None:
    done = plan(asked)
    for pool in asked.pools:
        for epoch, choice in enumerate(done.choices[pool.name]):
            if not choice.replicas:
                assert pool.upper[epoch] == 0.0
                continue
            points = variant_of(pool, choice).points
            left = choice.replicas - asked.spare
            assert pool.upper[epoch] == 0.0 or pool.upper[epoch] <= (1 + 1e-8) * max(
                point.carried_by(left) for point in points
            )
            least = [point for point in points if point.clock_mhz == choice.clock_mhz]
            assert pool.expected[epoch] <= (1 + 1e-8) * max(point.carried_by(choice.replicas) for point in least)


@given(requests())
def test_no_more_were_started_in_the_minimum_up_time_than_serve(asked: PlanRequest) -> None:
    done = plan(asked)
    for day in done.choices.values():
        for before, after in itertools.pairwise((PoolChoice(0, 0, 0, 0, 0.0), *day)):
            kept = before.replicas if before.gpus == after.gpus else 0
            assert after.starts == max(0, after.replicas - kept)
        for epoch, choice in enumerate(day):
            recent = day[max(0, epoch + 1 - asked.min_up) : epoch + 1]
            for gpus in {one.gpus for one in recent}:
                starts = sum(one.starts for one in recent if one.gpus == gpus)
                assert starts <= (choice.replicas if choice.gpus == gpus else 0)


@given(requests())
def test_the_bound_is_below_the_cost_and_joules_add_up(asked: PlanRequest) -> None:
    done = plan(asked)
    assert 0.0 <= done.bound <= done.cost * (1 + 1e-9) + 1e-12
    if not asked.tariff.per_kwh and not asked.tariff.per_gpu_hour:
        joules = sum(choice.joules for day in done.choices.values() for choice in day)
        assert abs(joules / 3.6e6 - done.cost) <= 1e-9 * max(1.0, done.cost)


@given(requests(), st.integers(0, EPOCHS - 1), st.floats(0.0, 1.0))
def test_more_load_never_costs_less(asked: PlanRequest, epoch: int, share: float) -> None:
    def raised(loads: tuple[float, ...]) -> tuple[float, ...]:
        # Up to the heaviest epoch, so that plans have as many replicas to choose from.
        more = loads[epoch] + share * (max(loads) - loads[epoch])
        return (*loads[:epoch], more, *loads[epoch + 1 :])

    pools = tuple(replace(pool, expected=raised(pool.expected), upper=raised(pool.upper)) for pool in asked.pools)
    assert plan(asked).bound <= plan(replace(asked, pools=pools)).cost * (1 + 1e-9) + 1e-12


@pytest.mark.slow
@given(requests(), st.integers(0, 3))
def test_a_limit_of_gpus_is_kept_and_never_makes_a_plan_cheaper(asked: PlanRequest, less: int) -> None:
    free = plan(asked)
    days = list(free.choices.values())
    most = max(sum(day[epoch].gpus * day[epoch].replicas for day in days) for epoch in range(EPOCHS))
    assume(most - less > 0)
    try:
        done = plan(replace(asked, gpus=most - less))
    except TooFewGpus:
        return
    for epoch in range(EPOCHS):
        used = sum(day[epoch].gpus * day[epoch].replicas for day in done.choices.values())
        if epoch + 1 < EPOCHS:
            used += sum(day[epoch + 1].gpus * day[epoch + 1].starts for day in done.choices.values())
        assert used <= most - less
    assert free.bound * (1 - 1e-9) <= done.bound <= done.cost * (1 + 1e-9) + 1e-12
