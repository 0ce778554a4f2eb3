"""Simulated GPUs behind the agent's device contract: ``perseus-agent --devices
perseus_sim.gpus.devices:open_devices:FOLDER``.

The folder (or the environment variable PERSEUS_SIM_GPUS) holds the shared files of one node's GPUs. The agent's calls
go to the files and nowhere else; what a clock does to time and energy is the trainer's physics. Faults that tests
inject come out as the errors a driver would raise.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from perseus_agent.devices.base import Controllability, DeviceIdentity, EnergyReading, EventReason
from perseus_agent.errors import DeviceBusy, DeviceFailed, DeviceLost, DriverUnavailable, InvalidClock, NoPermission
from perseus_core.power_policy import PowerPolicy
from perseus_core.units import s_from_ms, us_from_s, w_from_mw
from perseus_sim.gpus.model import MODELS, GpuModel
from perseus_sim.gpus.shared_gpu import SharedGpu
from perseus_sim.gpus.switching import Switches

ENV_GPUS = "PERSEUS_SIM_GPUS"
KEPT = 8
"""Changes of a clock remembered: more than are under way at any time."""
AT_LIMIT = 0.999
"""Share of the power limit from which on it counts as reached."""


PROFILES = {0: "MAX_P", 1: "MAX_Q", 7: "LLM_TRAINING", 12: "SYNC_BALANCED", 20: "TRAINING"}
"""Workload power profiles that are simulated, by NVML's number."""


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
        self._driver = _Driver(gpu, MODELS[spec.driver].faster(spec.speed)) if spec.driver else None
        self._reading = EnergyReading(0, 0)

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
        self._set(mhz)

    def reset_clocks(self) -> None:
        self._call(writes=True)
        self._set(0)

    def _set(self, mhz: int) -> None:
        self.gpu.request(mhz, None if self._driver is None else self._driver.call(mhz))

    def sm_clock_mhz(self) -> int:
        self._call()
        return self.gpu.clock_mhz if self._driver is None else self._driver.clock_mhz()

    def energy(self) -> Sequence[EnergyReading] | None:
        self._call()
        physics = self.gpu.physics()
        period_us = 0 if self._driver is None else us_from_s(self._driver.model.energy_period_s)
        if physics.now_us >= self._reading.time_us + period_us:  # between its ticks the counter stands still
            self._reading = EnergyReading(physics.now_us, physics.energy_uj // 1000)
        return [self._reading]

    def power_mw(self) -> int | None:
        self._call()
        return self.gpu.physics().power_mw

    def event_reasons(self) -> EventReason:
        self._call()
        limit, reasons = self.gpu.capped()
        wanted = self.gpu.locked_mhz or self.gpu.spec.default_clock_mhz
        throttled = EventReason(reasons) if limit and limit < wanted else EventReason.NONE
        return throttled | EventReason.POWER_CAP if self._driver and self._driver.at_power_limit() else throttled

    def power_policy(self) -> PowerPolicy:
        self._call()
        requested, enforced, floor_w, secondary_floor_w = self.gpu.policy()
        return PowerPolicy(_profile_names(requested), _profile_names(enforced), floor_w, secondary_floor_w)

    def close(self) -> None:
        """The GPU's file is closed with the process: workers may still be reading."""
        if self._driver is not None:
            self._driver.close()

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


def _profile_names(bits: int) -> tuple[str, ...]:
    return tuple(sorted(name for number, name in PROFILES.items() if bits >> number & 1))


class _Driver:
    """The driver of one GPU, in the machine's time. All GPUs of the node share its lock if those of the model do."""

    def __init__(self, gpu: SharedGpu, model: GpuModel) -> None:
        self.model = model.driver
        self._gpu, self._power_limit_w = gpu, model.power_limit_w
        self._limited_mhz = model.effective_mhz(model.max_clock_mhz)
        uuid = gpu.spec.uuid
        self._switches = Switches(model.driver, zlib.crc32(uuid.encode()))
        name = "driver" if model.driver.latency.shared_lock else uuid
        self._lock = (gpu.path.parent / f"{name}.lock").open("w")
        self._changes = [(0, gpu.locked_mhz)]  # when in effect, by the monotonic clock in nanoseconds; ascending

    def call(self, mhz: int) -> int:
        """Return when the call would; the microseconds from then until the clock is in effect."""
        switch = self._switches.draw(mhz)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            time.sleep(switch.call_s)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        settle_us = us_from_s(switch.latency_s - switch.call_s)
        effect_ns = time.monotonic_ns() + settle_us * 1_000
        earlier = [change for change in self._changes if change[0] < effect_ns]
        self._changes = [*earlier[-KEPT:], (effect_ns, mhz)]
        return settle_us

    def close(self) -> None:
        """Let go of the lock."""
        self._lock.close()

    def clock_mhz(self) -> int:
        """The clock in effect now, with what power and heat leave of it."""
        now_ns = time.monotonic_ns()
        set_mhz = [mhz for effect_ns, mhz in self._changes if effect_ns <= now_ns][-1]
        clock_mhz = set_mhz or self._gpu.spec.default_clock_mhz
        cap_mhz = self._gpu.capped()[0]
        if cap_mhz:
            clock_mhz = min(clock_mhz, cap_mhz)
        return min(clock_mhz, int(self._limited_mhz)) if self.at_power_limit() else clock_mhz

    def at_power_limit(self) -> bool:
        """Whether what the GPU computes now draws all that it may."""
        return w_from_mw(self._gpu.physics().power_mw) >= AT_LIMIT * self._power_limit_w


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
