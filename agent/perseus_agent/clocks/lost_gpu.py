"""When a GPU that was lost is used again.

A driver may stall for 45 s while it waits for firmware, and a GPU may fall off the bus for good: at first they look
alike. So a lost GPU is read again and again by its own thread, which a call that hangs keeps from nothing else. Once it
has answered for a while it is taken back, at its default clocks. If it is lost again without having been driven since,
it must answer for twice as long.
"""

from __future__ import annotations

from typing import Final

from perseus_agent.clocks.governor import Governor
from perseus_agent.devices.base import Controllability, Device
from perseus_agent.errors import DeviceError

ANSWERS: Final = 10
"""Read-backs in a row that a GPU must answer: five seconds at the default interval."""
MOST_ANSWERS: Final = 7_200
"""An hour at the default interval."""


class LostGpu:
    """Checks a GPU while it is lost. Belongs to the thread of its GPU."""

    def __init__(self, device: Device, governor: Governor) -> None:
        self._device = device
        self._governor = governor
        self._answers = 0
        self._needed = ANSWERS
        self._locks = 0

    def check(self) -> float | None:
        """Read the GPU once; take it back if it has answered for long enough. Returns when to ``pump`` the governor, if
        ever. A driver that was replaced is met by a new process only."""
        if self._governor.driver_replaced:
            return None
        try:
            self._device.sm_clock_mhz()
            state, message = self._device.controllability()
        except DeviceError:
            state, message = Controllability.LOST, ""
        if state is Controllability.LOST:
            self._answers = 0
            return None
        if self._answers == 0 and self._governor.locks > self._locks:  # it was driven since
            self._needed = ANSWERS
        self._answers += 1
        if self._answers < self._needed:
            return None
        self._answers, self._needed = 0, min(2 * self._needed, MOST_ANSWERS)
        self._locks = self._governor.locks
        return self._governor.take_back(state, message)
