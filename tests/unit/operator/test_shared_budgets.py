"""PowerBudgets over the jobs of several replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from tests.doubles.budget_site import (
    GRACE_S,
    Site,
)
from tests.unit.operator.conftest import frontier_of, member_of

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.power_status import MAX_SPEEDS, ShareStatus
from perseus_operator.api.schema import dump
from perseus_operator.budgets import power_budgets as module
from perseus_operator.budgets.budget import (
    Member,
)
from perseus_operator.budgets.draw import draw_to_status, member_from_status
from perseus_operator.budgets.power_budgets import OtherJob
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.objects.values import Now


@pytest.fixture
def site(make_job: Any) -> Site:
    return Site(make_job)


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
