"""PowerBudgets: which jobs share one, what a share does to a plan, and what is reported; over restarts and outages."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from tests.doubles.budget_site import (
    GRACE_S,
    Site,
    condition,
)
from tests.unit.operator.conftest import member_of

from perseus_operator.api.budget import BudgetReason, BudgetSpec
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.schema import parse_spec
from perseus_operator.budgets.allocation import Share
from perseus_operator.budgets.budget import (
    BudgetDecision,
    decide_shares,
    selects,
    within_budget,
)
from perseus_operator.errors import InvalidSpec, KubeNotFound, KubeUnavailable
from perseus_operator.families.training.features.power.plans import power_w, replicas_of
from perseus_operator.families.training.status import status
from perseus_operator.nodes.actions import Release
from perseus_operator.nodes.iterations import Measured
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.formatting import percent
from perseus_operator.objects.values import JobRef, Now


@pytest.fixture
def site(make_job: Any) -> Site:
    return Site(make_job)


# ---------------------------------------------------------------------------------------------------------- sharing
async def test_two_equal_jobs_share_equally_and_keep_the_budget(site: Site) -> None:
    a, b = site.job("a"), site.job("b")
    full_w = site.drawn_w("a")
    site.budget(round(1.6 * full_w))
    await site.tick()
    assert site.points("a") == site.points("b") != {0}
    assert site.drawn_w("a") + site.drawn_w("b") <= 1.6 * full_w
    met, reason, message = condition(a, ConditionType.PLAN_APPLIED)
    assert (met, reason) == (True, Reason.LIMITED_BY_BUDGET)
    (point,) = site.points("a")
    slowed = f"slowed by PowerBudget hall by {percent(a.state.frontier.times_us[point] / 1_000_000 - 1)}"
    assert f"The job is {slowed}: " in message
    assert condition(a, ConditionType.READY)[2] == f"The plan is in force, {slowed}."
    shown = status.figures(a.state, a.decide()).power_budget
    assert shown is not None
    assert (shown.name, shown.slowdown) == ("hall", percent(a.state.frontier.times_us[point] / 1_000_000 - 1))
    share = a.state.job.share
    assert share is not None
    assert f"{share.watts:,.0f} W of its {1.6 * full_w:,.0f} W are granted" in message
    assert f"this plan draws {site.drawn_w('a'):,.0f} W" in message
    assert condition(b, ConditionType.BOUND_KEPT)[1] is Reason.BOUND_KEPT
    assert site.kept()["status"] == "True"
    assert site.written["observedGeneration"] == 3
    assert site.written["jobs"] == 2
    assert [share["name"] for share in site.written["shares"]] == ["a", "b"]
    assert sum(share["watts"] for share in site.written["shares"]) <= 1.6 * full_w
    assert site.written["milliGpusPerKilowatt"] > 0


async def test_a_budget_that_is_no_limit_changes_nothing_and_says_so(site: Site) -> None:
    job = site.job("a")
    site.budget(1_000_000)
    await site.tick()
    assert site.points("a") == {0}
    assert condition(job, ConditionType.PLAN_APPLIED)[1] is Reason.PLAN_IN_FORCE
    assert site.written["milliGpusPerKilowatt"] == 0
    assert "all have enough" in site.kept()["message"]
    assert condition(job, ConditionType.READY)[2] == "The plan is in force."
    shown = status.figures(job.state, job.decide()).power_budget
    assert shown is not None
    assert shown.slowdown is None


async def test_the_stricter_of_objective_and_budget_counts(site: Site) -> None:
    job = site.job("a", objective={"type": "MaxSlowdown", "maxSlowdown": "20%"})
    assert site.points("a") == {4}
    wanted_w = site.drawn_w("a")
    site.budget(round(1.05 * wanted_w))
    await site.tick()
    assert site.points("a") == {4}, "its own objective is stricter"
    site.budget(round(0.95 * wanted_w))
    await site.tick()
    assert min(site.points("a")) > 4
    assert job.state.spec.objective.max_slowdown == "20%"


async def test_the_lower_priority_gives_first(site: Site) -> None:
    site.job("low", priority=-1)
    site.job("high", priority=5)
    full_w = site.drawn_w("low")
    site.budget(round(1.8 * full_w))
    await site.tick()
    assert site.points("high") == {0}
    assert min(site.points("low")) > 0


async def test_too_small_a_budget_is_said_and_everybody_is_as_frugal_as_can_be(site: Site) -> None:
    job = site.job("a")
    site.job("b")
    site.budget(10)
    await site.tick()
    last = len(job.state.frontier.times_us) - 1
    assert site.points("a") == site.points("b") == {last}
    kept = site.kept()
    assert (kept["status"], kept["reason"]) == ("False", "BudgetTooSmall")
    assert "10 W are less than the" in kept["message"]
    said = condition(job, ConditionType.PLAN_APPLIED)[2]
    assert f"{site.drawn_w('a'):,.0f} W are granted, more than its 10 W; this plan draws" in said
    assert "less than its jobs draw at their most frugal plans" in said


async def test_jobs_come_and_go(site: Site) -> None:
    site.job("a")
    full_w = site.drawn_w("a")
    site.budget(round(1.4 * full_w))
    await site.tick()
    assert site.points("a") == {0}
    site.job("b")
    assert site.points("b") == set(), "not before the budget has been shared with it"
    await site.tick()
    assert min(site.points("a") | site.points("b")) > 0
    assert site.drawn_w("a") + site.drawn_w("b") <= 1.4 * full_w
    site.jobs["b"].state.pods_observed(Selection(()), {}, wall_s=0.0)
    await site.tick()
    assert site.points("a") == {0}
    site.budgets.deleted({"metadata": {"name": "hall", "uid": "another"}})
    assert site.jobs["a"].state.job.share is not None
    site.budgets.deleted({"metadata": {"name": "hall", "uid": "u"}})
    assert site.jobs["a"].state.job.share is None


async def test_only_selected_jobs_share_and_the_strictest_of_two_budgets_counts(site: Site) -> None:
    inside, outside = site.job("in", labels={"team": "a"}), site.job("out")
    full_w = site.drawn_w("in")
    site.budget(round(0.8 * full_w), matchLabels={"team": "a"}, namespaces=["ns", "other"])
    site.budget(round(1.9 * full_w), name="site", uid="v")
    await site.tick()
    assert inside.state.job.share.budget == "hall"
    assert outside.state.job.share.budget == "site"
    assert site.points("out") == {0} or outside.state.job.share.watts >= 0.8 * full_w
    elsewhere = parse_spec(BudgetSpec, {"watts": 1, "selector": {"namespaces": ["other"]}})
    assert selects(elsewhere, "ns", {}, None) is False


@pytest.mark.parametrize(
    ("selector", "warned"), [({"matchLabels": {"team": "a"}}, True), ({"namespaces": ["ns"]}, False)]
)
async def test_a_budget_that_tenants_can_leave_by_a_label_says_so(
    site: Site, selector: dict[str, Any], warned: bool
) -> None:
    site.budget(5_000, **selector)
    await site.tick()
    [accepted] = [each for each in site.written["conditions"] if each["type"] == "Accepted"]
    assert accepted["status"] == "True"
    assert ("matchLabels is no limit to tenants" in accepted["message"]) is warned


async def test_what_is_drawn_at_clocks_that_are_not_set_is_taken_first(site: Site) -> None:
    watcher = site.job("watcher", mode="Recommend")
    watcher.state.baseline = Measured(1_000_000, 3_000_000, 5)
    site.job("a")
    full_w = site.drawn_w("a")
    site.budget(round(3000 + 0.8 * full_w))
    await site.tick()
    assert site.written["unsteeredWatts"] == 3000
    assert site.drawn_w("a") <= 0.8 * full_w
    assert not any(node.plans.selected for node in watcher.nodes)


async def test_a_job_under_a_budget_that_binds_is_not_measured_at_default_clocks(site: Site) -> None:
    job = site.job("a", running=False, baselineIterations=3)
    site.budget(100)
    job.solve()
    job.start_pods()
    job.connect_ranks()
    assert job.settle().waiting.reason is Reason.APPLYING
    await site.tick()
    assert site.points("a") == {len(job.state.frontier.times_us) - 1}


async def test_the_guard_does_not_speed_up_a_job_whose_watts_are_short(site: Site) -> None:
    job = site.job("a", objective={"type": "MaxSlowdown", "maxSlowdown": "1%"})
    job.state.baseline = Measured(1_000_000, 1000, 5)
    site.budget(round(0.8 * site.drawn_w("a")))
    await site.tick()
    slow = site.points("a")
    assert min(slow) > 0
    for iteration in range(1, 20):
        job.train(iteration, (1.2, 1.2))
        assert not [a for a in job.act().actions if isinstance(a, Release)]
    assert site.points("a") == slow


async def test_a_small_change_of_a_wish_moves_nobody(site: Site) -> None:
    changing = site.job("a", objective={"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1_100_000}})
    site.job("b")
    site.budget(round(1.7 * site.drawn_w("b")))
    await site.tick()
    share = site.jobs["b"].state.job.share
    writes = len(site.api.writes)
    await site.tick()
    assert len(site.api.writes) == writes, "nothing new is not written"
    deadline = {"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1_100_001}}
    changing.state.spec_accepted(site.make_job(objective=deadline).spec)
    await site.tick()
    assert site.jobs["b"].state.job.share == share


async def test_a_job_runs_the_plan_that_a_raised_budget_allows_though_it_lacked_a_watt_alone(site: Site) -> None:
    # Between two plans a watt is worth little: along the straight line it lacked less than moves watts between jobs.
    job = site.job("a")
    full_w = site.drawn_w("a")
    assert job.state.frontier.times_us[1] > 1.04 * job.state.frontier.times_us[0]
    site.budget(math.ceil(full_w) - 1)
    await site.tick()
    assert min(site.points("a")) > 0
    site.budget(math.ceil(full_w))
    await site.tick()
    assert site.points("a") == {0}


# ------------------------------------------------------------------------------------------ restarts and outages
async def test_a_budget_whose_deletion_the_watch_has_missed_binds_nobody(site: Site) -> None:
    job = site.job("a")
    site.budget(round(0.8 * site.drawn_w("a")))
    await site.tick()
    assert site.points("a") != {0}
    await site.budgets.restore()  # the list does not have it
    assert job.state.job.share is None
    job.settle()
    assert site.points("a") == {0}


async def test_a_budget_that_is_found_to_be_gone_binds_nobody(site: Site) -> None:
    job = site.job("a")
    site.budget(round(0.8 * site.drawn_w("a")))
    site.api.error = KubeNotFound("hall")
    await site.tick()
    assert job.state.job.share is None


async def test_a_budget_that_is_made_anew_while_it_is_listed_stays(site: Site) -> None:
    job = site.job("a")
    site.budget(round(0.8 * site.drawn_w("a")))
    watts = round(0.7 * site.drawn_w("a"))
    site.api.stored = [{"metadata": {"name": "hall", "uid": "u-2"}, "spec": {"watts": watts}}]
    await site.budgets.restore()
    await site.tick()
    assert 0 < job.state.job.share.watts <= watts


async def test_shares_outlive_a_restart(site: Site, make_job: Any) -> None:
    site.job("a")
    site.job("b")
    site.budget(round(1.6 * site.drawn_w("a")))
    await site.tick()
    before = {name: site.points(name) for name in "ab"}
    shares = {share["name"]: share["watts"] for share in site.written["shares"]}

    after = Site(make_job)
    after.api.stored = [
        {
            "metadata": {"name": "hall", "uid": "u"},
            "spec": {"watts": round(sum(shares.values()))},
            "status": site.written,
        }
    ]
    await after.budgets.restore()
    await after.tick()
    assert after.api.writes == [], "a restart is no news"
    restarted = make_job()
    restarted.state.job.ref = JobRef("ns", "a", "uid-a")
    after.see("a", restarted, taken_over_s=after.now_s)
    assert restarted.state.job.share == Share("hall", float(shares["a"]), hold_s=3600), "from the first thought on"
    restarted.start_pods()
    await after.tick()
    assert restarted.state.job.share.watts == shares["a"], "though its frontier is not read back yet"
    restarted.run()
    await after.tick()
    assert after.points("a") == before["a"], "b has not been seen yet and keeps its watts"
    await after.tick(GRACE_S + 1)
    assert after.points("a") == {0}, "b does not come back"


async def test_a_replaced_operator_shares_nothing(site: Site) -> None:
    job = site.job("a")
    site.budget(10)
    await site.budgets.tick(Now(1.0, 1_900_000_000.0), leads=False)
    assert site.api.writes == []
    assert job.state.job.share.watts is None, "another one decides"


async def test_a_status_that_another_writer_changed_is_written_again(site: Site) -> None:
    site.job("a")
    site.budget(10)
    await site.tick()
    ours = site.written

    def brought(status: dict[str, Any], version: int) -> None:
        metadata = {"name": "hall", "uid": "u", "generation": 3, "resourceVersion": str(version)}
        site.budgets.observe({"metadata": metadata, "spec": {"watts": 10}, "status": status})

    for stored, version in (({}, 9), (ours, 10)):  # what was so before, and our own write coming back
        brought(stored, version)
        await site.tick()
        assert len(site.api.writes) == 1
    brought({**ours, "jobs": 7}, 11)
    await site.tick()
    assert site.api.writes == [ours, ours]


async def test_a_status_that_could_not_be_written_is_written_later(site: Site) -> None:
    site.job("a")
    site.budget(10)
    site.api.error = KubeUnavailable("503")
    await site.tick()
    assert site.points("a") == {10}, "the plan does not wait for the API server"
    site.api.error = None
    await site.tick()
    assert site.api.writes == [], "not at once"
    await site.tick(10)
    assert site.kept()["reason"] == "BudgetTooSmall"
    site.api.error = KubeNotFound("gone")
    site.budget(20)
    await site.tick()


async def test_a_wrong_edit_is_said_and_what_was_accepted_stays(site: Site) -> None:
    site.job("a")
    site.budget(10)
    await site.tick()
    site.budgets.observe({"metadata": {"name": "hall", "uid": "u", "generation": 4}, "spec": {"watts": 0}})
    await site.tick()
    accepted = {c["type"]: c for c in site.written["conditions"]}["Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("False", "SpecInvalid")
    assert "spec.watts: must be an integer from 1" in accepted["message"]
    assert "stays in force" in accepted["message"]
    assert site.points("a") == {10}


async def test_a_job_without_a_frontier_is_not_taken_for_one_that_draws_nothing(site: Site) -> None:
    job = site.job("a", running=False)
    job.start_pods()
    site.budget(1000)
    await site.tick(GRACE_S + 1)
    await site.tick(GRACE_S + 1)
    kept = site.kept()
    assert (kept["status"], kept["reason"]) == ("Unknown", "PowerUnknown")
    assert "It is not known what 1 of 1 jobs draw, first ns/a: no frontier yet" in kept["message"]


def test_every_reason_is_said(make_job: Any) -> None:
    spec = parse_spec(BudgetSpec, {"watts": 1000})
    assert within_budget(spec, BudgetDecision()).reason is BudgetReason.NO_JOBS
    job = make_job()
    assert member_of(job.state, Now(0, 0)) is None, "no pod runs"
    job.run()
    member = member_of(job.state, Now(0, 0))
    assert member is not None
    decision = decide_shares(parse_spec(BudgetSpec, {"watts": 10**6}), [member], BudgetDecision())
    assert within_budget(spec, decision).reason is BudgetReason.SHARED
    named = {BudgetReason.ACCEPTED, BudgetReason.SPEC_INVALID, BudgetReason.TOO_SMALL, BudgetReason.POWER_UNKNOWN}
    of_energy = {reason for reason in BudgetReason if reason.startswith("Energy")}
    assert named | {BudgetReason.NO_JOBS, BudgetReason.SHARED} | of_energy == set(BudgetReason)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "spec: is required"),
        ({}, "spec.watts: is required"),
        ({"watts": "5kW"}, "spec.watts: must be an integer"),
        ({"watts": 5, "selector": {"namespaces": []}}, "spec.selector.namespaces: must be a list of 1 to 256"),
        ({"watts": 5, "selector": {"namespaces": ["a", "a"]}}, "different names"),
        ({"watts": 5, "selector": {"namespaces": ["A"]}}, "spec.selector.namespaces[0]: must be a namespace, not 'A'"),
        ({"watts": 5, "selector": {"matchLabels": {}}}, "spec.selector.matchLabels: must be a map of 1 to 16"),
        ({"watts": 5, "priority": 1}, "spec.priority: unknown field"),
    ],
)
def test_a_wrong_budget_is_named(spec: Any, message: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(BudgetSpec, spec)
    assert message in str(refused.value)


async def test_metrics_say_what_the_status_says_and_go_with_the_budget(site: Site) -> None:
    job = site.job("a")
    most_w = power_w(job.state.frontier, 0, replicas_of(job.spec))
    site.budget(int(most_w) + 1)
    await site.tick()

    def shown() -> dict[str, float]:
        found = re.findall(r'^perseus_budget_(\w+){budget="hall"} (\S+)$', site.metrics.exposition().decode(), re.M)
        return {name: float(value) for name, value in found}

    (figures,) = [written for written in site.api.writes if "grantedWatts" in written][-1:]
    assert shown()["granted_watts"] == figures["grantedWatts"] <= shown()["watts"]
    assert (shown()["jobs"], shown()["kept"]) == (1, 1)
    site.budget(1)
    await site.tick()
    assert shown()["kept"] == 0
    assert shown()["least_watts"] > shown()["watts"] == 1
    site.see("new", site.make_job(), None)  # its frontier is not known: neither kept nor broken
    site.budget(1_000_000)
    site.jobs["new"].start_pods()
    await site.tick(GRACE_S + 1)
    assert "kept" not in shown()
    site.budgets.deleted({"metadata": {"name": "hall", "uid": "u"}})
    assert shown() == {}
