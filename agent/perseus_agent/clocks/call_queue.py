"""The order of the driver's calls on a node, whose GPUs may share one lock of the driver.

A GPU that wants another clock asks for a turn and gets it at once, or when those before it are done. Nothing is stored
but the difference that it would make: what is sent is decided when its turn comes. What is urgent comes first, then
raises before lowerings, larger differences before smaller ones, and of equals the one that has waited longest. A turn
is bounded, so that a call that hangs stops its own GPU alone.

``CallQueue`` is the order alone, in whatever time its caller counts; ``CallTurns`` is what the threads of the agent
share, with what they have waited (``Waits``). Resets at the end of a lease and after a restart take no turn: they wait
for nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from perseus_core.units import s_from_us, us_from_ns

HOLD_US: Final = 100_000
"""Longest turn: calls take 5 ms, 13 ms at the 99th percentile, and a driver that hangs takes 45 s."""
DEFAULT_CLOCKS_MHZ: Final = 1 << 20
"""Stands for the default clocks in a difference: above all that are locked."""


WAITS_KEPT: Final = 256
ESTIMATE_EVERY: Final = 32
"""Sorting all waits takes as long as the rest of a turn: not at each of many."""


class Wait(NamedTuple):
    """How long a change waits for its turn: the median, and how much longer the 95th percentile is, in microseconds."""

    median_us: int
    late_us: int


class Waits:
    """What the changes of all GPUs of a node have waited.

    They count together: which of the GPUs that ask at the same moment has its turn first is chance, and one that
    remembered its own waits alone would be held for ever by a few long ones, since it then asks for nothing more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits_us: deque[int] = deque(maxlen=WAITS_KEPT)
        self._count = 0
        self.usual = Wait(0, 0)

    def add(self, wait_us: int) -> None:
        """A change has waited so long."""
        with self._lock:
            self._waits_us.append(wait_us)
            self._count += 1
            if self._count <= ESTIMATE_EVERY or self._count % ESTIMATE_EVERY == 0:
                ordered = sorted(self._waits_us)
                median_us = ordered[len(ordered) // 2]
                self.usual = Wait(median_us, ordered[len(ordered) * 19 // 20] - median_us)


def gain_mhz(applied_mhz: int | None, wanted_mhz: int | None) -> int:
    """The difference that a change makes: above 0 it is a raise. None: the default clocks."""
    before, after = (DEFAULT_CLOCKS_MHZ if mhz is None else mhz for mhz in (applied_mhz, wanted_mhz))
    return after - before


@dataclass
class _Waiting:
    gain_mhz: int
    since: int
    urgent: bool

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """What is urgent first, then raises, then larger differences, then those that wait longest."""
        return not self.urgent, self.gain_mhz <= 0, -abs(self.gain_mhz), self.since


class CallQueue:
    """Who may call the driver."""

    def __init__(self, hold_us: int = HOLD_US) -> None:
        """Nobody calls yet. ``hold_us``: after so long a turn ends by itself."""
        self._hold_us = hold_us
        self._waiting: dict[str, _Waiting] = {}
        self._arrivals = 0
        self.holder: str | None = None
        """Whose turn it is."""
        self.ends_us = 0
        """When the turn ends at the latest."""

    def ask(self, gpu: str, gain_mhz: int, now_us: int, *, urgent: bool = False) -> bool:
        """Ask for a turn, or say what the change would be by now. Returns whether it is this GPU's turn.

        Args:
            gpu: who asks.
            gain_mhz: the wanted clock minus the one that was sent last; see ``gain_mhz``.
            now_us: now, in microseconds of any clock that does not go back.
            urgent: it goes ahead of those that are not.
        """
        if self.holder != gpu:
            since = self._waiting[gpu].since if gpu in self._waiting else self._arrivals
            self._waiting[gpu] = _Waiting(gain_mhz, since, urgent)
            self._arrivals += 1
        self.advance(now_us)
        return self.holder == gpu

    def leave(self, gpu: str, now_us: int) -> None:
        """End a turn, or stop waiting for one."""
        self._waiting.pop(gpu, None)
        if self.holder == gpu:
            self.holder = None
        self.advance(now_us)

    def advance(self, now_us: int) -> str | None:
        """End a turn that has lasted too long, and give the next one. Returns whose turn it is."""
        if self.holder is not None and now_us >= self.ends_us:
            self.holder = None
        if self.holder is None and self._waiting:
            self.holder = min(self._waiting, key=lambda gpu: self._waiting[gpu].rank)
            self.ends_us = now_us + self._hold_us
            del self._waiting[self.holder]
        return self.holder


class CallTurns:
    """The queue of a node's GPUs, each of which has a thread that is woken when its turn comes."""

    def __init__(self, wake: Callable[[str], None], queue: CallQueue | None = None) -> None:
        """``wake``: called with the GPU whose turn has come while it waited; must not block."""
        self._wake = wake
        self._queue = queue or CallQueue()
        self._lock = threading.Lock()
        self.waits = Waits()

    def ask(self, gpu: str, gain_mhz: int, *, urgent: bool = False) -> float | None:
        """Ask for a turn. Returns None if it is this GPU's turn now, or when (monotonic seconds) to ask again if it has
        not been woken by then."""
        with self._lock:
            before = self._queue.holder
            is_turn = self._queue.ask(gpu, gain_mhz, _now_us(), urgent=urgent)
            following, ends_s = self._queue.holder, s_from_us(self._queue.ends_us)
        if following is not None and following not in (before, gpu):
            self._wake(following)
        return None if is_turn else ends_s

    def leave(self, gpu: str) -> None:
        """End a turn, or stop waiting for one, and wake the next."""
        with self._lock:
            before = self._queue.holder
            self._queue.leave(gpu, _now_us())
            following = self._queue.holder
        if following is not None and following not in (before, gpu):
            self._wake(following)


def _now_us() -> int:
    return us_from_ns(time.monotonic_ns())
