"""With a real GPU: CUDA events time a pipeline without a synchronisation of ours, and the agent measures what it draws.

Reads only: no clock is changed. The agent runs without the capability to do so.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from bisect import bisect
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.doubles.recording_node import RecordingNode, pod_uid, wait_for
from tests.frameworks.gpu_agent import AgentEnd

from perseus_agent.devices.nvml import NvmlDevices, may_write
from perseus_bench.command import REFUSED
from perseus_bench.cuda import CudaWorkload
from perseus_proto import hello as wire
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_sim.gpus.kubelet import AdmittedPod

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu(python: Path) -> None:
    probe = [str(python), "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if subprocess.run(probe, check=False).returncode:
        pytest.skip("no GPU that torch can use")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("queues", "tolerance_us"), [(8, 5_000), (1, 20_000)])
def test_instructions_are_timed_on_the_gpu_without_waiting_for_it(
    python: Path, tmp_path: Path, queues: int, tolerance_us: int
) -> None:
    """Megatron asks for one queue: the GPU's time is then known as well as the GPU once kept up with the host."""
    agent = AgentEnd(tmp_path / "agent.sock")
    result = tmp_path / "result.json"
    environment = {"PERSEUS_SOCKET": str(tmp_path / "agent.sock"), "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    command = [str(python), str(HERE / "gpu_worker.py"), str(result)]
    subprocess.run(command, env=os.environ | environment, timeout=200, check=True)
    agent.thread.join(10)
    said = json.loads(result.read_text())
    assert agent.hello is not None
    assert agent.hello.timing is wire.Timing.GPU
    assert agent.hello.gpu_hint == said["uuid"]
    assert said["synchronised"] == 0
    complete = agent.complete()
    assert len(complete) >= 10
    for record in list(complete.values())[1:]:
        assert record.end_us > record.begin_us
        assert 0 < sum(record.durations_us) <= 1.05 * (record.end_us - record.begin_us)
    # Steps that the host waited for ended, as events say it, when the host was told.
    late_us = [
        reached_us - complete[iteration].end_us
        for iteration, reached_us in enumerate(said["reached_us"], said["first_synchronised"])
        if iteration in complete
    ]
    assert len(late_us) >= 3
    assert min(late_us) >= 0
    assert max(late_us) < tolerance_us


@pytest.mark.usefixtures("gpu")
def test_an_agent_that_may_not_write_measures_time_and_energy_of_every_instruction(
    python: Path, real_uuid: str, tmp_path: Path
) -> None:
    """Forward, a wait of 200 ms, backward twice as long: the real agent, the real driver, real CUDA."""
    without_right: list[str] = []
    if may_write():
        if not (setpriv := shutil.which("setpriv")):
            pytest.skip("no setpriv to start an agent without CAP_SYS_ADMIN")
        without_right = [setpriv, "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    with RecordingNode.open(tmp_path) as node:
        node.start_agent("--devices=nvml", prefix=without_right)
        pod = messages.Pod(uid=pod_uid(0), namespace="training", name="pod-0")
        node.kubelet.admit(AdmittedPod(pod.uid, pod.namespace, pod.name, (real_uuid,)))
        result = tmp_path / "result.json"
        trainer = subprocess.Popen(
            [str(python), str(HERE / "gpu_instructions_worker.py"), str(result)],
            env=os.environ | {"PERSEUS_SOCKET": node.socket},
            stdin=subprocess.PIPE,
        )
        try:
            node.kubelet.place([trainer.pid], pod.uid)
            assert trainer.stdin
            trainer.stdin.write(b"go\n")
            trainer.stdin.close()
            with node.stub() as stub:
                named = {"job_uid": "job", "epoch": 1}
                stub.AcquireLease(messages.AcquireLeaseRequest(**named, job_name="a/b", ttl_ms=60_000, pods=[pod]))

                def verdict() -> int:
                    described = stub.DescribeNode(messages.DescribeNodeRequest())
                    (of_gpu,) = (gpu.controllability for gpu in described.gpus if gpu.uuid == real_uuid)
                    return of_gpu

                wait_for(verdict, "the driver has been asked whether clocks may be set")
                assert verdict() == messages.CONTROLLABILITY_NO_PERMISSION
                watch = stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid="job"), timeout=100)
                told = []
                for batch in watch:
                    told += [e.iteration for e in batch.events if e.WhichOneof("event") == "iteration"]
                    if len(told) >= 24:
                        break
                watch.cancel()
            metrics = metrics_of(node)
        finally:
            trainer.kill()
            trainer.wait()
    said = json.loads(result.read_text())
    print(said, told[-1])
    assert metrics["perseus_agent_clock_switches_total"] == metrics["perseus_agent_clock_restores_total"] == 0
    settled = [report for report in told[4:] if report.has_energy]
    assert len(settled) >= 10
    for report in settled:
        assert list(report.durations_us) == pytest.approx(said["durations_us"], rel=0.25)
        assert not report.planned
    last = settled[-1]
    forward_mj, backward_mj = last.instruction_energies_mj
    forward_us, backward_us = said["durations_us"]
    forward_w, backward_w = 1000 * forward_mj / forward_us, 1000 * backward_mj / backward_us
    quiet_us = sum(report.quiet_us for report in settled)
    quiet_w = 1000 * sum(report.quiet_mj for report in settled) / quiet_us
    assert quiet_us > 0.2 * said["wait_us"] * len(settled)
    assert forward_w == pytest.approx(backward_w, rel=0.25)
    assert 20 < quiet_w < 0.5 * forward_w
    rest_mj = quiet_w * (last.iteration_time_us - forward_us - backward_us) / 1000
    assert forward_mj + backward_mj + rest_mj == pytest.approx(last.energy_mj, rel=0.15)


