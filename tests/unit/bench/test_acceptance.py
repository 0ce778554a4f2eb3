"""The acceptance run on GPUs in virtual time: what it measures is what is there, and clocks are always returned."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.doubles.virtual_gpu import ITEM_S, VirtualGpu, VirtualTime

from perseus_agent.clocks.journal import Journal
from perseus_agent.errors import DeviceBusy, DeviceError, DeviceLost
from perseus_bench import command, kit
from perseus_bench.bench import Bench
from perseus_bench.kit import accept
from perseus_bench.markdown import render
from perseus_bench.options import parse_options
from perseus_bench.report import AcceptanceReport, Durations, report_json
from perseus_bench.restoration import RestorationFailed
from perseus_bench.workload import WorkItem
from perseus_core.hardware import Hardware
from perseus_core.latency import ENOUGH_OF_CLOCK, SwitchLatency
from perseus_sim.gpus.model import MODELS, GpuModel
from perseus_sim.gpus.switching import DriverLock


def exact(model: GpuModel, latency_s: float, call_s: float) -> GpuModel:
    """A model whose changes all take the same time."""
    latency = SwitchLatency.of_seconds(latency_s, latency_s, call_s, False, "test")
    driver = replace(
        model.driver, latency=latency, call_p99_s=call_s, target_share=0.0, outlier_probability=0.0, reader_period_s=0.0
    )
    return replace(model, driver=driver)


class SimulatedAgents:
    """The restoration trial without processes: the lock stays, and the next agent resets it after its start."""

    def __init__(self, gpu: VirtualGpu, start_s: float = 1.2) -> None:
        self.gpu = gpu
        self.start_s = start_s
        self.restores = True
        self.stopped = 0

    def lock_and_die(self, mhz: int) -> None:
        self.gpu.lock_clocks(mhz)
        self.gpu.time.pass_by(0.5)

    def start(self) -> None:
        self.gpu.time.pass_by(self.start_s)
        if self.restores:
            self.gpu.reset_clocks()

    def check(self) -> None:
        if not self.restores:
            raise RestorationFailed("the agent has ended")

    def stop(self) -> bool:
        self.stopped += 1
        return self.restores


class Run:
    """One run."""

    def __init__(self, folder: Path, model: GpuModel) -> None:
        self.time = VirtualTime()
        self.gpu = VirtualGpu(model, self.time)
        self.journal, _ = Journal.open(folder / "journal", "boot")
        self.agents = SimulatedAgents(self.gpu)
        self.pauses = 0
        self.interrupted_at: int | None = None

    def pause(self, seconds: float) -> bool:
        self.pauses += 1
        self.time.pass_by(seconds)
        return self.pauses == self.interrupted_at

    def accept(self, minutes: float = 1.0, **given: Any) -> AcceptanceReport:
        return accept(
            Bench(self.gpu, self.gpu, self.pause),
            self.journal,
            self.agents,
            minutes=minutes,
            driver_version="570.1",
            **given,
        )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_run_on_every_gpu_model_finds_what_the_model_says(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    run = Run(tmp_path, model)
    report = run.accept(0.5)
    assert report.complete, report.notes
    assert report.clocks_returned
    assert report.scan is not None
    free = [mhz for mhz in model.clocks_mhz if model.effective_mhz(mhz) > mhz - 1]
    assert report.scan.top_usable_mhz == free[-1]
    for point in report.scan.points:
        assert point.reached_mhz == round(model.effective_mhz(point.requested_mhz))
        assert point.item_time_s == pytest.approx(ITEM_S * model.slowdown(point.requested_mhz), rel=1e-3)
        assert point.power_w == pytest.approx(model.power_w(point.requested_mhz), rel=0.02)
    latency = report.latency()
    assert latency is not None
    published = model.driver.latency
    assert published.p50_s / 2 < latency.p50_s < published.p50_s * 2  # some tens of draws of a wide distribution
    assert latency.p50_s <= latency.p99_s
    assert run.time.now_s < 1.5 * 30


@settings(max_examples=10)
@given(latency_s=st.floats(0.002, 0.08), call_share=st.floats(0.05, 1.0))
@example(latency_s=0.0625, call_share=0.5)  # the clock changes while it is read
def test_the_latency_measured_is_the_latency_there_is(
    tmp_path_factory: pytest.TempPathFactory, latency_s: float, call_share: float
) -> None:
    run = Run(tmp_path_factory.mktemp("run"), exact(MODELS["a100"], latency_s, latency_s * call_share))
    report = run.accept(0.5)
    assert report.switches is not None
    assert report.switches.unreached == 0
    assert report.switches.speed is not None
    for figure in (report.switches.speed.p50_s, report.switches.speed.p99_s):
        assert figure == pytest.approx(latency_s, abs=ITEM_S / 10)
    # Read a little later, never before: times are whole microseconds.
    assert latency_s - 2e-6 <= report.switches.reported.p50_s < latency_s + 0.001
    assert report.calls is not None
    assert report.calls.lock.p50_s == pytest.approx(latency_s * call_share, abs=2e-6)
    assert report.pipeline is not None
    assert abs(report.pipeline.time_deviation_percent) < 0.3
    assert report.pipeline.energy_deviation_percent is not None
    assert abs(report.pipeline.energy_deviation_percent) < 0.3


@pytest.mark.parametrize("shared", [True, False])
def test_gpus_of_one_lock_are_told_from_gpus_of_their_own(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of the others in turn with those of the GPU under test, as threads of real drivers do."""
    model = exact(MODELS["a100"], 0.02, 0.005)
    run = Run(tmp_path, model)
    common = DriverLock(model.driver)
    run.gpu._lock = common  # type: ignore[attr-defined]
    others = [VirtualGpu(model, VirtualTime(), common if shared else None, f"GPU-{n}") for n in range(3)]

    class Contention:
        def __init__(self, _: object) -> None: ...

        def __enter__(self) -> None:
            request = run.gpu.lock_clocks

            def after_others(mhz: int) -> None:
                for other in others:
                    other.time.now_s = run.time.now_s
                    other.lock_clocks(mhz)
                request(mhz)

            monkeypatch.setattr(run.gpu, "lock_clocks", after_others)

        def __exit__(self, *_: object) -> None:
            monkeypatch.undo()

    monkeypatch.setattr("perseus_bench.calls._locked_without_pause", Contention)
    report = run.accept(0.5, others=others)
    assert report.calls is not None
    assert report.calls.shared_lock is shared
    assert [other.locked_mhz for other in others] == [0, 0, 0]
    assert run.journal.locked == frozenset()


