"""The NVML driver against the stateful shim, through the unmodified nvidia-ml-py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest
from tests.waiting import PATIENCE_S

from perseus_agent import errors
from perseus_agent.devices import nvml
from perseus_agent.devices.base import Controllability, EventReason, open_device_set
from perseus_agent.devices.energy import EnergyMeter
from perseus_core.power_policy import PowerPolicy
from perseus_sim.gpus.nvml_shim import ENV_STATE, Shim

LOCK = "nvmlDeviceSetGpuLockedClocks"
TICK_US = 1_000
CODES = sorted({value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")})


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


def test_a_gpu_returns_its_identity_and_its_clocks(devices: nvml.NvmlDevices) -> None:
    first, second = devices.devices
    assert first.identity.uuid != second.identity.uuid
    assert first.identity.model == "NVIDIA A100-SXM4-40GB"
    assert first.identity.supported_clocks_mhz == tuple(range(210, 1411, 15))
    assert devices.driver_version == "570.86.15"
    assert first.controllability() == (Controllability.YES, "")


def test_locking_pins_the_clock_and_resetting_gives_the_default_back(devices: nvml.NvmlDevices, shim: Shim) -> None:
    gpu = devices.devices[1]
    gpu.lock_clocks(900)
    assert (gpu.sm_clock_mhz(), shim.get(1, "locked_mhz"), shim.get(0, "locked_mhz")) == (900, 900, 0)
    gpu.reset_clocks()
    gpu.reset_clocks()
    assert (gpu.sm_clock_mhz(), shim.get(1, "locked_mhz")) == (1410, 0)


def test_a_clock_off_the_list_is_refused_before_the_driver_rounds_it(devices: nvml.NvmlDevices, shim: Shim) -> None:
    with pytest.raises(errors.InvalidClock, match="901 MHz is not a supported clock"):
        devices.devices[0].lock_clocks(901)
    assert shim.get(0, "lock_calls") == 0


def test_the_counter_of_a_gpu_that_is_led_moves_on_by_what_it_draws_now(shim: Shim) -> None:
    """A trainer tells at the begin of an instruction what it draws, and at its end what it drew."""
    for gpu, power_mw in enumerate((300_000, 84_000)):
        shim.set(gpu, energy_period_us=1_000)
        time.sleep(0.002)  # the counter moves at the next tick
        moments_us, readings_mj = [], []
        for _ in range(3):
            shim.spend(gpu, monotonic_us(), power_mw, 60_000_000)
            for pause_s in (0.0, 0.1):
                time.sleep(pause_s)
                moments_us.append(monotonic_us())
                readings_mj.append(shim.get(gpu, "energy_mj"))
                moments_us.append(monotonic_us())
        spent_mj = readings_mj[-1] - readings_mj[0]
        assert power_mw * (moments_us[-2] - moments_us[1] - 1_000) / 1e6 - 1 <= spent_mj
        assert spent_mj <= power_mw * (moments_us[-1] - moments_us[0] + 1_000) / 1e6 + 1


def test_a_lower_clock_draws_less_power_and_energy_is_its_integral(devices: nvml.NvmlDevices) -> None:
    gpu = devices.devices[0]
    high_mw = gpu.power_mw()
    gpu.lock_clocks(705)
    low_mw = gpu.power_mw()
    assert high_mw == 400_000
    assert low_mw is not None
    assert low_mw < high_mw
    # Each reading lies between two looks at the clock, so what was used between them is bounded on any machine.
    moments_us, readings = [monotonic_us()], []
    for pause_s in (0.1, 0):
        readings += gpu.energy() or ()
        moments_us.append(monotonic_us())
        time.sleep(pause_s)
        moments_us.append(monotonic_us())
    before, after = readings
    assert moments_us[0] <= before.time_us <= moments_us[1]
    used_mj = after.energy_mj - before.energy_mj
    least_us, most_us = moments_us[2] - moments_us[1], moments_us[3] - moments_us[0]
    tick_mj = high_mw * TICK_US / 1e6 + 1  # not published yet, and from before the clock fell
    assert low_mw * least_us / 1e6 - tick_mj <= used_mj <= low_mw * most_us / 1e6 + tick_mj


@pytest.mark.parametrize(
    "code", [value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")] + [77]
)
def test_every_code_leaves_as_one_of_our_errors(devices: nvml.NvmlDevices, shim: Shim, code: int) -> None:
    expected = nvml.ERRORS.get(code, errors.DeviceFailed)
    shim.inject(LOCK, code, gpu=0)
    gpu = devices.devices[0]
    with pytest.raises(expected, match=gpu.identity.uuid):
        gpu.lock_clocks(900)
    assert shim.get(0, "locked_mhz") == 0
    assert devices.devices[1].controllability()[0] is Controllability.YES


def test_every_code_that_nvml_knows_has_a_meaning() -> None:
    assert set(CODES) == set(nvml.ERRORS)


def test_without_permission_the_gpu_is_measured_only(devices: nvml.NvmlDevices, shim: Shim) -> None:
    gpu = devices.devices[0]
    shim.set(0, permitted=0)
    with pytest.raises(errors.NoPermission):
        gpu.reset_clocks()
    assert gpu.controllability()[0] is Controllability.NO_PERMISSION
    assert gpu.energy() is not None


def test_a_process_without_the_capability_says_so_before_it_writes(shim: Shim) -> None:
    opened = nvml.NvmlDevices(privileged=lambda: False, energy_check_s=0)
    assert opened.devices[0].controllability()[0] is Controllability.NO_PERMISSION
    assert shim.get(0, "reset_calls") == 0
    opened.close()


@pytest.mark.parametrize(
    ("effective", "uid_map", "expected"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("0000000000200000", "0 0 4294967295", True),
        ("000001ffffdfffff", "0 0 4294967295", False),  # everything but CAP_SYS_ADMIN
        ("000001ffffffffff", "0 100000 65536", False),  # hostUsers: false
    ],
)
def test_the_capability_counts_in_the_first_user_namespace(
    tmp_path: Path, effective: str, uid_map: str, expected: bool
) -> None:
    (tmp_path / "status").write_text(f"Name:\tagent\nCapPrm:\t0\nCapEff:\t{effective}\n")
    (tmp_path / "uid_map").write_text(f"         {uid_map}\n")
    assert nvml.may_write(tmp_path / "status", tmp_path / "uid_map") is expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [({"mig": 1}, Controllability.MIG), ({"mps": 3}, Controllability.SHARED), ({"lost": 1}, Controllability.LOST)],
)
def test_a_gpu_that_is_not_ours_alone_or_not_there_says_why(
    devices: nvml.NvmlDevices, shim: Shim, state: dict[str, int], expected: Controllability
) -> None:
    shim.set(1, **state)
    verdict, message = devices.devices[1].controllability()
    assert verdict is expected
    assert message
    assert devices.devices[0].controllability()[0] is Controllability.YES


def test_a_gpu_without_mig_has_it_off(shim: Shim) -> None:
    shim.inject("nvmlDeviceGetMigMode", pynvml.NVML_ERROR_NOT_SUPPORTED)
    opened = nvml.NvmlDevices(privileged=lambda: True, energy_check_s=0)
    assert opened.devices[0].controllability()[0] is Controllability.YES
    opened.close()


def test_a_lost_gpu_raises_and_leaves_its_neighbour_alone(devices: nvml.NvmlDevices, shim: Shim) -> None:
    shim.set(0, lost=1)
    with pytest.raises(errors.DeviceLost):
        devices.devices[0].lock_clocks(900)
    devices.devices[1].lock_clocks(900)
    assert shim.get(1, "locked_mhz") == 900


def test_a_gpu_that_is_lost_at_start_is_left_out(shim: Shim) -> None:
    shim.set(0, lost=1)
    opened = nvml.NvmlDevices(privileged=lambda: True, energy_check_s=0)
    assert [device.identity.minor_number for device in opened.devices] == [1]
    opened.close()


def test_a_write_follows_the_uuid_when_handles_come_to_mean_other_gpus(devices: nvml.NvmlDevices, shim: Shim) -> None:
    first, second = devices.devices
    first.sm_clock_mhz(), second.sm_clock_mhz()  # both hold handles from before
    shim.permute([1, 0])
    first.lock_clocks(600)
    second.lock_clocks(1200)
    assert (shim.get(0, "locked_mhz"), shim.get(1, "locked_mhz")) == (600, 1200)


def test_a_gpu_that_was_replaced_is_never_written(devices: nvml.NvmlDevices, shim: Shim) -> None:
    gpu = devices.devices[0]
    gpu.sm_clock_mhz()
    shim.set_text(0, uuid="GPU-11111111-0000-4000-8000-000000000000")
    with pytest.raises(errors.DeviceLost, match="does not find"):
        gpu.lock_clocks(900)
    assert shim.get(0, "lock_calls") == 0


def test_a_driver_reload_is_survived_and_energy_never_falls(devices: nvml.NvmlDevices, shim: Shim) -> None:
    gpu, meter = devices.devices[0], EnergyMeter()
    gpu.lock_clocks(900)
    totals_mj = []
    for reload in (False, True, False):
        if reload:
            shim.reload()
            shim.permute([1, 0])
        time.sleep(0.01)
        for reading in gpu.energy() or ():
            meter.add(reading)
            totals_mj.append(meter.total_mj)
    assert len(totals_mj) == 3
    assert 0 < totals_mj[0] <= totals_mj[1] < totals_mj[2]
    gpu.lock_clocks(600)
    assert (shim.get(0, "locked_mhz"), shim.get(1, "locked_mhz")) == (600, 0)


def test_event_reasons_keep_what_means_something_and_fall_back_on_old_drivers(
    devices: nvml.NvmlDevices, shim: Shim
) -> None:
    shim.set(0, reasons=0x40 | 0x04 | 0x100)
    expected = EventReason.HARDWARE_THERMAL | EventReason.POWER_CAP
    assert devices.devices[0].event_reasons() == expected
    shim.inject("nvmlDeviceGetCurrentClocksEventReasons", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert devices.devices[0].event_reasons() == expected


def test_a_gpu_is_busy_while_a_kernel_runs_and_an_old_one_does_not_say(devices: nvml.NvmlDevices, shim: Shim) -> None:
    gpu, other = devices.devices
    shim.set(0, busy_permille=1)
    shim.set(1, busy_permille=0)
    assert (gpu.busy(), other.busy()) == (True, False)
    shim.inject("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_NOT_SUPPORTED, gpu=1)
    assert (gpu.busy(), other.busy()) == (True, None)


def test_power_falls_back_where_there_is_no_instantaneous_field(devices: nvml.NvmlDevices, shim: Shim) -> None:
    shim.inject("nvmlDeviceGetFieldValues", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert devices.devices[0].power_mw() == 400_000
    shim.inject("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert devices.devices[0].power_mw() is None


def test_a_gpu_returns_the_number_by_which_dra_names_it(devices: nvml.NvmlDevices) -> None:
    assert [device.identity.minor_number for device in devices.devices] == [0, 1]


def test_a_board_tells_the_highest_limit_that_it_can_have_or_nothing(devices: nvml.NvmlDevices, shim: Shim) -> None:
    assert [device.identity.max_power_mw for device in devices.devices] == [400_000, 400_000]
    shim.inject("nvmlDeviceGetPowerManagementLimitConstraints", pynvml.NVML_ERROR_NOT_SUPPORTED)
    opened = open_device_set("nvml")
    assert [device.identity.max_power_mw for device in opened.devices] == [None, None]
    opened.close()


def test_power_profiles_and_smoothing_are_read_by_name_where_the_driver_has_them(
    devices: nvml.NvmlDevices, shim: Shim
) -> None:
    device, other = devices.devices
    assert device.power_policy() == PowerPolicy()
    shim.set(
        0, requested_profiles=1 << 7 | 1 << 1, enforced_profiles=1 << 1 | 1 << 31, floor_w=300, secondary_floor_w=90
    )
    assert device.power_policy() == PowerPolicy(("LLM_TRAINING", "MAX_Q"), ("MAX_Q", "PROFILE_31"), 300, 90)
    assert other.power_policy() == PowerPolicy()
    shim.inject("nvmlDeviceWorkloadPowerProfileGetCurrentProfiles", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert device.power_policy() == PowerPolicy(floor_w=300, secondary_floor_w=90)
    shim.inject("nvmlDeviceGetFieldValues", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert device.power_policy() is None


def test_the_reasons_of_newer_drivers_are_read(devices: nvml.NvmlDevices, shim: Shim) -> None:
    shim.set(0, busy_permille=1000, reasons=0x200 | 0x400 | 0x800)
    assert devices.devices[0].event_reasons() == EventReason.BOARD_LIMIT | EventReason.RELIABILITY


def test_no_driver_is_an_error_that_says_to_wait(nvml_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_STATE, raising=False)
    with pytest.raises(errors.DriverUnavailable, match="nvmlInit"):
        open_device_set("nvml")


def test_a_replaced_driver_is_an_error_that_says_to_leave(shim: Shim) -> None:
    shim.inject("nvmlInitWithFlags", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with pytest.raises(errors.DriverMismatch):
        open_device_set("nvml")


def test_the_nvml_driver_takes_no_argument() -> None:
    with pytest.raises(errors.SettingsError, match="nvml takes no argument"):
        nvml.open_devices("0")


def test_another_process_sees_and_makes_the_same_locks(
    devices: nvml.NvmlDevices, shim: Shim, nvml_library: Path
) -> None:
    """A foreign hand through pynvml itself, found by LD_LIBRARY_PATH as in a container."""
    script = (
        "import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0);"
        "print(pynvml.nvmlDeviceGetClockInfo(h, 1)); pynvml.nvmlDeviceSetGpuLockedClocks(h, 600, 600)"
    )
    devices.devices[0].lock_clocks(900)
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_LIBRARY_PATH": str(nvml_library.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert result.stdout.strip() == "900"
    assert devices.devices[0].sm_clock_mhz() == 600
