"""When a GPU's energy is read: as often as wanted, but for little of the thread's time, and not when a clock is due."""

from __future__ import annotations

from collections import deque
from typing import Final

READING_SHARE: Final = 0.01
"""Of the thread's time, at most, for the energy counter: some take 17 ms to answer, and a clock may be due then."""
READINGS: Final = 8
"""Remembered: one may have waited for a processor, not for the GPU."""
READING_LATE_S: Final = 1.0
"""How long one is put off at most."""
QUICK_S: Final = 0.001
"""One that takes longer is never taken beside a look: all GPUs may be looked at together, and a driver that reads them
one after the other would keep a clock waiting for all of them."""


class ReadingPace:
    """The moments of one GPU's readings, in seconds of the caller's clock."""

    def __init__(self, now_s: float) -> None:
        self._due_s = now_s
        self._took_s: deque[float] = deque(maxlen=READINGS)
        self._gives_way = False
        self.beside_looks = False
        """Whether readings wait for the next look, which comes soon: a wake-up costs more than they do."""

    def at_once(self, now_s: float, *, beside_looks: bool = False) -> None:
        """The next reading is due now. ``beside_looks``: see the attribute."""
        self._due_s, self.beside_looks = now_s, beside_looks

    def due_s(self, look_s: float) -> float:
        """When to ask ``takes_turn`` again; ``look_s``: when a clock may be due, 0: at no known time."""
        waits = self._gives_way or (self.beside_looks and self._takes_s < QUICK_S)
        return max(self._due_s, look_s) if waits else self._due_s

    def takes_turn(self, now_s: float, look_s: float) -> bool:
        """Whether to read now. A reading that a clock would have to wait for is taken after it."""
        if now_s < self._due_s:
            return False
        before_its_end = 0 < look_s < now_s + self._takes_s
        self._gives_way = before_its_end and now_s < self._due_s + READING_LATE_S
        return not self._gives_way

    @property
    def _takes_s(self) -> float:
        """How long a reading takes at most."""
        return max(self._took_s, default=0.0)

    def read(self, began_s: float, ended_s: float, interval_s: float) -> None:
        """Note a reading; the next one is due an interval later, or later still if readings are slow."""
        self._took_s.append(ended_s - began_s)
        self._due_s = began_s + max(interval_s, min(min(self._took_s) / READING_SHARE, READING_LATE_S))