@settings(max_examples=25)
@given(st.integers(1, 4_000))
def test_an_interruption_at_any_moment_returns_the_clocks(tmp_path_factory: pytest.TempPathFactory, pause: int) -> None:
    run = Run(tmp_path_factory.mktemp("run"), MODELS["h100"])
    run.interrupted_at = pause
    report = run.accept(0.1)
    assert run.gpu.locked_mhz == 0
    assert report.clocks_returned
    assert run.journal.locked == frozenset()
    assert not report.complete
    assert "interrupted" in report.notes[-1]
    render(report)


@settings(max_examples=25)
@given(st.integers(0, 110), st.sampled_from([DeviceBusy("busy"), DeviceLost("gone"), RuntimeError("a defect")]))
def test_a_driver_that_fails_once_at_any_call_leaves_no_clock_locked(
    tmp_path_factory: pytest.TempPathFactory, number: int, fault: Exception
) -> None:
    run = Run(tmp_path_factory.mktemp("run"), MODELS["a100"])
    request, calls = run.gpu._request, 0

    def failing(mhz: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise fault
        request(mhz)

    run.gpu._request = failing  # type: ignore[method-assign]
    with contextlib.suppress(RuntimeError):
        report = run.accept(0.1)
        assert report.clocks_returned
        assert report.complete or report.notes
    assert run.gpu.locked_mhz == 0
    assert run.journal.locked == frozenset()


@settings(max_examples=25)
@given(st.data())
def test_a_workload_that_makes_its_times_up_gets_its_clocks_returned_and_a_report(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Items may be too few, too many, of any length, at any time, and done before they were begun."""
    run = Run(tmp_path_factory.mktemp("run"), MODELS["a100"])
    times = st.sampled_from([1e-300, 1.0, 500.0, 1e6, 1e12, 1e300])
    made_up = [WorkItem(data.draw(times), data.draw(times)) for _ in range(data.draw(st.integers(0, 6)))]
    often = data.draw(st.sampled_from([1, 1, 500]))
    done = data.draw(st.sampled_from([-(2**63), 0, 2**63 - 1]))

    class MadeUp:
        name = "made up"

        def start(self, items: int | None = None) -> None: ...

        def completed(self) -> int:
            return done

        def finish(self) -> list[WorkItem]:
            return made_up * often

        def close(self) -> None: ...

    bench = Bench(run.gpu, MadeUp(), run.pause)
    report = accept(bench, run.journal, run.agents, minutes=0.1, driver_version="570.1")
    assert report.clocks_returned
    assert report.complete or report.notes
    assert run.gpu.locked_mhz == 0
    assert run.journal.locked == frozenset()
    render(report)
    json.dumps(report_json(report), allow_nan=False)
    with contextlib.suppress(ValueError):  # times that no plan can be rehearsed with
        report.hardware()


def test_a_gpu_that_cannot_be_reset_stays_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, MODELS["a100"])

    def refuse() -> None:
        raise DeviceLost("gone")

    monkeypatch.setattr(run.gpu, "reset_clocks", refuse)
    monkeypatch.setattr(kit, "RESET_S", 0.0)
    report = run.accept(0.1)
    assert not report.clocks_returned
    assert run.journal.locked == {run.gpu.identity.uuid}
    assert "could not be returned" in render(report)


def test_an_agent_that_does_not_restore_is_said_to(tmp_path: Path) -> None:
    run = Run(tmp_path, MODELS["a100"])
    run.agents.restores = False
    report = run.accept(0.1)
    assert report.restoration is None
    assert not report.complete
    assert any("the agent has ended" in note for note in report.notes)
    assert run.agents.stopped == 1
    assert run.gpu.locked_mhz == 0


def test_without_a_workload_speed_and_pipeline_are_not_made_up(tmp_path: Path) -> None:
    run = Run(tmp_path, MODELS["a100"])
    report = accept(Bench(run.gpu, None, run.pause), run.journal, run.agents, minutes=0.5, driver_version="570.1")
    assert report.pipeline is None
    assert report.switches is not None
    assert report.switches.speed is None
    assert report.scan is not None
    assert {point.item_time_s for point in report.scan.points} == {None}
    assert report.complete, report.notes  # everything that can be measured was


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> AcceptanceReport:
    return Run(tmp_path_factory.mktemp("run"), MODELS["h200"]).accept(0.5)


def test_the_report_names_nobody_unless_asked_to(report: AcceptanceReport) -> None:
    named = replace(report, gpu_uuid="GPU-secret", node_name="node-secret")
    for text in (json.dumps(report_json(report)), render(report)):
        assert "GPU-" not in text
    for text in (json.dumps(report_json(named)), render(named)):
        assert "GPU-secret" in text
        assert "node-secret" in text


def test_the_report_says_everything_it_has(report: AcceptanceReport) -> None:
    text = render(report)
    assert report.scan is not None
    assert report.switches is not None
    assert report.pipeline is not None
    for number in (report.scan.top_usable_mhz, report.pipeline.instructions, report.switches.reported.count):
        assert str(number) in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)
    body = json.loads(json.dumps(report_json(report)))
    assert body["gpu_model"] == report.gpu_model
    assert {*body["switch_latency"]} == {"p50_s", "p99_s", "call_s", "shared_lock", "source"}, (
        "as docs/acceptance.md says"
    )


def test_the_hardware_file_is_the_measured_latency_and_nothing_assumed(report: AcceptanceReport) -> None:
    hardware, latency = report.hardware(), report.latency()
    assert hardware is not None
    assert latency is not None
    assert hardware == Hardware(model=report.gpu_model, latency=latency, clocks=hardware.clocks)
    assert report.switches is not None
    changes = Counter[int]()
    for one in report.switches.transitions:
        changes[one.to_mhz] += one.reported.count
    assert hardware.clocks.keys() == {mhz for mhz, count in changes.items() if count >= ENOUGH_OF_CLOCK} != set()
    read = Hardware.from_json(hardware.to_json())
    assert read.to_json() == hardware.to_json(), "as perseus plan --hardware reads it"
    assert report.calls is not None
    shared = replace(report, calls=replace(report.calls, other_gpus=3, shared_lock=True)).hardware()
    assert shared is not None
    assert shared.gpus_per_lock == 4
    assert replace(report, switches=None).hardware() is None


def test_a_report_without_a_latency_that_plans_can_have_is_written_all_the_same(
    report: AcceptanceReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.switches is not None
    slow = replace(report, switches=replace(report.switches, speed=Durations(9, 61.0, 61.0, 61.0)))
    places = [text for name in ("json", "hardware") for text in (f"--{name}", str(tmp_path / name))]
    command._write(parse_options(places, {}), slow)
    assert "--hardware: not written: hardware: switch_latency_s.p50 must be between 0 and 60" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["json"]


def test_a_failed_trial_is_noted_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise DeviceError("out of order")

    monkeypatch.setattr(kit, "time_calls", fails)
    report = Run(tmp_path, MODELS["a40"]).accept(0.2)
    assert report.calls is None
    assert report.switches is not None
    assert "calls: out of order" in report.notes
    assert not report.complete
