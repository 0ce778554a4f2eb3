"""Epochs that agents have seen higher: drawn above if the counter was lost, not for a newer operator nor for a lie."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.doubles.lease_store import LeaseConnection, LeaseServer
from tests.unit.operator.conftest import LIMITS, Job, epochs_of
from tests.unit.operator.test_job_runner import session_of

from perseus_operator.errors import AgentFenced
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.nodes.actions import Acquire
from perseus_operator.replicas.epochs import MAX_LOST, MAX_RAISES
from perseus_operator.replicas.shard import LeaseRecord, shard_lease, shard_of


async def test_a_lost_counter_is_raised_once_for_all_jobs_of_a_shard() -> None:
    leases = LeaseConnection(LeaseServer())
    epochs = epochs_of(1, leases)
    writes = leases.server.writes
    assert await epochs.above(57, "a") == 58
    assert await epochs.above(40, namesake("a")) == 58, "it is above that already"
    assert (leases.server.counter, epochs.of("a"), epochs.drawn("a")) == (58, 1, 58)
    assert leases.server.writes == writes + 2, "of the counter and of the shard"
    assert leases.server.records[shard_lease(shard_of("a"))].epoch == 58, "which the next holder is to exceed"


async def test_agents_that_answer_at_once_with_different_epochs_are_all_commanded() -> None:
    leases = LeaseConnection(LeaseServer())
    epochs = epochs_of(1, leases)
    seen = {"a": 57, "b": 60, "c": 40, namesake("a"): 60}
    drawn = await asyncio.gather(*(epochs.above(epoch, job) for job, epoch in seen.items()))
    assert all(epoch is not None and epoch > before for epoch, before in zip(drawn, seen.values(), strict=True)), drawn
    assert leases.server.counter == max(epoch for epoch in drawn if epoch)


async def test_a_replica_that_has_taken_the_shard_is_left_in_command() -> None:
    leases = LeaseConnection(LeaseServer())
    epochs = epochs_of(1, leases)
    assert await epochs.above(57, "a") == 58
    leases.server.put(LeaseRecord(shard_lease(shard_of("a")), "another", 59))
    assert await epochs.above(59, "a") is None
    assert await epochs.above(40, "a") is None, "nor for what it has seen before"
    assert leases.server.counter == 58
    assert await epochs.newest("a") == 59


async def test_a_shard_that_is_taken_while_an_epoch_is_drawn_stays_taken() -> None:
    leases = LeaseConnection(LeaseServer())
    epochs, draw = epochs_of(1, leases), leases.next_epoch

    async def slowly(least: int) -> int:
        leases.server.put(LeaseRecord(shard_lease(shard_of("a")), "another", 80))
        return await draw(least)

    leases.next_epoch = slowly  # type: ignore[method-assign, assignment]
    assert await epochs.above(57, "a") is None
    assert leases.server.records[shard_lease(shard_of("a"))].holder == "another"


async def test_an_agent_that_names_what_was_never_drawn_is_not_believed() -> None:
    leases = LeaseConnection(LeaseServer())
    epochs = epochs_of(1, leases)
    writes = leases.server.writes
    assert await epochs.above(2**63 - 1, "a") is None
    assert await epochs.above(1 + MAX_LOST + 1, "a") is None
    assert await epochs.above(None, "a") is None
    assert leases.server.writes == writes


async def test_an_agent_that_always_asks_for_more_stops_its_own_job_alone() -> None:
    leases = LeaseConnection(LeaseServer())
    epochs = epochs_of(1, leases)
    raised = 1
    for _ in range(MAX_RAISES):
        raised = await epochs.above(raised, "liar") or pytest.fail("stopped too early")
    assert await epochs.above(raised, "liar") is None
    assert leases.server.counter <= 1 + MAX_RAISES
    assert await epochs.above(7, "honest") is not None
    epochs.forget("liar")
    assert (await epochs.above(raised, "liar") or 0) > raised


def namesake(uid: str) -> str:
    """Another job of the same shard."""
    return next(other for number in range(1000) if shard_of(other := f"{uid}-{number}") == shard_of(uid))


@pytest.mark.parametrize("answers", [True, False])
async def test_a_job_goes_on_under_the_raised_epoch_or_tries_again(answers: bool) -> None:
    sent: list[int] = []

    async def acquire(*_: Any, epoch: int, **__: Any) -> None:
        sent.append(epoch)
        raise AgentFenced("FAILED_PRECONDITION: StaleEpoch", 57)

    leases = LeaseConnection(LeaseServer())
    epochs = epochs_of(1, leases)
    leases.answers = answers
    services = SimpleNamespace(
        monotonic_s=lambda: 0.0,
        agents=SimpleNamespace(acquire=acquire),
        limits=LIMITS,
        epochs=epochs,
        metrics=Metrics(),
    )
    job = Job()
    job.run()
    node = job.nodes[0]
    await session_of(job, services).command(node, Acquire(node.name))
    await session_of(job, services).command(node, Acquire(node.name))
    assert job.state.job.fenced is None
    assert sent == ([1, 58] if answers else [1, 1])
    assert (node.failures > 0) is not answers
