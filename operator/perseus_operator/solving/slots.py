"""Turns for a bounded number of workers, fair between namespaces: one with many requests waits behind itself alone."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """At most so many at a time; a free slot goes to the namespace that has waited longest for its turn."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        """As many as there are now; more may be held for a while after a `resize`."""
        self.held = 0
        self.waiting = 0
        """Requests without a slot. A number, as metrics are read in another thread."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def resize(self, slots: int) -> None:
        """Have so many slots from now on. Those that are held beyond that stay until they are given back."""
        self.slots = slots
        self._grant()

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        """Hold a slot, on behalf of a namespace."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(mine)
        self.waiting += 1
        self._grant()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._give_back()  # it was given a slot at the same moment
            else:
                self.waiting -= 1
            raise
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self.held -= 1
        self._grant()

    def _grant(self) -> None:
        while self.held < self.slots and self._waiting:
            namespace, queue = self._waiting.popitem(last=False)
            first = queue.popleft()
            if queue:
                self._waiting[namespace] = queue  # behind all others
            if not first.done():
                self.held += 1
                self.waiting -= 1
                first.set_result(None)
