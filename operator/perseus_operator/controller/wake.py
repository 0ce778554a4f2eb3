"""When a runner looks at its job again: at once, or in its turn among all jobs.

Most of what agents send changes nothing: one more iteration like those before, one more lease renewed. To look at it
can wait, and one look is enough for many. What the job needs now, a straggler, an edit, a fault, never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from perseus_operator.controller.pace import Pace

_SHARE: Final = 0.1
"""Most that one job takes of the event loop where nothing is urgent; one look at thousands of nodes is long."""


class Wake:
    """Belongs to one runner, on its event loop."""

    def __init__(self, pace: Pace, monotonic_s: Callable[[], float]) -> None:
        """Create it; ``pace`` is shared by all jobs."""
        self._pace = pace
        self._monotonic_s = monotonic_s
        self._event = asyncio.Event()
        self._turn: asyncio.TimerHandle | None = None
        self._not_before_s = 0.0

    def now(self) -> None:
        """Look at once."""
        self._event.set()

    def in_turn(self) -> None:
        """Look when it is this job's turn, unless it is looked at before."""
        if self._turn is None and not self._event.is_set():
            now_s = self._monotonic_s()
            turn_s = max(self._pace.turn_s(now_s), self._not_before_s)
            self._turn = asyncio.get_running_loop().call_later(turn_s - now_s, self._event.set)

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
        """Give up the turn."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
