"""Work that several namespaces ask for is done once, and nobody waits for another's backlog."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.process import Outcome, Task, Verdict
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.shared_work import SharedWork
from perseus_operator.solving.slots import FairSlots


class Hard:
    """Work that ends when a test says so, one piece after the other."""

    def __init__(self, slots: int = 1) -> None:
        self.slots, self.shared = FairSlots(slots), SharedWork[str]()
        self.begun, self.ended = list[str](), list[str]()
        self.steps = asyncio.Semaphore(0)

    def doing(self, name: str) -> Callable[[], Awaitable[str]]:
        async def do() -> str:
            self.begun.append(name)
            await self.steps.acquire()
            self.ended.append(name)
            return f"{name} done"

        return do

    def ask(self, namespace: str, name: str) -> asyncio.Task[str]:
        return asyncio.create_task(self.shared.outcome(name.encode(), self.slots, namespace, self.doing(name)))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_honest_namespace_does_not_wait_behind_anothers_backlog() -> None:
    """It waited for 15.2 hard solves: the one whose inputs it had was the last of a hostile namespace."""
    hard = Hard()
    hostile = [hard.ask("evil", f"hard-{number}") for number in range(30)]
    await settle()
    honest = hard.ask("honest", "hard-29")
    await settle()
    for _ in range(2):
        hard.steps.release()
        await settle()
    assert honest.done()
    assert hostile[29].done(), "what was done for one is done for all"
    assert hard.ended == ["hard-0", "hard-29"]
    for one in hostile:
        one.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    assert (hard.slots.held, hard.slots.waiting) == (0, 0)


async def test_the_pool_shares_solves_between_namespaces_so() -> None:
    begun, go = list[bytes](), asyncio.Event()

    class Workers:
        slots = FairSlots(1)

        async def run(self, task: Task, request: bytes, most_bytes: int) -> Verdict:
            begun.append(request)
            await go.wait()
            return Verdict(Outcome.ANSWERED, b"a frontier")

    pool = SolverPool(workers=1, timeout_s=1, memory_mib=512)
    pool.solvers = Workers()
    requests = [SolveRequest("", "1f1b", 2, 2, None, 1, points) for points in range(30)]
    hostile = [asyncio.create_task(pool.solve(request, "evil")) for request in requests]
    while not begun:
        await asyncio.sleep(0.001)
    honest = asyncio.create_task(pool.solve(requests[29], "honest"))
    while pool.solvers.slots.waiting < 30:
        await asyncio.sleep(0.001)
    go.set()
    data, _ = await honest
    assert data == b"a frontier"
    wanted = json.dumps(asdict(requests[29])).encode()
    assert begun.index(wanted) == 1
    await asyncio.gather(*hostile)
    assert len(begun) == 30


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.sampled_from(["ask", "step", "give up"]))))
async def test_whoever_gives_up_nothing_is_done_twice_or_kept(steps: list[tuple[str, int, str]]) -> None:
    hard, asked = Hard(2), list[tuple[str, asyncio.Task[str]]]()
    for namespace, number, what in steps:
        if what == "ask":
            asked.append((f"w{number}", hard.ask(namespace, f"w{number}")))
        elif what == "step":
            hard.steps.release()
        elif asked:
            asked[number % len(asked)][1].cancel()
        await settle()
        under_way = len(hard.begun) - len(hard.ended)
        assert under_way >= 0
    for _ in range(200):
        hard.steps.release()
    outcomes = await asyncio.gather(*(task for _, task in asked), return_exceptions=True)
    for (name, _), outcome in zip(asked, outcomes, strict=True):
        assert outcome == f"{name} done" or isinstance(outcome, asyncio.CancelledError)
    assert not hard.shared._work
    assert (hard.slots.held, hard.slots.waiting, len(hard.slots._waiting)) == (0, 0, 0)


async def test_requests_that_are_given_up_leave_nothing_in_the_queue() -> None:
    """A namespace that made and deleted jobs while a solve ran left each in the queue until that had ended."""
    slots = FairSlots(1)

    async def hold() -> None:
        async with slots.turn("evil"):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(hold()) for _ in range(200)]
    await settle()
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert not slots._waiting
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert slots.held == 0
