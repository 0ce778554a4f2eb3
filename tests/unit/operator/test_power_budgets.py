"""PowerBudgets: which jobs share one, what a share does to a plan, and what is reported; over restarts and outages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.operator.conftest import frontier_of, member_of

from perseus_operator.api.budget import BudgetReason, BudgetSpec
from perseus_operator.api.conditions import ConditionType, Explanation, Reason
from perseus_operator.api.power_status import MAX_SPEEDS, ShareStatus
from perseus_operator.api.schema import dump, parse_spec
from perseus_operator.budgets import power_budgets as module
from perseus_operator.budgets.allocation import Share
from perseus_operator.budgets.budget import (
    BudgetDecision,
    Member,
    decide_shares,
    selects,
    within_budget,
)
from perseus_operator.budgets.draw import draw_to_status, member_from_status
from perseus_operator.budgets.power_budgets import OtherJob, PowerBudgets
from perseus_operator.errors import InvalidSpec, KubeNotFound, KubeUnavailable
from perseus_operator.families.training.features.power.plans import power_w, replicas_of
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.nodes.actions import Release
from perseus_operator.nodes.iterations import Measured
from perseus_operator.objects.formatting import percent
from perseus_operator.objects.values import JobRef, Now

GRACE_S = 30.0


class Api:
    """What is written to PowerBudgets, and what is there at the start."""

    def __init__(self) -> None:
        self.stored: list[dict[str, Any]] = []
        self.writes: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.labels: dict[str, dict[str, str]] = {"ns": {}}

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        if self.error is not None:
            raise self.error
        return self.labels[name]

    async def power_budgets(self) -> list[dict[str, Any]]:
        return self.stored

    async def write_budget_status(self, name: str, uid: str, status: dict[str, Any]) -> str:
        if self.error is not None:
            raise self.error
        self.writes.append(status)
        return str(10 * len(self.writes))


class Site:
    """Some jobs under some budgets, driven like the operator drives them."""

    def __init__(self, make_job: Any) -> None:
        self.make_job = make_job
        self.api = Api()
        self.jobs: dict[str, Any] = {}
        self.runners: list[Any] = []
        self.metrics = Metrics()
        self.budgets = PowerBudgets(self.api, lambda: self.runners, self.metrics, grace_s=GRACE_S)
        self.now_s = 0.0

    def job(self, name: str, *, labels: Mapping[str, str] | None = None, running: bool = True, **changes: Any) -> Any:
        job = self.make_job(**changes)
        job.state.job.ref = JobRef("ns", name, f"uid-{name}")
        self.see(name, job, labels)
        if running:
            job.run()
        return job

    def see(
        self, name: str, job: Any, labels: Mapping[str, str] | None = None, *, taken_over_s: float = -math.inf
    ) -> None:
        self.jobs[name] = job
        runner = SimpleNamespace(ref=job.state.ref, labels=labels or {}, taken_over_s=taken_over_s)
        runner.member = partial(member_of, job.state)
        runner.grant = job.state.job.share_granted
        runner.publish_draw = job.state.job.draw_published
        self.runners.append(runner)
        self.budgets.grant_share(runner)

    def budget(self, watts: int, name: str = "hall", uid: str = "u", **selector: Any) -> None:
        spec = {"watts": watts, **({"selector": selector} if selector else {})}
        self.budgets.observe({"metadata": {"name": name, "uid": uid, "generation": 3}, "spec": spec})

    async def tick(self, seconds: float = 1.0, *, leads: bool = True) -> None:
        self.now_s += seconds
        await self.budgets.tick(Now(self.now_s, 1_900_000_000.0 + self.now_s), leads=leads)
        for job in self.jobs.values():
            if job.state.frontier is not None and job.state.nodes:
                job.settle()

    def points(self, name: str) -> set[int]:
        return {point for node in self.jobs[name].nodes for point in node.plans.selected.values()}

    def drawn_w(self, name: str) -> float:
        state: Training = self.jobs[name].state
        assert state.frontier is not None
        assert state.spec is not None
        (point,) = self.points(name)
        return power_w(state.frontier, point, replicas_of(state.spec))

    @property
    def written(self) -> dict[str, Any]:
        return self.api.writes[-1]

    def kept(self) -> dict[str, Any]:
        found: dict[str, Any] = {c["type"]: c for c in self.written["conditions"]}["Kept"]
        return found


@pytest.fixture
def site(make_job: Any) -> Site:
    return Site(make_job)


def condition(job: Any, kind: ConditionType) -> tuple[bool | None, Reason, str]:
    found = next(c for c in conditions_of(job.state, job.decide()) if c.type is kind)
    return found.status, found.reason, found.message


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
    assert f"this plan draws {site.drawn_w('a'):.0f} W" in message
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
    assert "less than its jobs draw at their most frugal plans" in condition(job, ConditionType.PLAN_APPLIED)[2]


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
    site.jobs["b"].state.pods_observed([], {})
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
    assert "1 of 1 jobs have no frontier yet, first ns/a" in kept["message"]


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
    assert named | {BudgetReason.NO_JOBS, BudgetReason.SHARED} == set(BudgetReason)


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


# ---------------------------------------------------------------------------------------------------- several replicas


class Pair:
    """Two replicas: the first shares the budget, the second serves jobs of its own; the API server is between them."""

    def __init__(self, make_job: Any) -> None:
        self.first, self.second = Site(make_job), Site(make_job)
        self.first.budgets._others = lambda: self.of_second
        self.of_second: list[OtherJob] = []
        self.second_lives = True
        self.spec: dict[str, Any] = {}

    def budget(self, watts: int) -> None:
        self.spec = {"watts": watts}
        self._deliver()

    def _deliver(self) -> None:
        """The watch brings the budget to both, as far as they live."""
        status = self.first.api.writes[-1] if self.first.api.writes else {}
        version = str(10 * len(self.first.api.writes))
        metadata = {"name": "hall", "uid": "u", "generation": 3, "resourceVersion": version}
        for site in (self.first, self.second) if self.second_lives else (self.first,):
            site.budgets.observe({"metadata": metadata, "spec": self.spec, "status": status})

    async def tick(self) -> None:
        if self.second_lives:
            await self.second.tick(leads=False)
            self.of_second = [
                OtherJob("ns", name, {}, job.spec.priority, self.status_of(job))
                for name, job in self.second.jobs.items()
            ]
        await self.first.tick()
        self._deliver()

    @staticmethod
    def status_of(job: Any) -> dict[str, Any]:
        made = job.decide()
        conditions = [
            {"type": c.type.value, "status": "True" if c.status else "False"} for c in conditions_of(job.state, made)
        ]
        return {**dump(status.figures(job.state, made)), "conditions": conditions}


@pytest.fixture
def pair(make_job: Any) -> Pair:
    return Pair(make_job)


async def test_jobs_of_two_replicas_share_as_those_of_one_do(pair: Pair, site: Site) -> None:
    for name in "ab":
        site.job(name)
    full_w = site.drawn_w("a")
    site.budget(round(1.6 * full_w))
    await site.tick()
    pair.first.job("a")
    pair.second.job("b")
    pair.budget(round(1.6 * full_w))
    for _ in range(4):
        await pair.tick()
    assert pair.first.points("a") == site.points("a")
    assert pair.second.points("b") == site.points("b")
    assert pair.second.api.writes == [], "one replica writes"
    assert pair.first.jobs["a"].state.job.draw is None, "its own job need not say what it draws"
    assert [share["name"] for share in pair.first.written["shares"]] == ["a", "b"]


async def test_no_share_rises_while_the_replica_of_one_that_is_to_fall_is_dead(pair: Pair) -> None:
    low, high = pair.second.job("low", priority=-1), pair.first.job("high")
    full_w = pair.first.drawn_w("high")
    high.state.spec_accepted(pair.first.make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "30%"}).spec)
    pair.budget(math.ceil(1.75 * full_w))
    for _ in range(5):
        await pair.tick()
    assert pair.second.points("low") == {0}
    frugal = pair.first.points("high")
    assert min(frugal) > 0
    high.state.spec_accepted(pair.first.make_job().spec)  # it wants full speed now, and comes first
    pair.second_lives = False
    for _ in range(3):
        await pair.tick()
    assert pair.first.points("high") == frugal, "low still draws what it drew"
    assert pair.first.written["shares"][1]["watts"] < low.state.job.share.watts, "but it is to draw less"
    pair.second_lives = True
    pair._deliver()
    for _ in range(3):
        await pair.tick()
    assert pair.first.points("high") == {0}
    assert min(pair.second.points("low")) > 0
    assert pair.first.drawn_w("high") + pair.second.drawn_w("low") <= 1.75 * full_w


async def test_a_status_is_read_when_it_has_changed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(job: str, priority: int, status: Mapping[str, Any]) -> Member | None:
        read.append(job)
        return member_from_status(job, priority, status)

    monkeypatch.setattr(module, "member_from_status", counted)
    pair.second.job("b")
    pair.budget(10_000)
    await pair.tick()
    for _ in range(5):
        await pair.first.tick()
    assert read == ["ns/b"]
    await pair.tick()
    assert read == ["ns/b", "ns/b"]


async def test_who_takes_over_keeps_the_shares(pair: Pair) -> None:
    pair.first.job("a")
    pair.second.job("b")
    full_w = pair.first.drawn_w("a")
    pair.budget(round(1.6 * full_w))
    for _ in range(4):
        await pair.tick()
    before = {share["name"]: share["watts"] for share in pair.first.written["shares"]}
    second = pair.second
    second.budgets._others = lambda: [OtherJob("ns", "a", {}, 0, pair.status_of(pair.first.jobs["a"]))]
    await second.tick(leads=True)
    await second.tick(leads=True)
    assert second.jobs["b"].state.job.share.watts == before["b"]
    assert second.jobs["b"].state.job.draw is None
    assert sum(second.budgets._objects["hall"].decision.allocation.shares_w.values()) <= 1.6 * full_w
    assert await pair.first.budgets.tick(Now(500.0, 1_900_000_500.0), leads=False) is None
    assert pair.first.jobs["a"].state.job.draw is not None
    assert "perseus_budget_watts{" not in pair.first.metrics.exposition().decode(), "one replica shows it"


@pytest.mark.parametrize("points", [2, 11, 400])
async def test_a_draw_says_what_the_other_replica_must_know(make_job: Any, points: int) -> None:
    job = make_job()
    job.run()
    job.state.solve.frontier = frontier_of(job.spec, points)
    member = member_of(job.state, Now(0, 0))
    assert member is not None
    assert member.claim is not None
    written = dump(ShareStatus(name="hall", watts=7, draw=draw_to_status(member)))
    active = [{"type": "Active", "status": "True"}]
    read = member_from_status("ns/job", 0, {"powerBudget": written, "conditions": active})
    assert read is not None
    assert read.claim is not None
    assert (read.follows_w, read.held_w) == (7.0, math.ceil(member.held_w))
    assert (read.claim.least_w, read.claim.wanted_w) == (member.claim.least_w, member.claim.wanted_w)
    assert len(read.claim.curve) <= MAX_SPEEDS
    for share_w in (read.claim.least_w, (read.claim.least_w + read.claim.wanted_w) / 2, read.claim.wanted_w):
        assert read.claim.throughput(share_w) == pytest.approx(member.claim.throughput(share_w), rel=1e-3)


@pytest.mark.parametrize(
    ("status", "known"),
    [({}, True), ({"powerBudget": "x"}, True), ({"conditions": [{"type": "Active", "status": "False"}]}, False)],
)
def test_what_a_status_does_not_say_is_not_known(status: dict[str, Any], known: bool) -> None:
    assert member_from_status("ns/job", 3, status) == (Member("ns/job", 3) if known else None)


async def test_a_job_that_is_fenced_alone_stops_no_budget_and_keeps_its_share(site: Site) -> None:
    for name in ("a", "b"):
        site.job(name)
    full_w = site.drawn_w("a")
    site.budget(round(1.6 * full_w))
    await site.tick()
    before = {share["name"]: share["watts"] for share in site.written["shares"]}
    site.jobs["a"].state.job.fenced_by(Explanation(Reason.FENCED, "a newer operator commands this job"))
    site.budget(round(1.4 * full_w))
    await site.tick(GRACE_S + 1)
    after = {share["name"]: share["watts"] for share in site.written["shares"]}
    assert after["a"] == before["a"]
    assert after["b"] < before["b"]