def metrics_of(node: RecordingNode) -> dict[str, float]:
    """By name; one GPU."""
    with urllib.request.urlopen(f"http://{node.addresses['metrics']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_accept_refuses_a_gpu_whose_clocks_it_may_not_set(real_uuid: str, tmp_path: Path) -> None:
    """In one sentence, and leaves nothing behind."""
    if not (setpriv := shutil.which("setpriv")):
        pytest.skip("no setpriv to start it without CAP_SYS_ADMIN")
    journal = tmp_path / "journal.json"
    without_right = [setpriv, "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    command = [sys.executable, "-m", "perseus_bench", "--devices=nvml", f"--gpu={real_uuid}"]
    done = subprocess.run(
        [*without_right, *command, f"--journal={journal}"], capture_output=True, text=True, timeout=60, check=False
    )
    print(done.stderr)
    assert done.returncode == REFUSED
    assert real_uuid in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout
    assert not journal.exists()


@pytest.mark.usefixtures("gpu")
def test_work_items_of_accept_show_the_speed_that_the_clock_says(python: Path, real_uuid: str) -> None:
    """At default clocks: items follow each other without a gap, and take less time the higher the clock is."""
    devices = NvmlDevices(privileged=lambda: False)
    workload = CudaWorkload(real_uuid, str(python))
    try:
        (device,) = [device for device in devices.devices if device.identity.uuid == real_uuid]
        began_us = device.now_us()
        workload.start()
        clocks = []
        while device.now_us() - began_us < 3e6:
            clocks.append((device.now_us(), device.sm_clock_mhz()))
            time.sleep(0.001)
        seen = workload.completed()
        items = workload.finish()
        ended_us = device.now_us()
    finally:
        workload.close()
        devices.close()
    assert 0 < seen <= len(items)
    assert began_us < items[0].begin_us
    assert items[-1].begin_us + items[-1].duration_us < ended_us
    late_us = [after.begin_us - before.begin_us - before.duration_us for before, after in pairwise(items)]
    assert max(map(abs, late_us)) < 1
    ends_us = [item.begin_us + item.duration_us for item in items]
    cycles = []
    for (at_us, mhz), (_, after_mhz) in pairwise(clocks):
        index = bisect(ends_us, at_us)
        if at_us > began_us + 1e6 and mhz == after_mhz and index < len(items):
            cycles.append(mhz * items[index].duration_us)
    cycles.sort()
    durations_us = sorted(item.duration_us for item in items)
    spread = [cycles[round(share * (len(cycles) - 1))] / median(cycles) for share in (0.05, 0.95)]
    print(
        f"{workload.name}: {len(items)} items, µs: {durations_us[0]:.0f} / {median(durations_us):.0f} / "
        f"{durations_us[-1]:.0f}; clocks {min(c for _, c in clocks)} to {max(c for _, c in clocks)} MHz; "
        f"cycles of an item, 5th and 95th percentile by the median: {spread[0]:.3f}, {spread[1]:.3f}"
    )
    assert 100 < median(durations_us) < 2_000
    assert spread[0] > 0.9
    assert spread[1] < 1.1


def test_samples_of_power_agree_with_the_energy_counter(real_uuid: str) -> None:
    """Whatever the GPU does meanwhile."""
    devices = NvmlDevices(privileged=lambda: False)
    try:
        (device,) = [device for device in devices.devices if device.identity.uuid == real_uuid]
        if not device._energy.by_samples:
            pytest.skip(f"{device.identity.model} has no samples of power")
        device.energy()  # of the past seconds
        counter = device.raw_energy_mj()
        began_us, readings = device.now_us(), []
        for _ in range(25):
            time.sleep(0.2)
            readings += device.energy() or ()
        counted_mj, counted_us = device.raw_energy_mj() - counter, device.now_us() - began_us
    finally:
        devices.close()
    sampled_mj, sampled_us = readings[-1].energy_mj - readings[0].energy_mj, readings[-1].time_us - readings[0].time_us
    assert sampled_us > 0.9 * counted_us
    assert sampled_mj / sampled_us == pytest.approx(counted_mj / counted_us, rel=0.1)


def test_the_real_library_has_every_function_that_its_double_has() -> None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        pytest.skip(str(error))
    source = (HERE.parents[1] / "deploy" / "gpu-sim" / "nvml_shim.c").read_text()
    functions = set(re.findall(r"^nvmlReturn_t (nvml\w+)\(", source, re.MULTILINE))
    assert len(functions) > 20
    assert [name for name in sorted(functions) if not hasattr(library, name)] == []
