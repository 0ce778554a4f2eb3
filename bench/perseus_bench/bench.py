"""The GPU under test: its device, what computes on it, and a way to wait that an interruption ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from perseus_agent.devices.base import Device, EventReason
from perseus_agent.devices.energy import STALE_US, EnergyMeter
from perseus_agent.errors import AgentError, DeviceBusy
from perseus_bench.workload import WorkItem, Workload
from perseus_core.units import j_from_mj, s_from_us, us_from_s, w_from_mw

POLL_S: Final = 0.000_2
"""Between two readings of the clock after a change."""
WATCH_S: Final = 0.01
"""Between two readings of everything while the GPU holds a clock."""
BUSY_RETRIES: Final = 20


class Interrupted(AgentError):
    """The user ended the run."""


class Span:
    """What was read of the GPU over a span of time."""

    def __init__(self) -> None:
        self.clocks_mhz: list[int] = []
        self.powers_w: list[float] = []
        self.reasons: list[EventReason] = []


@dataclass(frozen=True)
class Bench:
    """One GPU under test.

    Attributes:
        device: the GPU.
        workload: what computes on it; None: nothing does, and only the reported clock is known.
        pause: waits so many seconds of the device's time; True: the run is interrupted.
    """

    device: Device
    workload: Workload | None
    pause: Callable[[float], bool]

    @property
    def clocks_mhz(self) -> Sequence[int]:
        """The supported clocks, ascending."""
        return self.device.identity.supported_clocks_mhz

    @property
    def step_mhz(self) -> int:
        """The smallest step of the clock grid."""
        clocks = self.clocks_mhz
        return min((high - low for low, high in pairwise(clocks)), default=1)

    @property
    def now_s(self) -> float:
        """The device's time."""
        return s_from_us(self.device.now_us())

    def wait(self, seconds: float) -> None:
        """Wait.

        Raises:
            Interrupted: the user ended the run.
        """
        if self.pause(max(0.0, seconds)):
            raise Interrupted("interrupted")

    def lock(self, mhz: int) -> float:
        """Lock a clock; a busy driver is asked again. Returns the duration of the call that worked, seconds."""
        return self._call(lambda: self.device.lock_clocks(mhz))

    def reset(self) -> float:
        """Return to the default clocks; see ``lock``."""
        return self._call(self.device.reset_clocks)

    def reads_as(self, mhz: int) -> bool:
        """Whether the SM clock reads as this one, or as its neighbour on the grid."""
        return abs(self.device.sm_clock_mhz() - mhz) <= self.step_mhz

    def watch(self, seconds: float) -> Span:
        """Read clock, power and reasons for a time."""
        span, until_s = Span(), self.now_s + seconds
        while True:
            span.clocks_mhz.append(self.device.sm_clock_mhz())
            span.reasons.append(self.device.event_reasons())
            if (power_mw := self.device.power_mw()) is not None:
                span.powers_w.append(w_from_mw(power_mw))
            if self.now_s >= until_s:
                return span
            self.wait(min(WATCH_S, seconds / 8))

    def read_default_mhz(self, seconds: float) -> int:
        """The clock that is read while none is locked."""
        self.reset()
        self.wait(seconds)
        return round(median(self.watch(seconds).clocks_mhz))

    @contextmanager
    def working(self, items: int | None = None) -> Iterator[list[WorkItem]]:
        """Let the workload compute; afterwards the list holds its items."""
        done: list[WorkItem] = []
        if self.workload is None:
            yield done
            return
        self.workload.start(items)
        try:
            yield done
        finally:
            done.extend(self.workload.finish())

    def energy_meter(self) -> EnergyReader:
        """A meter that begins now."""
        return EnergyReader(self)

    def _call(self, call: Callable[[], None]) -> float:
        for attempt in range(BUSY_RETRIES):
            begin_us = self.device.now_us()
            try:
                call()
                return s_from_us(self.device.now_us() - begin_us)
            except DeviceBusy:
                if attempt == BUSY_RETRIES - 1:
                    raise
                self.wait(0.01)
        raise AssertionError("unreachable")


class EnergyReader:
    """The GPU's energy between two moments, by its counter."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._meter = EnergyMeter()
        self.trusted = True

    def read(self) -> None:
        """Read the counter; call this at least once a second while it counts."""
        readings = self._bench.device.energy()
        self.trusted = self.trusted and readings is not None
        for reading in readings or ():
            self._meter.add(reading)

    def between_j(self, begin_s: float, end_s: float) -> float | None:
        """The energy of a span that has passed, J; waits until the counter has moved past its end.

        Returns:
            None: there is no counter that can be trusted, or it did not move.
        """
        moments = [us_from_s(begin_s), us_from_s(end_s)]
        patience_s = self._bench.now_s + 2 * s_from_us(STALE_US)
        while self.trusted and not self._meter.covers(moments[1]) and self._bench.now_s < patience_s:
            self._bench.wait(0.05)
            self.read()
        levels = self._meter.at(moments) if self.trusted else None
        return None if levels is None else j_from_mj(levels[1] - levels[0])
