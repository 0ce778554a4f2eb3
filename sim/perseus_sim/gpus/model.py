"""How time and power of a GPU follow its clock, and profiles of made-up models computed from it.

time(f)  = time(f_max) · (m + (1 − m) · f_max / f)              m: the share that waits for memory
power(f) = static + dynamic · f/f_max · V(f)²,   V(f) = max(floor, v0 + (1 − v0) · f/f_max)

with the clock held where power would exceed the board's limit, which is why the highest clocks are no faster. The
constants of the two GPUs are least-squares fits to the stage profiles in the public artifact of the SOSP'24 paper
(branch kronos of ml-energy/zeus: GPT-3 175B on A100 SXM, Bloom 176B on A40, whose clocks go from 855 MHz up); the
model stays within 1.1 % (time) and 1.7 % (power) of the A100's, within 1.5 % and 2.6 % of the A40's. Blocking power
is the one published there. Used to write the samples of the project and by tests; trainers read the resulting CSV.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKWARD_RATIO = 1.85
"""Backward to forward time of a transformer layer with activation recomputation, as in both of those profiles."""


@dataclass(frozen=True)
class GpuModel:
    """One kind of GPU."""

    name: str
    clocks_mhz: tuple[int, ...]
    """Supported clocks, ascending."""
    memory_share: float
    static_w: float
    dynamic_w: float
    voltage_floor: float
    voltage_offset: float
    power_limit_w: float
    blocking_power_w: float

    @property
    def max_clock_mhz(self) -> int:
        return self.clocks_mhz[-1]

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


MODELS = {
    "a100": GpuModel(
        name="NVIDIA A100-SXM4-80GB (simulated)",
        clocks_mhz=tuple(range(210, 1411, 15)),
        memory_share=0.1351,
        static_w=46.13,
        dynamic_w=460.3,
        voltage_floor=0.8228,
        voltage_offset=0.1807,
        power_limit_w=470.8,
        blocking_power_w=83.64,
    ),
    "a40": GpuModel(
        name="NVIDIA A40 (simulated)",
        clocks_mhz=tuple(range(210, 1741, 15)),
        memory_share=0.498,
        static_w=95.85,
        dynamic_w=288.4,
        voltage_floor=0.7535,
        voltage_offset=0.2897,
        power_limit_w=291.8,
        blocking_power_w=70.38,
    ),
}


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
    lowest_clock: float = 0.6,
) -> str:
    """A profile as the field writes it: ``stage,instruction,frequency,time,energy`` (MHz, s, J).

    Args:
        stages: pipeline stages.
        gpu: a key of ``MODELS``.
        imbalance: time of the longest stage over that of the others. Published for GPT-3 on 4 stages: 1.02 (175B) to
            1.17 (1B).
        forward_s: forward time of an ordinary stage at the highest clock.
        lowest_clock: lowest clock measured, over the highest: below, energy rises again.

    Returns:
        The CSV, as ``perseus_solver.read_profile`` reads it.

    Raises:
        ValueError: an argument breaks its rule.

    >>> profile_csv(stages=2).splitlines()[:2]
    ['stage,instruction,frequency,time,energy', '0,forward,1410,0.036000,16.9488']
    """
    if gpu not in MODELS:
        raise ValueError(f"gpu: must be one of {', '.join(MODELS)}, is {gpu!r}")
    if not forward_s > 0:
        raise ValueError(f"forward_s: must be more than 0, is {forward_s}")
    model = MODELS[gpu]
    clocks = [clock for clock in reversed(model.clocks_mhz) if clock >= lowest_clock * model.max_clock_mhz]
    lines = ["stage,instruction,frequency,time,energy"]
    for stage, weight in enumerate(stage_weights(stages, imbalance)):
        for instruction, ratio in (("forward", 1.0), ("backward", BACKWARD_RATIO)):
            for clock in clocks:
                time_s = forward_s * weight * ratio * model.slowdown(clock)
                lines.append(f"{stage},{instruction},{clock},{time_s:.6f},{time_s * model.power_w(clock):.4f}")
    return "\n".join(lines) + "\n"
