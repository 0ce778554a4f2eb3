"""What the agent needs from a GPU, and nothing else: the contract that a driver implements.

``perseus_agent.devices.nvml`` implements it with NVML, ``perseus_sim.gpus.devices`` with simulated GPUs. The setting
``--devices`` chooses: ``nvml``, or ``module:factory[:argument]``, where ``factory(argument: str)`` returns a
``DeviceSet``.

Rules for implementers:

* Every method may be called from any thread; the agent calls the writing ones of one device from one thread only.
* Raise nothing but subclasses of ``perseus_agent.errors.DeviceError``. A call may block (NVML: 45 s); the agent watches
  for that, the driver needs no timeouts of its own.
* "No value" is ``None``, never 0 or −1.
* Do what is asked, once: no retries of writes, no skipping of writes without effect, no leases, no journal.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from perseus_agent.errors import SettingsError
from perseus_core.power_policy import PowerPolicy


class Controllability(enum.Enum):
    """Whether this GPU's clocks may be written; the names are those of the wire."""

    YES = "YES"
    NO_PERMISSION = "NO_PERMISSION"
    """Measuring works; writing needs a capability that the process lacks."""
    NOT_SUPPORTED = "NOT_SUPPORTED"
    MIG = "MIG"
    """Partitioned: clocks belong to the whole GPU and so to other tenants."""
    SHARED = "SHARED"
    """MPS or time-slicing: likewise."""
    LOST = "LOST"
    """Fell off the bus, needs a reset, or does not answer."""
    FOREIGN = "FOREIGN"
    """Another program sets its clocks. Only the governor finds this; a driver never returns it."""


class EventReason(enum.Flag):
    """Why the GPU runs at another clock than the requested one. A driver drops bits that have no name here."""

    NONE = 0
    IDLE = enum.auto()
    POWER_CAP = enum.auto()
    HARDWARE_SLOWDOWN = enum.auto()
    SOFTWARE_THERMAL = enum.auto()
    HARDWARE_THERMAL = enum.auto()
    POWER_BRAKE = enum.auto()
    SYNC_BOOST = enum.auto()
    BOARD_LIMIT = enum.auto()
    """The board's current or voltage, not its power limit."""
    RELIABILITY = enum.auto()
    """The voltage that the chip bears for its lifetime."""


@dataclass(frozen=True)
class DeviceIdentity:
    """What never changes while a GPU is in the machine. ``uuid`` is its key everywhere; an index is never a key."""

    uuid: str
    model: str
    supported_clocks_mhz: tuple[int, ...]
    """SM clocks that may be locked, ascending; empty where the GPU has no such list (then it is not controllable)."""
    minor_number: int | None = None
    """Of its device file: some programs call the GPU by it."""
    max_power_mw: int | None = None
    """The highest power limit that the board can be set to: it never draws more in the mean."""
    nvml_index: int | None = None
    """By which others may call it too; it may be another GPU's after the driver has been loaded again."""


class EnergyReading(NamedTuple):
    """The cumulative energy counter and the device's time (see ``Device.now_us``) at which it was read."""

    time_us: int
    energy_mj: int


class Device(Protocol):
    """One physical GPU. Every method but ``now_us`` and ``close`` may raise ``DeviceError``."""

    @property
    def identity(self) -> DeviceIdentity:
        """UUID, model and supported clocks; known without a call to the driver."""

    def controllability(self) -> tuple[Controllability, str]:
        """Read whether clocks may be written now.

        Called before each lease, since another tenant may have changed it.

        Returns:
            The state, and a sentence that says why not; empty for YES.
        """

    def now_us(self) -> int:
        """Now in microseconds, on the clock that stamps energy and that training processes on this GPU use.

        CLOCK_MONOTONIC, or the virtual time of a simulator.
        """

    def lock_clocks(self, mhz: int) -> None:
        """Lock the SM clock. The GPU has accepted the request when this returns, but may still be changing its clock.

        Args:
            mhz: one of ``identity.supported_clocks_mhz``.

        Raises:
            InvalidClock: the clock is not supported.
            NoPermission: the process lacks the capability; nothing was changed.
            DeviceError: any other refusal; the clock may or may not have been changed.
        """

    def reset_clocks(self) -> None:
        """Return to the default clocks. Resetting a GPU that is not locked is not an error.

        Raises:
            DeviceError: the GPU may still be locked.
        """

    def sm_clock_mhz(self) -> int:
        """Read the SM clock, MHz."""

    def energy(self) -> Sequence[EnergyReading] | None:
        """Read the energy counter.

        Returns:
            Readings since the last call, oldest first; possibly none. Where a reading is below the one before, the
            counter began anew and the energy between the two is not known. None: the GPU has no counter that can be
            trusted.
        """

    def power_mw(self) -> int | None:
        """Read the power drawn now, mW; None where the GPU does not measure it."""

    def event_reasons(self) -> EventReason:
        """Read why the GPU runs at another clock than the requested one; ``NONE``: there is no reason."""

    def close(self) -> None:
        """Release the handle. Never changes clocks: restoring them is the governor's task."""


@runtime_checkable
class ListsProcesses(Protocol):
    """A device whose driver says who computes on it; not needed to run an agent, which asks the kubelet."""

    def compute_processes(self) -> int | None:
        """Count the processes that hold the GPU for computing.

        Returns:
            The number, in whatever process namespace; None: the driver does not say.

        Raises:
            DeviceError: the driver refused.
        """


@runtime_checkable
class TellsPowerPolicy(Protocol):
    """A device whose driver says what else it is held to; not needed to run an agent."""

    def power_policy(self) -> PowerPolicy | None:
        """Read workload power profiles and power smoothing; None: the GPU or its driver has neither.

        Raises:
            DeviceError: the driver refused.
        """


@runtime_checkable
class SaysWhetherBusy(Protocol):
    """A device whose driver says whether it computes; without it long waits run at the plan's clock."""

    def busy(self) -> bool | None:
        """Read whether a kernel ran in the driver's last sample, which lasts up to a second.

        Returns:
            Whether one did, also one that only waits for another GPU; None: the driver does not say.

        Raises:
            DeviceError: the driver refused.
        """


class DeviceSet(Protocol):
    """The node's GPUs and the library behind them."""

    @property
    def driver_version(self) -> str:
        """Version of the GPU driver, for people."""

    @property
    def devices(self) -> Sequence[Device]:
        """All GPUs of the node; the list does not change while the set is open."""

    def close(self) -> None:
        """Release the library. Never changes clocks."""


def open_device_set(choice: str) -> DeviceSet:
    """Open the GPUs that the setting ``--devices`` names.

    Args:
        choice: ``nvml``, or ``module:factory[:argument]``, whose ``factory(argument)`` returns a ``DeviceSet``.

    Raises:
        SettingsError: the choice names nothing that can be called.
        DeviceError: the driver refused; the subclass says whether to try again.
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
