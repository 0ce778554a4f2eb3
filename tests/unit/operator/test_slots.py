"""Turns for a number of workers that changes."""

from __future__ import annotations

import asyncio
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from perseus_operator.solving.slots import FairSlots

Step = tuple[Literal["ask", "end", "give up", "resize"], int, bool]
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "end", "give up", "resize"]), st.integers(0, 5), st.booleans()), max_size=60
)
"""What happens, to which one, and whether the next thing happens only after all tasks have noticed."""


@given(STEPS)
async def test_no_slot_is_idle_while_somebody_waits_and_none_is_lost(steps: list[Step]) -> None:
    turns, asked, running = FairSlots(0), list[asyncio.Task[None]](), dict[asyncio.Task[None], asyncio.Event]()

    async def work(namespace: str) -> None:
        async with turns.turn(namespace):
            task = asyncio.current_task()
            assert task is not None
            running[task] = asyncio.Event()
            try:
                await running[task].wait()
            finally:
                del running[task]

    before = 0
    for what, number, settled in steps:
        before = max(before, turns.held)
        if what == "ask":
            asked.append(asyncio.create_task(work(f"namespace-{number % 3}")))
        elif what == "end" and running:
            list(running.values())[number % len(running)].set()
        elif what == "give up" and asked:
            asked[number % len(asked)].cancel()
        elif what == "resize":
            turns.resize(number)
        if not settled:
            continue
        for _ in range(6):
            await asyncio.sleep(0)
        assert turns.held == len(running) <= max(turns.slots, before)
        assert turns.held >= min(turns.slots, len(running) + turns.waiting)
        before = 0
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert (turns.held, turns.waiting) == (0, 0)


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=30), st.integers(1, 3))
async def test_no_more_go_on_in_a_turn_of_the_loop_than_there_are_slots(namespaces: list[str], slots: int) -> None:
    """Nor does one namespace come twice before another that waits."""
    turns, went_on, of_turn = FairSlots(slots), list[str](), list[int]()

    async def work(namespace: str) -> None:
        await turns.loop_turn(namespace)
        went_on.append(namespace)

    tasks = [asyncio.create_task(work(namespace)) for namespace in namespaces]
    while len(went_on) < len(namespaces):
        before = len(went_on)
        await asyncio.sleep(0)
        of_turn.append(len(went_on) - before)
    assert max(of_turn) <= slots
    for name in set(namespaces):
        waiting = went_on[slots : len(went_on) - went_on[::-1].index(name)]
        for other in set(namespaces) - {name}:
            assert waiting.count(other) <= waiting.count(name) + slots
    await asyncio.gather(*tasks)
    assert (turns.held, turns.waiting, turns._served) == (0, 0, {})
