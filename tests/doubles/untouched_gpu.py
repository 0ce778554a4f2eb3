"""A real GPU whose clocks only seem to change: reads are the driver's, writes take their time and are noted.

So the agent's control can be judged against a GPU that computes and a host that really runs ahead of it, on a machine
where clocks must not be set. ``--devices tests.doubles.untouched_gpu:open_devices:<folder>``; its file ``latency``
holds the median and the 99th percentile of a change, and the duration of a call, seconds.
"""

from __future__ import annotations

import json
import random
import threading
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perseus_agent.devices.base import Controllability, Device, DeviceIdentity
from perseus_agent.devices.nvml import NvmlDevices
from perseus_core.latency import SwitchLatency


class Change(NamedTuple):
    """Of the clock that the GPU would have."""

    effect_us: int
    """When it would have it."""
    mhz: int


class UntouchedGpu:
    """Everything but the clock is the real GPU's."""

    def __init__(self, real: Device, latency: SwitchLatency, calls: Path) -> None:
        self._real = real
        self._latency = latency
        self._calls = calls
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._changes: list[Change] = []

    @property
    def identity(self) -> DeviceIdentity:
        return self._real.identity

    def controllability(self) -> tuple[Controllability, str]:
        return Controllability.YES, ""

    def lock_clocks(self, mhz: int) -> None:
        self._change(mhz)

    def reset_clocks(self) -> None:
        self._change(self.identity.supported_clocks_mhz[-1])

    def sm_clock_mhz(self) -> int:
        with self._lock:
            return in_effect(self._changes, self.now_us()) or self.identity.supported_clocks_mhz[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _change(self, mhz: int) -> None:
        began_us = self.now_us()
        latency_s = self._random.lognormvariate(0, self._latency.sigma) * self._latency.p50_s
        with self._lock:
            change = Change(began_us + round(1e6 * latency_s), mhz)
            self._changes = effects([*self._changes, change])
            with self._calls.open("a") as file:
                file.write(json.dumps(change) + "\n")
        time.sleep(self._latency.call_s)


def in_effect(changes: Sequence[Change], at_us: float) -> int | None:
    """The clock at that time, of changes in the order of their effects; None: as before the first."""
    after = bisect(changes, at_us, key=lambda change: change.effect_us)
    return changes[after - 1].mhz if after else None


def effects(asked: Sequence[Change]) -> list[Change]:
    """Of changes in the order in which they were asked for, those that come into effect, in the order in which they do:
    what a later one overtakes never does."""
    found: list[Change] = []
    for change in asked:
        while found and found[-1].effect_us >= change.effect_us:
            found.pop()
        found.append(change)
    return found


class UntouchedSet:
    """The GPUs of this machine."""

    def __init__(self, real: NvmlDevices, wrap: Callable[[Device], UntouchedGpu]) -> None:
        self._real = real
        self.driver_version = real.driver_version
        self.devices = [wrap(device) for device in real.devices]

    def close(self) -> None:
        self._real.close()


def open_devices(argument: str) -> UntouchedSet:
    """This machine's GPUs, with their changes noted in a folder. The driver is opened without the right to write."""
    folder = Path(argument)
    p50_s, p99_s, call_s = json.loads((folder / "latency").read_text())
    latency = SwitchLatency.of_seconds(p50_s, p99_s, call_s, shared_lock=True, source="as the test says")
    return UntouchedSet(
        NvmlDevices(privileged=lambda: False),
        lambda device: UntouchedGpu(device, latency, folder / f"{device.identity.uuid}.changes"),
    )


def read_changes(folder: Path, uuid: str) -> list[Change]:
    """Every change asked for so far, in order."""
    lines = (folder / f"{uuid}.changes").read_text().splitlines()
    return [Change(*json.loads(line)) for line in lines]
