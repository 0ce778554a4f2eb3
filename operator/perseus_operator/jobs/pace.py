"""Turns of many that want to do the same now and then."""

from __future__ import annotations


class Pace:
    """Spreads what many want to do over time: each gets the next free turn, in the order of asking."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._free_s = float("-inf")

    def turn_s(self, now_s: float) -> float:
        """Reserve the next free turn; its time."""
        turn_s = max(now_s, self._free_s)
        self._free_s = turn_s + self._interval_s
        return turn_s
