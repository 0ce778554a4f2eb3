"""GPUs that record every call that changes them: for tests and measurements of the agent.

A lock outlives the process that set it, as on real hardware: with a folder, state and journal of calls are files in it,
so that a test sees what a killed agent left behind. ``open_devices(folder)`` is for ``--devices
tests.doubles.recording_gpu:open_devices:<folder>``; the file ``gpus`` names the UUIDs, ``<uuid>.fault`` holds the name
of an error class, ``hang <seconds>``, or ``compute <pid>`` (without an end, in that process), for the next calls.
Energy is integrated from a made-up power; physics are in ``perseus_sim.gpus.devices``.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perseus_agent import errors
from perseus_agent.devices.base import Controllability, DeviceIdentity, EnergyReading, EventReason

CLOCKS_MHZ = tuple(range(210, 1411, 15))
DEFAULT_MHZ = CLOCKS_MHZ[-1]
MAPPED_CALLS = 200_000


@dataclass
class Call:
    """One call that changed a GPU."""

    time_ns: int
    gpu: str
    mhz: int | None
    """None: reset to the default clocks."""


@dataclass
class RecordingGpu:
    """One GPU in memory; change its public fields to make it behave otherwise."""

    uuid: str
    clocks_mhz: tuple[int, ...] = CLOCKS_MHZ
    state: tuple[Controllability, str] = (Controllability.YES, "")
    reasons: EventReason = EventReason.NONE
    fault: Exception | None = None
    """Raised by every writing call."""
    has_energy: bool = True
    reads_mhz: int | None = None
    """What is read back instead of the truth."""
    working: bool | None = None
    """Whether its driver says that a kernel runs; None: it does not say."""
    locked_mhz: int | None = None
    calls: list[Call] = field(default_factory=list)
    energy_mj: float = 0.0
    clock_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000
    _since_us: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def identity(self) -> DeviceIdentity:
        return DeviceIdentity(self.uuid, "Recording GPU", self.clocks_mhz)

    def controllability(self) -> tuple[Controllability, str]:
        return self.state

    def now_us(self) -> int:
        return self.clock_us()

    def lock_clocks(self, mhz: int) -> None:
        self._change(mhz)

    def reset_clocks(self) -> None:
        self._change(None)

    def sm_clock_mhz(self) -> int:
        return self.reads_mhz or self.locked_mhz or DEFAULT_MHZ

    def energy(self) -> Sequence[EnergyReading] | None:
        if not self.has_energy:
            return None
        return [EnergyReading(self._integrate(), int(self.energy_mj))]

    def power_mw(self) -> int | None:
        return 50_000 + 250 * (self.locked_mhz or DEFAULT_MHZ)

    def event_reasons(self) -> EventReason:
        return self.reasons

    def busy(self) -> bool | None:
        if self.fault is not None:
            raise self.fault
        return self.working

    def close(self) -> None:
        """Nothing is held."""

    def _change(self, mhz: int | None) -> None:
        now_ns = time.monotonic_ns()
        if self.fault is not None:
            raise self.fault
        self._integrate()
        self.locked_mhz = mhz
        self.calls.append(Call(now_ns, self.uuid, mhz))

    def _integrate(self) -> int:
        with self._lock:
            now_us = self.now_us()
            elapsed_us = 0 if self._since_us is None else now_us - self._since_us
            self.energy_mj += (self.power_mw() or 0) * elapsed_us / 1e6
            self._since_us = now_us
            return now_us


class FileGpu(RecordingGpu):
    """A GPU whose lock, calls and faults are files."""

    def __init__(self, uuid: str, folder: Path) -> None:
        super().__init__(uuid)
        self._folder = folder
        self.locked_mhz = read_lock(folder, uuid)

    def controllability(self) -> tuple[Controllability, str]:
        self._misbehave()
        return super().controllability()

    def sm_clock_mhz(self) -> int:
        self._misbehave()
        return read_lock(self._folder, self.uuid) or DEFAULT_MHZ

    def _change(self, mhz: int | None) -> None:
        self._misbehave()
        super()._change(mhz)
        call = self.calls.pop()
        line = json.dumps({"time_ns": call.time_ns, "gpu": call.gpu, "mhz": call.mhz, "pid": os.getpid()}) + "\n"
        with (self._folder / "calls").open("a") as file:
            file.write(line)  # first: who sees the lock has the call that made it
        temporary = self._folder / f"{self.uuid}.new"
        temporary.write_text(str(mhz or ""))
        temporary.replace(self._folder / f"{self.uuid}.lock")

    def _misbehave(self) -> None:
        try:
            fault = (self._folder / f"{self.uuid}.fault").read_text().split()
        except FileNotFoundError:
            return
        if fault and fault[0] == "hang":
            time.sleep(float(fault[1]))
        elif fault and fault[0] == "compute":
            while int(fault[1]) == os.getpid():
                pass
        elif fault:
            raise getattr(errors, fault[0])("injected")


class MappedGpu(RecordingGpu):
    """A GPU that notes its calls in shared memory, in about a microsecond each: for measuring, not for faults."""

    def __init__(self, uuid: str, path: Path) -> None:
        super().__init__(uuid)
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")

    def _change(self, mhz: int | None) -> None:
        now_ns = time.monotonic_ns()
        self.locked_mhz = mhz
        words, count = self._words, self._words[0]
        place = 1 + 2 * count
        if place + 1 < len(words):
            words[place], words[place + 1], words[0] = now_ns, mhz or 0, count + 1


@dataclass
class RecordingSet:
    """Several GPUs."""

    gpus: Sequence[RecordingGpu]
    driver_version: str = "recording"

    @property
    def devices(self) -> Sequence[RecordingGpu]:
        return self.gpus

    def close(self) -> None:
        """Nothing is held."""


def open_devices(argument: str) -> RecordingSet:
    """The GPUs of a folder."""
    folder = Path(argument)
    return RecordingSet([FileGpu(uuid, folder) for uuid in (folder / "gpus").read_text().split()])


def open_mapped(argument: str) -> RecordingSet:
    """The GPUs of a folder, with their calls in shared memory."""
    folder = Path(argument)
    gpus = []
    for uuid in (folder / "gpus").read_text().split():
        with (folder / f"{uuid}.calls").open("ab") as file:  # the agent's keeper opens it too
            file.truncate(8 * (1 + 2 * MAPPED_CALLS))
        gpus.append(MappedGpu(uuid, folder / f"{uuid}.calls"))
    return RecordingSet(gpus)


def read_mapped(folder: Path, uuid: str) -> list[Call]:
    """Every call so far of a GPU opened by ``open_mapped``."""
    words = memoryview((folder / f"{uuid}.calls").read_bytes()).cast("Q")
    return [Call(words[1 + 2 * n], uuid, words[2 + 2 * n] or None) for n in range(words[0])]


def read_lock(folder: Path, uuid: str) -> int | None:
    """The clock that a GPU of a folder is locked to; None: its default clocks."""
    try:
        return int((folder / f"{uuid}.lock").read_text() or 0) or None
    except FileNotFoundError:
        return None


def read_calls(folder: Path) -> list[Call]:
    """Every call so far that changed a GPU of a folder, in order."""
    try:
        lines = (folder / "calls").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = map(json.loads, lines)
    return [Call(call["time_ns"], call["gpu"], call["mhz"]) for call in found]
