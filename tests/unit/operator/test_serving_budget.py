"""Pools under a PowerBudget: what they claim, at which ceiling they run, and what a lying engine gains: nothing."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from tests.doubles.engine_pool import EnginePool
from tests.unit.operator.test_power_budgets import Site

from perseus_core.leases import NO_RESTING_CLOCK, RestingClock
from perseus_core.serving import FOLLOW_TABLE
from perseus_operator.api.conditions import Reason
from perseus_operator.budgets.allocation import Claim, Share
from perseus_operator.budgets.member import Member
from perseus_operator.families.serving.features.power.ceiling import HEADROOM, MOST_OF_DRAW
from perseus_operator.families.serving.features.power.demand import Demand
from perseus_operator.jobs.events import condition_events
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.objects.values import JobRef

REPLICAS = 3
HELD_W = REPLICAS * 4 * 700.0


@pytest.fixture(scope="module")
def in_force() -> EnginePool:
    pool = EnginePool()
    pool.run(1_500, until=lambda: pool.second > 60 and not pool.decide().trying)
    pool.run(30)
    return pool


@pytest.fixture
def pool(in_force: EnginePool) -> EnginePool:
    """Three replicas that follow a table."""
    return deepcopy(in_force)


def member_of(pool: EnginePool) -> Member:
    return pool.family.member(pool.now, settled=True)


def claim_of(pool: EnginePool) -> Claim:
    claim = member_of(pool).claim
    assert claim is not None
    return claim


def grant(pool: EnginePool, watts: float | None) -> None:
    """A budget grants this; None: there is no budget any more."""
    claim_of(pool)
    pool.job.share_granted(None if watts is None else Share("hall", watts, hold_s=60))
    pool.run(3)


def test_before_there_is_a_table_a_pool_counts_with_its_power_limits() -> None:
    pool = EnginePool()
    pool.run(5)
    pool.job.share_granted(Share("hall", 100.0))
    pool.run(2)
    member = member_of(pool)
    assert (member.claim, member.drawn_w, member.held_w) == (None, HELD_W, HELD_W)
    assert {node.resting for node in pool.nodes} == {NO_RESTING_CLOCK}


@pytest.mark.parametrize("mode", ["Observe", "Recommend", "Canary"])
def test_a_pool_whose_clocks_are_not_all_set_counts_with_its_power_limits(pool: EnginePool, mode: str) -> None:
    grant(pool, claim_of(pool).least_w)
    pool.edit(mode=mode)
    member = member_of(pool)
    assert (member.claim, member.drawn_w) == (None, HELD_W)
    pool.run(3)
    assert {node.resting for node in pool.nodes} == {NO_RESTING_CLOCK}


def test_the_claim_begins_with_what_the_load_needs_and_ends_without_a_ceiling(pool: EnginePool) -> None:
    claim, under = claim_of(pool), pool.family.pool.model.ceilings
    assert claim.gpus == 4 * REPLICAS
    assert claim.curve[-1][1] == 1.0
    assert all(low < high for low, high in pairwise(claim.curve))
    assert under[0].running >= HEADROOM * 64, "the lowest ceiling carries the load of 64 requests"
    assert claim.least_w == pytest.approx(REPLICAS * under[0].watts, rel=0.06)
    pool.running = lambda replica, second: 150
    pool.run(3)
    needed = next(each for each in under if each.running >= HEADROOM * 150)
    assert claim_of(pool).least_w >= REPLICAS * needed.watts > claim.least_w
    pool.running = lambda replica, second: 4
    pool.second += 660
    pool.step()
    assert claim_of(pool).least_w < REPLICAS * needed.watts, "after ten minutes it is forgotten"


def test_a_share_becomes_a_ceiling_that_no_clock_exceeds(pool: EnginePool) -> None:
    middle_w, speed = claim_of(pool).curve[2]
    whole = pool.family.pool.model.table
    grant(pool, middle_w + 0.5)
    [resting] = {node.resting for node in pool.nodes}
    assert resting == RestingClock(pool.family.pool.ceiling_mhz, 60)
    assert 0 < resting.mhz < pool.machine.clocks_mhz[-1]
    assert pool.clocks == [FOLLOW_TABLE] * REPLICAS
    for node in pool.nodes:
        assert node.engines.ordered is not None
        table = node.engines.ordered.table
        assert table is not None
        assert (
            max(*table.ladder_mhz, *table.boost_mhz, *(mhz for row in table.clocks_mhz for mhz in row)) <= resting.mhz
        )
    said = pool.conditions()["ClocksApplied"]
    assert (said.status, said.reason) == (True, Reason.LIMITED_BY_BUDGET)
    assert "slowed by PowerBudget hall by" in said.message
    assert Reason.LIMITED_BY_BUDGET in [event.reason for event in condition_events({}, pool.conditions().values())]
    assert pool.status()["powerBudget"]["slowdown"] == f"{100 * (1 / speed - 1):.2f}%"
    assert pool.conditions()["Ready"].status is True

    grant(pool, None)
    assert {node.resting for node in pool.nodes} == {NO_RESTING_CLOCK}
    assert all(node.engines.ordered is not None and node.engines.ordered.table == whole for node in pool.nodes)
    assert pool.conditions()["ClocksApplied"].reason is Reason.TABLE_IN_FORCE


def test_enough_watts_slow_nothing(pool: EnginePool) -> None:
    grant(pool, claim_of(pool).wanted_w)
    assert {node.resting for node in pool.nodes} == {NO_RESTING_CLOCK}
    assert "slowdown" not in pool.status()["powerBudget"]
    assert pool.conditions()["ClocksApplied"].reason is Reason.TABLE_IN_FORCE


def test_a_pool_never_gets_less_than_its_load_needs(pool: EnginePool) -> None:
    pool.running = lambda replica, second: 150
    pool.run(3)
    grant(pool, 1.0)
    needed = next(each for each in pool.family.pool.model.ceilings if each.running >= HEADROOM * 150)
    assert {node.resting.mhz for node in pool.nodes} == {needed.clock_mhz}


def test_a_ceiling_counts_as_applied_when_agents_hold_it(pool: EnginePool) -> None:
    grant(pool, claim_of(pool).curve[1][0])
    pool.nodes[0].clock = None
    assert pool.conditions()["ClocksApplied"].reason is Reason.APPLYING


def test_under_a_ceiling_nothing_is_tried_above_it_nor_compared(pool: EnginePool) -> None:
    grant(pool, claim_of(pool).least_w)
    ceiling_mhz, blocks = pool.family.pool.ceiling_mhz, set()
    pool.family.pool.trials.paused_until_s = -math.inf  # the canary is to try its clocks again
    for _ in range(40):
        pool.second += 180
        member_of(pool)
        pool.step()
        blocks.add(pool.family.pool.switched_back(pool.wall_s))
        assert all(mhz == FOLLOW_TABLE or 0 < mhz <= ceiling_mhz for mhz in pool.clocks)
    assert blocks == {""}


def test_gpus_that_cannot_be_set_count_with_their_power_limits(pool: EnginePool) -> None:
    before = claim_of(pool)
    node = pool.nodes[0]
    node.gpus_described(node.clocks_mhz, dict.fromkeys(node.gpus, "another program set its clocks"), node.gpus)
    one_w = before.least_w / REPLICAS
    assert claim_of(pool).least_w == pytest.approx(before.least_w - one_w + 2_800.0, abs=2)
    pool.nodes[1].lease_lost()
    assert claim_of(pool).least_w == pytest.approx(before.least_w - 2 * one_w + 5_600.0, abs=2)
    pool.nodes[2].lease_lost()
    assert member_of(pool).drawn_w == HELD_W, "nobody is heard of"


def busy(window: EngineWindow) -> EngineWindow:
    """An engine that says it has a great load, of which its GPUs know nothing."""
    return replace(window, running=200.0, waiting=10_000)


def test_an_engine_that_claims_a_great_load_gains_no_more_than_half_of_what_it_draws(pool: EnginePool) -> None:
    pool.family.pool.demand = Demand()
    pool.running = lambda replica, second: 1
    pool.run(30)
    honest, drawn_w = claim_of(pool), pool.family.pool.demand.drawn_w()
    pool.lie = busy
    pool.run(30)
    under = pool.family.pool.model.ceilings
    believed_w = max([each.watts for each in under if each.watts <= MOST_OF_DRAW * drawn_w] or [under[0].watts])
    assert believed_w < 0.9 * under[-1].watts, "else there is nothing to gain"
    assert honest.least_w <= claim_of(pool).least_w <= math.ceil(REPLICAS * 1.05 * max(believed_w, drawn_w))
    assert claim_of(pool).curve[-1] == honest.curve[-1], "nor does it want more than before"


def test_an_engine_that_draws_more_than_its_model_says_is_slowed_for_it(pool: EnginePool) -> None:
    share_w = claim_of(pool).curve[3][0]
    grant(pool, share_w)
    before_mhz = pool.family.pool.ceiling_mhz
    drawn_w = pool.family.pool.granted.watts / REPLICAS  # type: ignore[union-attr]
    pool.lie = lambda window: replace(window, changed=True, energy_mj=round(1.3e-3 * drawn_w * window.time_us))
    pool.run(3)
    grant(pool, share_w)
    assert 0 < pool.family.pool.ceiling_mhz < before_mhz


def watched(site: Site, name: str, pool: EnginePool, **changes: Any) -> EnginePool:
    """A pool that shares the site's budgets."""
    pool.edit(**changes)
    pool.job.ref = JobRef("ns", name, f"uid-{name}")
    runner = SimpleNamespace(ref=pool.job.ref, labels={}, taken_over_s=-math.inf)
    runner.member, runner.grant = pool.family.member, pool.job.share_granted
    runner.publish_draw = pool.job.draw_published
    site.runners.append(runner)
    return pool


