"""A batch of telemetry is read event by event, whatever bytes it has; the result is that of parsing it as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from perseus_core.iteration import IterationReport
from perseus_operator.clients.agents.client import AgentPool
from perseus_operator.clients.agents.messages import RankJoined, StreamOpened
from perseus_operator.clients.agents.telemetry import LARGEST_EVENT, TornBatch, dropped_of, events_of
from perseus_operator.errors import AgentRefused
from perseus_operator.nodes.node import MOST_RANKS, Node, Rank
from perseus_proto.planset import MAX_INSTRUCTIONS
from perseus_proto.v1alpha1 import agent_pb2

events = st.builds(
    agent_pb2.TelemetryEvent,
    iteration=st.none() | st.builds(agent_pb2.IterationReport, durations_us=st.lists(st.integers(0, 2**32 - 1))),
    rank_left=st.none() | st.builds(agent_pb2.Rank, pod_uid=st.text(max_size=5)),
)


@given(st.integers(0, 2**64 - 1), st.lists(events, max_size=8))
def test_the_events_are_those_of_the_message(dropped: int, sent: list[agent_pb2.TelemetryEvent]) -> None:
    data = agent_pb2.TelemetryBatch(dropped=dropped, events=sent).SerializeToString()
    assert [event for event, _ in events_of(data)] == sent
    assert dropped_of(data) == dropped


@given(st.binary(max_size=200))
def test_whatever_bytes_come_there_is_one_error(data: bytes) -> None:
    try:
        whole = list(agent_pb2.TelemetryBatch.FromString(data).events)
    except DecodeError:
        whole = None
    try:
        found = [event for event, _ in events_of(data)]
        dropped_of(data)
    except TornBatch:
        return
    assert whole is None or len(found) == len(whole)


def test_the_longest_report_is_read_and_a_longer_one_is_not() -> None:
    words = [2**32 - 1] * MAX_INSTRUCTIONS
    longest = agent_pb2.IterationReport(
        durations_us=words, instruction_energy_mj=words, leads_us=[2**31 - 1] * MAX_INSTRUCTIONS
    )
    event = agent_pb2.TelemetryEvent(iteration=longest)
    assert event.ByteSize() <= LARGEST_EVENT
    huge = agent_pb2.TelemetryEvent(gpu=agent_pb2.GpuEvent(message="x" * LARGEST_EVENT))
    data = agent_pb2.TelemetryBatch(events=[event, huge, event]).SerializeToString()
    assert [one is None for one, _ in events_of(data)] == [False, True, False]


def pool_of(*batches: bytes, description: bytes = b"") -> AgentPool:
    """A client of an agent that sends these."""

    class Call:
        def __aiter__(self) -> AsyncIterator[bytes]:
            return self._sent()

        async def _sent(self) -> AsyncIterator[bytes]:
            for batch in batches:
                yield batch

        def cancel(self) -> None: ...

    class Channel:
        def unary_stream(self, *_: Any) -> Any:
            return lambda request: Call()

        def unary_unary(self, *_: Any) -> Any:
            async def call(request: Any, timeout: float) -> bytes:
                return description

            return call

    class Entry:
        channel, uses = Channel(), 0

    pool = AgentPool(None, timeout_s=1.0)

    @contextlib.asynccontextmanager
    async def channel(_: str) -> AsyncIterator[Any]:
        yield Entry()

    pool._channels.use = cast(Any, channel)  # type: ignore[method-assign]
    return pool


async def turns_while(work: Any) -> tuple[int, list[Any]]:
    """Turns of the event loop that others had while a stream was read, and what it gave."""
    turns, reading = 0, asyncio.create_task(collected(work))
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    return turns, reading.result()


async def collected(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_others_have_turns_while_a_message_of_a_million_events_is_read() -> None:
    event = agent_pb2.TelemetryEvent(rank_left=agent_pb2.Rank())
    data = agent_pb2.TelemetryBatch(events=[event] * 20_000).SerializeToString()
    turns, found = await turns_while(pool_of(data).watch("a:1", "job", namespace="team"))
    assert len(found) == 20_001
    assert turns > 60, "one for each 256 events or so"


async def test_telemetry_is_read_in_turns_of_namespaces_one_in_each_turn_of_the_loop() -> None:
    """However many streams one of them has, and however much they say."""
    report = agent_pb2.IterationReport(iteration_time_us=9, compute_span_us=9, durations_us=[2**32 - 1] * 20_000)
    long = agent_pb2.TelemetryBatch(events=[agent_pb2.TelemetryEvent(iteration=report)] * 4).SerializeToString()
    pool, began = pool_of(long), list[str]()

    async def read(namespace: str) -> None:
        stream = pool.watch("a:1", "job", namespace=namespace)
        async with contextlib.aclosing(stream):
            async for event in stream:
                if isinstance(event, IterationReport):
                    began.append(namespace)

    hostile = [asyncio.create_task(read("evil")) for _ in range(50)]
    for _ in range(4):
        await asyncio.sleep(0)
    assert began, "they are being read"
    honest, at = asyncio.create_task(read("honest")), len(began)
    per_turn = list[int]()
    while not honest.done():
        before = len(began)
        await asyncio.sleep(0)
        per_turn.append(len(began) - before)
    assert max(per_turn) == 1, "an event of this length is a turn"
    assert began[at:].count("evil") <= 2 + began.count("honest") == 6
    for one in hostile:
        one.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    assert (pool._reading.held, pool._reading.waiting) == (0, 0)


async def test_a_batch_of_nothing_but_fields_that_it_cannot_have_is_not_read_to_its_end() -> None:
    """64 MiB of them held the event loop for twenty seconds."""
    few = b"\x18\x00" * 64 + agent_pb2.TelemetryBatch(events=[agent_pb2.TelemetryEvent()]).SerializeToString()
    assert len(list(events_of(few))) == 1
    with pytest.raises(TornBatch, match="more than 64 fields beside its events"):
        list(events_of(b"\x18\x00" * 65))


async def test_a_torn_batch_is_an_error_of_the_agent_and_the_first_event_counts() -> None:
    rank = agent_pb2.TelemetryEvent(rank_joined=agent_pb2.Rank(pod_uid="p"))
    data = agent_pb2.TelemetryBatch(events=[rank]).SerializeToString() + b"\x12\xff\xff\xff\x7f"
    found: list[Any] = []

    async def read() -> None:
        async for event in pool_of(data).watch("a:1", "job", namespace="team"):
            found.append(event)

    with pytest.raises(AgentRefused, match="cannot be read"):
        await read()
    assert [type(event) for event in found] == [StreamOpened, RankJoined]


async def test_reports_with_more_than_any_can_have_are_left_out_before_anything_is_computed() -> None:
    many = [1] * (MAX_INSTRUCTIONS + 1)
    sent = [
        agent_pb2.TelemetryEvent(iteration=agent_pb2.IterationReport(**{name: many}))
        for name in ("durations_us", "instruction_energy_mj", "leads_us")
    ]
    data = agent_pb2.TelemetryBatch(events=sent).SerializeToString()
    found = await collected(pool_of(data).watch("a:1", "job", namespace="team"))
    assert [type(event) for event in found] == [StreamOpened]


@pytest.mark.parametrize("data", [b"\xff" * 10, bytes(25 << 20)], ids=["noise", "too large"])
async def test_a_description_that_cannot_be_is_an_error_of_the_agent(data: bytes) -> None:
    with pytest.raises(AgentRefused):
        await pool_of(description=data).describe("a:1")


def test_an_agent_that_says_what_it_likes_fills_a_bounded_table() -> None:
    node = Node("n", "a:1", frozenset())
    for number in range(5_000):
        node.rank_joined(Rank("p", f"GPU-{number}", number, 0, 0, number, 0))
        node.gpu_slowed(f"GPU-{number}", "POWER_CAP", "held")
    assert len(node.ranks) == len(node.gpu_events) == MOST_RANKS
    node.rank_joined(Rank("p", "GPU-0", 0, 0, 0, 77, 0))
    assert node.ranks[next(iter(node.ranks))].pid == 77
