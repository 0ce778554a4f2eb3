"""What a plan meets on real GPUs: how long clock changes take, who marks instructions, and how much durations scatter.

The operator learns it, and the solver rehearses plans under it. Between them it travels as JSON, which is also what
``perseus plan --hardware`` reads from users: so it is checked here once, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

from perseus_core.clock_latency import MAX_CLOCKS
from perseus_core.instruction import InstructionKind
from perseus_core.latency import MAX_LATENCY_US, SwitchLatency, published_latency
from perseus_core.marks import BEST_MARKS_FIRST, MarkSource
from perseus_core.units import s_from_us, us_from_s

MAX_BYTES: Final = 1 << 16
"""Of a description as JSON: it has ten numbers, and two of each clock."""
MAX_GPUS_PER_LOCK: Final = 1024
DEFAULT_LAUNCH_S: Final = 1e-5
"""Of one kernel from Python: public traces say 5 to 10 µs."""
DEFAULT_LAUNCH_QUEUE: Final = 1024
"""Kernels that CUDA takes before a launch waits, as measured by several users; NVIDIA documents no number."""
DEFAULT_KERNELS: Final = MappingProxyType(
    {
        InstructionKind.FORWARD: 300,
        InstructionKind.BACKWARD: 600,
        InstructionKind.INPUT_GRADIENT: 300,
        InstructionKind.WEIGHT_GRADIENT: 300,
        InstructionKind.CONSTANT: 1,
        InstructionKind.STEP: 1_000,
    }
)
"""Of an instruction: a transformer layer launches about 30 kernels forward and twice as many backward."""
_MAX_KERNELS, _MAX_PIPELINES, _MAX_NOISE, _MAX_NAME = 1_000_000, 10_000_000, 0.5, 256
_MAX_DIGITS: Final = 5
_MAX_S: Final = s_from_us(MAX_LATENCY_US)


@dataclass(frozen=True)
class Hardware:
    """Everything about GPUs, node, framework and job that decides what becomes of a plan.

    A field that is out of range raises ValueError, which names the field and the rule.

    Attributes:
        model: name of the GPU model, as the driver gives it.
        latency: distribution of the time that a clock change takes, and the duration of a call.
        marks: who marks instructions.
        launch_s: time in which the host launches one kernel, seconds.
        launch_queue: kernels that the host may be ahead of the GPU.
        kernels: kernels of one instruction of each kind.
        gpus_per_lock: GPUs of one stage whose calls follow each other, because they share a driver's lock. They change
            clocks together, and compute as fast as the slowest of them.
        noise: relative standard deviation of the time that an instruction takes; 0 where nothing is said about it.
        pipelines: data-parallel pipelines of the job. Each iteration ends with the slowest of them.
        clocks: by clock, MHz, the distribution for changes to it, where it is known. Calls last as in ``latency``.
    """

    model: str
    latency: SwitchLatency
    marks: MarkSource = MarkSource.GPU
    launch_s: float = DEFAULT_LAUNCH_S
    launch_queue: int = DEFAULT_LAUNCH_QUEUE
    kernels: Mapping[InstructionKind, int] = field(default_factory=lambda: DEFAULT_KERNELS)
    gpus_per_lock: int = 1
    noise: float = 0.0
    pipelines: int = 1
    clocks: Mapping[int, SwitchLatency] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not 1 <= len(self.model) <= _MAX_NAME:
            raise ValueError(f"hardware: model must have 1 to {_MAX_NAME} characters, not {len(self.model)}")
        _check_quantiles("switch_latency_s", self.latency)
        if len(self.clocks) > MAX_CLOCKS:
            raise ValueError(f"hardware: switch_latency_s.clocks must be at most {MAX_CLOCKS}")
        for mhz, latency in self.clocks.items():
            _check_quantiles(f"switch_latency_s.clocks.{mhz}", latency)
        _number("call_s", self.latency.call_s, 0.0, _MAX_S)
        _number("launch_s", self.launch_s, 0.0, 1.0)
        _number("noise", self.noise, 0.0, _MAX_NOISE)
        _whole("launch_queue", self.launch_queue, 1, _MAX_KERNELS)
        _whole("gpus_per_lock", self.gpus_per_lock, 1, MAX_GPUS_PER_LOCK)
        _whole("pipelines", self.pipelines, 1, _MAX_PIPELINES)
        for kind, count in self.kernels.items():
            _whole(f"kernels.{kind.label}", count, 1, _MAX_KERNELS)

    def latency_of(self, mhz: int) -> SwitchLatency:
        """Return the distribution of the time that a change to a clock takes."""
        return self.clocks.get(mhz, self.latency)

    @classmethod
    def published(cls, model: str, *, marks: MarkSource = MarkSource.GPU, gpus_per_lock: int = 1) -> Self:
        """Return what to assume of a GPU model on which nothing was measured.

        Args:
            model: the GPU's name as NVML gives it.
            marks: who marks instructions.
            gpus_per_lock: GPUs of one stage on a node. They count only where the model's driver has one lock for all.

        Raises:
            ValueError: the name is empty or too long, or ``gpus_per_lock`` is out of range.
        """
        latency = published_latency(model)
        return cls(model=model, latency=latency, marks=marks, gpus_per_lock=gpus_per_lock if latency.shared_lock else 1)

    def to_json(self) -> str:
        """The description as `from_json` reads it: what plans depend on and nothing else, in one spelling only, so that
        equal descriptions are equal texts. How the host launches is written where it is not assumed.
        """
        times: dict[str, Any] = _quantiles_to_json(self.latency)
        if self.clocks:
            times["clocks"] = {str(mhz): _quantiles_to_json(latency) for mhz, latency in self.clocks.items()}
        document: dict[str, Any] = {
            "model": self.model,
            "switch_latency_s": times,
            "call_s": self.latency.call_s,
            "marks": self.marks.word,
            "gpus_per_lock": self.gpus_per_lock,
            "noise": self.noise,
            "pipelines": self.pipelines,
        }
        if self.launch_s != DEFAULT_LAUNCH_S:
            document["launch_s"] = self.launch_s
        if self.launch_queue != DEFAULT_LAUNCH_QUEUE:
            document["launch_queue"] = self.launch_queue
        if self.kernels != DEFAULT_KERNELS:
            document["kernels"] = {kind.label: count for kind, count in self.kernels.items()}
        return json.dumps(document, sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> Hardware:
        """Read a description, as ``perseus plan --hardware`` does.

        Args:
            text: ``{"model": "…", "switch_latency_s": {"p50": 0.02, "p99": 0.1}, "call_s": 0.002, "marks": "gpu"}``,
                and optionally ``launch_s``, ``launch_queue``, ``kernels`` (by instruction), ``gpus_per_lock``,
                ``noise`` and ``pipelines``. ``switch_latency_s`` may have ``clocks``, the same by the clock that is
                changed to: ``{"1335": {"p50": 0.04, "p99": 0.06}}``.

        Raises:
            ValueError: the message names the field and the rule.
        """
        if len(text) > MAX_BYTES:
            raise ValueError(f"hardware: too large: at most {MAX_BYTES:,} bytes")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"hardware: not JSON: {error}") from None
        fields = _fields("hardware", document, _REQUIRED, _OPTIONAL)
        times = _fields("switch_latency_s", fields["switch_latency_s"], _QUANTILES, ("clocks",))
        if not isinstance(fields["model"], str):
            raise ValueError("hardware: model must be a text")
        marks = next((marks for marks in MarkSource if marks.word == fields["marks"]), None)
        if marks is None:
            words = ", ".join(marks.word for marks in BEST_MARKS_FIRST)
            raise ValueError(f"hardware: marks must be one of {words}, not {_short(fields['marks'])}")
        gpus_per_lock = _whole("gpus_per_lock", fields.get("gpus_per_lock", 1), 1, MAX_GPUS_PER_LOCK)
        call_us = us_from_s(_number("call_s", fields["call_s"], 0.0, _MAX_S))
        latency = _latency("switch_latency_s", times, call_us, gpus_per_lock > 1)
        return Hardware(
            model=fields["model"],
            latency=latency,
            clocks=_clocks(times.get("clocks", {}), latency),
            marks=marks,
            launch_s=_number("launch_s", fields.get("launch_s", DEFAULT_LAUNCH_S), 0.0, 1.0),
            launch_queue=_whole("launch_queue", fields.get("launch_queue", DEFAULT_LAUNCH_QUEUE), 1, _MAX_KERNELS),
            kernels=_kernels(fields.get("kernels", {})),
            gpus_per_lock=gpus_per_lock,
            noise=_number("noise", fields.get("noise", 0.0), 0.0, _MAX_NOISE),
            pipelines=_whole("pipelines", fields.get("pipelines", 1), 1, _MAX_PIPELINES),
        )


_QUANTILES: Final = ("p50", "p99")
_REQUIRED: Final = ("model", "switch_latency_s", "call_s", "marks")
_OPTIONAL: Final = ("launch_s", "launch_queue", "kernels", "gpus_per_lock", "noise", "pipelines")


def _fields(name: str, value: Any, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    """Check that a value is an object with these fields and no others."""
    if not isinstance(value, dict):
        raise ValueError(f"hardware: {name} must be an object, not {_short(value)}")
    missing = [key for key in required if key not in value]
    if missing:
        raise ValueError(f"hardware: {name} has no field {missing[0]!r}; needed are {', '.join(required)}")
    unknown = [key for key in value if key not in (*required, *optional)]
    if unknown:
        names = ", ".join((*required, *optional))
        raise ValueError(f"hardware: {name} has the unknown field {_short(unknown[0])}; known are {names}")
    return value


def _kernels(value: Any) -> Mapping[InstructionKind, int]:
    given = _fields("kernels", value, (), tuple(kind.label for kind in InstructionKind))
    counts = {
        kind: _whole(f"kernels.{kind.label}", given[kind.label], 1, _MAX_KERNELS)
        for kind in InstructionKind
        if kind.label in given
    }
    return MappingProxyType({**DEFAULT_KERNELS, **counts})


def _clocks(value: Any, others: SwitchLatency) -> Mapping[int, SwitchLatency]:
    """Read latencies by clock, in the order of their clocks; calls are as those of all ``others``."""
    if not isinstance(value, dict) or len(value) > MAX_CLOCKS:
        raise ValueError(f"hardware: switch_latency_s.clocks must be an object of at most {MAX_CLOCKS} clocks")
    clocks = {}
    for key, times in value.items():
        name = f"switch_latency_s.clocks.{_short(key)}"
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS):
            raise ValueError(f"hardware: {name} must be named by a clock in MHz")
        fields = _fields(name, times, _QUANTILES, ())
        clocks[int(key)] = _latency(name, fields, others.call_us, others.shared_lock)
    return MappingProxyType(dict(sorted(clocks.items())))


def _latency(name: str, times: Mapping[str, Any], call_us: int, shared_lock: bool) -> SwitchLatency:
    p50_us, p99_us = (us_from_s(_number(f"{name}.{key}", times[key], 0.0, _MAX_S)) for key in _QUANTILES)
    return SwitchLatency(p50_us, p99_us, call_us, shared_lock, "given")


def _quantiles_to_json(latency: SwitchLatency) -> dict[str, float]:
    return {"p50": latency.p50_s, "p99": latency.p99_s}


def _check_quantiles(name: str, latency: SwitchLatency) -> None:
    if 0 < latency.p50_us <= latency.p99_us <= MAX_LATENCY_US:
        return
    p50, p99 = latency.p50_s, latency.p99_s
    _number(f"{name}.p50", p50, 0.0, _MAX_S)
    _number(f"{name}.p99", p99, 0.0, _MAX_S)
    if p99 < p50:
        raise ValueError(f"hardware: {name}.p99 must be at least p50, {p50:g}, not {p99:g}")
    if p50 == 0 < p99:
        raise ValueError(f"hardware: {name}.p50 must be greater than zero where p99 is, {p99:g}")


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"hardware: {name} must be a number, not {_short(value)}")
    if not low <= value <= high:  # which NaN is not
        raise ValueError(f"hardware: {name} must be between {low:g} and {high:g}, not {_short(value)}")
    return float(value)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"hardware: {name} must be a whole number between {low} and {high}, not {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
