"""Conditions of a GPU that are reported to its job, and when one begins and ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from perseus_agent.devices.base import EventReason

DEBOUNCE_ON: Final = 2
DEBOUNCE_OFF: Final = 4
"""Read-backs in a row before a reason begins or ends: hardware slowdown blinks during clock changes."""


class GpuNoticeKind(Enum):
    """Kinds of GPU events; the names are those of the wire."""

    THERMAL_SLOWDOWN = "THERMAL_SLOWDOWN"
    POWER_BRAKE = "POWER_BRAKE"
    HARDWARE_SLOWDOWN = "HARDWARE_SLOWDOWN"
    POWER_CAP = "POWER_CAP"
    BOARD_LIMIT = "BOARD_LIMIT"
    RELIABILITY = "RELIABILITY"
    DRIFT = "DRIFT"
    FOREIGN_WRITE = "FOREIGN_WRITE"
    LOST = "LOST"
    CLOCKS_RESTORED = "CLOCKS_RESTORED"


_REASONS: Final = {
    GpuNoticeKind.THERMAL_SLOWDOWN: EventReason.SOFTWARE_THERMAL | EventReason.HARDWARE_THERMAL,
    GpuNoticeKind.POWER_BRAKE: EventReason.POWER_BRAKE,
    GpuNoticeKind.HARDWARE_SLOWDOWN: EventReason.HARDWARE_SLOWDOWN,
    GpuNoticeKind.POWER_CAP: EventReason.POWER_CAP,
    GpuNoticeKind.BOARD_LIMIT: EventReason.BOARD_LIMIT,
    GpuNoticeKind.RELIABILITY: EventReason.RELIABILITY,
}


@dataclass(frozen=True)
class GpuNotice:
    """An event: a condition of the GPU began or ended."""

    kind: GpuNoticeKind
    gpu_uuid: str
    active: bool
    message: str

    def __str__(self) -> str:
        """As the log has it."""
        restored = self.kind is GpuNoticeKind.CLOCKS_RESTORED  # neither begins nor ends
        return f"{self.kind.value}{'' if restored else ' begins' if self.active else ' ends'}: {self.message}"


class Slowdowns:
    """Why the driver slows one GPU down: what its read-backs say, without blinking."""

    def __init__(self) -> None:
        self._levels = dict.fromkeys(_REASONS, 0)
        self._active = dict.fromkeys(_REASONS, False)

    def read(self, reasons: EventReason) -> Iterator[tuple[GpuNoticeKind, bool]]:
        """Take one read-back. Yields what begins (True) or ends (False) with it."""
        for kind, bits in _REASONS.items():
            level = self._levels[kind]
            level = max(1, level + 1) if reasons & bits else min(-1, level - 1)
            self._levels[kind] = max(-DEBOUNCE_OFF, min(DEBOUNCE_ON, level))
            active = self._active[kind]
            if level >= DEBOUNCE_ON if not active else level <= -DEBOUNCE_OFF:
                self._active[kind] = not active
                yield kind, not active
