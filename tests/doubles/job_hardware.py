"""Hardware of a job in few words: the figures that a test is about, and clocks by their median and 99th percentile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perseus_core.latency import SwitchLatency
from perseus_core.marks import MarkSource
from perseus_operator.families.training.features.hardware.hardware import JobHardware


def latency(p50_us: int, p99_us: int) -> SwitchLatency:
    """A switch latency of GPUs that do not share a lock."""
    return SwitchLatency(p50_us, p99_us, 4_500, False, "measured")


def job_hardware(
    model: str,
    p50_us: int,
    p99_us: int,
    call_us: int = 4_500,
    *,
    marks: MarkSource | None = None,
    gpus_per_lock: int = 1,
    clocks: Mapping[int, tuple[int, int]] | None = None,
    **fields: Any,
) -> JobHardware:
    """What a job's plans are rehearsed under; ``clocks``: median and 99th percentile by clock."""
    overall = SwitchLatency(p50_us, p99_us, call_us, gpus_per_lock > 1, "measured")
    by_clock = {mhz: latency(*times) for mhz, times in (clocks or {}).items()}
    hardware = JobHardware(model, overall, gpus_per_lock=gpus_per_lock, **fields)
    return hardware.marked_by(marks).with_latency(overall, by_clock)
