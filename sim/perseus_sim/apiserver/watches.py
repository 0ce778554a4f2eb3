"""What changed, in order: a log of each resource's changes that watchers replay from a revision and then follow.

A watcher that falls far behind must list again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from perseus_sim.apiserver.errors import Expired, Json

REMEMBERED = 20_000
"""Changes stored for each resource: far more than a client misses between two watches, and a few megabytes."""


@dataclass(frozen=True)
class Change:
    """One object's step from one state to the next; ``previous`` is None for a new object."""

    revision: int
    object: Json
    previous: Json | None
    deleted: bool

    def event(self, selected: Callable[[Json], bool]) -> str | None:
        """What a watcher of the selected objects sees: leaving the selection is a deletion, entering it an addition."""
        before = self.previous is not None and selected(self.previous)
        after = not self.deleted and selected(self.object)
        if before:
            return "MODIFIED" if after else "DELETED"
        return "ADDED" if after else None


class Feed:
    """The changes of one resource."""

    def __init__(self) -> None:
        self._log: deque[Change] = deque(maxlen=REMEMBERED)
        self._forgotten = 0  # revision of the newest change no longer in the log
        self._watchers: set[asyncio.Queue[Change | None]] = set()

    def publish(self, revision: int, obj: Json, previous: Json | None, *, deleted: bool) -> None:
        """Record a change and send it to the watchers."""
        if len(self._log) == REMEMBERED:
            self._forgotten = self._log[0].revision
        change = Change(revision, obj, previous, deleted)
        self._log.append(change)
        for queue in tuple(self._watchers):
            if queue.qsize() >= REMEMBERED:
                self._watchers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(change)

    def subscribe(self, since: int, current: int) -> asyncio.Queue[Change | None]:
        """A queue of the changes after a revision; None in it means that the watcher was too slow.

        Raises:
            Expired: changes after that revision are forgotten, or it lies in the future (of a server that was
            restarted).
        """
        if since < self._forgotten or since > current:
            raise Expired(f"too old resource version: {since} ({self._forgotten})")
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        for change in self._log:
            if change.revision > since:
                queue.put_nowait(change)
        self._watchers.add(queue)
        return queue

    def unsubscribe(self, queue: asyncio.Queue[Change | None]) -> None:
        """Stop feeding a queue."""
        self._watchers.discard(queue)
