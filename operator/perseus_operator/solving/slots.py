"""Turns for a bounded number of workers, or of the event loop, fair between namespaces: one with many requests waits
behind itself alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager


class FairSlots:
    """At most so many at a time; a free slot goes to the waiting namespace whose last turn is longest ago."""

    def __init__(self, slots: int, *, spare: int = 0) -> None:
        """``spare``: slots beyond these for namespaces that hold none, while another namespace holds several."""
        self._spare = spare
        self.slots = slots
        """As many as there are now; more may be held for a while after a `resize`."""
        self.held = 0
        self.waiting = 0
        """Requests without a slot. A number, as metrics are read in another thread."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: dict[str, int] = {}
        """When namespaces that wait or hold a slot had their last turn, by count."""
        self._holding: Counter[str] = Counter()
        self._turns = 0

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
                self._give_back(namespace)  # it was given a slot at the same moment
            else:
                self.waiting -= 1
                self._leave(namespace, mine)
            raise
        try:
            yield
        finally:
            self._give_back(namespace)

    async def loop_turn(self, namespace: str) -> None:
        """Wait for a turn of the event loop: of those that wait for one, one goes on in it for each slot.

        What awaits nothing would give a slot back before anybody else could ask for it, and all would go on in one.
        """
        async with self.turn(namespace):
            await asyncio.sleep(0)

    def _leave(self, namespace: str, request: asyncio.Future[None]) -> None:
        """Keep nothing of a request that has been given up: a namespace could make any number."""
        queue = self._waiting.get(namespace)
        if queue is not None and request in queue:
            queue.remove(request)
            if not queue:
                del self._waiting[namespace]
        self._forget(namespace)

    def _give_back(self, namespace: str) -> None:
        self.held -= 1
        self._holding[namespace] -= 1
        self._forget(namespace)
        self._grant()

    def _forget(self, namespace: str) -> None:
        """Keep nothing of a namespace that has ended."""
        if namespace not in self._waiting and not self._holding[namespace]:
            del self._holding[namespace]
            self._served.pop(namespace, None)

    def _eligible(self) -> Collection[str]:
        """The namespaces that wait and may have a slot now."""
        if self.held < self.slots:
            return self._waiting
        if self.held < self.slots + self._spare and max(self._holding.values(), default=0) > 1:
            return [name for name in self._waiting if not self._holding[name]]
        return ()

    def _grant(self) -> None:
        while eligible := self._eligible():
            namespace = min(eligible, key=lambda name: self._served.get(name, 0))
            queue = self._waiting[namespace]
            first = queue.popleft()
            if not queue:
                del self._waiting[namespace]
            if not first.done():
                self._turns += 1
                self._served[namespace] = self._turns
                self._holding[namespace] += 1
                self.held += 1
                self.waiting -= 1
                first.set_result(None)
