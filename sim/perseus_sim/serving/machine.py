"""What a step of an engine takes on a simulated GPU, in seconds and joules, at each clock.

A step reads all weights once, reads the keys and values of every sequence that decodes, multiplies each new token with
the weights, and samples. Matrix products wait for whichever takes longer, their bytes or their operations; attention of
a decoding sequence waits for bytes, of a prompt for operations. The figures come from NVIDIA's tables for the H200
(``figures.toml``); times and watts at default clocks are checked against those that ML.ENERGY measured on H100s.

How a step follows the clock is *assumed*: operations take longer in proportion, bytes only below a knee, where the
clock no longer keeps the memory busy. `Assumptions` holds what sources disagree about, so that results are given over a
range.

power = idle + active · r · V² while a step runs, and in it for each byte and each operation a fixed energy, that of an
operation with V². ``r`` is the clock over the highest, ``V`` as in ``perseus_core.gpus``. Where products would draw
more than the power limit, the clock falls until they do not.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from perseus_core.gpus import GpuCurves, known_gpus

_FIGURES: Final[dict[str, Any]] = tomllib.loads((Path(__file__).with_name("figures.toml")).read_text(encoding="utf-8"))
_KERNELS: Final = {name: figure["value"] for name, figure in _FIGURES["kernels"].items()}
BYTES_OF_A_VALUE: Final = 2
"""bfloat16."""
MODELS: Final = tuple(_FIGURES["model"])
GPUS: Final = tuple(_FIGURES["gpu"])
WATTS: Final = tuple(_FIGURES["watts"])


@dataclass(frozen=True)
class LanguageModel:
    """The shape of a dense decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """Weights that each token is multiplied with."""
        attention = 2 * self.hidden * self.head * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.hidden * self.vocabulary

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * BYTES_OF_A_VALUE * self.layers * self.kv_heads * self.head


def language_model(name: str) -> LanguageModel:
    """Return one of `MODELS`."""
    return LanguageModel(**_FIGURES["model"][name])


@dataclass(frozen=True)
class Assumptions:
    """What sources disagree about.

    Attributes:
        knee_mhz: below, bytes take longer in proportion to the clock.
        watts: one of `WATTS`: whose figures of power hold.
        power_limit_w: of one GPU; None: its data sheet's.
    """

    knee_mhz: float = 1090.0
    watts: str = "middle"
    power_limit_w: float | None = None


class Step(NamedTuple):
    """What one step computes."""

    decoding: int
    """Sequences that get one more token."""
    kv_tokens: int
    """Tokens whose keys and values those read."""
    prompt_tokens: int
    """Tokens of prompts."""
    prompt_pairs: float
    """Pairs of a prompt's token and one before it: what attention of prompts computes."""
    prompts: int
    """Prompts of which the last token is computed."""


class Costs(NamedTuple):
    """A machine at one clock: what `Machine.seconds` and `Machine.joules` multiply a step with."""

    step_s: float
    reduce_s: float
    weights_s: float
    token_s: float
    kv_s: float
    pair_s: float
    sample_s: float
    idle_w: float
    active_w: float
    weights_j: float
    kv_j: float
    decode_j: float
    token_j: float
    pair_j: float
    sample_j: float


