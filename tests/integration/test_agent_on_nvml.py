"""The whole node on the NVML driver: real agent and trainer processes, the unmodified nvidia-ml-py, the shim's GPUs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from tests.doubles.recording_node import RecordingNode, gpu_uuid, plan_set_of, wait_for
from tests.waiting import PATIENCE_S

from perseus_agent.devices.nvml import may_write
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.nvml_shim import ENV_STATE, Shim
from perseus_sim.gpus.offer import make_gpus
from perseus_sim.gpus.shim_gpu import STATE

CLOCKS_MHZ = [[1200, 900, 1200, 900]]
COUNTER_MS = 10
IDLE_W, FULL_W = 55, 400
JOB = "job"
pytestmark = pytest.mark.skipif(not may_write(), reason="the agent rightly refuses to set clocks without CAP_SYS_ADMIN")


@pytest.fixture
def shim(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shim]:
    """Two GPUs under load, under the UUIDs that the node's kubelet gives out."""
    shim = Shim(nvml_library, tmp_path / "nvml-state", create_gpus=2)
    for gpu in range(2):
        shim.set(gpu, busy_permille=1000, energy_period_us=COUNTER_MS * 1000)
        shim.set_text(gpu, uuid=gpu_uuid(gpu))
    monkeypatch.setenv(ENV_STATE, str(shim.state))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library.parent))
    yield shim
    shim.close()


@pytest.fixture
def node(shim: Shim, tmp_path: Path) -> Iterator[RecordingNode]:
    with RecordingNode.open(tmp_path) as node:
        node.start_agent("--devices=nvml")
        yield node


def run_job(
    node: RecordingNode, pod: messages.Pod, ttl_ms: int = 60_000, check_every: int = 0
) -> subprocess.Popen[bytes]:
    """A trainer in a leased pod, with a plan in force from its next iteration on."""
    plan_set = plan_set_of([CLOCKS_MHZ])
    named = {"job_uid": JOB, "epoch": 1}
    with node.stub() as stub:
        stub.AcquireLease(messages.AcquireLeaseRequest(**named, job_name="a/b", ttl_ms=ttl_ms, pods=[pod]))
        trainer = node.start_trainer(pod, check_every=check_every)
        wait_for(lambda: stub.DescribeNode(messages.DescribeNodeRequest()).ranks, "the rank has joined")
        stub.PushPlanSet(messages.PushPlanSetRequest(**named, plan_set=plan_set))
        selection = messages.Selection(data_parallel_rank=0, point=0)
        stub.SelectPlan(messages.SelectPlanRequest(**named, plan_id=plan_set.plan_id, selections=[selection]))
    return trainer


def test_a_plan_becomes_clocks_and_measured_energy_and_ends_with_the_trainer(node: RecordingNode, shim: Shim) -> None:
    pod = node.add_pod(0, [0])
    trainer = run_job(node, pod)
    seen: set[int] = set()
    wait_for(lambda: seen.add(shim.get(0, "clock_mhz")) or {1200, 900} <= seen, "both clocks were run at")
    with node.stub() as stub:
        watch = stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid=JOB), timeout=PATIENCE_S)
        report = next(
            event.iteration
            for batch in watch
            for event in batch.events
            if event.WhichOneof("event") == "iteration" and event.iteration.planned and event.iteration.has_energy
        )
        watch.cancel()
    assert len(report.durations_us) == len(CLOCKS_MHZ[0])
    # The counter may be a step behind at the begin, or at the end.
    time_ms = report.iteration_time_us / 1000
    assert IDLE_W * (time_ms - COUNTER_MS) < report.energy_mj < FULL_W * (time_ms + COUNTER_MS)
    trainer.kill()
    wait_for(lambda: shim.get(0, "locked_mhz") == 0, "the GPU is back at its default clocks")
    assert (shim.get(1, "lock_calls"), shim.get(1, "reset_calls")) == (0, 0)  # not the job's: never written


def test_a_test_between_iterations_finds_default_clocks_and_training_its_plan(node: RecordingNode, shim: Shim) -> None:
    run_job(node, node.add_pod(0, [0]), check_every=20)
    for _ in range(2):
        wait_for(lambda: shim.get(0, "locked_mhz") in CLOCKS_MHZ[0], "the plan's clock")
        wait_for(lambda: shim.get(0, "locked_mhz") == 0, "default clocks, while the GPU is tested")
    with node.stub() as stub:
        [rank] = stub.DescribeNode(messages.DescribeNodeRequest()).ranks
        wait_for(
            lambda: stub.DescribeNode(messages.DescribeNodeRequest()).ranks[0].iteration > rank.iteration + 20,
            "training goes on",
        )


