"""Simulated GPUs and their driver, on the machine of ``tests.simulation.machine``.

A GPU outlives the processes that set it. A call of the driver takes time inside the kernel: it comes into effect at
some moment of it, whatever becomes of the process meanwhile, and the process has not ended before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.simulation.machine import scheduler
from tests.simulation.scheduler import NS, Process, Waiter

from perseus_agent.devices.base import Controllability, DeviceIdentity, EnergyReading, EventReason
from perseus_agent.errors import DeviceBusy, DeviceFailed, DeviceLost, InvalidClock
from perseus_core.units import mj_from_j, mw_from_w

CLOCKS_MHZ: Final = tuple(range(210, 1411, 15))
MODEL: Final = "NVIDIA A100-SXM4-80GB"
IDLE_W, LIMIT_W = 83.64, 400.0
READING_S: Final = 0.00002
SEEN: Final = 0.1
"""Of readings, the share within which another thread may run: they are most of all calls, and short."""
WRITES_S: Final = (0.002, 0.013)
EFFECT_S: Final = (0.005, 0.09)
FOREIGN: Final = "foreign"
"""Who writes as another program."""
REASON_OF_FOREIGN: Final = EventReason.SYNC_BOOST
"""What the driver says beside a clock that a foreign program has set: no limit of the GPU explains a higher one."""


@dataclass
class Driver:
    """What is wrong with a node's driver now."""

    hangs: bool = False
    refuses: bool = False
    lost: bool = False
    slow: float = 1.0
    """How much longer changes take to come into effect."""


@dataclass
class Gpu:
    """The hardware."""

    uuid: str
    driver: Driver
    locked_mhz: int = 0
    """0: the default clocks."""
    clock_mhz: int = CLOCKS_MHZ[-1]
    since_ns: int = 0
    """When its lock changed."""
    writer: str = ""
    """Who wrote it last."""
    foreign_ns: int | None = None
    """Since when a foreign program's lock is on it."""
    steady_before_foreign: bool = False
    writes_before_foreign: int = 0
    busy_w: float = 0.0
    """What the instruction draws that it executes; 0: it executes none."""
    executing: Waiter | None = None
    """Of the instruction that it executes: woken when the clock changes, at which it goes on at another speed."""
    reasons: EventReason = EventReason.NONE
    counts: bool = True
    """Its counter of energy answers."""
    energy_j: float = 0.0
    energy_ns: int = 0
    changed: Callable[[Gpu, str], None] = field(default=lambda *_: None)
    """Called after each write, with who wrote it before."""

    def write(self, mhz: int, writer: str, *, slow: float = 1.0) -> None:
        """Take a lock, or none, at once; the clock follows."""
        own = scheduler()
        self.settle()
        if self.locked_mhz != mhz:
            self.since_ns = own.now_ns
        before, wrote, self.locked_mhz, self.writer = self.locked_mhz, self.writer, mhz, writer
        own.note(f"{self.uuid}: {before or 'default'} -> {mhz or 'default'} MHz by {writer}")
        late_s = slow * own.random.uniform(*EFFECT_S)
        own.after(late_s, lambda: self._follow(mhz))
        self.changed(self, wrote)

    def _follow(self, mhz: int) -> None:
        if mhz == self.locked_mhz:
            self.settle()
            self.clock_mhz = mhz or CLOCKS_MHZ[-1]
            if self.executing is not None:
                scheduler().wake(self.executing)

    @property
    def power_w(self) -> float:
        """What it draws now."""
        return self.busy_w or IDLE_W

    def execute(self, watts: float) -> None:
        """Begin an instruction that draws so much, or end one: 0."""
        self.settle()
        self.busy_w = watts

    def settle(self) -> None:
        """Bring the counter of energy to now."""
        now_ns = scheduler().now_ns
        self.energy_j += self.power_w * (now_ns - self.energy_ns) / NS
        self.energy_ns = now_ns


class SimulatedDevice:
    """One process's handle of a GPU: a ``Device``."""

    def __init__(self, gpu: Gpu, process: Process, minor: int) -> None:
        self._gpu = gpu
        self._process = process
        self.identity = DeviceIdentity(gpu.uuid, MODEL, CLOCKS_MHZ, minor, mw_from_w(LIMIT_W), minor)

    def controllability(self) -> tuple[Controllability, str]:
        self._read()
        return Controllability.YES, ""

    def now_us(self) -> int:
        return scheduler().now_ns // 1000

    def lock_clocks(self, mhz: int) -> None:
        if mhz not in CLOCKS_MHZ:
            raise InvalidClock(f"{mhz} MHz is not a supported clock")
        self._write(mhz)

    def reset_clocks(self) -> None:
        self._write(0)

    def sm_clock_mhz(self) -> int:
        self._read()
        return self._gpu.clock_mhz

    def energy(self) -> Sequence[EnergyReading] | None:
        self._read()
        self._gpu.settle()
        if not self._gpu.counts:
            return None
        return [EnergyReading(self.now_us(), mj_from_j(self._gpu.energy_j))]

    def power_mw(self) -> int | None:
        self._read()
        return mw_from_w(self._gpu.power_w)

    def event_reasons(self) -> EventReason:
        self._read()
        return self._gpu.reasons if self._gpu.busy_w else EventReason.IDLE

    def close(self) -> None:
        """Nothing is open."""

    def _write(self, mhz: int) -> None:
        own, driver = scheduler(), self._gpu.driver
        takes_s = own.random.uniform(*WRITES_S)
        if not (driver.refuses or driver.lost or driver.hangs):
            self._process.calls += 1
            effect_s = takes_s * own.random.random()
            own.after(effect_s, lambda: self._gpu.write(mhz, self._process.name, slow=driver.slow))
            own.after(takes_s, lambda: own.leave(self._process, 1))
            own.pause(takes_s)
            return
        self._call(takes_s)
        self._gpu.write(mhz, self._process.name, slow=driver.slow)

    def _read(self) -> None:
        """Be inside the driver for a moment."""
        self._call(READING_S if scheduler().random.random() < SEEN else 0.0)

    def _call(self, seconds: float) -> None:
        """Be inside the driver for so long, and while it hangs."""
        own, driver = scheduler(), self._gpu.driver
        if seconds:
            own.pause(seconds)
        while driver.hangs:
            own.pause(0.05)
        if driver.lost:
            raise DeviceLost(f"{self._gpu.uuid}: fell off the bus")
        if driver.refuses and own.random.random() < 0.8:
            raise (DeviceBusy if own.random.random() < 0.5 else DeviceFailed)(f"{self._gpu.uuid}: refused")


class SimulatedDevices:
    """A node's GPUs, as a process has opened them."""

    driver_version = "560.35"

    def __init__(self, gpus: Sequence[Gpu], process: Process) -> None:
        self.devices = [SimulatedDevice(gpu, process, minor) for minor, gpu in enumerate(gpus)]

    def close(self) -> None:
        """Nothing is open."""


NODES: Final[dict[str, Sequence[Gpu]]] = {}
"""The GPUs of each node, for ``open_devices``."""


def open_devices(node: str) -> SimulatedDevices:
    """The factory of ``--devices tests.simulation.gpus:open_devices:NODE``."""
    process = scheduler().current
    assert process is not None
    return SimulatedDevices(NODES[node], process)