class Machine:
    """An instance of a model on one or more GPUs of a kind.

    Args:
        gpu: one of `GPUS`.
        model: one of `MODELS`.
        parallel: GPUs that each layer is split over (tensor parallel).
        assumptions: what is not known.
    """

    def __init__(self, gpu: str, model: str, parallel: int, assumptions: Assumptions | None = None) -> None:
        self.model = language_model(model)
        self.parallel = parallel
        self.assumptions = assumptions or Assumptions()
        self.curves: GpuCurves = known_gpus()[gpu]
        self._figures = {name: figure["value"] for name, figure in _FIGURES["gpu"][gpu].items()}
        self._watts = {name: figure["value"] for name, figure in _FIGURES["watts"][self.assumptions.watts].items()}
        self._limit_w = self.assumptions.power_limit_w or self.curves.power_limit_w
        self._costs: dict[int, Costs] = {}

    @cached_property
    def clocks_mhz(self) -> tuple[int, ...]:
        """Clocks worth running at, ascending; the last stands for the default clocks."""
        return tuple(mhz for mhz in self.curves.clocks_mhz if mhz >= 600)

    @cached_property
    def kv_capacity(self) -> int:
        """Tokens whose keys and values fit beside the weights, in nine tenths of the memory, as engines do."""
        memory = 0.9 * self.parallel * self._figures["memory_gib"] * 2**30
        return int((memory - BYTES_OF_A_VALUE * self.model.weights) / self.model.kv_bytes)

    @property
    def power_limit_w(self) -> float:
        """Of all GPUs together."""
        return self.parallel * self._limit_w

    def costs(self, clock_mhz: int) -> Costs:
        """Return the costs of steps at a clock, MHz."""
        costs = self._costs.get(clock_mhz)
        if costs is None:
            costs = self._costs[clock_mhz] = self._costs_at(clock_mhz)
        return costs

    @staticmethod
    def seconds(costs: Costs, step: Step) -> float:
        """Return how long a step takes."""
        tokens = step.decoding + step.prompt_tokens
        return (
            costs.step_s
            + costs.reduce_s * tokens
            + max(costs.weights_s, costs.token_s * tokens)
            + costs.kv_s * step.kv_tokens
            + costs.pair_s * step.prompt_pairs
            + costs.sample_s * (step.decoding + step.prompts)
        )

    @staticmethod
    def joules(costs: Costs, step: Step, seconds: float) -> float:
        """Return what all GPUs draw in a step that takes so many seconds."""
        return (
            costs.active_w * seconds
            + costs.sample_j * (step.decoding + step.prompts)
            + costs.weights_j
            + costs.kv_j * step.kv_tokens
            + costs.decode_j * step.decoding
            + costs.token_j * step.prompt_tokens
            + costs.pair_j * step.prompt_pairs
        )

    def _costs_at(self, clock_mhz: int) -> Costs:
        figures, watts, model, parallel = self._figures, self._watts, self.model, self.parallel
        bandwidth = 1e12 * figures["bandwidth_tbs"] * _KERNELS["achieved_bandwidth"]
        memory_mhz = self._limited(clock_mhz, memory=True)
        product_mhz = self._limited(clock_mhz, memory=False)
        voltage = self._voltage(clock_mhz)
        slower = max(1.0, self.assumptions.knee_mhz / memory_mhz)
        operations = 1e12 * _KERNELS["tera_flops_per_mhz"] * product_mhz
        weights = model.weights / parallel
        kv = model.kv_bytes / parallel
        pair = 4.0 * model.layers * model.heads * model.head / parallel
        launch_us = model.layers * (4 * _KERNELS["gemm_us"] + _KERNELS["attention_us"] + _KERNELS["other_us"])
        reduced = model.layers * 2 if parallel > 1 else 0
        ratio = self.curves.max_clock_mhz / clock_mhz
        launch_s = 1e-6 * launch_us * (1 - _KERNELS["launch_share"] + _KERNELS["launch_share"] * ratio)
        sample_s = 1e-6 * _KERNELS["sample_us"] * model.vocabulary / 128256 * (1 + ratio) / 2
        moved = BYTES_OF_A_VALUE * 2 * model.hidden * (parallel - 1) / parallel
        active_w = watts["idle_w"] + watts["active_w"] * self._power_ratio(clock_mhz)
        byte_j = 1e-12 * (watts["byte_pj"] + watts["die_pj"] * self._voltage(memory_mhz) ** 2)
        flop_j = self._flop_j(product_mhz, clock_mhz)
        return Costs(
            step_s=1e-6 * _KERNELS["host_us"] + launch_s + 1e-6 * reduced * _KERNELS["reduce_us"],
            reduce_s=reduced * moved / (1e9 * _KERNELS["reduce_gbs"]),
            weights_s=BYTES_OF_A_VALUE * weights * slower / bandwidth,
            token_s=2 * weights / operations,
            kv_s=kv * slower / bandwidth,
            pair_s=pair / (_KERNELS["attention_share"] * operations),
            sample_s=sample_s,
            idle_w=parallel * (watts["idle_w"] + watts["active_w"] * self._power_ratio(clock_mhz)),
            active_w=parallel * active_w,
            weights_j=parallel * BYTES_OF_A_VALUE * weights * byte_j,
            kv_j=parallel * kv * byte_j,
            decode_j=parallel * 2e-12 * weights * watts["decode_pj"] * voltage**2,
            token_j=parallel * 2 * weights * flop_j,
            pair_j=parallel * pair * flop_j,
            sample_j=parallel * sample_s * watts["sample_w"] * self._power_ratio(clock_mhz),
        )

    def _voltage(self, clock_mhz: float) -> float:
        curves = self.curves
        ratio = clock_mhz / curves.max_clock_mhz
        return max(curves.voltage_floor, curves.voltage_offset + (1 - curves.voltage_offset) * ratio)

    def _power_ratio(self, clock_mhz: float) -> float:
        """Power of what switches with every cycle, over that at the highest clock."""
        return clock_mhz / self.curves.max_clock_mhz * self._voltage(clock_mhz) ** 2

    def _demanded_w(self, clock_mhz: float, *, memory: bool) -> float:
        """Power of one GPU that only reads, or only multiplies, without a limit."""
        watts = self._watts
        demanded_w = watts["idle_w"] + watts["active_w"] * self._power_ratio(clock_mhz)
        if memory:
            bandwidth = 1e12 * self._figures["bandwidth_tbs"] * _KERNELS["achieved_bandwidth"]
            byte_j = 1e-12 * (watts["byte_pj"] + watts["die_pj"] * self._voltage(clock_mhz) ** 2)
            return float(demanded_w + byte_j * bandwidth * min(1.0, clock_mhz / self.assumptions.knee_mhz))
        rate = _KERNELS["tera_flops_per_mhz"] * clock_mhz
        return float(demanded_w + watts["prompt_pj"] * rate * self._voltage(clock_mhz) ** 2)

    def _limited(self, clock_mhz: float, *, memory: bool) -> float:
        """The clock that the power limit leaves of a clock."""
        if self._demanded_w(clock_mhz, memory=memory) <= self._limit_w:
            return clock_mhz
        low, high = 0.0, clock_mhz
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self._demanded_w(middle, memory=memory) <= self._limit_w else (low, middle)
        return max(low, self.curves.clocks_mhz[0])

    def _flop_j(self, product_mhz: float, clock_mhz: float) -> float:
        """Energy of one operation; at the power limit so that time and power agree with it."""
        if product_mhz == clock_mhz:
            return float(1e-12 * self._watts["prompt_pj"] * self._voltage(clock_mhz) ** 2)
        active_w = self._watts["idle_w"] + self._watts["active_w"] * self._power_ratio(clock_mhz)
        return float(max(0.0, self._limit_w - active_w) / (1e12 * _KERNELS["tera_flops_per_mhz"] * product_mhz))
