"""What a rank leaves its GPU's thread to do that can wait: records to read and reports to make, part by part.

A turn of the thread takes as many parts as fit beside what is due, so however much a rank writes, no turn is long, and
commands and clocks come first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from perseus_agent.clocks.follower import Follower
from perseus_agent.clocks.iteration_reports import IterationReports
from perseus_agent.clocks.latency import Effect
from perseus_core.units import us_from_ns

ROOM_S: Final = 0.004
"""Processor time of a turn after which no further part is begun; parts take up to 4 ms."""


class Backlog:
    """Of one GPU. Belongs to its thread."""

    def __init__(self, reports: IterationReports) -> None:
        self._reports = reports
        self._unread = False
        self._unreported = False
        self._counter = False

    @property
    def pending(self) -> bool:
        """Whether there is something to do."""
        return self._unread or self._unreported

    def unread(self) -> None:
        """The rank may have closed records."""
        self._unread = True

    def unreported(self, *, counter: bool) -> None:
        """Reports may be ready; ``counter`` as in ``IterationReports``."""
        self._unreported, self._counter = True, counter

    def forget(self) -> None:
        """The rank has gone: what it has not written is not read any more."""
        self._unread = False

    def work(
        self, follower: Follower | None, writes: int, *, began_s: float, enforced: bool, effects: Sequence[Effect]
    ) -> float:
        """Do a few parts. Returns the processor time of it, seconds.

        Args:
            follower: of the rank; None: there is none, and only reports are made.
            writes: the device's clock changes so far.
            began_s: processor time of this thread at which the turn began.
            enforced, effects: as in ``IterationReports``.
        """
        from_s = now_s = time.thread_time()
        while self.pending and now_s - began_s < ROOM_S:
            if self._unread and follower is not None:
                finished, self._unread = follower.collect_part(writes, us_from_ns(time.monotonic_ns()))
                self._reports.add(finished)
            elif self._unreported:
                self._unreported = self._reports.publish_part(counter=self._counter, enforced=enforced, effects=effects)
            else:
                self._unread = False
            now_s = time.thread_time()
        return now_s - from_s
