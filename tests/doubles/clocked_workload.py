"""Work items in real time at the speed of whatever clock a device reports: a workload for GPUs that cannot compute.

``perseus-bench --workload tests.doubles.clocked_workload:open_workload[:MODEL]``, such as on simulated GPUs
behind NVML. A thread reads the clock, moves the work on by it, and says what a simulated GPU draws meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from perseus_agent.devices.base import Device
from perseus_bench.workload import WorkItem, WorkloadFailed
from perseus_core.units import mw_from_w, s_from_us
from perseus_sim.gpus.model import MODELS, GpuModel
from perseus_sim.gpus.nvml_shim import ENV_STATE
from perseus_sim.gpus.shared_gpu import Physics
from perseus_sim.gpus.shim_gpu import NoGpus, ShimGpu

ITEM_S: Final = 0.002
"""A work item at the highest clock: several readings of the clock long."""
READING_S: Final = 0.000_5


class ClockedWorkload:
    """See the module."""

    def __init__(self, device: Device, model: GpuModel, gpu: ShimGpu | None = None) -> None:
        """``gpu``: the simulated GPU that computes; None: what it draws is not simulated."""
        self.name = "work items computed from the reported clock"
        self._device = device
        self._gpu = gpu
        self._power_mw = lru_cache(
            lambda mhz: mw_from_w(model.power_limit_w if mhz >= model.plateau_mhz else model.power_w(mhz))
        )
        self._speed = lru_cache(lambda mhz: model.slowdown(model.max_clock_mhz) / model.slowdown(mhz))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._limit: int | None = None
        self._items: list[WorkItem] = []

    def start(self, items: int | None = None) -> None:
        self._limit, self._items = items, []
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(self._items,), name="work", daemon=True)
        self._thread.start()

    def completed(self) -> int:
        return len(self._items)

    def finish(self) -> Sequence[WorkItem]:
        if self._thread is None:
            raise WorkloadFailed("not started")
        if self._limit is None:
            self._stop.set()
        self._thread.join()
        self._thread = None
        return self._items

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, items: list[WorkItem]) -> None:
        before_s = begin_s = s_from_us(self._device.now_us())
        left_s = ITEM_S
        while not self._stop.is_set() and (self._limit is None or len(items) < self._limit):
            mhz = self._device.sm_clock_mhz()
            speed = self._speed(mhz)
            if self._gpu is not None:
                self._gpu.advance(Physics(self._device.now_us(), 0, self._power_mw(mhz)))
            now_s = s_from_us(self._device.now_us())
            worked_s = (now_s - before_s) * speed
            while worked_s >= left_s and (self._limit is None or len(items) < self._limit):
                worked_s -= left_s
                end_s = now_s - worked_s / speed
                items.append(WorkItem(begin_s * 1e6, (end_s - begin_s) * 1e6))
                begin_s, left_s = end_s, ITEM_S
            left_s -= worked_s
            before_s = now_s
            time.sleep(READING_S)
        if self._gpu is not None:
            self._gpu.rest()


def open_workload(device: Device, argument: str) -> ClockedWorkload:
    """The workload for a device, by the speed of a GPU model (a100 unless named)."""
    state = os.environ.get(ENV_STATE, "")
    gpu: ShimGpu | None = None
    with contextlib.suppress(NoGpus):  # a driver alone, without the list of its node's GPUs
        gpu = ShimGpu(Path(state).parent, device.identity.uuid) if state else None
    return ClockedWorkload(device, MODELS[argument or "a100"], gpu)
