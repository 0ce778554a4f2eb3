"""The simulated GPU: what the agent's device sees, and the physics that the trainer's engine books on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_agent.devices.base import Controllability, Device, EventReason, open_device_set
from perseus_agent.errors import DeviceBusy, DeviceLost, DriverUnavailable, InvalidClock, NoPermission
from perseus_core.units import mw_from_w
from perseus_sim.gpus import devices as devices_module
from perseus_sim.gpus import shared_gpu as shared_gpu_module
from perseus_sim.gpus.devices import Fault, SimulatedDevice, open_devices
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.shared_gpu import HISTORY, GpuSpec, Physics, SharedGpu
from perseus_sim.training import engine as engine_module
from perseus_sim.training.engine import Engine, Table

CLOCKS = (900, 1000, 1100, 1200)
TABLE = Table(list(CLOCKS), [1333.0, 1200.0, 1100.0, 1000.0], [200_000.0, 240_000.0, 290_000.0, 350_000.0])
BLOCKING_MW = 80_000


def make(folder: Path, name: str = "GPU-0", **changes: object) -> SharedGpu:
    spec: dict[str, object] = {
        "uuid": name,
        "model": "test",
        "supported_clocks_mhz": CLOCKS,
        "blocking_power_mw": BLOCKING_MW,
    }
    return SharedGpu.create(folder, GpuSpec(**{**spec, **changes}))  # type: ignore[arg-type]


def device_of(gpu: SharedGpu) -> Device:
    (device,) = open_devices(str(gpu.path.parent)).devices
    return device


# --------------------------------------------------------------------------------------- the device


def test_two_views_see_one_gpu(tmp_path: Path) -> None:
    gpu = make(tmp_path)
    (device,) = open_device_set(f"perseus_sim.gpus.devices:open_devices:{tmp_path}").devices
    assert device.identity.uuid == "GPU-0"
    assert device.identity.supported_clocks_mhz == CLOCKS
    assert device.controllability() == (Controllability.YES, "")
    assert device.sm_clock_mhz() == 1200
    device.lock_clocks(1000)
    assert gpu.locked_mhz == device.sm_clock_mhz() == 1000
    gpu.advance(Physics(5_000, 7_999, 100_000))
    assert device.energy() == [(5_000, 7)]
    assert device.now_us() == 5_000
    assert device.power_mw() == 100_000
    device.reset_clocks()
    device.reset_clocks()
    assert gpu.locked_mhz == 0
    assert [change.mhz for change in gpu.history()] == [1000, 0, 0]


def test_an_unsupported_clock_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    device = device_of(gpu := make(tmp_path))
    with pytest.raises(InvalidClock, match="1001 MHz is not a supported clock"):
        device.lock_clocks(1001)
    assert gpu.history() == []


def test_a_thermal_cap_is_seen_with_its_reason_only_where_it_binds(tmp_path: Path) -> None:
    device = device_of(gpu := make(tmp_path))
    gpu.cap(1100, EventReason.HARDWARE_THERMAL.value)
    assert device.sm_clock_mhz() == 1100
    assert device.event_reasons() is EventReason.HARDWARE_THERMAL
    device.lock_clocks(1000)
    assert device.sm_clock_mhz() == 1000
    assert device.event_reasons() is EventReason.NONE
    gpu.cap(0)
    device.reset_clocks()
    assert device.sm_clock_mhz() == 1200


def test_faults_come_out_as_the_drivers_errors(tmp_path: Path) -> None:
    device = device_of(gpu := make(tmp_path))
    gpu.fail(Fault.LOST)
    with pytest.raises(DeviceLost):
        device.energy()
    gpu.fail(Fault.BUSY)
    with pytest.raises(DeviceBusy):
        device.lock_clocks(1000)
    gpu.fail(Fault.NO_PERMISSION)
    assert device.controllability()[0] is Controllability.NO_PERMISSION
    assert device.sm_clock_mhz() == 1200
    with pytest.raises(NoPermission):
        device.reset_clocks()
    gpu.fail(Fault.NONE)
    device.lock_clocks(1000)
    assert [change.mhz for change in gpu.history()] == [1000]


def test_a_partitioned_gpu_says_so(tmp_path: Path) -> None:
    verdict, why = device_of(make(tmp_path, controllability="MIG")).controllability()
    assert verdict is Controllability.MIG
    assert why


def test_a_folder_without_gpus_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSEUS_SIM_GPUS", raising=False)
    with pytest.raises(DriverUnavailable, match="PERSEUS_SIM_GPUS"):
        open_devices()
    with pytest.raises(DriverUnavailable, match="holds no simulated GPU"):
        open_devices(str(tmp_path))
    (tmp_path / "x.gpu").write_bytes(b"nonsense")
    with pytest.raises(DriverUnavailable):
        open_devices(str(tmp_path))


def test_the_history_keeps_the_latest_changes(tmp_path: Path) -> None:
    gpu = make(tmp_path)
    for number in range(HISTORY + 10):
        gpu.request(CLOCKS[number % 2])
    assert len(gpu.history()) == HISTORY
    assert gpu.requested().number == HISTORY + 10
    assert gpu.history()[-1].mhz == gpu.locked_mhz
    before = gpu.requested().number
    assert gpu.history(before) == []
    for mhz in CLOCKS[:2]:
        gpu.request(mhz)
    assert [change.mhz for change in gpu.history(before)] == list(CLOCKS[:2])
    assert len(gpu.history(1)) == HISTORY, "what is forgotten cannot be left out"


# -------------------------------------------------------------------------------------- the physics


def engine_on(gpu: SharedGpu, noise: float = 0.0) -> Engine:
    return Engine(gpu, speed=None, noise=noise, seed=1)


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[str, int]]:
    step = st.one_of(
        st.tuples(st.just("work"), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 5_000)),
        st.tuples(st.just("lock"), st.sampled_from((0, *CLOCKS))),
        st.tuples(st.just("cap"), st.sampled_from((0, 950, 1100))),
    )
    return draw(st.lists(step, min_size=1, max_size=30))


@settings(max_examples=60)
@given(lives(), st.sampled_from((0, 300, 5_000)), st.sampled_from((0.0, 0.05)))
def test_energy_is_power_times_time_and_never_decreases(
    tmp_path_factory: pytest.TempPathFactory, life: list[tuple[str, int]], latency_us: int, noise: float
) -> None:
    gpu = make(tmp_path_factory.mktemp("gpu"), switch_latency_us=latency_us)
    published: list[Physics] = []
    advance = gpu.advance

    def record(physics: Physics) -> None:
        published.append(physics)
        advance(physics)

    gpu.advance = record  # type: ignore[method-assign]
    engine = engine_on(gpu, noise)
    before = Physics(0, 0, 0)
    for what, value in life:
        match what:
            case "work":
                engine.work(TABLE)
            case "wait":
                engine.wait_until(engine.now_us + value)
            case "lock":
                gpu.request(value)
            case "cap":
                gpu.cap(value)
    for moment in published:
        assert moment.now_us >= before.now_us
        assert moment.energy_uj >= before.energy_uj
        booked_uj = moment.energy_uj - before.energy_uj
        # Both ends are cut to whole microseconds and microjoules; one microsecond is at most 350 µJ here.
        assert booked_uj == pytest.approx(moment.power_mw * (moment.now_us - before.now_us) / 1000, abs=360)
        before = moment
    assert gpu.physics().energy_uj == engine.energy_uj


@given(st.sampled_from(CLOCKS), st.sampled_from(CLOCKS))
def test_a_faster_clock_takes_no_longer(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert TABLE.at(low)[0] >= TABLE.at(high)[0]


def test_between_and_beyond_the_measured_clocks() -> None:
    assert TABLE.at(1050) == pytest.approx((1150.0, 265_000.0))
    assert TABLE.at(1300) == (1000.0, 350_000.0)
    assert TABLE.at(450) == pytest.approx((2666.0, 200_000.0))
    constant = Table([0], [500.0], [90_000.0])
    assert constant.at(900) == (500.0, 90_000.0)


def test_a_switch_takes_effect_after_the_latency_inside_an_instruction(tmp_path: Path) -> None:
    gpu = make(tmp_path, switch_latency_us=500)
    engine = engine_on(gpu)
    gpu.request(1000)
    engine.work(TABLE)
    # Half of it at 1200 MHz (500 of 1000 µs), the other half at 1000 MHz (half of 1200 µs).
    assert engine.now_us == pytest.approx(500 + 600)
    assert engine.energy_uj == pytest.approx(500 * 350 + 600 * 240, abs=2)


def test_a_switch_is_hidden_by_waiting_longer_than_its_latency(tmp_path: Path) -> None:
    gpu = make(tmp_path, switch_latency_us=500)
    engine = engine_on(gpu)
    gpu.request(1000)
    engine.wait_until(600.0)
    engine.work(TABLE)
    assert engine.now_us == pytest.approx(600 + 1200)


def test_only_the_latest_of_several_requests_counts(tmp_path: Path) -> None:
    gpu = make(tmp_path)
    engine = engine_on(gpu)
    gpu.request(900)
    gpu.request(1000)
    engine.work(TABLE)
    assert engine.now_us == pytest.approx(1200)


def test_time_stands_still_for_the_agent_but_not_for_a_dead_one(tmp_path: Path) -> None:
    gpu = make(tmp_path)
    engine = engine_on(gpu)
    for _ in range(20):  # nobody answers: bounded each time, and given up after a few
        engine.await_agent()
    assert engine.now_us == 0
    gpu.request(1100)
    engine.await_agent()
    engine.work(TABLE)
    assert engine.now_us == pytest.approx(1100)


def test_a_new_process_continues_the_gpus_time_and_energy(tmp_path: Path) -> None:
    gpu = make(tmp_path)
    engine_on(gpu).work(TABLE)
    first = gpu.physics()
    second = engine_on(SharedGpu(gpu.path))
    second.work(TABLE)
    assert second.now_us == pytest.approx(2 * first.now_us)
    assert second.energy_uj == pytest.approx(2 * first.energy_uj, abs=2)


class Time:
    """The machine's time, which passes where somebody waits; stands for the module."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(1e9 * seconds)


