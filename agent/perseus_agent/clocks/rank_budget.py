"""How much of the agent's processor the ranks of one GPU may use, so that none slows the clocks of another GPU.

All threads of the agent share one interpreter. A rank costs it time by each ring and each record of an iteration, and a
rank that forges both would take all of it. What was spent is paid back at a constant rate; a rank that owes more than
its burst is not followed, at default clocks, until it has paid. Pure: time is an argument.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.1
"""Of one processor in the long run: at 200 instructions a second, each at another clock, a rank costs 0.012."""
BURST_S: Final = 0.3
"""More than the longest record costs, of 65,536 instructions, which an honest rank writes once in minutes."""
LOOK_S: Final = 0.000_03
"""What a ring costs beside what is measured: waking up and going back to sleep."""


class RankBudget:
    """The account of one GPU's ranks; one that follows another pays what that one owes."""

    def __init__(self, share: float = SHARE, burst_s: float = BURST_S) -> None:
        self._share = share
        self._burst_s = burst_s
        self._owed_s = 0.0
        self._at_s = 0.0
        self.muted_until_s = 0.0
        """Until when the rank is not followed; 0: it is."""

    def spend(self, cpu_s: float, now_s: float, *, mute: bool = True) -> bool:
        """Note what a turn has cost. Returns whether the rank must not be followed from now on.

        Args:
            cpu_s: processor time of the turn.
            now_s: now, in seconds of any clock that does not go back.
            mute: there is a rank that can be left alone.
        """
        self._owed_s = max(0.0, self._owed_s - self._share * (now_s - self._at_s)) + cpu_s
        self._at_s = now_s
        if self._owed_s <= self._burst_s or self.muted_until_s or not mute:
            return False
        self.muted_until_s = now_s + self._owed_s / self._share
        return True

    def paid(self, now_s: float) -> bool:
        """Whether the rank has just paid what it owed, and may be followed again."""
        if not 0 < self.muted_until_s <= now_s:
            return False
        self.muted_until_s = 0.0
        return True
