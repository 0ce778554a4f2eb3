"""Sharing watts: what no exchange may improve, what a budget may never exceed, and who gives first."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp

from perseus_operator.api.budget import BudgetSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.budgets.allocation import MIN_GAIN, Allocation, Claim, Share, allocate, steady
from perseus_operator.budgets.budget import BudgetDecision, decide_shares
from perseus_operator.budgets.member import Member
from perseus_operator.budgets.watts import next_watts
from perseus_operator.families.training.features.frontier.objective import Infeasible, Target
from perseus_operator.families.training.features.power.plans import claim, power_w, within_share
from perseus_operator.solving.view import FrontierView

EXACT = 1e-9
"""Of a throughput: sums of a few hundred floats."""


def frontier_of(steps: list[tuple[int, int]], energy_mj: int, digest: str = "f") -> FrontierView:
    """A convex frontier: from the fastest plan on, each step slower saves less energy per microsecond."""
    steps = sorted(steps, key=lambda step: step[1] / step[0], reverse=True)
    times_us, energies_mj = [1_000_000], [energy_mj + sum(saved for _, saved in steps)]
    for longer, saved in steps:
        times_us.append(times_us[-1] + longer)
        energies_mj.append(energies_mj[-1] - saved)
    return FrontierView(digest, tuple(times_us), tuple(energies_mj), 2, 80_000, 0, 0, 1, False)


frontiers = st.builds(
    frontier_of,
    st.lists(st.tuples(st.integers(1_000, 200_000), st.integers(1, 80_000)), min_size=1, max_size=8),
    st.integers(500_000, 3_000_000),
)


@st.composite
def groups(draw: Any, priorities: tuple[int, ...] = (0,)) -> list[Claim]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        frontier = draw(frontiers)
        gpus = draw(st.sampled_from([1, 8, 64, 1000]))
        wanted = draw(st.integers(0, len(frontier.times_us) - 1))
        priority = draw(st.sampled_from(priorities))
        job = f"ns/job-{number}"
        found.append(claim(job, frontier, replicas=gpus, gpus=gpus, priority=priority, wanted=wanted))
    return found


def budget_of(claims: list[Claim], share: float) -> float:
    """Between what the plans of least power need and what all jobs want."""
    least, wanted = (math.fsum(ws) for ws in zip(*((c.least_w, c.wanted_w) for c in claims), strict=True))
    return least + share * (wanted - least)


def total(claims: list[Claim], shares: dict[str, float]) -> float:
    return math.fsum(c.throughput(shares[c.job]) for c in claims)


@settings(max_examples=30, deadline=None)
@given(groups((0, 0, 1, -5)), st.floats(0, 1.2))
def test_the_budget_is_kept_and_nobody_gets_what_it_cannot_use(claims: list[Claim], share: float) -> None:
    budget_w = budget_of(claims, share)
    found = allocate(budget_w, claims)
    assert found.feasible
    assert found.total_w <= budget_w * (1 + EXACT)
    for one in claims:
        assert one.least_w * (1 - EXACT) <= found.shares_w[one.job] <= one.wanted_w * (1 + EXACT)
    spare_w = budget_w - found.total_w
    everybody = all(found.shares_w[c.job] >= c.wanted_w * (1 - EXACT) for c in claims)
    assert everybody or spare_w <= budget_w * EXACT, "watts are left while somebody wants them"
    assert (found.price == 0) == (everybody or spare_w > budget_w * EXACT) or everybody


@settings(max_examples=30, deadline=None)
@given(groups(), st.floats(0, 1), st.data())
def test_no_exchange_between_equals_improves(claims: list[Claim], share: float, data: Any) -> None:
    found = dict(allocate(budget_of(claims, share), claims).shares_w)
    before = total(claims, found)
    amounts = [1e-3, 1.0, 50.0, data.draw(st.floats(1e-3, 1e5))]
    for giver, taker in permutations(claims, 2):
        for watts in amounts:
            moved_w = min(watts, found[giver.job] - giver.least_w, taker.wanted_w - found[taker.job])
            if moved_w <= 0:
                continue
            after = {**found, giver.job: found[giver.job] - moved_w, taker.job: found[taker.job] + moved_w}
            assert total(claims, after) <= before * (1 + EXACT)


@settings(max_examples=24, deadline=None)
@given(groups(), st.floats(0, 1))
def test_it_is_the_optimum_of_the_linear_programme(claims: list[Claim], share: float) -> None:
    """The same question put to another solver: mixtures of plans, watts within_share the budget, most throughput."""
    budget_w = budget_of(claims, share)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    power, speed = [], []
    for one in claims:
        weights = [solver.NumVar(0, 1, "") for _ in one.curve]
        solver.Add(sum(weights) == 1)
        power += [w * watts for w, (watts, _) in zip(weights, one.curve, strict=True)]
        speed += [w * one.gpus * rate for w, (_, rate) in zip(weights, one.curve, strict=True)]
    solver.Add(sum(power) <= budget_w)
    solver.Maximize(sum(speed))
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    found = dict(allocate(budget_w, claims).shares_w)
    assert total(claims, found) == pytest.approx(solver.Objective().Value(), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(groups((0, 1, 2)), st.floats(0, 1))
def test_the_lower_priority_gives_first(claims: list[Claim], share: float) -> None:
    found = allocate(budget_of(claims, share), claims)
    for high in claims:
        if found.shares_w[high.job] >= high.wanted_w * (1 - EXACT):
            continue
        for low in claims:
            if low.priority < high.priority:
                assert found.shares_w[low.job] == pytest.approx(low.least_w)


@settings(max_examples=40, deadline=None)
@given(groups((0, 1)), st.floats(0, 1), st.floats(0, 1))
def test_more_watts_harm_nobody(claims: list[Claim], one: float, other: float) -> None:
    less, more = (allocate(budget_of(claims, share), claims) for share in sorted((one, other)))
    for each in claims:
        assert less.shares_w[each.job] <= more.shares_w[each.job] * (1 + EXACT) + EXACT
    if len({claim.priority for claim in claims}) == 1:
        assert less.price >= more.price * (1 - EXACT)


@settings(max_examples=40, deadline=None)
@given(groups((0, 1)), st.floats(0, 0.999))
def test_too_small_a_budget_is_said_and_everybody_is_as_frugal_as_it_can_be(claims: list[Claim], share: float) -> None:
    least_w = math.fsum(c.least_w for c in claims)
    found = allocate(share * least_w, claims)
    assert not found.feasible
    assert found.shares_w == {c.job: c.least_w for c in claims}


@settings(max_examples=24, deadline=None)
@given(groups((0, 1)), st.floats(0, 1), st.randoms())
def test_the_order_of_jobs_means_nothing(claims: list[Claim], share: float, random: Any) -> None:
    budget_w, shuffled = budget_of(claims, share), list(claims)
    random.shuffle(shuffled)
    assert allocate(budget_w, shuffled) == allocate(budget_w, claims)


@settings(max_examples=30, deadline=None)
@given(frontiers, st.sampled_from([1, 8, 1000]), st.floats(0, 1.5), st.integers(0, 8))
def test_a_job_runs_the_fastest_plan_of_its_share_but_no_faster_than_it_wants(
    frontier: FrontierView, copies: int, share: float, wanted: int
) -> None:
    last = len(frontier.times_us) - 1
    wanted = min(wanted, last)
    asked = Target(frontier.times_us[wanted])
    watts = power_w(frontier, last, copies) + share * (power_w(frontier, 0, copies) - power_w(frontier, last, copies))
    found, limited = within_share(asked, Share("b", watts), frontier, copies)
    assert isinstance(found, Target)
    point = frontier.lookup(found.time_us)
    assert power_w(frontier, point, copies) <= watts + 1e-3
    assert point >= wanted
    assert limited == (point > wanted)
    if point > wanted:
        assert power_w(frontier, point - 1, copies) > watts, "the next faster one fits too"


def test_what_no_share_limits_stays_as_asked() -> None:
    frontier = frontier_of([(100_000, 100_000)], 1_000_000)
    asked, infeasible = Target(1_000_000.0, "note"), Infeasible("no")
    assert within_share(asked, None, frontier, 1) == (asked, False)
    assert within_share(infeasible, Share("b", 1.0), frontier, 1) == (infeasible, False)
    assert within_share(None, Share("b", 1.0), None, 1) == (None, False)
    starved, limited = within_share(asked, Share("b", 1.0, feasible=False), frontier, 1)
    assert (starved, limited) == (Target(1_100_000, "note"), True), "the plan of least power, whatever the share"


def test_a_curve_has_no_plan_that_is_slower_for_more_power() -> None:
    odd = FrontierView("f", (100, 110, 120), (10, 9, 12), 1, 0, 0, 0, 1, False)
    found = claim("ns/a", odd, replicas=1, gpus=1, priority=0, wanted=0)
    assert all(low[0] < high[0] and low[1] < high[1] for low, high in pairwise(found.curve))
    assert found.least_w == math.ceil(1000 * 9 / 110), "in whole watts"


# ----------------------------------------------------------------------------------------------------- steadiness


@settings(max_examples=40, deadline=None)
@given(groups((0, 1)), st.floats(0, 1), st.floats(0, 1))
def test_what_is_kept_is_allowed_and_leaves_nobody_far_behind(claims: list[Claim], then: float, now: float) -> None:
    before = allocate(budget_of(claims, then), claims).shares_w
    budget_w = budget_of(claims, now)
    fresh = allocate(budget_w, claims)
    found = steady(before, fresh, claims, budget_w)
    assert found.total_w <= budget_w * (1 + EXACT) + 1e-6
    for one in claims:
        assert found.shares_w[one.job] >= one.least_w * (1 - EXACT)
        gain = one.throughput(fresh.shares_w[one.job]) / one.throughput(found.shares_w[one.job]) - 1
        assert gain <= MIN_GAIN + EXACT
    assert steady(found.shares_w, fresh, claims, budget_w) == found, "asked again, it says the same"


@settings(max_examples=30, deadline=None)
@given(groups(), st.lists(st.floats(0, 1.2), min_size=2, max_size=4), st.sampled_from([None, 1, 10_000]))
def test_however_a_budget_moved_no_job_stays_a_plan_slower_than_it_allows(
    claims: list[Claim], levels: list[float], max_step: int | None
) -> None:
    members = [Member(one.job, one.priority, one) for one in claims]
    decision, watts, now_s = BudgetDecision(), None, 1.9e9
    for level in levels:
        target = max(1, round(budget_of(claims, level)))
        step = None if max_step is None else max(1, target // (4 * max_step))
        raw = {"watts": target} if step is None else {"watts": target, "maxStepWattsPerSecond": step}
        spec = parse_spec(BudgetSpec, raw)
        for _ in range(60):
            now_s += 1.0
            watts = next_watts(spec, watts, now_s, 1.0)
            decision = decide_shares(replace(spec, watts=max(1, int(watts))), members, decision)
            if watts == target:
                break
    fresh = allocate(max(1, int(watts or 0)), claims)
    for one in claims:
        share_w = decision.allocation.shares_w[one.job]
        assert one.speed(share_w) >= one.speed(fresh.shares_w[one.job]), f"{one.job} has {share_w} W"


def test_a_wish_that_moves_a_little_moves_nobody_else() -> None:
    frontier = frontier_of([(10_000, 20_000 - 300 * i) for i in range(30)], 1_000_000)
    budget_w = 18_000.0
    other = claim("ns/other", frontier, replicas=8, gpus=8, priority=0, wanted=0)
    shares: dict[str, float] = {}
    moves = 0
    for wanted in [10, 9, 10, 11, 10, 9, 10]:
        claims = [claim("ns/late", frontier, replicas=8, gpus=8, priority=0, wanted=wanted), other]
        fresh = allocate(budget_w, claims)
        found: Allocation = steady(shares, fresh, claims, budget_w) if shares else fresh
        moves += shares.get("ns/other", found.shares_w["ns/other"]) != found.shares_w["ns/other"]
        shares = dict(found.shares_w)
    assert moves == 0
    hasty = [claim("ns/late", frontier, replicas=8, gpus=8, priority=1, wanted=0), other]
    after = steady(shares, allocate(budget_w, hasty), hasty, budget_w)
    assert after.shares_w["ns/other"] < shares["ns/other"], "but a wish that moves much does"
