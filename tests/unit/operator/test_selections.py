"""Selections on a stream: each gets its own answer, and one that breaks is asked again by a call."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.waiting import PATIENCE_S, pass_time

from perseus_operator.clients.agents.client import AgentPool
from perseus_operator.clients.agents.selections import SelectionStream
from perseus_operator.errors import AgentFenced, AgentUnavailable
from perseus_proto.v1alpha1 import agent_pb2 as pb


def failure(code: grpc.StatusCode, **metadata: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata.items()), "")


class Agent:
    """A stub of one agent, and the stream that is open to it: answers with the iteration that is asked for."""

    def __init__(self) -> None:
        self.opened = self.calls = 0
        self.ended = False
        self.answers = True
        self.error: grpc.aio.AioRpcError | None = None
        """What the stream ends with."""
        self.call_error: grpc.aio.AioRpcError | None = None
        self._asked: asyncio.Queue[pb.SelectPlanRequest] = asyncio.Queue()
        self.is_asked = asyncio.Event()

    def SelectPlans(self) -> Agent:
        self.opened += 1
        self.ended, self._asked = False, asyncio.Queue()
        return self

    async def SelectPlan(self, request: Any, timeout: float) -> Any:
        self.calls += 1
        if self.call_error:
            raise self.call_error
        return pb.SelectPlanResponse(furthest_iteration=request.from_iteration)

    async def write(self, request: pb.SelectPlanRequest) -> None:
        if self.error:
            raise self.error
        self._asked.put_nowait(request)

    async def read(self) -> Any:
        request = await self._asked.get()
        self.is_asked.set()
        await asyncio.sleep(0)
        if not self.answers:
            await asyncio.Event().wait()
        return pb.SelectPlanResponse(furthest_iteration=request.from_iteration)

    def done(self) -> bool:
        return self.ended

    def cancel(self) -> None:
        self.ended = True


class Line:
    """A pool with a connection to that agent."""

    def __init__(self, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = AgentPool(None, timeout_s=PATIENCE_S)
        monkeypatch.setattr(self.pool._channels, "_open", lambda _: None)
        monkeypatch.setattr("perseus_operator.clients.agents.channels.agent_pb2_grpc.AgentStub", lambda _: agent)

    async def select(self, iteration: int) -> int:
        return await self.pool.select(
            "agent", job_uid="job", epoch=1, plan_id="plan", points=[(0, 1)], from_iteration=iteration
        )


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def line(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(agent, monkeypatch)


async def test_many_on_one_stream_each_get_their_own_answer(agent: Agent, line: Line) -> None:
    assert await asyncio.gather(*(line.select(n) for n in range(100))) == list(range(100))
    assert (agent.opened, agent.calls) == (1, 0)


async def test_a_stream_that_has_ended_is_opened_again(agent: Agent, line: Line) -> None:
    await line.select(1)
    agent.ended = True
    assert await line.select(2) == 2
    assert (agent.opened, agent.calls) == (2, 0)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_stream_that_breaks_is_replaced_by_a_call_and_opened_again(
    agent: Agent, line: Line, code: grpc.StatusCode
) -> None:
    agent.error = failure(code)
    assert await line.select(1) == 1
    agent.error = None
    assert await line.select(2) == 2
    assert (agent.opened, agent.calls) == (2, 1)


async def test_an_agent_without_the_stream_is_called_from_then_on(agent: Agent, line: Line) -> None:
    agent.error = failure(grpc.StatusCode.UNIMPLEMENTED)
    assert [await line.select(n) for n in range(3)] == [0, 1, 2]
    assert (agent.opened, agent.calls) == (1, 3)


async def test_a_silent_stream_is_given_up_in_time(agent: Agent, line: Line) -> None:
    """The deadline of an answer holds: a call after it would wait as long again."""
    agent.answers = False
    waiting = asyncio.create_task(line.select(5))
    await agent.is_asked.wait()
    pass_time(PATIENCE_S - 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    pass_time(1)
    with pytest.raises(AgentUnavailable, match=f"no answer to a selection within {PATIENCE_S:g} s"):
        await waiting
    assert agent.calls == 0
    assert agent.ended
    agent.answers = True
    assert await line.select(6) == 6
    assert (agent.opened, agent.calls) == (2, 0)


async def test_a_refusal_is_what_the_call_says(agent: Agent, line: Line) -> None:
    agent.error = agent.call_error = failure(
        grpc.StatusCode.FAILED_PRECONDITION, **{"perseus-error": "StaleEpoch", "perseus-epoch": "9"}
    )
    with pytest.raises(AgentFenced) as fenced:
        await line.select(1)
    assert fenced.value.seen == 9


class Busy:
    """A stub of agents that answer a moment later; ``begun`` has what was asked, in this order."""

    def __init__(self, begun: list[str]) -> None:
        self._begun = begun

    def SelectPlans(self) -> Busy:
        return self

    async def write(self, _: Any) -> None:
        self._begun.append("select")

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return pb.SelectPlanResponse()

    async def RenewLease(self, _: Any, timeout: float) -> Any:
        self._begun.append("renew")
        await asyncio.sleep(0)
        return pb.Lease()

    def done(self) -> bool:
        return False


async def test_selections_do_not_wait_for_renewals_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr("perseus_operator.clients.agents.channels.agent_pb2_grpc.AgentStub", lambda _: Busy(begun))
    pool = AgentPool(None, timeout_s=PATIENCE_S)
    monkeypatch.setattr(pool._channels, "_open", lambda _: None)
    names = [f"agent-{number}" for number in range(400)]
    renewals = [asyncio.create_task(pool.renew(name, job_uid="job", epoch=1, ttl_s=30.0)) for name in names]
    await asyncio.sleep(0)
    await asyncio.gather(
        *(pool.select(name, job_uid="job", epoch=1, plan_id="p", points=[(0, 1)], from_iteration=1) for name in names)
    )
    assert begun.index("select") < 100
    last = max(place for place, what in enumerate(begun) if what == "select")
    assert begun[: last + 1].count("renew") <= 100, "the rest comes after them"
    await asyncio.gather(*renewals)
    assert begun.count("renew") == len(names)


async def test_an_answer_that_nobody_waits_for_is_not_taken_for_the_next_one(agent: Agent) -> None:
    stream = SelectionStream(agent.SelectPlans, timeout_s=PATIENCE_S)
    first = asyncio.create_task(stream.select(pb.SelectPlanRequest(from_iteration=1)))
    await asyncio.sleep(0)  # it is sent
    first.cancel()
    answer = await stream.select(pb.SelectPlanRequest(from_iteration=2))
    assert first.cancelled()
    assert answer is not None
    assert answer.furthest_iteration == 2