def test_a_killed_agent_s_locks_are_given_back_by_its_successor(node: RecordingNode, shim: Shim) -> None:
    trainer = run_job(node, node.add_pod(0, [0]))
    wait_for(lambda: shim.get(0, "locked_mhz"), "the GPU is locked")
    node.kill_agent_and_keeper()
    trainer.kill()
    assert shim.get(0, "locked_mhz")  # NVML keeps a lock whose owner has died
    node.start_agent("--devices=nvml")
    wait_for(lambda: shim.get(0, "locked_mhz") == 0, "the successor has given it back")
    assert shim.get(1, "reset_calls") == 0


def test_a_killed_agent_s_locks_are_given_back_by_its_keeper(node: RecordingNode, shim: Shim) -> None:
    trainer = run_job(node, node.add_pod(0, [0]))
    wait_for(lambda: shim.get(0, "locked_mhz"), "the GPU is locked")
    node.kill_agent()
    trainer.kill()
    wait_for(lambda: shim.get(0, "locked_mhz") == 0, "the keeper has given it back")
    assert shim.get(1, "reset_calls") == 0


def test_an_agent_leaves_gpus_that_were_replaced_by_others(
    nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when simulated GPUs are installed again, and there are fewer."""
    gpus = tmp_path / "gpus"
    make_gpus(gpus, "node-a", 3, MODELS["a100"], nvml_library)
    monkeypatch.setenv(ENV_STATE, str(gpus / STATE))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(gpus))
    with RecordingNode.open(tmp_path / "node") as node:
        agent = node.start_agent("--devices=nvml")
        assert agent.poll() is None
        make_gpus(gpus, "node-a", 2, MODELS["a100"], nvml_library)
        assert agent.wait(PATIENCE_S) != 0
        assert "the GPU driver was replaced since the agent started" in node.log()
        node.start_agent("--devices=nvml")
        with node.stub() as stub:
            assert len(stub.DescribeNode(messages.DescribeNodeRequest()).gpus) == 2


def test_without_permission_the_agent_measures_and_training_runs_on(node: RecordingNode, shim: Shim) -> None:
    shim.set(0, permitted=0)
    trainer = run_job(node, node.add_pod(0, [0]))
    with node.stub() as stub:

        def verdict() -> int:
            gpus = stub.DescribeNode(messages.DescribeNodeRequest()).gpus
            return next(gpu.controllability for gpu in gpus if gpu.uuid == gpu_uuid(0))

        wait_for(lambda: verdict() == messages.CONTROLLABILITY_NO_PERMISSION, "the agent says that it may not write")
        begun = stub.DescribeNode(messages.DescribeNodeRequest()).ranks[0].iteration
        wait_for(
            lambda: stub.DescribeNode(messages.DescribeNodeRequest()).ranks[0].iteration > begun + 3,
            "the trainer goes on",
        )
    assert trainer.poll() is None
    assert shim.get(0, "locked_mhz") == 0


def test_a_lost_gpu_is_fenced_and_its_neighbour_driven(node: RecordingNode, shim: Shim) -> None:
    shim.inject("nvmlDeviceSetGpuLockedClocks", pynvml.NVML_ERROR_GPU_IS_LOST, gpu=1)
    pods = [node.add_pod(0, [0]), node.add_pod(1, [1])]
    with node.stub() as stub:
        named = {"job_uid": JOB, "epoch": 1}
        stub.AcquireLease(messages.AcquireLeaseRequest(**named, job_name="a/b", ttl_ms=60_000, pods=pods))
        trainers = [node.start_trainer(pod, dp=number) for number, pod in enumerate(pods)]
        wait_for(lambda: len(stub.DescribeNode(messages.DescribeNodeRequest()).ranks) == 2, "both ranks have joined")
        plan_set = plan_set_of([CLOCKS_MHZ])
        stub.PushPlanSet(messages.PushPlanSetRequest(**named, plan_set=plan_set))
        selections = [messages.Selection(data_parallel_rank=number, point=0) for number in range(2)]
        stub.SelectPlan(messages.SelectPlanRequest(**named, plan_id=plan_set.plan_id, selections=selections))
        wait_for(lambda: shim.get(0, "locked_mhz"), "the sound GPU is driven")
        wait_for(
            lambda: (
                messages.CONTROLLABILITY_LOST
                in [gpu.controllability for gpu in stub.DescribeNode(messages.DescribeNodeRequest()).gpus]
            ),
            "the lost GPU is said to be lost",
        )
    assert [trainer.poll() for trainer in trainers] == [None, None]
