"""Connections to agents over many renewals of the certificates: what is under way is never cut off, nothing new begins
on an old one, and none is left over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_operator.clients.agents.client import AgentPool

ADDRESS = "10.0.0.1:1"


class Channel:
    """As grpc's, as far as the pool knows."""

    def __init__(self, number: int) -> None:
        self.number, self.closed = number, False
        self.SelectPlans = None
        """Nothing is selected here."""

    async def channel_ready(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        self.closed = True


class Files:
    """Certificates that change whenever a test says so."""

    def __init__(self) -> None:
        self.new = True

    def renewed(self) -> object | None:
        new, self.new = self.new, False
        return object() if new else None


class World:
    """A pool whose channels are made up, and calls that last until they are told to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = AgentPool(None, timeout_s=60.0)
        self.files, self.opened = Files(), list[Channel]()
        self.calls: list[tuple[asyncio.Task[None], asyncio.Event, Channel]] = []
        monkeypatch.setattr(self.pool._channels, "_files", self.files)
        monkeypatch.setattr(self.pool._channels, "_open", self._open)
        monkeypatch.setattr(
            "perseus_operator.clients.agents.channels.agent_pb2_grpc.AgentStub", lambda channel: channel
        )

    def _open(self, address: str) -> Channel:
        assert address == ADDRESS
        self.opened.append(Channel(len(self.opened)))
        return self.opened[-1]

    async def begin(self) -> None:
        may, on = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def call(line: Any) -> None:
            on.set_result(line.channel)
            await may.wait()

        task = asyncio.create_task(self.pool._request(ADDRESS, call))
        self.calls.append((task, may, await on))

    async def end(self, index: int) -> None:
        task, may, _ = self.calls.pop(index)
        may.set()
        await task

    async def renew(self) -> None:
        """A call notices it; the new connection stands a moment later."""
        self.files.new = True
        await self.begin()
        await self.end(-1)
        for _ in range(5):
            await asyncio.sleep(0)


@given(st.lists(st.sampled_from(["begin", "end first", "end last", "renew"]), max_size=25))
def test_a_connection_is_closed_when_the_last_on_it_has_ended_and_not_before(moves: list[str]) -> None:
    async def play(monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(monkeypatch)
        await world.renew()
        for move in moves:
            match move:
                case "begin":
                    await world.begin()
                    assert world.calls[-1][2] is world.opened[-1], "the newest that stands"
                case "end first" | "end last" if world.calls:
                    await world.end(0 if move == "end first" else -1)
                case "renew":
                    await world.renew()
            in_use = {channel.number for _, _, channel in world.calls} | {world.opened[-1].number}
            assert {channel.number for channel in world.opened if not channel.closed} == in_use
        await world.pool.close()
        assert all(channel.closed for channel in world.opened)
        while world.calls:
            await world.end(0)

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(play(monkeypatch))
