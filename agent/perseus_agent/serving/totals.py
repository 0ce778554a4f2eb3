"""What all engines of a node did since the agent began: sums that never fall, whichever engines leave."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final

_KEPT: Final = 1_024
"""Boosts remembered: enough for a 99th percentile that two outliers do not make."""


class EngineTotals:
    """The sums of one node. Any thread may call it."""

    def __init__(self) -> None:
        self.samples = 0
        """What engines have said, and could be true."""
        self.refused = 0
        """What they have said, and could not be true."""
        self.boosts = 0
        """That were measured."""
        self.pages_read = 0
        """Metrics pages that are read now, of engines that do not say by themselves what they do."""
        self._lock = threading.Lock()
        self._held_us = Counter[str]()
        self._boosts_us: deque[int] = deque(maxlen=_KEPT)

    def sampled(self, *, possible: bool) -> None:
        """An engine has said something."""
        with self._lock:
            self.samples += possible
            self.refused += not possible

    def held(self, reason: str, time_us: int) -> None:
        """A reason has held the clock of an engine for so long."""
        with self._lock:
            self._held_us[reason] += time_us

    def boosted(self, time_us: int) -> None:
        """A boost has taken so long."""
        with self._lock:
            self.boosts += 1
            self._boosts_us.append(time_us)

    @property
    def held_us(self) -> Mapping[str, int]:
        """How long each reason has held the clocks of engines."""
        with self._lock:
            return dict(self._held_us)

    def boost_us(self, share: float) -> int | None:
        """The time within which a share of the latest boosts was done; None: there was none."""
        with self._lock:
            ordered = sorted(self._boosts_us)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
