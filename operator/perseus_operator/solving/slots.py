"""Turns for a bounded number of workers, fair between namespaces: one with many requests waits behind itself alone."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """At most so many at a time; a free slot goes to the namespace that has waited longest for its turn."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        """Hold a slot, on behalf of a namespace."""
        if self._free:
            self._free -= 1
        else:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(namespace, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._release()  # it was given a slot at the same moment
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            namespace, queue = self._waiting.popitem(last=False)
            first = queue.popleft()
            if queue:
                self._waiting[namespace] = queue  # behind all others
            if not first.done():
                first.set_result(None)
                return
        self._free += 1
