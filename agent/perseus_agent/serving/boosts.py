"""How soon an engine's clocks are up once prompts wait: from its word to the raised clock in effect on all GPUs."""

from __future__ import annotations

import math

from perseus_core.serving import DEFAULT_CLOCKS


class BoostMeter:
    """The boosts of one engine. A clock that is replaced before it is in effect everywhere is not measured."""

    def __init__(self) -> None:
        self._since_us = 0
        self._clock_mhz = DEFAULT_CLOCKS
        self._latest_us = 0
        self._awaited: set[str] = set()
        """GPUs of which the raised clock is not known to be in effect; empty: nothing is measured."""

    def began(self, uuids: tuple[str, ...], clock_mhz: int, since_us: int) -> None:
        """This clock was chosen for prompts that waited since then."""
        self._awaited, self._clock_mhz, self._since_us, self._latest_us = set(uuids), clock_mhz, since_us, since_us

    def replaced(self) -> None:
        """Another clock was chosen."""
        self._awaited.clear()

    def seen(self, uuid: str, applied_mhz: int, effective_us: int) -> int | None:
        """A GPU was given a clock, in effect from a moment on.

        Returns:
            How long the boost took, µs, if this GPU is the last; otherwise None.
        """
        if uuid not in self._awaited or applied_mhz != self._clock_mhz or effective_us < self._since_us:
            return None
        self._awaited.discard(uuid)
        self._latest_us = max(self._latest_us, effective_us)
        return None if self._awaited else self._latest_us - self._since_us


def is_above(clock_mhz: int, other_mhz: int) -> bool:
    """Whether a clock is above another; the default clocks are above all others.

    >>> is_above(DEFAULT_CLOCKS, 1200), is_above(1200, 1200), is_above(900, DEFAULT_CLOCKS)
    (True, False, False)
    """
    return (clock_mhz or math.inf) > (other_mhz or math.inf)
