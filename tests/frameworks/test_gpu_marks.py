"""With a real GPU: marks that it writes itself, how far hosts are ahead of it, and what it draws and how fast it runs.

Reads only: no clock is changed. Figures are printed (``-s``), for docs/clocks-take-time.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.doubles.recording_node import RecordingNode, pod_uid
from tests.frameworks.gpu_agent import AgentEnd

from perseus_agent.devices.base import EventReason
from perseus_agent.devices.nvml import NvmlDevice, NvmlDevices
from perseus_agent.errors import DeviceError
from perseus_core.marks import MarkSource
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_sim.gpus.kubelet import AdmittedPod

HERE = Path(__file__).resolve().parent
SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
EVENT_US = 2_000
"""How well events can be placed on the host's clock; with one queue no better than the GPU once kept up."""

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[NvmlDevice]:
    """The GPU that torch calls the first, for reading."""
    try:
        devices = NvmlDevices(privileged=lambda: False)
    except DeviceError as error:
        pytest.skip(f"no NVIDIA driver: {error}")
    yield devices.devices[0]
    devices.close()


@pytest.fixture
def python_gpu(python: Path) -> Path:
    probe = [str(python), "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if subprocess.run(probe, check=False).returncode:
        pytest.skip("no GPU that torch can use")
    return python


Run = Callable[..., tuple[AgentEnd, dict[str, Any]]]


@pytest.fixture
def run(python_gpu: Path, tmp_path: Path) -> Run:
    """Train in a process of its own, with these marks; the agent's end, and what the process said."""

    def train(
        schedule: str = "Schedule1F1B",
        mode: str = "plain",
        timing: str = "cuda",
        queues: int = 8,
        *,
        worker: str = "gpu_marks_worker.py",
        watch: bool = False,
    ) -> tuple[AgentEnd, dict[str, Any]]:
        place = tmp_path / timing  # short: it is part of a socket's address
        place.mkdir()
        agent = AgentEnd(place / "agent.sock", watch=watch)
        environment = {"PERSEUS_SOCKET": str(place / "agent.sock"), "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
        command = [str(python_gpu), str(HERE / worker), str(place / "result.json")]
        subprocess.run([*command, schedule, mode, timing], env=os.environ | environment, timeout=300, check=True)
        agent.thread.join(10)
        return agent, json.loads((place / "result.json").read_text())

    return train


@pytest.mark.parametrize("mode", ["plain", "graphs"])
@pytest.mark.parametrize("queues", [1, 8])
def test_what_the_gpu_writes_agrees_with_its_events(run: Run, mode: str, queues: int) -> None:
    agent, said = run(mode=mode, queues=queues, watch=True)
    assert said["connected"]
    assert {record.source for record in agent.records} == {MarkSource.GPU}
    assert agent.unordered == 0
    delays_us = agent.delays_us()
    assert len(delays_us) > len(agent.complete()), "few marks were seen: is a processor free to look?"
    print(f"{mode}, {queues} queues: mark seen after event, µs: {_spread(delays_us)}")
    assert delays_us[0] > -EVENT_US
    assert median(delays_us) < EVENT_US


def test_marks_by_the_gpu_cost_no_more_than_events_do(run: Run) -> None:
    """Neither waits for the GPU; a step takes the time of its kernels in both."""
    steps_s = {}
    for timing in ("events", "cuda"):
        agent, _ = run(timing=timing)
        spans_us = [record.end_us - record.begin_us for record in agent.complete().values()]
        assert len(spans_us) > 5
        steps_s[timing] = median(spans_us) / 1e6
    print(f"step by events {steps_s['events']:.4f} s, by the GPU's own marks too {steps_s['cuda']:.4f} s")
    assert steps_s["cuda"] < 1.02 * steps_s["events"]


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_lead_of_every_instruction_is_known(run: Run, schedule: str, queues: int) -> None:
    agent, _ = run(schedule, queues=queues)
    _all_leads_are_known(agent, f"{schedule}, {queues} queues")


@pytest.mark.parametrize(
    ("worker", "variant"),
    [
        ("gpu_megatron_worker.py", "1f1b"),
        ("gpu_megatron_worker.py", "interleaved"),
        ("gpu_megatron_worker.py", "overlapped"),
        ("gpu_deepspeed_worker.py", "deepspeed"),
    ],
)
def test_marks_and_leads_under_the_schedules_of_other_frameworks(run: Run, worker: str, variant: str) -> None:
    """With one hardware queue, as Megatron-LM requires. Sends and receives take no time: the other ranks are absent."""
    agent, said = run(variant, queues=1, worker=worker, watch=True)
    assert said["connected"]
    assert {record.source for record in agent.records} == {MarkSource.GPU}
    assert agent.unordered == 0
    delays_us = agent.delays_us()
    print(f"{variant}: mark seen after event, µs: {_spread(delays_us)}")
    assert delays_us[0] > -EVENT_US
    assert median(delays_us) < EVENT_US
    _all_leads_are_known(agent, variant)


def test_replays_of_a_whole_iteration_are_marked_by_nodes_of_the_graph(run: Run) -> None:
    """In order, in the iteration of the replay, and when the graph's events say so."""
    agent, said = run(mode="captured", watch=True)
    assert not [line for line in said["said"] if "whole iterations" in line]
    complete = agent.complete()
    assert len(complete) >= said["replays"]
    assert {record.source for record in complete.values()} == {MarkSource.GPU}
    assert agent.unordered == 0
    delays_us = agent.delays_us()
    print(f"captured: mark seen after event, µs: {_spread(delays_us)}")
    assert delays_us[0] > -EVENT_US
    assert median(delays_us) < EVENT_US


def _all_leads_are_known(agent: AgentEnd, name: str) -> None:
    """In most iterations, for each instruction; windows of iterations do not overlap."""
    complete = agent.complete()
    assert len(complete) >= 8
    leads_us = []
    for record in complete.values():
        assert len(record.leads_us) == len(record.begins_us)
        assert all(begin <= after for begin, after in pairwise(record.begins_us))
        leads_us += record.leads_us
    assert min(leads_us) > -EVENT_US
    assert max(leads_us) > 0
    ordered = [complete[iteration] for iteration in sorted(complete)]
    step_us = median(record.end_us - record.begin_us for record in ordered)
    print(f"{name}: host ahead of the GPU by µs: {_spread(sorted(leads_us))}, of steps of {step_us:.0f}")
    assert all(a.end_us <= b.begin_us for a, b in pairwise(ordered))


class Watch:
    """Reads of the SM clock, its limits and the power, in a thread."""

    def __init__(self, device: NvmlDevice, every_s: float) -> None:
        self.reads: list[tuple[int, int, EventReason, int]] = []
        self._device, self._every_s = device, every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def within(self, begin_us: float, end_us: float) -> list[tuple[int, int, EventReason, int]]:
        return [read for read in self.reads if begin_us <= read[0] <= end_us]

    def _read(self) -> None:
        device = self._device
        while not self._done.wait(self._every_s):
            now_us = time.monotonic_ns() // 1000
            self.reads.append((now_us, device.sm_clock_mhz(), device.event_reasons(), device.power_mw() or 0))


def _load(python: Path, folder: Path, mode: str) -> dict[str, Any]:
    result = folder / f"{mode}.json"
    command = [str(python), str(HERE / "gpu_load_worker.py"), str(result), mode]
    subprocess.run(command, timeout=200, check=True)
    said: dict[str, Any] = json.loads(result.read_text())
    return said


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_plateau_is_where_the_power_limit_holds_the_clock(
    python_gpu: Path, device: NvmlDevice, tmp_path: Path, kind: str
) -> None:
    """Of a transformer layer at default clocks. Where nothing limits it, it runs at the highest."""
    watch = Watch(device, 0.01)
    try:
        begin_us, end_us = _load(python_gpu, tmp_path, kind)["span_us"]
    finally:
        watch.stop()
    steady = watch.within(begin_us + 2e6, end_us)
    assert len(steady) > 50
    clocks = sorted(clock for _, clock, _, _ in steady)
    limited = sum(bool(reasons & EventReason.POWER_CAP) for _, _, reasons, _ in steady) / len(steady)
    highest = device.identity.supported_clocks_mhz[-1]
    power_w = median(power for _, _, _, power in steady) / 1000
    print(f"{kind}: clock {_spread(clocks)} MHz of {highest}, {power_w:.0f} W, power limit in {limited:.0%} of reads")
    assert clocks[-1] <= highest
    if limited > 0.9:
        assert median(clocks) < highest
    if limited < 0.1:
        assert median(clocks) > 0.95 * highest


def test_the_clock_that_rises_by_itself_is_seen_in_the_speed_of_work(
    python_gpu: Path, device: NvmlDevice, tmp_path: Path
) -> None:
    """After idling the GPU raises its clock without us. What it reports and how fast it works agree in the end."""
    watch = Watch(device, 0.0005)
    try:
        said = _load(python_gpu, tmp_path, "ramp")
    finally:
        watch.stop()
    ends_us, items_us = said["ends_us"], said["items_us"]
    steady_us = median(items_us[len(items_us) // 2 :])
    reached_us = next(end for end, item in zip(ends_us, items_us, strict=True) if item < 1.05 * steady_us)
    reads = watch.within(said["begin_us"], ends_us[-1])
    assert reads
    final_mhz = median(clock for _, clock, _, _ in reads[len(reads) // 2 :])
    reported_us = next(at for at, clock, _, _ in reads if clock > 0.95 * final_mhz)
    slowest = max(items_us[:50]) / steady_us
    print(
        f"ramp: first items {slowest:.2f} times as long; full speed after {reached_us - said['begin_us']:.0f} µs, the "
        f"clock reported as such after {reported_us - said['begin_us']} µs; {final_mhz} MHz"
    )
    later = [item for item in items_us[len(items_us) // 2 :] if item < 2 * steady_us]
    assert len(later) > 0.9 * len(items_us) // 2
    assert items_us[0] > 0.9 * steady_us


def test_energy_is_split_between_alternating_kernels_as_each_draws_alone(
    python_gpu: Path, device: NvmlDevice, tmp_path: Path
) -> None:
    """A product of matrices and a copy, 150 ms each, measured by the real agent; alone by the driver's own samples."""
    uuid = device.identity.uuid
    with RecordingNode.open(tmp_path) as node:
        node.start_agent("--devices=nvml")
        pod = messages.Pod(uid=pod_uid(0), namespace="training", name="pod-0")
        node.kubelet.admit(AdmittedPod(pod.uid, pod.namespace, pod.name, (uuid,)))
        result = tmp_path / "result.json"
        trainer = subprocess.Popen(
            [str(python_gpu), str(HERE / "gpu_load_worker.py"), str(result), "alternating"],
            env=os.environ | {"PERSEUS_SOCKET": node.socket},
            stdin=subprocess.PIPE,
        )
        watch = Watch(device, 0.02)
        try:
            node.kubelet.place([trainer.pid], pod.uid)
            assert trainer.stdin
            trainer.stdin.write(b"go\n")
            trainer.stdin.close()
            with node.stub() as stub:
                lease = messages.AcquireLeaseRequest(job_uid="job", epoch=1, job_name="a/b", ttl_ms=100_000, pods=[pod])
                stub.AcquireLease(lease)
                reports = []
                for batch in stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid="job"), timeout=150):
                    reports += [e.iteration for e in batch.events if e.WhichOneof("event") == "iteration"]
                    if len(reports) >= 60:
                        break
        finally:
            watch.stop()
            trainer.kill()
            trainer.wait()
    alone_w = []
    for begin_us, end_us in json.loads(result.read_text())["alone_us"].values():
        steady = watch.within(begin_us + 2e6, end_us)
        alone_w.append(sum(power for _, _, _, power in steady) / len(steady) / 1000)
    last = next(report for report in reversed(reports) if report.has_energy)
    found_w = [
        1000 * energy / duration
        for energy, duration in zip(last.instruction_energies_mj, last.durations_us, strict=True)
    ]
    print(f"alone {alone_w[0]:.0f} and {alone_w[1]:.0f} W, found in turns {found_w[0]:.0f} and {found_w[1]:.0f} W")
    assert alone_w[0] > 1.1 * alone_w[1], "the two kernels draw alike: nothing to tell apart"
    assert found_w[0] > found_w[1]
    # Of the difference between the two, most must be found; in turns the chip is warmer and neither is quite alone.
    assert found_w[0] - found_w[1] > 0.6 * (alone_w[0] - alone_w[1])
    assert sum(found_w) == pytest.approx(sum(alone_w), rel=0.15)


def _spread(values: list[int]) -> str:
    """Of ascending values: the lowest, median, 99th percentile and highest."""
    return f"{values[0]} / {median(values):.0f} / {values[round(0.99 * (len(values) - 1))]} / {values[-1]}"
