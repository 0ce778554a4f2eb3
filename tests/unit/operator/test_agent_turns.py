"""Calls to agents take turns: never more at once than their answers can be read in time, and who is silent holds up
nobody who answers."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from perseus_operator.clients.agents.client import _AT_ONCE, AgentPool
from perseus_operator.errors import AgentUnavailable


class Agents:
    """As the pool calls them: each answers once it may."""

    def __init__(self) -> None:
        self.pool = AgentPool(None, timeout_s=60.0)
        self.may = asyncio.Event()
        self.called = Counter[str]()

    async def ask(self, address: str) -> str:
        async def call(_: object) -> str:
            self.called[address] += 1
            await self.may.wait()
            return address

        return await self.pool._request(address, call)

    async def fail(self, address: str) -> None:
        async def call(_: object) -> str:
            raise AgentUnavailable("DEADLINE_EXCEEDED: no answer")

        with pytest.raises(AgentUnavailable):
            await self.pool._request(address, call)


async def until_still() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_thousand_are_called_in_turn_and_all_are() -> None:
    agents = Agents()
    names = [f"agent-{n}" for n in range(1000)]
    calls = [asyncio.create_task(agents.ask(name)) for name in names]
    await until_still()
    assert agents.called.total() == _AT_ONCE, "a deadline begins with the call, so nobody's runs out while it waits"
    agents.may.set()
    assert await asyncio.gather(*calls) == names
    assert agents.called == Counter(names)


async def test_hundreds_of_silent_agents_do_not_keep_the_others_waiting() -> None:
    agents = Agents()
    silent = [f"silent-{n}" for n in range(3 * _AT_ONCE)]
    for name in silent:
        await agents.fail(name)
    waiting = [asyncio.create_task(agents.ask(name)) for name in silent]
    await until_still()
    assert agents.called.total() == _AT_ONCE
    well = asyncio.create_task(agents.ask("well"))
    await until_still()
    assert agents.called["well"] == 1
    agents.may.set()
    await asyncio.gather(*waiting, well)

    agents.may.clear()  # they have answered: they are as good as any again
    again = [asyncio.create_task(agents.ask(name)) for name in silent[: 2 * _AT_ONCE]]
    await until_still()
    other = asyncio.create_task(agents.ask("well"))
    await until_still()
    assert agents.called["well"] == 1, "it waits its turn among them"
    agents.may.set()
    await asyncio.gather(*again, other)
