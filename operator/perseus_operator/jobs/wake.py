"""When a runner looks at its job again: at once, in its turn among all jobs, or at a certain time.

Most of what agents send changes nothing. One more iteration like those before can wait, and one look is enough for
many. What the job needs now, a straggler, an edit, a fault, never waits. Nor does what is due at a certain time, such
as the next renewal of a lease: with a thousand jobs a turn comes later than that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from perseus_operator.jobs.pace import Pace

_SHARE: Final = 0.1
"""Most that one job takes of the event loop where nothing is urgent; one look at thousands of nodes is long."""


class Wake:
    """Belongs to one runner, on its event loop."""

    def __init__(self, pace: Pace, monotonic_s: Callable[[], float]) -> None:
        """Create it; ``pace`` is shared by all jobs."""
        self._pace = pace
        self._monotonic_s = monotonic_s
        self._event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._turn_s = float("-inf")
        """Reserved, and kept if an urgent look comes before it: a job holds up the others by one turn at most."""
        self._not_before_s = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._due_s = float("inf")

    def now(self) -> None:
        """Look at once."""
        self._event.set()

    def in_turn(self) -> None:
        """Look when it is this job's turn, unless it is looked at before."""
        if self._timer is not None or self._event.is_set():
            return
        now_s = self._monotonic_s()
        if self._turn_s < now_s:
            self._turn_s = self._pace.turn_s(now_s)
        pause_s = max(self._turn_s, self._not_before_s) - now_s
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._event.set)

    def at(self, due_s: float) -> None:
        """Look at this time (monotonic), whichever job's turn it is, unless the job is looked at before."""
        if due_s >= self._due_s or self._event.is_set():
            return
        if self._due is not None:
            self._due.cancel()
        self._due_s = due_s
        pause_s = max(0.0, due_s - self._monotonic_s())
        self._due = asyncio.get_running_loop().call_later(pause_s, self._event.set)

    def looking(self) -> None:
        """The runner looks at everything known so far."""
        self._event.clear()
        self.cancel()

    def looked(self, duration_s: float) -> None:
        """The look took so long."""
        self._not_before_s = self._monotonic_s() + duration_s / _SHARE

    async def wait(self, timeout_s: float) -> None:
        """Wait until the job is to be looked at, or the time is over."""
        # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()

    def cancel(self) -> None:
        """Do not look in turn, nor at a certain time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due is not None:
            self._due.cancel()
            self._due, self._due_s = None, float("inf")
