"""One simulated GPU in virtual time, which computes by itself: device and workload of an acceptance run.

Time moves when somebody waits or calls the driver, so minutes pass in a second and every run with one seed is the same.
The clock follows a lock after the drawn latency of its model; meanwhile work goes on at the old clock. Energy moves in
the ticks of the model's counter, the power limit holds the clock down and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from perseus_agent.devices.base import Controllability, DeviceIdentity, EnergyReading, EventReason
from perseus_agent.errors import InvalidClock
from perseus_bench.workload import WorkItem
from perseus_core.units import mj_from_j, mw_from_w, us_from_s
from perseus_sim.gpus.model import GpuModel
from perseus_sim.gpus.switching import DriverLock, Switches

READING_S: Final = 20e-6
"""One reading of a value, as measured on an H100 (docs/clocks-take-time.md: 1 to 16 µs, 77 at most)."""
ITEM_S: Final = 0.000_5
"""A work item at the highest clock."""


class VirtualTime:
    """The time that the GPUs of a node share."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def pass_by(self, seconds: float) -> bool:
        """Wait; never interrupted."""
        self.now_s += max(0.0, seconds)
        return False


class VirtualGpu:
    """Device and workload."""

    def __init__(
        self,
        model: GpuModel,
        time: VirtualTime,
        lock: DriverLock | None = None,
        uuid: str = "GPU-virtual",
        seed: int = 0,
    ) -> None:
        self.time = time
        self.identity = DeviceIdentity(uuid, model.name, model.clocks_mhz)
        self.locked_mhz = 0
        self.controllable = (Controllability.YES, "")
        self._model = model
        self._switches = Switches(model.driver, seed)
        self._lock = lock or DriverLock(model.driver)
        self._pending: list[tuple[float, int]] = []
        self._mhz = model.max_clock_mhz
        self._settled_s = 0.0
        self._energy_j = 0.0
        self._ticks: list[tuple[float, float]] = [(0.0, 0.0)]
        self._limit: int | None = 0  # items to do; None: without end; 0: idle
        self._items: list[WorkItem] = []
        self._done_of_item = 0.0
        self._item_begin_s = 0.0
        self._effective = lru_cache(model.effective_mhz)
        self._slowdown = lru_cache(model.slowdown)
        self._power_w = lru_cache(model.power_w)

    # ---------------------------------------------------------------------------------- the device

    def controllability(self) -> tuple[Controllability, str]:
        return self.controllable

    def now_us(self) -> int:
        return us_from_s(self.time.now_s)

    def lock_clocks(self, mhz: int) -> None:
        if mhz not in self.identity.supported_clocks_mhz:
            raise InvalidClock(f"{mhz} MHz is not a supported clock")
        self._request(mhz)

    def reset_clocks(self) -> None:
        self._request(0)

    def sm_clock_mhz(self) -> int:
        self._read()
        return round(self._effective(self._mhz) if self._limit != 0 else self._mhz)

    def energy(self) -> Sequence[EnergyReading]:
        self._read()
        ticks, self._ticks = self._ticks, self._ticks[-1:]
        return [EnergyReading(us_from_s(at_s), mj_from_j(energy_j)) for at_s, energy_j in ticks]

    def power_mw(self) -> int:
        self._read()
        return mw_from_w(self._draws_w())

    def event_reasons(self) -> EventReason:
        self._read()
        if self._limit == 0:
            return EventReason.IDLE
        return EventReason.POWER_CAP if self._effective(self._mhz) < self._mhz - 1 else EventReason.NONE

    def compute_processes(self) -> int:
        return 0

    def close(self) -> None:
        """It is memory."""

    # -------------------------------------------------------------------------------- the workload

    @property
    def name(self) -> str:
        return "simulated work items"

    def start(self, items: int | None = None) -> None:
        self._settle()
        self._limit, self._items, self._done_of_item = items, [], 0.0
        self._item_begin_s = self.time.now_s

    def completed(self) -> int:
        self._read()
        return len(self._items)

    def finish(self) -> Sequence[WorkItem]:
        self._settle()
        while self._limit is not None and len(self._items) < self._limit:
            self.time.now_s += ITEM_S
            self._settle()
        self._limit = 0
        return self._items

    # ------------------------------------------------------------------------------------- inside

    def _request(self, mhz: int) -> None:
        switch = self._switches.draw(mhz)
        begin_s = self._lock.acquire(self.time.now_s, switch.call_s)
        effective_s = max(begin_s + switch.latency_s, self._pending[-1][0] if self._pending else 0.0)
        self._pending.append((effective_s, mhz or self._model.max_clock_mhz))
        self.locked_mhz = mhz
        self.time.now_s = begin_s + switch.call_s
        self._settle()

    def _read(self) -> None:
        self.time.now_s += READING_S
        self._settle()

    def _draws_w(self) -> float:
        return self._power_w(self._mhz) if self._limit != 0 else self._model.blocking_power_w

    def _settle(self) -> None:
        """Bring clock, work and energy to the present."""
        while self._pending and self._pending[0][0] <= self.time.now_s:
            at_s, mhz = self._pending.pop(0)
            self._spend(at_s)
            self._mhz = mhz
        self._spend(self.time.now_s)

    def _spend(self, until_s: float) -> None:
        """At one clock, up to a moment."""
        while self._settled_s < until_s:
            left = self._limit is None or len(self._items) < self._limit
            item_s = ITEM_S * self._slowdown(self._mhz)
            ends_s = self._settled_s + (1 - self._done_of_item) * item_s if left else until_s
            to_s = min(until_s, ends_s)
            self._draw(to_s)
            if left:
                self._done_of_item += (to_s - self._settled_s) / item_s
            self._settled_s = to_s
            if left and to_s == ends_s:
                self._items.append(WorkItem(self._item_begin_s * 1e6, (to_s - self._item_begin_s) * 1e6))
                self._item_begin_s, self._done_of_item = to_s, 0.0
                if len(self._items) == self._limit:
                    self._limit = 0

    def _draw(self, until_s: float) -> None:
        """Energy up to a moment, and the counter's ticks on the way."""
        power_w, period_s = self._draws_w(), self._model.driver.energy_period_s
        next_s = (self._settled_s // period_s + 1) * period_s
        if next_s <= until_s:
            self._ticks.append((next_s, self._energy_j + power_w * (next_s - self._settled_s)))
        self._energy_j += power_w * (until_s - self._settled_s)
