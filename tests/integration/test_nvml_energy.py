"""Energy by the NVML driver against the stateful shim: which counter is trusted, and samples of power."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import pairwise

import pynvml
import pytest
from tests.waiting import eventually

from perseus_agent.devices import driver_energy, nvml
from perseus_agent.devices.base import Controllability
from perseus_agent.devices.energy import EnergyMeter
from perseus_sim.gpus.nvml_shim import Shim

LOCK = "nvmlDeviceSetGpuLockedClocks"
TICK_US = 1_000
CODES = sorted({value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")})


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


@pytest.mark.parametrize(("state", "trusted"), [({}, True), ({"energy_frozen": 1}, False), ({"has_energy": 0}, False)])
def test_the_energy_counter_is_trusted_only_if_it_moves(shim: Shim, state: dict[str, int], trusted: bool) -> None:
    shim.set(0, busy_permille=1000, energy_period_us=1000, has_samples=0, **state)
    opened = nvml.NvmlDevices(privileged=lambda: True, energy_check_s=0.01)
    assert (opened.devices[0].energy() is not None) is trusted
    opened.close()


def test_an_energy_counter_faster_than_any_gpu_is_not_trusted(shim: Shim) -> None:
    shim.set(0, busy_permille=1000, energy_period_us=1000, has_samples=0, max_mw=2_000_000_000)
    opened = nvml.NvmlDevices(privileged=lambda: True, energy_check_s=0.01)
    assert opened.devices[0].energy() is None
    opened.close()


@pytest.fixture
def sampled(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> Iterator[nvml.NvmlDevice]:
    """A GPU under load with samples of power, which are asked for at every call."""
    monkeypatch.setattr(driver_energy, "SAMPLES_EVERY_US", 0)
    shim.set(0, busy_permille=1000, energy_period_us=TICK_US)
    opened = nvml.NvmlDevices(privileged=lambda: True)
    yield opened.devices[0]
    opened.close()


def counter_at(shim: Shim, time_us: int) -> int:
    """Wait for a moment; what the counter says then."""
    time.sleep(max(0, time_us - monotonic_us()) / 1e6)
    return shim.get(0, "energy_mj")


def test_samples_of_power_agree_with_the_counter(sampled: nvml.NvmlDevice, shim: Shim) -> None:
    """A load that falls by half between two samples is seen there, and the counter is not read for it."""
    meter = EnergyMeter()
    shim.inject("nvmlDeviceGetTotalEnergyConsumption", pynvml.NVML_ERROR_UNKNOWN, times=-1)
    eventually(lambda: [meter.add(reading) for reading in sampled.energy() or ()])  # told from here on
    begin_us = monotonic_us()
    begin_mj = counter_at(shim, begin_us + 40_000)
    sampled.lock_clocks(705)
    middle_us, middle_mj = monotonic_us(), shim.get(0, "energy_mj")
    end_mj = counter_at(shim, middle_us + 100_000)
    end_us = monotonic_us()
    eventually(lambda: [meter.add(reading) for reading in sampled.energy() or ()] and meter.covers(end_us))
    levels = meter.at([begin_us + 40_000, middle_us, end_us])
    assert levels is not None
    slack_mj = 400 * 25  # 25 ms at full power: within a sample, and where the test stood still
    assert levels[1] - levels[0] == pytest.approx(middle_mj - begin_mj, abs=slack_mj)
    assert levels[2] - levels[1] == pytest.approx(end_mj - middle_mj, abs=slack_mj)
    assert (levels[2] - levels[1]) / (end_us - middle_us) < 0.8 * 400 / 1000


def test_no_sample_counts_twice_and_missed_ones_are_not_estimated(
    sampled: nvml.NvmlDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [reading for _ in range(20) if not time.sleep(0.01) for reading in sampled.energy() or ()]
    assert [later.time_us - earlier.time_us for earlier, later in pairwise(told)] == pytest.approx(
        [20_000] * (len(told) - 1), abs=2_000
    )
    assert sampled.energy() is not None
    samples = sampled.power_samples()
    shifted = [(time_us + 3_600_000_000, power) for time_us, power in samples]
    monkeypatch.setattr(sampled, "power_samples", lambda: shifted)
    first = (sampled.energy() or [None])[0]
    assert first is not None
    assert first.energy_mj == 0


def test_samples_that_say_otherwise_than_the_counter_are_no_longer_used(
    sampled: nvml.NvmlDevice, shim: Shim, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_energy, "COMPARE_EVERY_US", 500_000)  # many samples, of which one may be missing
    honest, counter_mj = sampled.power_samples, sampled.raw_energy_mj
    monkeypatch.setattr(sampled, "raw_energy_mj", lambda: 10**9 + counter_mj())  # a driver loaded long ago
    meter = EnergyMeter()

    def read(times: int) -> None:
        for _ in range(times):
            time.sleep(0.01)
            for reading in sampled.energy() or ():
                meter.add(reading)

    read(120)
    assert sampled._energy.by_samples
    monkeypatch.setattr(sampled, "power_samples", lambda: [(at, power // 2) for at, power in honest()])
    eventually(lambda: read(1) or not sampled._energy.by_samples)
    assert re.search(r"samples of power no longer used: -[1-5]\d% of the counter", caplog.text)
    told_mj, counted_mj = meter.total_mj, shim.get(0, "energy_mj")
    read(10)
    rise_mj, counted_mj = meter.total_mj - told_mj, shim.get(0, "energy_mj") - counted_mj
    assert 0.5 * counted_mj < rise_mj <= counted_mj + 400 * 20  # goes on from here: no jump to the counter's level


def test_a_driver_that_keeps_samples_no_more_is_asked_for_its_counter(
    sampled: nvml.NvmlDevice, shim: Shim, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    eventually(sampled.energy)
    monkeypatch.setattr(driver_energy, "COMPARE_EVERY_US", 200_000)
    shim.set(0, has_samples=0)
    assert list(sampled.energy() or ()) == []
    assert sampled._energy.by_samples, "they may come again"
    begun_mj = shim.get(0, "energy_mj")
    readings = eventually(sampled.energy)
    assert "samples of power no longer used: none for 0.2 s" in caplog.text
    assert 0 <= readings[-1].energy_mj <= shim.get(0, "energy_mj") - begun_mj + 400 * 20, "no jump to its level"


def test_a_gpu_without_samples_of_power_has_its_counter(shim: Shim) -> None:
    shim.set(0, busy_permille=1000, energy_period_us=TICK_US)
    shim.inject("nvmlDeviceGetSamples", pynvml.NVML_ERROR_NOT_SUPPORTED, times=-1)
    opened = nvml.NvmlDevices(privileged=lambda: True, energy_check_s=0.05)
    [reading] = opened.devices[0].energy() or ()
    assert abs(reading.energy_mj - shim.get(0, "energy_mj")) < 400 * 1_000
    opened.close()


def test_a_gpu_that_cannot_be_measured_leaves_the_others_theirs(shim: Shim, caplog: pytest.LogCaptureFixture) -> None:
    """Source: NVIDIA/dcgm-exporter issue 46: one of eight GPUs answers its identity, and ERR for what is measured."""
    for gpu in (0, 1):
        shim.set(gpu, busy_permille=1000, energy_period_us=TICK_US)
    for function in ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetSamples"):
        shim.inject(function, pynvml.NVML_ERROR_UNKNOWN, gpu=1)
    opened = nvml.NvmlDevices(privileged=lambda: True, energy_check_s=0.05)
    assert [device.energy() is not None for device in opened.devices] == [True, False]
    assert [device.controllability()[0] for device in opened.devices] == [Controllability.YES] * 2
    assert caplog.text.count("; its energy counter is not used") == 1
    opened.close()
