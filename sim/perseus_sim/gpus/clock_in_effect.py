"""The clock of a simulated GPU as what runs on it sees it: a request is in effect once its latency has passed."""

from __future__ import annotations

from typing import Protocol

from perseus_sim.gpus.shared_gpu import GpuSpec, Physics, Request


class Gpu(Protocol):
    """What work moves: ``shared_gpu.SharedGpu``, or ``shim_gpu.ShimGpu`` on a real node."""

    spec: GpuSpec

    def physics(self) -> Physics: ...
    def advance(self, physics: Physics) -> None: ...
    def requested(self) -> Request: ...
    def requested_ns(self) -> int: ...
    def settle_us(self) -> int: ...
    def capped(self) -> tuple[int, int]: ...
    @property
    def locked_mhz(self) -> int: ...


class ClockInEffect:
    """Of one GPU, from the clock that it has now on."""

    def __init__(self, gpu: Gpu) -> None:
        self.seen = gpu.requested()
        """The latest request that was taken up."""
        self._gpu = gpu
        self._mhz = gpu.locked_mhz
        self.coming: list[tuple[float, int]] = []
        """Changes under way: when each is in effect, and its clock; 0: the default clocks."""

    @property
    def requested(self) -> bool:
        """Whether there is a request that was not taken up."""
        return self._gpu.requested() != self.seen

    @property
    def changes_us(self) -> float | None:
        """When the next change is in effect; None: none is under way."""
        return self.coming[0][0] if self.coming else None

    @property
    def mhz(self) -> int:
        """The clock in effect, MHz, as what limits it leaves it."""
        wanted = self._mhz or self._gpu.spec.default_clock_mhz
        limit = self._gpu.capped()[0]
        return min(wanted, limit) if limit else wanted

    def take_up(self, requested_us: float) -> None:
        """Take up the latest request. One before it whose clock would be in effect later is void.

        Args:
            requested_us: when it came.
        """
        self.seen = self._gpu.requested()
        effect_us = requested_us + self._gpu.settle_us()
        self.coming = [change for change in self.coming if change[0] < effect_us] + [(effect_us, self.seen.mhz)]

    def settle(self, now_us: float) -> None:
        """Let the changes that are due be in effect."""
        while self.coming and self.coming[0][0] <= now_us:
            self._mhz = self.coming.pop(0)[1]