def test_a_simulated_driver_takes_its_time_and_shows_the_clock_in_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change is in effect later than its call returns, and until then the old clock is read."""
    time = Time()
    monkeypatch.setattr(devices_module, "time", time)
    monkeypatch.setattr(shared_gpu_module, "time", time)
    model = MODELS["h100"]
    uuid = "GPU-0"
    spec = GpuSpec(uuid, model.name, model.clocks_mhz, 139_000, driver="h100")
    device = SimulatedDevice(SharedGpu.create(tmp_path, spec))
    default_mhz = device.sm_clock_mhz()
    before_ns = time.monotonic_ns()
    device.lock_clocks(1005)
    called_us = (time.monotonic_ns() - before_ns) / 1000
    assert called_us > 0
    settle_us = device.gpu.settle_us()
    assert settle_us > 0
    assert device.gpu.requested_ns() == time.now_ns
    time.now_ns += 1_000 * settle_us - 1
    assert device.sm_clock_mhz() == default_mhz
    time.now_ns += 1
    assert device.sm_clock_mhz() == 1005
    device.gpu.advance(Physics(1, 0, mw_from_w(model.power_limit_w)))
    device.reset_clocks()
    time.now_ns += 1_000 * device.gpu.settle_us()
    assert EventReason.POWER_CAP in device.event_reasons()
    assert 1005 < device.sm_clock_mhz() < model.max_clock_mhz
    device.close()


def test_the_driver_of_a_faster_gpu_is_faster(tmp_path: Path) -> None:
    """By the same draws: the same GPU, in less time."""
    settles_us = []
    for speed in (1, 4):
        spec = GpuSpec("GPU-0", "made up", MODELS["h100"].clocks_mhz, 139_000, driver="h100", speed=speed)
        device = SimulatedDevice(SharedGpu.create(tmp_path / str(speed), spec))
        device.lock_clocks(1005)
        settles_us.append(device.gpu.settle_us())
        device.close()
    assert settles_us[0] == pytest.approx(4 * settles_us[1], abs=4)


def test_a_later_request_does_not_void_a_change_that_is_under_way(tmp_path: Path) -> None:
    """Of two requests the first is in effect until the second is, unless the second is there earlier."""
    for settles_us, clocks in (((100, 300), [1000, 1100]), ((300, 100), [1100])):
        gpu = make(tmp_path / str(settles_us[0]))
        engine = Engine(gpu, speed=None, noise=0.0, seed=1)
        for settle_us, mhz in zip(settles_us, (1000, 1100), strict=True):
            gpu.request(mhz, settle_us)
            engine.block()
            engine.wait_until(engine.now_us)
        assert [mhz for _, mhz in engine._clock.coming] == clocks


def test_a_request_that_comes_while_the_gpu_waits_counts_from_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, now_ns = make(tmp_path), 0

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        for _ in range(2):
            now_ns += round(seconds * 1e9 / 2)
            if gpu.requested().mhz != 1000:
                gpu.request(1000, 2_000)

    clock = SimpleNamespace(monotonic_ns=lambda: now_ns, sleep=sleep)
    for module in (engine_module, shared_gpu_module):
        monkeypatch.setattr(module, "time", clock)
    engine = Engine(gpu, speed=1.0, noise=0.0, seed=1)
    engine.wait_until(10_000.0)
    engine.wait_until(engine.now_us)
    assert engine._clock.coming == [(7_000.0, 1000)]


@pytest.mark.timeout(20)
def test_work_ends_however_long_the_machine_has_been_up(tmp_path: Path) -> None:
    """After days, a float of microseconds cannot express what is left of an instruction when its end is rounded."""
    gpu = make(tmp_path)
    gpu.advance(Physics(10**12, 0, 0))
    engine = Engine(gpu, speed=None, noise=0.0, seed=1)
    lengths_us = [1000 + k / 7 for k in range(20)]
    for length_us in lengths_us:
        engine.work(Table([gpu.spec.default_clock_mhz], [length_us], [300_000.0]))
    assert engine.now_us == pytest.approx(10**12 + sum(lengths_us), abs=1)
