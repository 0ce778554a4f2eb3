"""What a user writes about a job moves no neighbour's watts beyond the GPUs that it holds and the priority granted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.doubles.budget_site import GRACE_S, Site, condition
from tests.doubles.engine_pool import EnginePool
from tests.unit.operator.conftest import member_of

from perseus_core.grain import Grain
from perseus_operator.api.budget import BudgetSpec
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import dump, parse_spec
from perseus_operator.budgets.draw import draw_to_status, member_from_status
from perseus_operator.clients.agents.hardware import gpu_of
from perseus_operator.families.fixed_clock.family import FixedClockFamily
from perseus_operator.families.training.features.bound.guard import CONFIRM, Hold
from perseus_operator.jobs.family import Surroundings
from perseus_operator.jobs.family import member_of as family_member_of
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.nodes.gpu import MAX_BOARD_W, UNKNOWN_BOARD_W, Gpu
from perseus_operator.nodes.iterations import Measured
from perseus_operator.nodes.workloads import select
from perseus_operator.objects.values import JobRef, Now
from perseus_proto.v1alpha1 import agent_pb2 as pb

LIMIT_W = 700.0
FIXED = {"type": "FixedClock", "clockMegahertz": 1200}


@pytest.fixture
def site(make_job: Any) -> Site:
    return Site(make_job)


def describe_gpus(job: Any, max_power_w: float | None = LIMIT_W) -> None:
    for node in job.nodes:
        gpus = {rank.gpu_uuid: Gpu("NVIDIA H100 80GB HBM3", max_power_w=max_power_w) for rank in node.ranks.values()}
        node.gpus_described({}, {}, gpus)


def forge_profile(job: Any, factor: int) -> None:
    """As if every instruction drew so much more."""
    frontier = job.state.frontier
    job.state.solve.frontier = replace(frontier, energies_mj=tuple(factor * e for e in frontier.energies_mj))


async def settle(site: Site) -> None:
    """Until every rank that runs must have been seen."""
    await site.tick()
    await site.tick(GRACE_S)
    await site.tick()


async def test_a_forged_profile_takes_no_more_than_the_gpus_that_the_job_holds_can_draw(site: Site) -> None:
    victim = site.job("victim")
    describe_gpus(victim)
    full_w = site.drawn_w("victim")
    site.budget(round(2.2 * full_w))
    await settle(site)
    assert site.points("victim") == {0}

    forger = site.job("forger", running=False)
    forger.solve()
    forge_profile(forger, 1000)
    forger.start_pods()
    await site.tick()
    await site.tick()
    assert site.points("victim") == {0}, "pods that hold no GPU draw nothing"

    forger.connect_ranks()
    describe_gpus(forger)
    await site.tick()
    await site.tick()
    share = forger.state.job.share
    assert share.watts <= share.held_w == 4 * LIMIT_W
    assert site.kept()["reason"] != "BudgetTooSmall"
    assert victim.state.job.share.watts >= 2.2 * full_w - 4 * LIMIT_W - 1


async def test_one_process_is_not_the_whole_job_that_a_manifest_describes(site: Site) -> None:
    victim = site.job("victim")
    describe_gpus(victim)
    full_w = site.drawn_w("victim")
    sleeper = site.job("sleeper", running=False)
    sleeper.solve()
    forge_profile(sleeper, 1000)
    sleeper.start_pods()
    sleeper.connect_ranks()
    for node in sleeper.nodes[1:]:
        node.ranks.clear()
    del sleeper.nodes[0].ranks[next(iter(sleeper.nodes[0].ranks))]
    describe_gpus(sleeper)
    site.budget(round(full_w + LIMIT_W))
    await settle(site)
    assert site.points("victim") == {0}
    assert site.written["unsteeredWatts"] == LIMIT_W


async def test_processes_on_one_gpu_are_one_gpu(site: Site) -> None:
    job = site.job("a")
    for node in job.nodes:
        node.ranks = {rank_id: replace(rank, gpu_uuid="GPU-0-0") for rank_id, rank in node.ranks.items()}
    describe_gpus(job)
    member = member_of(job.state, Now(0, 0))
    assert member is not None
    assert member.claim is not None
    assert (member.held_w, member.claim.gpus) == (LIMIT_W, 1)


async def test_a_measured_baseline_is_clamped_too(site: Site) -> None:
    watcher = site.job("watcher", mode="Recommend")
    describe_gpus(watcher)
    watcher.state.baseline = Measured(1_000_000, 10**9, 5)
    site.budget(10_000)
    await settle(site)
    assert site.written["unsteeredWatts"] == 4 * LIMIT_W


async def test_a_kept_share_shrinks_with_the_gpus_that_are_held(site: Site) -> None:
    job = site.job("a")
    describe_gpus(job)
    site.budget(100_000)
    await settle(site)
    before = job.state.job.share.watts
    job.state.solve.frontier = None  # nothing of the new profile is known
    for node in job.nodes:
        node.ranks.clear()
    await site.tick()
    assert (before > 0, job.state.job.share.watts) == (True, 0)


@pytest.mark.parametrize(
    ("told_mw", "counts_w"), [(700_000, 700.0), (0, UNKNOWN_BOARD_W), (int(MAX_BOARD_W * 1000) + 1, UNKNOWN_BOARD_W)]
)
def test_a_limit_that_is_not_told_or_cannot_be_true_is_the_highest_there_is(
    make_job: Any, told_mw: int, counts_w: float
) -> None:
    job = make_job()
    job.run()
    describe_gpus(job, gpu_of(pb.Gpu(model="A", max_power_mw=told_mw), "").max_power_w)
    member = member_of(job.state, Now(0, 0))
    assert member is not None
    assert member.held_w == 4 * counts_w


# ----------------------------------------------------------------------------------------------------- priority


async def test_priority_above_0_is_granted_by_the_budget_alone(site: Site) -> None:
    site.job("loud", priority=1_000_000)
    site.job("quiet")
    site.budget(round(1.6 * site.drawn_w("quiet")))
    await site.tick()
    assert site.points("loud") == site.points("quiet"), "asking is not enough"
    assert {share["priority"] for share in site.written["shares"]} == {0}


async def test_what_is_granted_counts_up_to_its_highest(site: Site) -> None:
    site.job("first", priority=1_000_000)
    site.job("second", priority=7)
    site.job("modest", priority=-3)
    watts = round(2.6 * site.drawn_w("first"))
    spec = {"watts": watts, "priorities": [{"namespace": "ns", "highest": 10}, {"namespace": "other", "highest": 99}]}
    site.budgets.observe({"metadata": {"name": "hall", "uid": "u", "generation": 3}, "spec": spec})
    await site.tick()
    assert {share["name"]: share["priority"] for share in site.written["shares"]} == {
        "first": 10,
        "second": 7,
        "modest": -3,
    }
    assert site.points("first") == {0}
    assert min(site.points("modest")) > 0


def test_a_namespace_may_be_granted_nothing_below_0() -> None:
    with pytest.raises(Exception, match=r"spec\.priorities\[0\]\.highest: must be an integer from 0"):
        parse_spec(BudgetSpec, {"watts": 1, "priorities": [{"namespace": "a", "highest": -1}]})


# --------------------------------------------------------------------------------------------- the guard within a share


def slowed_by_a_budget(site: Site, *, grains: str = "") -> Any:
    job = site.job("a", objective={"type": "MaxSlowdown", "maxSlowdown": "1%"})
    if grains:
        of = {"i": Grain.INSTRUCTION, "s": Grain.SEGMENT, "t": Grain.STAGE}
        job.state.solve.frontier = replace(job.state.frontier, grains=tuple(of[letter] for letter in grains))
    site.budget(round(0.8 * site.drawn_w("a")))
    return job


async def test_slower_than_the_share_explains_is_noticed_and_never_answered_with_more_watts(site: Site) -> None:
    job = slowed_by_a_budget(site)
    await site.tick()
    point, drawn_w = site.points("a"), site.drawn_w("a")
    at = job.train_on(1, 2 * CONFIRM, 1.0)
    assert job.state.guard.hold is Hold.NOTHING, "as slow as the budget makes it is as it should be"
    at = job.train_on(at, CONFIRM, 1.2)
    assert job.state.guard.hold is not Hold.NOTHING
    met, reason, message = condition(job, ConditionType.BOUND_KEPT)
    assert (met, reason) == (False, Reason.BOUND_EXCEEDED)
    assert "; PowerBudget hall allows " in message
    job.train_on(at + 1, 4 * CONFIRM, 1.5)
    assert (site.points("a"), site.drawn_w("a")) == (point, drawn_w)


async def test_no_step_of_the_guard_draws_more_than_a_share_that_the_objective_fills(site: Site) -> None:
    """Seed 20403 of the simulation: the share was as many watts as the job wanted, and the fastest plan drew more."""
    job = site.job("a", objective={"type": "MaxSlowdown", "maxSlowdown": "10%"})
    job.state.baseline = Measured(job.state.frontier.times_us[0], 400_000, CONFIRM)
    site.budget(100_000)
    await site.tick()
    point, share = site.points("a"), job.state.job.share
    assert min(point) > 0
    assert condition(job, ConditionType.PLAN_APPLIED)[1] is Reason.PLAN_IN_FORCE
    at = 1
    for held in (Hold.FASTEST_PLAN, Hold.DEFAULT_CLOCKS):
        at = job.train_on(at, CONFIRM, 1.2) + 1
        await site.tick()
        assert job.state.guard.hold is held
        assert site.points("a") == point
        assert site.drawn_w("a") <= share.watts
        assert "The job runs at the plan that PowerBudget hall allows" in condition(job, ConditionType.BOUND_KEPT)[2]
        assert condition(job, ConditionType.PLAN_APPLIED)[1] is Reason.LIMITED_BY_BUDGET


async def test_what_a_budget_made_slow_is_no_evidence_once_it_is_gone(site: Site) -> None:
    job = slowed_by_a_budget(site)
    await site.tick()
    (point,) = site.points("a")
    job.state.baseline = Measured(job.state.frontier.times_us[0], 400_000, CONFIRM)
    assert job.state.frontier.times_us[point] > 1.05 * job.state.baseline.time_us
    job.train_on(1, 2 * CONFIRM, 1.0)
    site.budgets.deleted({"metadata": {"name": "hall", "uid": "u"}})
    await site.tick()
    assert job.state.guard.hold is Hold.NOTHING
    assert condition(job, ConditionType.BOUND_KEPT)[1] is Reason.BOUND_KEPT
    (point,) = site.points("a")
    assert job.state.frontier.times_us[point] <= 1.01 * job.state.frontier.times_us[0]


async def test_a_coarser_plan_within_the_share_is_tried(site: Site) -> None:
    job = slowed_by_a_budget(site, grains="iiiiiiiiiit")
    await site.tick()
    (fine,) = site.points("a")
    assert fine < 10
    job.train_on(1, CONFIRM, 1.2)
    assert site.points("a") == {10}
    assert job.state.guard.hold is Hold.STAGES


async def test_a_straggler_gets_no_watts_that_the_budget_does_not_have(site: Site) -> None:
    """Seed 5 of the simulation: its pipeline ran the fastest plan, and all together drew more than the share."""
    job = slowed_by_a_budget(site)
    await site.tick()
    (point,) = site.points("a")
    assert point > 0
    job.state.stragglers.detector.slowdowns = {0: 1.2}
    decision = job.decide()
    assert decision.wanted[0] == point, "as fast as the share allows"
    assert min(decision.wanted.values()) == point


@pytest.mark.parametrize("measured", [False, True])
async def test_a_suspended_job_whose_pods_run_draws_what_its_default_clocks_draw(site: Site, measured: bool) -> None:
    """Seed 72 of the simulation: it was said to draw nothing, and others were granted its watts."""
    job, other = site.job("a"), site.job("b")
    default_w = site.drawn_w("a")
    if measured:
        job.state.baseline = Measured(1_000_000, round(1_000 * 1.1 * default_w), 5)
        default_w *= 1.1
    site.budget(round(1.7 * default_w))
    await settle(site)
    pods = [pod for node in job.nodes for pod in node.pods]
    spec = replace(job.state.spec, suspend=True)
    job.state.job.spec_accepted(spec, spec)
    job.state.pods_observed(select(spec, pods), {}, wall_s=0.0)
    await settle(site)
    assert site.written["unsteeredWatts"] == pytest.approx(default_w, abs=1.0)
    assert other.state.job.share.watts <= round(1.7 * default_w) - default_w
    assert member_from_status("ns/a", 0, stored(member_of(job.state, Now(0, 0)))) is not None

    job.state.pods_observed(select(spec, []), {}, wall_s=0.0)
    await settle(site)
    assert (site.written["jobs"], site.written["unsteeredWatts"]) == (1, 0), "its pods are gone, too"


def stored(member: Any) -> dict[str, Any]:
    """The status of a suspended job that another replica serves."""
    active = {"type": "Active", "status": "False"}
    return {"conditions": [active], "powerBudget": {"name": "hall", "draw": dump(draw_to_status(member))}}


def test_of_a_suspended_job_with_a_fixed_clock_and_of_a_pool_it_is_not_known_what_they_draw() -> None:
    """Their GPUs have no power limits that anybody would say while their leases are given back."""
    pool = EnginePool(suspend=True)
    pods = [pod for node in pool.nodes for pod in node.pods]
    pool.job.pods_observed(select(pool.job.spec, pods), {}, wall_s=0.0)
    fixed = PerseusJob(JobRef("ns", "fixed", "uid"), generation=1)
    nobody: Any = None
    family = FixedClockFamily(Surroundings(fixed, nobody, nobody, nobody, nobody))
    family.spec_accepted(parse_spec(JobSpec, {"objective": FIXED, "suspend": True}))
    fixed.pods_observed(select(fixed.spec, pods), {}, wall_s=0.0)
    for job, of in ((pool.job, pool.family), (fixed, family)):
        member = family_member_of(job, of, Now(1e6, 1e6), settled=True)
        assert member is not None
        assert (member.claim, member.drawn_w) == (None, None)
