"""The same work for several who ask: it is done once, in the first turn that any of them gets.

Each waits for its own turn. So a namespace never waits behind the backlog of another that has asked for the same
before, and one that asks for much gains nothing by asking for what others need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from perseus_operator.solving.slots import FairSlots

T = TypeVar("T")


@dataclass(eq=False)
class _Work(Generic[T]):
    """A piece of work that somebody waits for."""

    done: asyncio.Future[T]
    asked: int = 0
    """How many wait for it."""
    under_way: asyncio.Future[None] | None = None
    """Ends with the attempt under way, however that ends; None: none is."""


class SharedWork(Generic[T]):
    """Pieces of work by digest, each done in the first turn of any that ask."""

    def __init__(self) -> None:
        self._work: dict[bytes, _Work[T]] = {}

    async def outcome(self, digest: bytes, slots: FairSlots, namespace: str, do: Callable[[], Awaitable[T]]) -> T:
        """Wait for the outcome of a piece of work.

        Args:
            digest: of the work: the same has the same outcome.
            slots: in one of which it is done.
            namespace: whose turn it is.
            do: does it. If it is cancelled with the one who asked, or fails, the next one calls its own.
        """
        work = self._work.get(digest)
        if work is None:
            work = self._work[digest] = _Work(asyncio.get_running_loop().create_future())
        work.asked += 1
        turn = asyncio.create_task(self._in_turn(work, slots, namespace, do))
        try:
            await asyncio.wait({turn, work.done}, return_when=asyncio.FIRST_COMPLETED)
            return work.done.result() if work.done.done() else turn.result()
        finally:
            await _cancelled(turn)
            work.asked -= 1
            if not work.asked and self._work.get(digest) is work:
                del self._work[digest]
                work.done.cancel()

    async def _in_turn(self, work: _Work[T], slots: FairSlots, namespace: str, do: Callable[[], Awaitable[T]]) -> T:
        while True:
            async with slots.turn(namespace):
                if work.done.done():
                    return work.done.result()
                if work.under_way is None:
                    attempt = work.under_way = asyncio.get_running_loop().create_future()
                    try:
                        outcome = await do()
                        work.done.set_result(outcome)
                        return outcome
                    finally:
                        work.under_way = None
                        attempt.set_result(None)
                other = work.under_way
            # Without a slot: the one who does it has one.
            await asyncio.wait({other})


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """End a task that is needed no more, and wait until it has given its slot back."""
    if task.cancel():
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # the one who asked has the outcome, or is gone
