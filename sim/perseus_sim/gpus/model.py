"""How time and power of a GPU follow its clock, and profiles of made-up models computed from it.

time(f)  = time(f_max) · (m + (1 − m) · f_max / f)              m: the share that waits for memory
power(f) = static + dynamic · f/f_max · V(f)²,   V(f) = max(floor, v0 + (1 − v0) · f/f_max)

with the clock held where power would exceed the board's limit, which is why the highest clocks are no faster. The
constants are data, one file a GPU in ``models``, each with its source. Those of A100 and A40 are least-squares fits to
the stage profiles in the public artifact of the SOSP'24 paper (branch kronos of ml-energy/zeus); most of the others are
assumed and say so. Used to write the samples of the project and by tests; trainers read the resulting CSV.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perseus_proto.latency import published_latency
from perseus_sim.gpus.switching import DriverModel

BACKWARD_RATIO = 1.85
"""Backward to forward time of a transformer layer with activation recomputation, as in both of those profiles."""


@dataclass(frozen=True)
class GpuModel:
    """One kind of GPU."""

    name: str
    clocks_mhz: tuple[int, ...]
    """Supported clocks, ascending."""
    lowest_profiled_mhz: int
    """Lowest clock worth measuring: below, energy rises again."""
    memory_share: float
    static_w: float
    dynamic_w: float
    voltage_floor: float
    voltage_offset: float
    power_limit_w: float
    blocking_power_w: float
    driver: DriverModel
    sources: dict[str, str]
    """Where each figure comes from."""

    @classmethod
    def read(cls, path: Path) -> GpuModel:
        """Read a file of figures.

        Raises:
            OSError, ValueError, KeyError, TypeError: it is not one.
        """
        found: dict[str, Any] = tomllib.loads(path.read_text())
        compute, driver = ({key: one["value"] for key, one in found[part].items()} for part in ("compute", "driver"))
        lowest, highest, step = compute.pop("clocks_mhz")
        latency = published_latency(found["name"])
        sources = {key: one["source"] for part in ("compute", "driver") for key, one in found[part].items()}
        return cls(
            name=found["name"],
            clocks_mhz=tuple(range(lowest, highest + 1, step)),
            driver=DriverModel(latency=latency, **driver),
            sources={**sources, "latency": latency.source},
            **compute,
        )

    @property
    def max_clock_mhz(self) -> int:
        return self.clocks_mhz[-1]

    @property
    def plateau_mhz(self) -> int:
        """The supported clock that is nearest to what the power limit leaves of the highest."""
        limited_mhz = self.effective_mhz(self.max_clock_mhz)
        return min(self.clocks_mhz, key=lambda mhz: abs(mhz - limited_mhz))

    def effective_mhz(self, clock_mhz: float) -> float:
        """The clock that the power limit leaves of a clock."""
        if self._demanded_w(clock_mhz) <= self.power_limit_w:
            return clock_mhz
        low, high = 0.0, clock_mhz
        for _ in range(50):  # power grows with the clock; 50 halvings leave less than a millihertz
            middle = (low + high) / 2
            low, high = (middle, high) if self._demanded_w(middle) <= self.power_limit_w else (low, middle)
        return low

    def slowdown(self, clock_mhz: float) -> float:
        """Time at a clock over time at the highest clock."""
        return self._relative_time(clock_mhz) / self._relative_time(self.max_clock_mhz)

    def power_w(self, clock_mhz: float) -> float:
        """Power while computing at a clock."""
        return self._demanded_w(self.effective_mhz(clock_mhz))

    def _relative_time(self, clock_mhz: float) -> float:
        return self.memory_share + (1 - self.memory_share) * self.max_clock_mhz / self.effective_mhz(clock_mhz)

    def _demanded_w(self, clock_mhz: float) -> float:
        ratio = clock_mhz / self.max_clock_mhz
        voltage = max(self.voltage_floor, self.voltage_offset + (1 - self.voltage_offset) * ratio)
        return self.static_w + self.dynamic_w * ratio * voltage**2


MODELS = {path.stem: GpuModel.read(path) for path in sorted((Path(__file__).parent / "models").glob("*.toml"))}
"""By the names of ``--gpu-model``."""
GPU_MODELS = tuple(MODELS)


def stage_weights(stages: int, imbalance: float) -> tuple[float, ...]:
    """Relative work of each stage: equal layers, and the language-model head on top of the last one's.

    Raises:
        ValueError: no stage, or a last stage lighter than the others.
    """
    if stages < 1:
        raise ValueError(f"stages: must be at least 1, is {stages}")
    if imbalance < 1:
        raise ValueError(f"imbalance: longest over shortest stage, must be at least 1, is {imbalance}")
    return (*(1.0,) * (stages - 1), imbalance if stages > 1 else 1.0)


def profile_csv(
    stages: int = 4,
    gpu: str = "a100",
    imbalance: float = 1.12,
    forward_s: float = 0.036,
) -> str:
    """A profile as the field writes it: ``stage,instruction,frequency,time,energy`` (MHz, s, J).

    Args:
        stages: pipeline stages.
        gpu: a key of ``MODELS``.
        imbalance: time of the longest stage over that of the others. Published for GPT-3 on 4 stages: 1.02 (175B) to
            1.17 (1B).
        forward_s: forward time of an ordinary stage at the highest clock.

    Returns:
        The CSV, as ``perseus_solver.read_profile`` reads it.

    Raises:
        ValueError: an argument breaks its rule.

    >>> profile_csv(stages=2).splitlines()[:2]
    ['stage,instruction,frequency,time,energy', '0,forward,1410,0.036000,16.9488']
    """
    if not forward_s > 0:
        raise ValueError(f"forward_s: must be more than 0, is {forward_s}")
    kinds = (("forward", 1.0), ("backward", BACKWARD_RATIO))
    weights = enumerate(stage_weights(stages, imbalance))
    return _csv(gpu, [(stage, kind, forward_s * weight * ratio) for stage, weight in weights for kind, ratio in kinds])


def steps_csv(gpu: str = "a100", step_s: float = 0.4) -> str:
    """A profile of a job without a pipeline: its only instruction is ``step``.

    Args:
        gpu: a key of ``MODELS``.
        step_s: time of an iteration at the highest clock.

    Returns:
        The CSV, as ``perseus_solver.read_profile`` reads it.

    Raises:
        ValueError: an argument breaks its rule.
    """
    if not step_s > 0:
        raise ValueError(f"step_s: must be more than 0, is {step_s}")
    return _csv(gpu, [(0, "step", step_s)])


def _csv(gpu: str, instructions: Iterable[tuple[int, str, float]]) -> str:
    """The rows of instructions at every clock worth measuring: stage, kind, and seconds at the highest clock."""
    if gpu not in MODELS:
        raise ValueError(f"gpu: must be one of {', '.join(MODELS)}, is {gpu!r}")
    model = MODELS[gpu]
    clocks = [clock for clock in reversed(model.clocks_mhz) if clock >= model.lowest_profiled_mhz]
    lines = ["stage,instruction,frequency,time,energy"]
    for stage, kind, fastest_s in instructions:
        for clock in clocks:
            time_s = fastest_s * model.slowdown(clock)
            lines.append(f"{stage},{kind},{clock},{time_s:.6f},{time_s * model.power_w(clock):.4f}")
    return "\n".join(lines) + "\n"
