"""What the agent needs from a GPU, and nothing else: the contract between the governor and a driver.

Implemented by ``perseus_agent.devices.nvml`` (production) and by doubles such as ``perseus_sim.gpus.devices``. The
setting ``--devices`` chooses: ``nvml``, or ``module:factory[:argument]``, where ``factory(argument: str)`` returns a
``DeviceSet``.

Rules for implementers:

* Every method may be called from any thread; the agent calls the writing ones of one device from one thread only.
* Nothing is raised but classes of ``perseus_agent.errors`` under ``DeviceError``. A call may block (NVML: 45 s); the
  governor's watchdog deals with that, the driver needs no timeouts of its own.
* "No value" is ``None``, never 0 or −1. No policy here: no retries of writes, no skipping of no-ops, no leases, no
  journal.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from perseus_agent.errors import SettingsError


class Controllability(enum.Enum):
    """Whether this GPU's clocks may be written; the names are those of the wire."""

    YES = "YES"
    NO_PERMISSION = "NO_PERMISSION"
    """Measuring works, writing needs a capability the process lacks."""
    NOT_SUPPORTED = "NOT_SUPPORTED"
    MIG = "MIG"
    """Partitioned: clocks belong to the whole GPU and so to other tenants."""
    SHARED = "SHARED"
    """MPS or time-slicing: likewise."""
    LOST = "LOST"
    """Fell off the bus, needs a reset, or does not answer."""
    FOREIGN = "FOREIGN"
    """Somebody else sets its clocks. Decided by the governor, never answered by a driver."""


class EventReason(enum.Flag):
    """Why the GPU runs at another clock than asked for. Bits that mean nothing to us are dropped by the driver."""

    NONE = 0
    IDLE = enum.auto()
    POWER_CAP = enum.auto()
    HARDWARE_SLOWDOWN = enum.auto()
    SOFTWARE_THERMAL = enum.auto()
    HARDWARE_THERMAL = enum.auto()
    POWER_BRAKE = enum.auto()
    SYNC_BOOST = enum.auto()


@dataclass(frozen=True)
class DeviceIdentity:
    """What never changes while a GPU is in the machine. ``uuid`` is the key everywhere; an index is never one."""

    uuid: str
    model: str
    supported_clocks_mhz: tuple[int, ...]
    """SM clocks that may be locked, ascending; empty where the GPU has no such list (then it is not controllable)."""
    minor_number: int | None = None
    """Of its device file: the NVIDIA DRA driver calls the GPU ``gpu-<minor number>``."""


class EnergyReading(NamedTuple):
    """The cumulative energy counter and the device's time (see ``Device.now_us``) at which it was read."""

    time_us: int
    energy_mj: int


class Device(Protocol):
    """One physical GPU."""

    @property
    def identity(self) -> DeviceIdentity: ...

    def controllability(self) -> tuple[Controllability, str]:
        """Whether clocks may be written now, and a sentence that says why not (empty for YES). Asked before each
        lease."""

    def now_us(self) -> int:
        """The clock that stamps energy and that trainers on this GPU use: CLOCK_MONOTONIC, or a simulator's virtual
        time."""

    def lock_clocks(self, mhz: int) -> None:
        """Pin the SM clock to a supported clock. Returning means that the request was installed, not reached."""

    def reset_clocks(self) -> None:
        """Back to the default clocks. Resetting what is not locked is not an error."""

    def sm_clock_mhz(self) -> int:
        """The SM clock now."""

    def energy(self) -> Sequence[EnergyReading] | None:
        """What the GPU tells of its energy since the last call, oldest first; None where it has no counter that can be
        trusted. A level below the one before: what was used in between is not known."""

    def power_mw(self) -> int | None:
        """Power drawn now, or None where it is not measured."""

    def event_reasons(self) -> EventReason: ...

    def close(self) -> None:
        """Let go of the handle. Never touches clocks: giving them back is the governor's business."""


class DeviceSet(Protocol):
    """The node's GPUs and the library behind them."""

    @property
    def driver_version(self) -> str: ...

    @property
    def devices(self) -> Sequence[Device]: ...

    def close(self) -> None: ...


def open_device_set(choice: str) -> DeviceSet:
    """Open what the setting ``--devices`` names: ``nvml`` (short for this package's NVML driver) or a double.

    Raises:
        SettingsError: the choice names nothing that can be called.
        DeviceError: the driver refused (see the classes for what to do about it).
    """
    target = "perseus_agent.devices.nvml:open_devices" if choice == "nvml" else choice
    module_name, _, rest = target.partition(":")
    factory_name, _, argument = rest.partition(":")
    try:
        factory: Callable[[str], DeviceSet] = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"--devices: {choice!r} is neither 'nvml' nor an importable 'module:factory[:argument]': {error}"
        ) from error
    return factory(argument)
