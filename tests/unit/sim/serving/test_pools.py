"""Pools over a week: steady minutes agree with engines that serve request by request; policies keep their rules."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.bench.serving_pools.policies import ClockPolicy, World, hindsight, merged, peak, served, splits
from tests.bench.serving_pools.service import WEEK_MIN, Service, Shape, class_of

from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.canary import complete_table
from perseus_sim.serving.controllers import Fixed, Law
from perseus_sim.serving.fleet import Setting, run
from perseus_sim.serving.load import Chat
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.objective import Objective, attainment
from perseus_sim.serving.requests import Request
from perseus_solver.serving.planner import LatencyLimits

OBJECTIVE = Objective()
LIMITS = LatencyLimits(OBJECTIVE.first_token_s, OBJECTIVE.undisturbed, OBJECTIVE.per_token_s, OBJECTIVE.attainment)
SHAPE = Shape(peak=12.0, valley_to_peak=4.0, weekend=0.6)
CHAT = Chat(4.0, prompt_tokens=700, output_tokens=150)


@pytest.fixture(scope="module")
def world() -> World:
    """A chat on one or two GPUs a replica."""
    service = Service.of_trace(CHAT.requests(900.0, seed=1), SHAPE)
    return World(service, LIMITS, {gpus: Machine("h100", "llama-3.1-8b", gpus) for gpus in (1, 2)})


def drawn(world: World, rate: float, seconds: float) -> list[Request]:
    """Requests of the service that come independently of each other."""
    draw, now_s, found = random.Random(3), 0.0, []
    together = [one for requests in world.service.requests.values() for one in requests]
    while (now_s := now_s + draw.expovariate(rate)) < seconds:
        one = draw.choice(together)
        found.append(Request(now_s, one.prompt_tokens, one.output_tokens))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_steady_minute_agrees_with_engines_that_serve_each_request(world: World, share: float) -> None:
    replicas, seconds, machine = 2, 40.0, world.machines[1]
    (pool,) = splits(world.service)["one pool"]
    (variant,) = world.variants(pool, (1,), ClockPolicy.LAW)
    rate = share * max(point.carried_by(replicas) for point in variant.points)
    requests = drawn(world, rate, seconds)
    mean = len(requests) / seconds
    table = complete_table(machine, OBJECTIVE, 800.0, MODELS["h100"].driver.latency.p50_s)
    for clocks, controller, most in (
        (ClockPolicy.HIGHEST, lambda _: Fixed(), 1.05),
        # The law boosts as far as the prompts that wait need it, which steady minutes take for the most it does.
        (ClockPolicy.LAW, lambda _: Law(table, OBJECTIVE, machine), 1.3),
    ):
        done = run(Setting(machine, MODELS["h100"].driver, replicas), requests, controller, tail_s=0.0)
        steady = world.fluid(pool, 1, clocks).serve(np.array([mean]), np.array([replicas]))
        watts = float(steady.joules[0]) / 60.0
        assert 0.94 < watts / (done.joules / done.seconds) < most
        late = 100.0 * float(steady.late[0] / steady.requests[0])
        assert 100.0 - late == pytest.approx(attainment(done.served, OBJECTIVE, machine).percent, abs=1.5)


def test_a_pool_that_is_offered_more_than_it_computes_is_late_until_that_is_served(world: World) -> None:
    (pool,) = splits(world.service)["one pool"]
    fluid = world.fluid(pool, 1, ClockPolicy.HIGHEST)
    loads = np.array([10.0, 60.0, 10.0, 10.0, 10.0, 10.0])
    done = fluid.serve(loads, np.ones(6, dtype=np.intp))
    late = done.late / done.requests
    assert late[0] < 0.2
    assert late[1] == late[2] == 1.0
    assert late[5] < 0.2
    none = fluid.serve(loads, np.zeros(6, dtype=np.intp))
    assert (none.late == none.requests).all()
    assert none.joules.sum() == 0.0


def test_the_optimum_in_hindsight_costs_less_than_what_is_provisioned_for_the_peak(world: World) -> None:
    loads = world.service.weeks(1, seed=2)
    pools = splits(world.service)["one pool"]
    (pool,) = pools
    total = np.sum(list(loads.values()), axis=0)
    fixed = served(world, loads, {pool: peak(world, total, pool, 2)}, ClockPolicy.HIGHEST)
    schedules, gap = hindsight(world, loads, pools, (1, 2), ClockPolicy.LAW)
    best = served(world, loads, schedules, ClockPolicy.LAW)
    assert gap == pytest.approx(0.0, abs=1e-6)
    assert best.joules < 0.7 * fixed.joules
    assert best.attainment_percent >= 99.0
    spare, _ = hindsight(world, loads, pools, (1, 2), ClockPolicy.LAW, spare=1)
    assert served(world, loads, spare, ClockPolicy.LAW).attainment_percent >= best.attainment_percent


def test_a_week_has_the_shape_that_was_asked_for(world: World) -> None:
    loads = world.service.weeks(2, seed=1)
    total = np.sum(list(loads.values()), axis=0)
    assert len(total) == 2 * WEEK_MIN
    assert np.quantile(total, 0.98) == pytest.approx(SHAPE.peak, rel=0.4)
    hours = total.reshape(-1, 60).mean(axis=1)[:168]
    assert 3.0 < hours.max() / hours.min() < 7.0
    weekday, weekend = hours[24:48].max(), hours[120:144].max()
    assert weekend < weekday
    again = world.service.weeks(2, seed=1)
    assert all((again[name] == load).all() for name, load in loads.items())


def test_an_hour_that_is_repeated_is_the_traces_own(world: World) -> None:
    loads = world.service.hours(1)
    total = np.sum(list(loads.values()), axis=0)
    assert total.max() == pytest.approx(SHAPE.peak)
    assert (total[:60] == total[60:120]).all()


def test_each_request_is_of_one_class_and_rare_classes_join_the_next_longer_one(world: World) -> None:
    assert class_of(Request(0.0, 255, 99)) == "SS"
    assert class_of(Request(0.0, 256, 350)) == "ML"
    assert class_of(Request(0.0, 1_024, 100)) == "LM"
    pools = merged(world.service)
    assert sorted(name for pool in pools for name in pool) == sorted(world.service.shares)
    assert all(sum(world.service.shares[name] for name in pool) >= 0.02 for pool in pools)
