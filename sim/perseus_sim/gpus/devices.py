"""Simulated GPUs behind the agent's device contract: ``perseus-agent --devices
perseus_sim.gpus.devices:open_devices:FOLDER``.

The folder (or the environment variable PERSEUS_SIM_GPUS) holds the shared files of one node's GPUs. The agent's calls
go to the files and nowhere else; what a clock does to time and energy is the trainer's physics. Faults that tests
inject come out as the errors a driver would raise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from perseus_agent.devices.base import Controllability, DeviceIdentity, EnergyReading, EventReason
from perseus_agent.errors import DeviceBusy, DeviceFailed, DeviceLost, DriverUnavailable, InvalidClock, NoPermission
from perseus_proto.units import s_from_ms
from perseus_sim.gpus.shared_gpu import SharedGpu

ENV_GPUS = "PERSEUS_SIM_GPUS"


class Fault(IntEnum):
    """What a test may do to the calls of a GPU's driver."""

    NONE = 0
    LOST = 1
    NO_PERMISSION = 2
    """Writes only."""
    BUSY = 3
    UNKNOWN = 4
    SLOW = 5
    """Every call takes as many milliseconds as the argument says."""


class SimulatedDevice:
    """One GPU."""

    def __init__(self, gpu: SharedGpu) -> None:
        self.gpu = gpu
        spec = gpu.spec
        self._identity = DeviceIdentity(spec.uuid, spec.model, spec.supported_clocks_mhz)

    @property
    def identity(self) -> DeviceIdentity:
        return self._identity

    def controllability(self) -> tuple[Controllability, str]:
        self._call()
        if self.gpu.fault()[0] == Fault.NO_PERMISSION:
            return Controllability.NO_PERMISSION, "the simulated driver refuses writes"
        verdict = Controllability[self.gpu.spec.controllability]
        return verdict, "" if verdict is Controllability.YES else f"simulated as {verdict.value}"

    def now_us(self) -> int:
        return self.gpu.physics().now_us

    def lock_clocks(self, mhz: int) -> None:
        self._call(writes=True)
        if mhz not in self._identity.supported_clocks_mhz:
            raise InvalidClock(f"{mhz} MHz is not a supported clock of {self._identity.uuid}")
        self.gpu.request(mhz)

    def reset_clocks(self) -> None:
        self._call(writes=True)
        self.gpu.request(0)

    def sm_clock_mhz(self) -> int:
        self._call()
        return self.gpu.clock_mhz

    def energy(self) -> Sequence[EnergyReading] | None:
        self._call()
        physics = self.gpu.physics()
        return [EnergyReading(physics.now_us, physics.energy_uj // 1000)]

    def power_mw(self) -> int | None:
        self._call()
        return self.gpu.physics().power_mw

    def event_reasons(self) -> EventReason:
        self._call()
        limit, reasons = self.gpu.capped()
        wanted = self.gpu.locked_mhz or self.gpu.spec.default_clock_mhz
        return EventReason(reasons) if limit and limit < wanted else EventReason.NONE

    def close(self) -> None:
        """The file is closed with the process: workers may still be reading."""

    def _call(self, *, writes: bool = False) -> None:
        fault, argument = self.gpu.fault()
        match fault:
            case Fault.LOST:
                raise DeviceLost(f"{self._identity.uuid} has fallen off the bus (simulated)")
            case Fault.NO_PERMISSION if writes:
                raise NoPermission("the simulated driver refuses writes")
            case Fault.BUSY:
                raise DeviceBusy("the simulated driver is busy")
            case Fault.UNKNOWN:
                raise DeviceFailed("the simulated driver answers nonsense")
            case Fault.SLOW:
                time.sleep(s_from_ms(argument))


class SimulatedDevices:
    """The GPUs of one simulated node."""

    def __init__(self, devices: Sequence[SimulatedDevice]) -> None:
        self._devices = tuple(devices)

    @property
    def driver_version(self) -> str:
        return "simulated"

    @property
    def devices(self) -> Sequence[SimulatedDevice]:
        return self._devices

    def close(self) -> None:
        for device in self._devices:
            device.close()


def open_devices(folder: str = "") -> SimulatedDevices:
    """The GPUs whose files are in a folder.

    Raises:
        DriverUnavailable: no folder is named, or it holds none.
    """
    place = folder or os.environ.get(ENV_GPUS, "")
    if not place:
        raise DriverUnavailable(f"no folder of simulated GPUs: set {ENV_GPUS}")
    try:
        gpus = SharedGpu.open_all(Path(place))
    except (OSError, ValueError) as error:
        raise DriverUnavailable(f"simulated GPUs in {place}: {error}") from error
    if not gpus:
        raise DriverUnavailable(f"{place} holds no simulated GPU")
    return SimulatedDevices([SimulatedDevice(gpu) for gpu in gpus])
