"""When changes of a clock take effect on the shim's GPUs, through the unmodified nvidia-ml-py."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.waiting import eventually

from perseus_agent.devices import nvml
from perseus_agent.devices.base import EventReason
from perseus_sim.gpus.nvml_shim import Shim


def test_a_slow_transition_shows_the_old_clock_first(devices: nvml.NvmlDevices, shim: Shim) -> None:
    shim.set(0, transition_us=3_600_000_000)
    gpu = devices.devices[0]
    gpu.lock_clocks(600)
    assert gpu.sm_clock_mhz() == 1410
    shim.set(0, transition_us=20_000)
    gpu.lock_clocks(750)
    eventually(lambda: gpu.sm_clock_mhz() == 750)


def test_changes_take_what_was_drawn_and_calls_hold_a_lock_for_the_node(devices: nvml.NvmlDevices, shim: Shim) -> None:
    """Of four hundred drawn latencies the median and the tail are those that were set."""
    shim.set(0, transition_us=20_000, transition_p99_us=80_000, outlier_permille=1_000)
    first, second = devices.devices[:2]
    settles_us = []
    for step in range(400):
        first.lock_clocks(600 + 15 * (step % 40))
        settles_us.append(shim.get(0, "settle_us"))
    ordered = sorted(settles_us)
    assert ordered[200] == pytest.approx(20_000, rel=0.2)
    assert ordered[392] == pytest.approx(80_000, rel=0.5)
    for gpu in (0, 1):
        shim.set(gpu, transition_us=100_000, transition_p99_us=0, call_us=30_000, shared_lock=1)
    began_ns = time.monotonic_ns()
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda device: device.lock_clocks(900), (first, second)))
    assert time.monotonic_ns() - began_ns >= 60_000_000  # one waits for the other
    effects_us = sorted(shim.get(gpu, "last_write_ns") // 1_000 + shim.get(gpu, "settle_us") for gpu in (0, 1))
    assert effects_us[1] - effects_us[0] >= 29_999


def test_an_older_change_that_would_come_later_is_void(devices: nvml.NvmlDevices, shim: Shim) -> None:
    gpu = devices.devices[0]
    shim.set(0, transition_us=3_600_000_000)
    gpu.lock_clocks(600)
    shim.set(0, transition_us=50_000)
    gpu.lock_clocks(750)
    shim.set(0, transition_us=100_000)
    gpu.lock_clocks(900)  # which leaves the one before it in effect until then
    seen = []
    eventually(lambda: seen.append(gpu.sm_clock_mhz()) or seen[-1] == 900)
    assert 600 not in seen
    assert set(seen) <= {1410, 750, 900}


def test_a_trainer_that_draws_all_it_may_is_held_at_the_plateau(devices: nvml.NvmlDevices, shim: Shim) -> None:
    gpu = devices.devices[0]
    shim.set(0, plateau_mhz=1200)
    shim.spend(0, 0, 400_000, 60_000_000)
    gpu.lock_clocks(1410)
    assert (gpu.sm_clock_mhz(), gpu.event_reasons()) == (1200, EventReason.POWER_CAP)
    gpu.lock_clocks(1200)
    assert (gpu.sm_clock_mhz(), gpu.event_reasons()) == (1200, EventReason.NONE)
    gpu.lock_clocks(1410)
    shim.spend(0, 0, 300_000, 60_000_000)
    assert gpu.event_reasons() is EventReason.NONE
