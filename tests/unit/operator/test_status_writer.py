"""What others write over our words: an operator that slept and wakes, somebody by hand. The watch is late and leaves
out; in the end what is stored is what this operator says, or it has heard that a newer one speaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.conftest import EPOCH, Desk, spec_of

from perseus_core import keys
from perseus_operator.api.conditions import Reason
from perseus_operator.budgets.allocation import Share
from perseus_operator.clients.kube.versioned import Versioned, is_newer
from perseus_operator.controller.status_writer import NEVER_S
from perseus_operator.jobs.pace import Pace
from perseus_operator.nodes.iterations import Measured
from perseus_operator.objects.values import Now

ANNOTATION = keys.ANNOTATION_PLANNED_SLOWDOWN


class Watched(Desk):
    """A desk to which a watch brings what is stored; its job runs."""

    def __init__(self) -> None:
        super().__init__(pace=Pace(1e6), status_interval_s=0.0)
        self.job.run()
        self.brought = 0
        """The version that the watch has brought last."""

    def bring(self, version: int) -> bool:
        """The watch: in order, but not every version."""
        self.brought = max(self.brought, version)
        return self.reporter.observe(*self.versions[self.brought], str(self.brought))

    async def reconcile(self) -> None:
        self.job.now_s += 60  # beyond every pause
        await self.report(self.job.settle())

    async def settle(self) -> None:
        """Until the watch has nothing more to bring, and nothing more is written."""
        for _ in range(8):
            before = len(self.versions)
            self.bring(len(self.versions) - 1)
            await self.reconcile()
            if len(self.versions) == before:
                return
        raise AssertionError("still writing")


async def test_a_baseline_of_another_shape_is_discarded_with_one_event() -> None:
    server = Watched()
    server.job.state.baseline = Measured(1_000_000, 400_000, 3)
    await server.settle()
    assert "BaselineDiscarded" not in server.posted
    for pipelines in (3, 2):
        shape = {"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": pipelines}
        server.job.state.spec_accepted(spec_of(pipeline=shape, baselineIterations=3))
        await server.settle()
        await server.settle()
    assert server.posted.count("BaselineDiscarded") == 1


async def test_a_budget_that_slows_a_job_is_one_event_and_ready_says_it_as_long_as_it_does() -> None:
    server = Watched()
    await server.settle()
    ready = lambda: next(c["message"] for c in server.status["conditions"] if c["type"] == "Ready")  # noqa: E731
    assert ready() == "The plan is in force."
    server.job.state.job.share_granted(Share("hall-b", 1_500.0))
    for _ in range(3):
        await server.settle()
    assert ready().startswith("The plan is in force, slowed by PowerBudget hall-b by ")
    assert server.posted.count("LimitedByBudget") == 1
    [said] = [message for reason, message in server.said if reason == "PlanChanged" and "PowerBudget" in message]
    assert said.endswith(f"on purpose, {ready().removeprefix('The plan is in force, ')}")
    server.job.state.job.share_granted(None)
    await server.settle()
    assert ready() == "The plan is in force."


MOVES = st.lists(st.sampled_from(["edit", "reconcile", "lost", "bring", "skip", "stale", "more", "strip"]), max_size=14)


@settings(max_examples=60)
@given(MOVES, st.randoms(use_true_random=False))
def test_whatever_others_write_and_however_late_the_watch_our_status_stays(moves: list[str], dice: Any) -> None:
    async def play() -> None:
        server = Watched()
        for number, move in enumerate(moves):
            match move:
                case "edit":
                    server.job.state.job.generation += 1
                    server.job.state.spec_accepted(
                        spec_of(objective={"type": dice.choice(["MinEnergy", "MaxThroughput"])})
                    )
                case "reconcile":
                    await server.reconcile()
                case "lost":
                    server.answers = False
                    await server.reconcile()
                    server.answers = True
                case "bring":
                    server.bring(min(server.brought + 1, len(server.versions) - 1))
                case "skip":
                    server.bring(dice.randint(server.brought, len(server.versions) - 1))
                case "stale":  # an operator that believes what was so some time ago
                    server.store(status=dice.choice(server.versions)[0])
                case "more":
                    server.store(status={**server.status, "stragglers": [{"dataParallelRank": number}]})
                case "strip":
                    server.store(annotations={})
        await server.settle()
        alone = Watched()
        alone.job.state.job.generation = server.job.state.job.generation
        assert server.job.state.spec is not None
        alone.job.state.spec_accepted(server.job.state.spec)
        await alone.settle()
        assert plain(server.status) == plain(alone.status)
        assert server.annotations.keys() == {ANNOTATION}
        assert server.annotations == alone.annotations

    asyncio.run(play())


def plain(status: dict[str, Any]) -> dict[str, Any]:
    """Without times."""
    conditions = {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}
    return {**status, "conditions": conditions}


async def test_our_own_status_coming_back_costs_no_write() -> None:
    server = Watched()
    await server.settle()
    for edit in ("MinEnergy", "MaxThroughput"):
        server.job.state.job.generation += 1
        server.job.state.spec_accepted(spec_of(objective={"type": edit}))
        await server.reconcile()
        written = len(server.versions)
        for version in range(written):
            assert not server.bring(version)
            await server.reconcile()
        assert len(server.versions) == written


async def test_what_changes_during_a_write_is_reported_as_soon_as_it_has_ended() -> None:
    server = Watched()
    await server.settle()
    for missed in (False, True):
        server.job.now_s += 100
        server.job.state.job.generation += 1
        now = Now(server.job.now_s, server.job.wall_s)
        server.reporter.report(server.job.state.job, server.described(server.job.decide()), now)
        [write] = server.spawned
        server.spawned.clear()
        if missed:
            server.job.state.job.generation += 1
            report = server.described(server.job.decide())
            assert server.reporter.report(server.job.state.job, report, now) == NEVER_S
        assert await write is missed


async def test_an_operator_that_finds_a_newer_writer_stops_writing() -> None:
    server = Watched()
    await server.settle()
    server.lose_shard(EPOCH + 1)
    server.store(status={**server.status, "observedGeneration": 7})
    assert server.bring(len(server.versions) - 1)
    await server.settle()
    assert server.status["observedGeneration"] == 7
    assert server.job.state.job.fenced is not None
    assert server.job.state.job.fenced.reason is Reason.FENCED
    assert f"its epoch is {EPOCH + 1}, this operator's is {EPOCH}" in server.job.state.job.fenced.message


async def test_an_operator_that_cannot_read_the_newest_epoch_waits_until_it_can() -> None:
    server = Watched()
    await server.settle()
    server.leases.answers = False
    theirs = {**server.status, "observedGeneration": 7}
    server.store(status=theirs)
    await server.settle()
    assert server.status == theirs
    server.leases.answers = True
    await server.settle()
    assert server.status["observedGeneration"] == 1


@pytest.mark.parametrize(
    ("version", "than", "newer"),
    [("10", "9", True), ("9", "10", False), ("9", "9", False), ("1", "", True), ("b", "a", True), ("a", "a", False)],
)
def test_versions_are_numbers_where_they_can_be(version: str, than: str, newer: bool) -> None:
    assert is_newer(version, than) is newer


def test_an_answer_older_than_the_watch_does_not_count() -> None:
    stored = Versioned("")
    stored.write_started("ours")
    assert stored.observed("theirs", "12")
    stored.write_succeeded("11")
    assert stored.value == "theirs"
    stored.write_started("ours again")
    assert not stored.observed("ours again", "13"), "our own, before its answer"
    stored.write_succeeded("13")
    assert stored.value == "ours again"
