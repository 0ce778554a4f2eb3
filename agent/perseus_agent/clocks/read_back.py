"""Compares the clock that a GPU runs at with what was written, and says when they differ for no reason.

A clock takes a moment to take effect, and reads one step beside the requested one; a GPU that is hot or at its power
limit runs slower and says so. What differs beyond that, several times in a row and always alike, is either a lock that
did not take (drift) or the setting of another program (foreign): of a clock that had been reached and then changed
without a write, another program has changed it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from perseus_agent.devices.base import EventReason

STRIKES: Final = 3
"""Read-backs in a row that must disagree with the lock before it is reported."""
HISTORY: Final = 1_024
"""Writes remembered for the read-back: at the default bound, more than fit into the default time to settle."""


class Verdict(Enum):
    """What a read-back says."""

    AGREES = "agrees"
    EXPLAINED = "explained"
    """The clock is lower and the GPU says why, or it has not differed for long enough."""
    DRIFTED = "drifted"
    FOREIGN = "foreign"


class ReadBack:
    """Of one GPU."""

    def __init__(self, clocks_mhz: tuple[int, ...], now_s: float) -> None:
        """``clocks_mhz``: that the GPU supports."""
        self._clocks_mhz = clocks_mhz
        self._history: deque[tuple[float, int | None]] = deque([(now_s, None)], maxlen=HISTORY)
        self._verified = False
        self._strikes = 0
        self._striking_mhz = 0

    def wrote(self, mhz: int | None, now_s: float) -> None:
        """Take in a write; None: the default clocks, where any clock is right."""
        self._verified = False
        if mhz is None:
            self._history.clear()
            self._strikes = 0
        self._history.append((now_s, mhz))

    def restarted(self) -> None:
        """Begin to count anew."""
        self._strikes = 0

    def compare(self, clock_mhz: int, reasons: EventReason, *, settled_before_s: float) -> Verdict:
        """Judge a clock that was read now.

        Args:
            clock_mhz: as read.
            reasons: why the GPU says that it runs slower.
            settled_before_s: writes before this (monotonic) are in effect; of later ones each may be or not.
        """
        while len(self._history) > 1 and self._history[1][0] <= settled_before_s:
            self._history.popleft()
        expected = {mhz for _, mhz in self._history}
        if None in expected or any(mhz is not None and abs(clock_mhz - mhz) <= self.tolerance(mhz) for mhz in expected):
            self._verified = self._verified or (len(expected) == 1 and None not in expected)
            self._strikes = 0
            return Verdict.AGREES
        highest = max(mhz for mhz in expected if mhz is not None)
        # Any reason explains a clock below the requested one, and none a clock above it.
        if clock_mhz < highest and reasons:
            return Verdict.EXPLAINED  # neither agreement nor disagreement
        # A lock reads the same every time; what makes the clock wander is not a setting of another program.
        steady = self._strikes == 0 or clock_mhz == self._striking_mhz
        self._strikes = self._strikes + 1 if steady else 1
        self._striking_mhz = clock_mhz
        if self._strikes < STRIKES:
            return Verdict.EXPLAINED
        return Verdict.FOREIGN if len(expected) == 1 and self._verified else Verdict.DRIFTED

    def tolerance(self, mhz: int) -> int:
        """One step of the GPU's clock grid around ``mhz``: the clock read back may be one step beside the requested
        one."""
        clocks = self._clocks_mhz
        if mhz not in clocks:
            return 0
        position = clocks.index(mhz)
        around = clocks[max(0, position - 1) : position + 2]
        return max(around) - min(around) if len(around) < 3 else (around[2] - around[0] + 1) // 2