async def test_two_pools_and_a_job_share_a_budget(make_job: Any, in_force: EnginePool) -> None:
    site = Site(make_job)
    first = watched(site, "first", deepcopy(in_force), priority=10)
    second = watched(site, "second", deepcopy(in_force))
    job = site.job("train")
    wanted_w = claim_of(first).wanted_w, claim_of(second).wanted_w
    least_w = claim_of(first).least_w, claim_of(second).least_w

    async def share(watts: float) -> dict[str, float]:
        site.budget(int(watts))
        for _ in range(3):
            first.second = second.second = first.second + 1
            await site.tick()
        return {"first": first.job.share.watts or 0.0, "second": second.job.share.watts or 0.0,
                "train": job.state.job.share.watts or 0.0}  # fmt: skip

    ample = await share(10**6)
    job_w = ample["train"]
    assert (ample["first"], ample["second"]) == wanted_w
    tight = await share(sum(least_w) + job_w)
    assert sum(tight.values()) <= sum(least_w) + job_w + 1
    assert all(tight[name] >= least for name, least in zip(("first", "second"), least_w, strict=True))
    assert tight["train"] > 0.0
    short = await share(sum(least_w) / 2)
    assert (short["first"], short["second"]) == least_w, "no pool gets less than its load needs"
    assert site.kept()["reason"] == "BudgetTooSmall"
