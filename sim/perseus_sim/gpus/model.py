"""Simulated GPU models: the figures of ``perseus_core.gpus`` with the behaviour of a driver."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perseus_core.gpus import FILES, GpuCurves, read_figures
from perseus_core.latency import faster_model, published_latency
from perseus_sim.gpus.switching import DriverModel


@dataclass(frozen=True)
class GpuModel(GpuCurves):
    """One kind of GPU, and how its driver behaves."""

    driver: DriverModel

    @classmethod
    def read(cls, path: Path) -> GpuModel:
        """Read a file of figures.

        Raises:
            OSError, ValueError, KeyError, TypeError: it is not one.
        """
        figures = read_figures(path)
        driver: dict[str, Any] = tomllib.loads(path.read_text())["driver"]
        latency = published_latency(figures["name"])
        sources = {key: one["source"] for key, one in driver.items()}
        figures["sources"] |= {**sources, "latency": latency.source}
        figures["name"] += " (simulated)"
        return cls(driver=DriverModel(latency=latency, **{key: one["value"] for key, one in driver.items()}), **figures)

    def faster(self, factor: int) -> GpuModel:
        """The same on which everything takes ``factor`` times less time; its watts and clocks are the same."""
        return replace(self, name=faster_model(self.name, factor), driver=self.driver.faster(factor))


MODELS = {path.stem: GpuModel.read(path) for path in FILES}
"""By the names of ``perseus_core.gpus.GPU_MODELS``."""
