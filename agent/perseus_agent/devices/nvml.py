"""Real GPUs behind ``perseus_agent.devices.base.Device``; the only module that imports pynvml.

Every NVML code becomes a class of ``perseus_agent.errors`` (``ERRORS``), and a GPU is addressed by its UUID alone: a
handle is checked against it before each write, since indices and handles may mean another GPU after the driver has been
reloaded. After a reload the library is opened again, at most once a call. Retries and time limits are the governor's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pynvml

from perseus_agent.devices.base import Controllability, DeviceIdentity, EnergyReading, EventReason
from perseus_agent.devices.driver_energy import DriverEnergy
from perseus_agent.devices.sampled_energy import Sample
from perseus_agent.errors import (
    DeviceBusy,
    DeviceError,
    DeviceFailed,
    DeviceLost,
    DriverMismatch,
    DriverUnavailable,
    InvalidClock,
    NoPermission,
    NotSupported,
    SettingsError,
)
from perseus_core.power_policy import PowerPolicy
from perseus_core.units import us_from_ns

log = logging.getLogger(__name__)
T = TypeVar("T")

ERRORS: Final[Mapping[int, type[DeviceError]]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: DriverUnavailable,  # still so after the library was opened again
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: DriverUnavailable,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverUnavailable,
    pynvml.NVML_ERROR_OPERATING_SYSTEM: DriverUnavailable,  # device files withheld: a mistake in the deployment
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: DriverMismatch,
    pynvml.NVML_ERROR_NO_PERMISSION: NoPermission,
    pynvml.NVML_ERROR_NOT_SUPPORTED: NotSupported,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: NotSupported,
    pynvml.NVML_ERROR_DEPRECATED: NotSupported,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: NotSupported,
    pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED: NotSupported,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: InvalidClock,
    pynvml.NVML_ERROR_FREQ_NOT_SUPPORTED: InvalidClock,
    pynvml.NVML_ERROR_NOT_FOUND: InvalidClock,
    pynvml.NVML_ERROR_TIMEOUT: DeviceBusy,
    pynvml.NVML_ERROR_IN_USE: DeviceBusy,
    pynvml.NVML_ERROR_NOT_READY: DeviceBusy,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: DeviceBusy,
    pynvml.NVML_ERROR_MEMORY: DeviceBusy,
    pynvml.NVML_ERROR_NO_DATA: DeviceBusy,
    pynvml.NVML_ERROR_INVALID_STATE: DeviceBusy,
    pynvml.NVML_ERROR_GPU_IS_LOST: DeviceLost,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: DeviceLost,
    pynvml.NVML_ERROR_RESET_REQUIRED: DeviceLost,
    pynvml.NVML_ERROR_RESET_TYPE_NOT_SUPPORTED: DeviceLost,
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: DeviceLost,
    pynvml.NVML_ERROR_IRQ_ISSUE: DeviceLost,
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: DeviceLost,
    pynvml.NVML_ERROR_ALREADY_INITIALIZED: DeviceFailed,
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE: DeviceFailed,  # pynvml grows its buffers itself
    pynvml.NVML_ERROR_UNKNOWN: DeviceFailed,
}
"""What each code means to the agent; codes not listed (a newer driver's) are DeviceFailed."""

REASONS: Final[Mapping[int, EventReason]] = {
    0x01: EventReason.IDLE,
    0x04: EventReason.POWER_CAP,
    0x08: EventReason.HARDWARE_SLOWDOWN,
    0x10: EventReason.SYNC_BOOST,
    0x20: EventReason.SOFTWARE_THERMAL,
    0x40: EventReason.HARDWARE_THERMAL,
    0x80: EventReason.POWER_BRAKE,
    0x200: EventReason.BOARD_LIMIT,
    0x400: EventReason.RELIABILITY,
}
"""Clock event reasons by NVML's bit. Left out: application and display clocks, which do not show a locked clock."""

_PROFILE: Final = "NVML_POWER_PROFILE_"
PROFILES: Final[Mapping[int, str]] = {
    getattr(pynvml, name): name.removeprefix(_PROFILE)
    for name in dir(pynvml)
    if name.startswith(_PROFILE) and "OPERATION" not in name and name != f"{_PROFILE}MAX"
}
"""Names of workload power profiles, by number; what newer drivers add has its number as a name."""
ENERGY_CHECK_S: Final = 0.25
"""How long the energy counters are watched at start: twice the slowest known period, about 106 ms."""
_CAP_SYS_ADMIN: Final = 1 << 21


def open_devices(argument: str) -> NvmlDevices:
    """All GPUs of the node; the factory behind ``--devices nvml``.

    Raises:
        SettingsError: an argument was given.
        DeviceError: the driver refused.
    """
    if argument:
        raise SettingsError(f"--devices: nvml takes no argument, was given {argument!r}")
    return NvmlDevices()


def may_write(status: Path = Path("/proc/self/status"), uid_map: Path = Path("/proc/self/uid_map")) -> bool:
    """Whether the driver lets this process set clocks: it requires CAP_SYS_ADMIN in the first user namespace."""
    effective = next((line.split()[1] for line in status.read_text().splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) & _CAP_SYS_ADMIN) and uid_map.read_text().split() == ["0", "0", "4294967295"]


class NvmlDevices:
    """The library, opened, and its GPUs."""

    def __init__(self, privileged: Callable[[], bool] = may_write, energy_check_s: float = ENERGY_CHECK_S) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self.may_write = privileged()
        _translate("nvmlInit", pynvml.nvmlInit)
        try:
            self.driver_version: str = _translate("driver version", pynvml.nvmlSystemGetDriverVersion)
            self.devices: tuple[NvmlDevice, ...] = tuple(self._found())
            before = [_unless_failed(device.raw_energy_mj) for device in self.devices]
            time.sleep(energy_check_s if any(value is not None for value in before) else 0)
            for device, value in zip(self.devices, before, strict=True):
                try:
                    device.judge_energy(value, energy_check_s)
                except DriverUnavailable:
                    raise
                except DeviceError as error:
                    log.error("%s; its energy counter is not used", error)
        except BaseException:
            pynvml.nvmlShutdown()
            raise

    @property
    def generation(self) -> int:
        """How often the library was opened again; handles are as old as this."""
        return self._generation

    def reopen(self, generation: int) -> None:
        """Open the library again after a driver reload, unless another thread already did since ``generation``."""
        with self._lock:
            if self._generation == generation:
                log.warning("NVML reports that it is not initialised: opening it again")
                self.close()  # calls of other threads then fail likewise, and come here
                _translate("nvmlInit", pynvml.nvmlInit)
                self._generation += 1

    def close(self) -> None:
        """Let go of the driver, so that it can be unloaded or MIG be changed."""
        with contextlib.suppress(DeviceError):  # it may be gone already
            _translate("nvmlShutdown", pynvml.nvmlShutdown)

    def _found(self) -> list[NvmlDevice]:
        """The GPUs that answer. One that does not return its UUID is left out: it cannot be addressed."""
        devices = []
        for index in range(_translate("device count", pynvml.nvmlDeviceGetCount)):
            try:
                handle = _translate(f"GPU {index}", partial(pynvml.nvmlDeviceGetHandleByIndex, index))
                uuid: str = _translate(f"GPU {index}", partial(pynvml.nvmlDeviceGetUUID, handle))
                devices.append(NvmlDevice(self, uuid, index))
            except DeviceError as error:
                log.error("GPU %d is left out: %s", index, error)
        return devices


class NvmlDevice:
    """One GPU."""

    def __init__(self, library: NvmlDevices, uuid: str, index: int | None = None) -> None:
        self._library = library
        self._uuid = uuid
        self._handle: Any = None
        self._handle_generation = -1
        self._no_permission = not library.may_write
        self._energy = DriverEnergy(uuid, self)
        self._missing: set[str] = set()
        self.identity = DeviceIdentity(
            uuid=uuid,
            model=self._call("name", pynvml.nvmlDeviceGetName),
            supported_clocks_mhz=self._supported_clocks(),
            minor_number=self._optional("minor number", pynvml.nvmlDeviceGetMinorNumber),
            max_power_mw=self._max_power_mw(),
            nvml_index=index,
        )

    def controllability(self) -> tuple[Controllability, str]:
        try:
            mode = self._optional("MIG mode", pynvml.nvmlDeviceGetMigMode)
            if mode is not None and any(mode):  # now, or after the next reset
                return Controllability.MIG, "MIG is on: clocks belong to the whole GPU and so to its other tenants"
            if self._optional("MPS", pynvml.nvmlDeviceGetMPSComputeRunningProcesses):
                return Controllability.SHARED, "processes share the GPU through MPS"
        except DeviceError as error:
            return Controllability.LOST, str(error)
        if not self.identity.supported_clocks_mhz:
            return Controllability.NOT_SUPPORTED, "the GPU lists no clocks that can be locked"
        if self._no_permission:
            return Controllability.NO_PERMISSION, "setting clocks takes CAP_SYS_ADMIN in the host's user namespace"
        return Controllability.YES, ""

    def now_us(self) -> int:
        return us_from_ns(time.monotonic_ns())

    def lock_clocks(self, mhz: int) -> None:
        if mhz not in self.identity.supported_clocks_mhz:  # the driver would silently use another one
            raise InvalidClock(f"{self._uuid}: {mhz} MHz is not a supported clock")
        self._write("lock clocks", lambda handle: pynvml.nvmlDeviceSetGpuLockedClocks(handle, mhz, mhz))

    def reset_clocks(self) -> None:
        self._write("reset clocks", pynvml.nvmlDeviceResetGpuLockedClocks)

    def sm_clock_mhz(self) -> int:
        clock: int = self._call("SM clock", lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        return clock

    def energy(self) -> Sequence[EnergyReading] | None:
        return self._energy.read()

    def power_mw(self) -> int | None:
        """The instantaneous field, where there is one: the plain call averages over a second on most GPUs."""
        fields = self._optional(
            "instant power", lambda handle: pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
        )
        if fields is not None and fields[0].nvmlReturn == pynvml.NVML_SUCCESS:
            return int(fields[0].value.uiVal)
        power: int | None = self._optional("power", pynvml.nvmlDeviceGetPowerUsage)
        return power

    def event_reasons(self) -> EventReason:
        bits = self._optional("event reasons", pynvml.nvmlDeviceGetCurrentClocksEventReasons)
        if bits is None:  # drivers before the renaming
            bits = self._optional("throttle reasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        reasons = EventReason.NONE
        for bit, reason in REASONS.items():
            if bits & bit:
                reasons |= reason
        return reasons

    def power_policy(self) -> PowerPolicy | None:
        """Drivers before 570 know no profiles, and those before 580 no second floor."""
        profiles = self._optional("power profiles", _current_profiles)
        floors = self._optional("power smoothing", _power_floors)
        if profiles is None and floors is None:
            return None
        requested, enforced = profiles or ((), ())
        return PowerPolicy(requested, enforced, *(floors or (0, 0)))

    def compute_processes(self) -> int | None:
        processes = self._optional("compute processes", pynvml.nvmlDeviceGetComputeRunningProcesses)
        return None if processes is None else len(processes)

    def busy(self) -> bool | None:
        rates = self._optional("utilization", pynvml.nvmlDeviceGetUtilizationRates)
        return None if rates is None else rates.gpu > 0

    def close(self) -> None:
        """The library owns the handle."""

    def raw_energy_mj(self) -> int | None:
        """The driver's counter, which starts at zero when the driver is loaded."""
        value: int | None = self._optional("energy", pynvml.nvmlDeviceGetTotalEnergyConsumption)
        return value

    def judge_energy(self, before_mj: int | None, elapsed_s: float) -> None:
        """Decide what the energy of this GPU is; see ``DriverEnergy.judge``."""
        self._energy.judge(before_mj, elapsed_s)

    def power_samples(self) -> list[Sample]:
        """Power over the past seconds, oldest first; empty where there are none."""

        def read(handle: Any) -> list[Sample]:
            try:
                kind, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_TOTAL_POWER_SAMPLES, 0)
            except pynvml.NVMLError_NotFound:  # none yet
                return []
            if kind != pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
                return []
            return [(sample.timeStamp, sample.sampleValue.uiVal) for sample in samples]

        return self._optional("power samples", read) or []

    def _supported_clocks(self) -> tuple[int, ...]:
        """SM clocks at the fastest memory clock, at which the GPU computes."""
        memory = self._optional("memory clocks", pynvml.nvmlDeviceGetSupportedMemoryClocks)
        if not memory:
            return ()
        clocks = self._optional(
            "SM clocks", lambda handle: pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle, max(memory))
        )
        return tuple(sorted(set(clocks or ())))

    def _max_power_mw(self) -> int | None:
        limits = self._optional("power limits", pynvml.nvmlDeviceGetPowerManagementLimitConstraints)
        return None if limits is None else int(limits[1])

    def _write(self, what: str, function: Callable[[Any], object]) -> None:
        def checked(handle: Any) -> None:
            if pynvml.nvmlDeviceGetUUID(handle) != self._uuid:
                log.warning("%s: its handle now means another GPU; looking it up again", self._uuid)
                handle = self._resolve()
                if pynvml.nvmlDeviceGetUUID(handle) != self._uuid:
                    raise DeviceLost(f"{self._uuid}: the driver does not find this GPU by its UUID")
            function(handle)

        try:
            self._call(what, checked)
        except NoPermission:
            self._no_permission = True
            raise

    def _optional(self, what: str, function: Callable[[Any], T]) -> T | None:
        """The value, or None where this GPU or driver has none; it is then not read again."""
        if what in self._missing:
            return None
        try:
            return self._call(what, function)
        except NotSupported:
            self._missing.add(what)
            return None

    def _call(self, what: str, function: Callable[[Any], T]) -> T:
        def attempt() -> T:
            if self._handle_generation != self._library.generation:
                self._resolve()
            return function(self._handle)

        generation = self._library.generation
        name = f"{self._uuid}: {what}"
        try:
            return _translate(name, attempt)
        except DriverUnavailable:
            self._library.reopen(generation)
            return _translate(name, attempt)

    def _resolve(self) -> Any:
        generation = self._library.generation
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except pynvml.NVMLError_NotFound:
            raise DeviceLost(f"{self._uuid}: the driver does not find this GPU any more") from None
        self._handle_generation = generation
        return self._handle


def _current_profiles(handle: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the workload power profiles that are requested, and of those that are enforced."""
    current = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
    pynvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(handle, pynvml.byref(current))
    return _profile_names(current.requestedProfilesMask.mask), _profile_names(current.enforcedProfilesMask.mask)


def _profile_names(mask: Sequence[int]) -> tuple[str, ...]:
    """The words of a mask hold 32 profiles each."""
    numbers = [number for number in range(32 * len(mask)) if mask[number // 32] >> (number % 32) & 1]
    return tuple(sorted(PROFILES.get(number, f"PROFILE_{number}") for number in numbers))


def _power_floors(handle: Any) -> tuple[int, int] | None:
    """Watts at which power smoothing keeps the GPU, and at which delayed smoothing does; None: it is not supported."""
    fields = (
        pynvml.NVML_FI_PWR_SMOOTHING_ENABLED,
        pynvml.NVML_FI_PWR_SMOOTHING_PRIMARY_POWER_FLOOR,
        pynvml.NVML_FI_PWR_SMOOTHING_SECONDARY_POWER_FLOOR,
    )
    values = pynvml.nvmlDeviceGetFieldValues(handle, list(fields))
    if values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    floors = [value.value.uiVal if value.nvmlReturn == pynvml.NVML_SUCCESS else 0 for value in values[1:]]
    return (floors[0], floors[1]) if values[0].value.uiVal else (0, 0)


def _unless_failed(call: Callable[[], T]) -> T | None:
    """What a call about one GPU returns; None: it failed, which says nothing of the others."""
    try:
        return call()
    except DriverUnavailable:
        raise
    except DeviceError:
        return None


def _translate(what: str, function: Callable[[], T]) -> T:
    """Call NVML and translate its errors."""
    try:
        return function()
    except pynvml.NVMLError as error:
        raise ERRORS.get(error.value, DeviceFailed)(f"{what}: NVML: {error}") from error
    except pynvml.NVMLLibraryMismatchError as error:  # pynvml's own: the driver is older than the binding
        raise NotSupported(f"{what}: NVML: {error}") from error
