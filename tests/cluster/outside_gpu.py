"""A simulated GPU, read from outside its node."""

from __future__ import annotations

import time
from pathlib import Path

from perseus_sim.gpus.shim_gpu import ShimGpus, open_shim

GPUS = "run/perseus-simulated-gpus"
"""Path of the simulated GPUs below a node's root."""


class Gpu:
    """One GPU of a node, read from outside the node."""

    def __init__(self, folder: Path, uuid: str, stage: int) -> None:
        self.uuid, self.stage = uuid, stage
        self._index = ShimGpus.read(folder).uuids.index(uuid)
        self._shim = open_shim(folder)
        self._resets = self._shim.get(self._index, "reset_calls")
        self.defaults: list[float] = []
        """Times of every reset to default clocks, by the monotonic clock."""

    @property
    def locked_mhz(self) -> int:
        """The clock that is set, in MHz; 0 for default clocks."""
        return self._shim.get(self._index, "locked_mhz")

    def written(self) -> int:
        """Return how often its clocks were set or reset."""
        return self._shim.get(self._index, "lock_calls") + self._shim.get(self._index, "reset_calls")

    def look(self) -> int:
        """Return the clock that is set now, and record a reset to default clocks since the last look, however short."""
        resets = self._shim.get(self._index, "reset_calls")
        if resets > self._resets:
            self.defaults.append(time.monotonic())
        self._resets = resets
        return self.locked_mhz

    def default_after(self, since: float) -> float | None:
        """Return the seconds from a time to the first reset to default clocks; None if there was none."""
        return next((time - since for time in self.defaults if time >= since), None)
