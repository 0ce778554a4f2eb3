"""How time and power of a GPU follow its clock: published and measured figures of GPU models.

time(f)  = time(f_max) · (m + (1 − m) · f_max / f)              m: the share that waits for memory
power(f) = static + dynamic · f/f_max · V(f)²,   V(f) = max(floor, v0 + (1 − v0) · f/f_max)

with the clock held where power would exceed the board's limit, which is why the highest clocks are no faster. The
constants are data, one file a GPU beside this module, each with its source. Those of A100 and A40 are least-squares
fits to the stage profiles in the public artifact of the SOSP'24 paper (branch kronos of ml-energy/zeus); most of the
others are assumed and say so. The operator estimates from them what it has not measured, and simulated GPUs follow
them. How long clock changes take is in ``perseus_core.latency``. Standard library only.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

BACKWARD_RATIO: Final = 1.85
"""Backward over forward time of a transformer layer with activation recomputation, as in the published profiles."""
TRUE_SHARES: Final = (0.8, 2.2)
"""What plans really save, over what is estimated by these curves, lies between these. On both published profiles, each
estimated with the curves of its own GPU and of two others, at 12 and 96 microbatches and for 0, 5 and 15 % of slowdown,
the share was 0.90 to 2.14: real GPUs save more at their first steps down than a smooth curve does."""
_OTHER_BOARDS: Final = frozenset({"PCIE", "NVL", "MIG"})
"""Words in names of boards with the chip of one of these, but another power limit, memory and clocks."""
FILES: Final = tuple(sorted(Path(__file__).parent.glob("*.toml")))
GPU_MODELS: Final = tuple(path.stem for path in FILES)
"""``a100``, ``h100``, …"""


def model_words(model: str) -> frozenset[str]:
    """The words of a GPU's name as NVML gives it, in upper case: an A4000 is no A40.

    >>> sorted(model_words("NVIDIA A100-SXM4-80GB"))
    ['80GB', 'A100', 'NVIDIA', 'SXM4']
    """
    return frozenset(model.upper().replace("-", " ").replace("(", " ").split())


@dataclass(frozen=True)
class GpuCurves:
    """Time and power of one GPU model by clock."""

    name: str
    """As NVML gives it."""
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
    sources: dict[str, str]
    """Where each figure comes from."""

    @property
    def max_clock_mhz(self) -> int:
        """The highest supported clock."""
        return self.clocks_mhz[-1]

    @property
    def plateau_mhz(self) -> int:
        """The supported clock that is nearest to what the power limit leaves of the highest."""
        limited_mhz = self.effective_mhz(self.max_clock_mhz)
        return min(self.clocks_mhz, key=lambda mhz: abs(mhz - limited_mhz))

    @property
    def assumed(self) -> bool:
        """Whether some figure of time or power is assumed, and not a fit to measurements or published."""
        return any(self.sources[figure].startswith("assumed") for figure in ("memory_share", "static_w", "dynamic_w"))

    def effective_mhz(self, clock_mhz: float) -> float:
        """The clock that the power limit leaves of a clock."""
        if self.demanded_w(clock_mhz) <= self.power_limit_w:
            return clock_mhz
        low, high = 0.0, clock_mhz
        for _ in range(50):  # power grows with the clock; 50 halvings leave less than a millihertz
            middle = (low + high) / 2
            low, high = (middle, high) if self.demanded_w(middle) <= self.power_limit_w else (low, middle)
        return low

    def slowdown(self, clock_mhz: float) -> float:
        """Time at a clock over time at the highest clock, under the power limit."""
        return self.relative_time(self.effective_mhz(clock_mhz)) / self.relative_time(
            self.effective_mhz(self.max_clock_mhz)
        )

    def power_w(self, clock_mhz: float) -> float:
        """Power while computing at a clock, under the power limit."""
        return self.demanded_w(self.effective_mhz(clock_mhz))

    def relative_time(self, reached_mhz: float) -> float:
        """Time at a clock that is reached, over what it would take at the highest without a power limit."""
        return self.memory_share + (1 - self.memory_share) * self.max_clock_mhz / reached_mhz

    def demanded_w(self, clock_mhz: float) -> float:
        """Power while computing at a clock without a power limit."""
        ratio = clock_mhz / self.max_clock_mhz
        voltage = max(self.voltage_floor, self.voltage_offset + (1 - self.voltage_offset) * ratio)
        return self.static_w + self.dynamic_w * ratio * voltage**2


def read_figures(path: Path) -> dict[str, Any]:
    """Read the table ``[compute]`` of a file of figures, as the fields of `GpuCurves`.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is not one.
    """
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    figures = {key: one["value"] for key, one in table["compute"].items()}
    lowest, highest, step = figures.pop("clocks_mhz")
    sources = {key: one["source"] for key, one in table["compute"].items()}
    return {"name": table["name"], "clocks_mhz": tuple(range(lowest, highest + 1, step)), "sources": sources, **figures}


@cache
def known_gpus() -> dict[str, GpuCurves]:
    """Every model with figures here, by the names of `GPU_MODELS`."""
    return {path.stem: GpuCurves(**read_figures(path)) for path in FILES}


def curves_of(model: str) -> GpuCurves | None:
    """The figures of a GPU model; None: there are none, or they are of another board with the same chip.

    Args:
        model: the GPU's name as NVML gives it.

    >>> curves_of("NVIDIA A100-SXM4-40GB").name
    'NVIDIA A100-SXM4-80GB'
    >>> curves_of("NVIDIA L4") is None
    True
    >>> curves_of("NVIDIA H100 PCIe") is None  # 350 W, where the figures are of a board of 700 W
    True
    """
    words = model_words(model)
    if words & _OTHER_BOARDS:
        return None
    return next((curves for name, curves in known_gpus().items() if name.upper() in words), None)
