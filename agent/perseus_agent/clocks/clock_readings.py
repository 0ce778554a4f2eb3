"""Readings of a GPU's SM clock besides the read-back: how long a change took, and what an iteration ran at."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from perseus_agent.clocks.latency import LatencyMeter
from perseus_agent.clocks.reckoning import ClockReading
from perseus_agent.devices.base import Device, EventReason
from perseus_agent.errors import DeviceError
from perseus_core.units import us_from_ns

READ_ROOM_S: Final = 0.001
"""A change that is due sooner is not kept waiting: on an H100 such a reading takes 1 to 16 µs, and 77 µs at worst."""


def sampled_clock(device: Device) -> Sequence[ClockReading]:
    """The clock now, and whether power limits it; nothing if it cannot be read, which the read-back reports."""
    try:
        limited = EventReason.POWER_CAP in device.event_reasons()
        return [ClockReading(device.now_us(), device.sm_clock_mhz(), limited)]
    except DeviceError:
        return ()


def measure_change(device: Device, latency: LatencyMeter, now_s: float, look_s: float) -> None:
    """Read the clock to see whether a change is in effect, unless another is due meanwhile.

    Args:
        device: of which the change is.
        latency: where the reading goes.
        now_s, look_s: now, and when a clock may be due; 0: at no known time.
    """
    if 0 < look_s < now_s + READ_ROOM_S:
        latency.give_up()
        return
    began_us = us_from_ns(time.monotonic_ns())
    try:
        clock_mhz, reasons = device.sm_clock_mhz(), device.event_reasons()
    except DeviceError:
        latency.give_up()
        return
    held = bool(reasons & ~EventReason.IDLE)
    latency.read(clock_mhz, began_us, us_from_ns(time.monotonic_ns()), held=held)
