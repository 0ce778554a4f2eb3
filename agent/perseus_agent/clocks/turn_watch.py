"""Whether the thread of a GPU makes progress, seen from another thread.

A turn that does not end is either a driver that does not answer, or a thread of ours that computes without an end.

The time that the thread computes in its own program tells them apart. The kernel's time is not counted: a driver that
waits for its firmware may do so there, at full speed. Only the first is the GPU's fault; the second is a defect of the
agent, which no longer obeys anyone for this GPU, so the process must end for its keeper to give the GPU back.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

BUSY_S: Final = 1.0
"""Of computing within one turn: fifty times the longest turn that any rank can cause."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class Stall(enum.Enum):
    """Why a turn does not end."""

    DRIVER = "a driver call"
    BUSY = "the agent's own thread"


def computed_s(thread: threading.Thread) -> float:
    """Seconds that a thread of this process has computed outside the kernel; 0 where the kernel does not say."""
    try:
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) / _TICKS_PER_S
    except (OSError, ValueError, IndexError):  # it has not begun, or has ended
        return 0.0


class TurnWatch:
    """The turns of one thread. ``begin`` and ``end`` belong to the thread, ``stall`` to the watchdog."""

    def __init__(
        self, hang_s: float, computed: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Between turns.

        Args:
            hang_s: how long a turn may take that waits for the driver.
            computed: seconds that the thread has computed so far.
            clock: seconds.
        """
        self._hang_s = hang_s
        self._computed = computed
        self._clock = clock
        self._began_s: float | None = None
        self._seen: tuple[float, float] | None = None  # the turn that the watchdog saw first, and computed until then
        self.cpu_began_s = 0.0
        """Processor time of the thread when its turn began."""
        self.longest_s = 0.0
        """Most processor time that a turn took."""

    def begin(self) -> float:
        """A turn begins. Returns now, seconds."""
        self._began_s = now_s = self._clock()
        self.cpu_began_s = time.thread_time()
        return now_s

    def end(self) -> None:
        """It ends."""
        self._began_s = None
        self.longest_s = max(self.longest_s, time.thread_time() - self.cpu_began_s)

    def stall(self) -> Stall | None:
        """Why the turn does not end; None: it does, as far as can be seen. Call it again and again."""
        began_s = self._began_s
        if began_s is None:
            self._seen = None
            return None
        if self._seen is None or self._seen[0] != began_s:
            self._seen = began_s, self._computed()
            return None
        if self._computed() - self._seen[1] > BUSY_S:
            return Stall.BUSY
        return Stall.DRIVER if self.overdue else None

    @property
    def overdue(self) -> bool:
        """Whether the turn takes too long, for whatever reason."""
        began_s = self._began_s
        return began_s is not None and self._clock() - began_s > self._hang_s
