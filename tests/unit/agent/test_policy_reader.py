"""What a driver holds a GPU to: read now and then, kept where the driver does not answer."""

from __future__ import annotations

from pathlib import Path

from perseus_agent.clocks.policy_reader import READ_S, PolicyReader
from perseus_agent.devices.base import TellsPowerPolicy
from perseus_core.power_policy import PowerPolicy
from perseus_sim.gpus.devices import Fault, SimulatedDevice
from perseus_sim.gpus.shared_gpu import GpuSpec, SharedGpu


def test_a_change_is_seen_and_a_silent_driver_forgets_nothing(tmp_path: Path) -> None:
    now_s = 1000.0
    gpu = SharedGpu.create(tmp_path, GpuSpec("GPU-0", "H100", (900, 1200), 60_000))
    device = SimulatedDevice(gpu)
    assert isinstance(device, TellsPowerPolicy)
    reader = PolicyReader(device, lambda: now_s)
    reader.read()
    assert reader.latest == PowerPolicy()
    gpu.enforce(1 << 7, 1 << 1, floor_w=300, secondary_floor_w=90)
    reader.read()
    assert reader.latest == PowerPolicy(), "not at every turn"
    now_s += READ_S
    reader.read()
    expected = PowerPolicy(("LLM_TRAINING",), ("MAX_Q",), 300, 90)
    assert reader.latest == expected
    assert str(expected) == "power profiles requested: LLM_TRAINING, enforced: MAX_Q, power floors of 300 and 90 W"
    gpu.fail(Fault.BUSY)
    now_s += READ_S
    reader.read()
    assert reader.latest == expected


def test_a_device_without_it_is_never_asked() -> None:
    reader = PolicyReader(object())  # type: ignore[arg-type]
    reader.read()
    assert reader.latest is None
