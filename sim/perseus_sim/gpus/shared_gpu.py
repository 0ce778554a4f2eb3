"""One simulated GPU as a small shared file, so that agent, trainer and test see the same hardware.

Every word has one writer. The trainer writes the physics (virtual time, energy, power), guarded by a sequence number;
the agent's device writes the requested clock; tests write faults and thermal caps. What never changes is in a JSON file
beside it. Standard library only, since trainers import it.
"""

from __future__ import annotations

import json
import mmap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

_MAGIC: Final = int.from_bytes(b"SIMGPU01", "little")
_SEQUENCE, _NOW_US, _ENERGY_UJ, _POWER_MW = 4, 5, 6, 7  # the trainer's
_REQUEST, _REQUEST_NS, _SETTLE_US = 12, 13, 14  # the agent's
_CAP, _FAULT, _PROFILES, _FLOORS = 16, 17, 18, 19  # the test's
_HISTORY, _FIRST = 20, 21  # the agent's
HISTORY: Final = 512
"""Clock changes remembered."""
_BYTES: Final = 8 * (_FIRST + 2 * HISTORY)
_LOW: Final = 0xFFFF_FFFF


@dataclass(frozen=True)
class GpuSpec:
    """What never changes about a simulated GPU."""

    uuid: str
    model: str
    supported_clocks_mhz: tuple[int, ...]
    """Ascending; the last is the default clock."""
    blocking_power_mw: int
    switch_latency_us: int = 0
    """Virtual time from a request to the new clock, where the driver is not simulated."""
    driver: str = ""
    """The GPU model whose driver is simulated: calls take time, and changes draw a latency. Empty: neither."""
    speed: int = 1
    """How many times faster than its model that driver is."""
    controllability: str = "YES"
    """A name of ``perseus_agent.devices.base.Controllability``."""

    def __post_init__(self) -> None:
        if list(self.supported_clocks_mhz) != sorted(set(self.supported_clocks_mhz)) or not self.supported_clocks_mhz:
            raise ValueError("supported_clocks_mhz: must be ascending and not empty")

    @property
    def default_clock_mhz(self) -> int:
        return self.supported_clocks_mhz[-1]


class Physics(NamedTuple):
    """Time, energy and power as the trainer wrote them, read together."""

    now_us: int
    energy_uj: int
    power_mw: int


class Request(NamedTuple):
    """The clock requested last; ``mhz`` is 0 for the default clocks. ``number`` grows with each request."""

    number: int
    mhz: int


class ClockChange(NamedTuple):
    """One write of the agent; ``mhz`` is 0 for the default clocks."""

    time_us: int
    mhz: int


