"""Epochs that agents have seen higher: drawn above if the counter was lost, not for a newer operator nor for a lie."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.operator.conftest import LIMITS, Job
from tests.unit.operator.test_job_runner import session_of

from perseus_operator.controller.epochs import MAX_LOST, MAX_RAISES, Epochs
from perseus_operator.errors import AgentFenced, KubeUnavailable
from perseus_operator.planning.node_actions import Acquire
from perseus_operator.reporting.metrics import Metrics


class Counter:
    """The counter as the API server has it."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.writes = 0
        self.answers = True

    async def newest(self) -> int:
        await asyncio.sleep(0)  # others run while the API server answers
        if not self.answers:
            raise KubeUnavailable("503")
        return self.value

    async def raise_to(self, epoch: int, known: int) -> int:
        if await self.newest() <= known:
            self.value = epoch
            self.writes += 1
        return self.value

    def epochs(self, first: int) -> Epochs:
        return Epochs(first, newest=self.newest, raise_to=self.raise_to)


async def test_a_lost_counter_is_raised_once_for_all_jobs() -> None:
    counter = Counter(1)
    epochs = counter.epochs(1)
    assert await epochs.above(57, "a") == 58
    assert await epochs.above(40, "b") == 58, "it is above that already"
    assert (counter.value, counter.writes, epochs.first) == (58, 1, 1)


async def test_agents_that_answer_at_once_with_different_epochs_are_all_commanded() -> None:
    counter = Counter(1)
    epochs = counter.epochs(1)
    seen = {"a": 57, "b": 60, "c": 40, "d": 60}
    drawn = await asyncio.gather(*(epochs.above(epoch, job) for job, epoch in seen.items()))
    assert all(epoch is not None and epoch > before for epoch, before in zip(drawn, seen.values(), strict=True)), drawn
    assert counter.value == epochs.drawn == 61


async def test_a_newer_operator_is_left_in_command() -> None:
    counter = Counter(2)
    epochs = counter.epochs(1)
    assert await epochs.above(2, "a") is None
    assert counter.value == 2
    raised = Counter(1)
    older = raised.epochs(1)
    assert await older.above(57, "a") == 58
    raised.value = 59
    assert await older.above(40, "b") is None, "an operator has started since"


async def test_an_agent_that_names_what_was_never_drawn_is_not_believed() -> None:
    counter = Counter(1)
    epochs = counter.epochs(1)
    assert await epochs.above(2**63 - 1, "a") is None
    assert await epochs.above(1 + MAX_LOST + 1, "a") is None
    assert await epochs.above(None, "a") is None
    assert counter.writes == 0


async def test_an_agent_that_always_asks_for_more_stops_its_own_job_alone() -> None:
    counter = Counter(1)
    epochs = counter.epochs(1)
    raised = 1
    for _ in range(MAX_RAISES):
        raised = await epochs.above(raised, "liar") or pytest.fail("stopped too early")
    assert await epochs.above(raised, "liar") is None
    assert counter.writes <= MAX_RAISES
    assert await epochs.above(7, "honest") is not None
    epochs.forget("liar")
    assert await epochs.above(raised, "liar") == raised + 1


@pytest.mark.parametrize("answers", [True, False])
async def test_a_job_goes_on_under_the_raised_epoch_or_tries_again(answers: bool) -> None:
    sent: list[int] = []

    async def acquire(*_: Any, epoch: int, **__: Any) -> None:
        sent.append(epoch)
        raise AgentFenced("FAILED_PRECONDITION: StaleEpoch", 57)

    counter = Counter(1)
    counter.answers = answers
    services = SimpleNamespace(
        monotonic_s=lambda: 0.0,
        agents=SimpleNamespace(acquire=acquire),
        limits=LIMITS,
        epochs=counter.epochs(1),
        metrics=Metrics(),
    )
    job = Job()
    job.run()
    node = job.nodes[0]
    await session_of(job, services).command(node, Acquire(node.name))
    await session_of(job, services).command(node, Acquire(node.name))
    assert job.state.fenced is None
    assert sent == ([1, 58] if answers else [1, 1])
    assert (node.failures > 0) is not answers
