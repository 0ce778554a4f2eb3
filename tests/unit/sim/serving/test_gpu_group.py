"""The GPUs of a simulated engine: which clocks are in effect on them, and what they draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from perseus_sim.gpus.shared_gpu import GpuSpec, SharedGpu
from perseus_sim.serving.gpu_group import GpuGroup

CLOCKS = (900, 1200, 1500)


def gpus(folder: Path, count: int) -> list[SharedGpu]:
    return [
        SharedGpu.create(folder, GpuSpec(f"GPU-{number}", "model", CLOCKS, 100_000, switch_latency_us=30_000))
        for number in range(count)
    ]


def test_the_slowest_clock_in_effect_counts_and_so_does_the_fastest(tmp_path: Path) -> None:
    first, second = gpus(tmp_path, 2)
    group = GpuGroup([first, second], now_us=10**15)
    assert group.clocks_mhz(10**15) == (1500, 1500)
    first.request(900)
    now_us = first.requested_ns() // 1000
    assert group.clocks_mhz(now_us) == (1500, 1500), "the change takes 30 ms"
    assert group.clocks_mhz(now_us + 30_000) == (900, 1500)
    second.request(1200)
    asked_us = second.requested_ns() // 1000
    assert group.clocks_mhz(asked_us + 30_000) == (900, 1200)


def test_joules_are_booked_on_all_gpus_alike_and_none_is_lost(tmp_path: Path) -> None:
    both = gpus(tmp_path, 2)
    begin_us = 5_000_000
    group = GpuGroup(both, begin_us)
    before = [gpu.physics().energy_uj for gpu in both]
    joules = 0.0
    for step in range(1, 1001):
        joules += 0.35 * (step % 3)
        group.drew(joules, begin_us + 700 * step)  # more often than counters move
    group.drew(joules, begin_us + 2_000_000)
    drawn = [(gpu.physics().energy_uj - begun) / 1e6 for gpu, begun in zip(both, before, strict=True)]
    assert drawn == pytest.approx([joules / 2, joules / 2], rel=1e-4)
    assert all(gpu.physics().now_us == begin_us + 2_000_000 for gpu in both)