class SharedGpu:
    """A view of the file; any number of processes may hold one."""

    def __init__(self, path: Path) -> None:
        """Open the GPU of ``<uuid>.gpu``, whose specification is in ``<uuid>.json``.

        Raises:
            OSError, ValueError: there is none, or it is not one.
        """
        text = json.loads(path.with_suffix(".json").read_text())
        self.spec = GpuSpec(**{**text, "supported_clocks_mhz": tuple(text["supported_clocks_mhz"])})
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._words = memoryview(self._map).cast("Q")
        if self._words[0] != _MAGIC:
            raise ValueError(f"{path} is not a simulated GPU")

    @classmethod
    def create(cls, folder: Path, spec: GpuSpec) -> Self:
        """A new GPU at virtual time 0, at its default clocks."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{spec.uuid}.gpu"
        path.with_suffix(".json").write_text(json.dumps(asdict(spec)))
        path.write_bytes(_MAGIC.to_bytes(8, "little") + bytes(_BYTES - 8))
        gpu = cls(path)
        gpu.advance(Physics(0, 0, spec.blocking_power_mw))
        return gpu

    @classmethod
    def open_all(cls, folder: Path) -> list[Self]:
        """The GPUs of a node, by UUID."""
        return [cls(path) for path in sorted(folder.glob("*.gpu"))]

    def close(self) -> None:
        """Let go of the file."""
        self._words.release()
        self._map.close()

    # -------------------------------------------------------------------------------- the trainer's

    def advance(self, physics: Physics) -> None:
        """Publish a moment. Time and energy never decrease: the caller sees to it."""
        words = self._words
        words[_SEQUENCE] += 1
        words[_NOW_US], words[_ENERGY_UJ], words[_POWER_MW] = physics
        words[_SEQUENCE] += 1

    def physics(self) -> Physics:
        """A moment, never torn."""
        words = self._words
        while True:
            before = words[_SEQUENCE]
            physics = Physics(words[_NOW_US], words[_ENERGY_UJ], words[_POWER_MW])
            if before % 2 == 0 and words[_SEQUENCE] == before:
                return physics
            time.sleep(0)  # the writer is between two stores

    # ---------------------------------------------------------------------------------- the agent's

    def request(self, mhz: int, settle_us: int | None = None) -> None:
        """Request a clock, MHz (0: the default clocks), which is in effect so much later; None: as specified."""
        words = self._words
        words[_SETTLE_US] = self.spec.switch_latency_us if settle_us is None else settle_us
        changes = words[_HISTORY]
        offset = _FIRST + 2 * (changes % HISTORY)
        words[offset], words[offset + 1] = words[_NOW_US], mhz
        words[_HISTORY] = changes + 1
        words[_REQUEST_NS] = time.monotonic_ns()
        words[_REQUEST] = ((words[_REQUEST] >> 32) + 1) << 32 | mhz

    def requested(self) -> Request:
        """The last request."""
        word: int = self._words[_REQUEST]
        return Request(word >> 32, word & _LOW)

    def requested_ns(self) -> int:
        """When, on the machine's monotonic clock."""
        stamp: int = self._words[_REQUEST_NS]
        return stamp

    def settle_us(self) -> int:
        """How long after it the clock requested last is in effect."""
        settle_us: int = self._words[_SETTLE_US]
        return settle_us

    def history(self, since: int = 0) -> list[ClockChange]:
        """The clock changes that are remembered, oldest first.

        Args:
            since: number of a request; it and those before it are left out.
        """
        words = self._words
        count = words[_HISTORY]
        offsets = (_FIRST + 2 * (index % HISTORY) for index in range(max(since, count - HISTORY, 0), count))
        return [ClockChange(words[offset], words[offset + 1]) for offset in offsets]

    # ----------------------------------------------------------------------------------- the test's

    def cap(self, mhz: int, reasons: int = 0) -> None:
        """Hold the clock at or below a limit, for reasons that the device will report; 0 MHz ends it."""
        self._words[_CAP] = reasons << 32 | mhz

    def capped(self) -> tuple[int, int]:
        """The limit (0: none) and its reasons."""
        word: int = self._words[_CAP]
        return word & _LOW, word >> 32

    def enforce(self, requested: int, enforced: int, *, floor_w: int = 0, secondary_floor_w: int = 0) -> None:
        """Set workload power profiles, as bits, and the floors of power smoothing; neither changes the clock."""
        self._words[_PROFILES] = requested << 32 | enforced
        self._words[_FLOORS] = floor_w << 32 | secondary_floor_w

    def policy(self) -> tuple[int, int, int, int]:
        """Requested and enforced profiles, and both floors."""
        profiles, floors = self._words[_PROFILES], self._words[_FLOORS]
        return profiles >> 32, profiles & _LOW, floors >> 32, floors & _LOW

    def fail(self, fault: int, argument: int = 0) -> None:
        """Make the device's calls fail (see ``perseus_sim.gpus.devices.Fault``); 0 ends it."""
        self._words[_FAULT] = argument << 32 | fault

    def fault(self) -> tuple[int, int]:
        """What calls fail with, and its argument."""
        word: int = self._words[_FAULT]
        return word & _LOW, word >> 32

    # -------------------------------------------------------------------------------------- of both

    @property
    def locked_mhz(self) -> int:
        """The clock that is locked; 0: the default clocks."""
        return self.requested().mhz

    @property
    def clock_mhz(self) -> int:
        """The clock that the last request and the limit leave."""
        wanted = self.locked_mhz or self.spec.default_clock_mhz
        limit = self.capped()[0]
        return min(wanted, limit) if limit else wanted
