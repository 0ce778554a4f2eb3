"""A simulated job spread over pods: what it refuses, and that it trains, on GPUs behind NVML, over its own network."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, eventually

from perseus_sim.gpus import shim_gpu
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.offer import make_gpus
from perseus_sim.profiles import profile_csv
from perseus_sim.training.coordinator import PipelineIteration
from perseus_sim.training.pod_job import main, ranks_of, report

GIVEN = {shim_gpu.ENV_FOLDER: "/gpus", "NVIDIA_VISIBLE_DEVICES": "GPU-b,GPU-a"}
JOB = ["--stages=2", "--microbatches=2", "--pipelines=2", "--blocking-power=83.64"]


def test_every_gpu_is_one_rank_and_pods_follow_each_other() -> None:
    first = ranks_of(GIVEN)
    assert (first.first, first.uuids, first.coordinates) == (0, ("GPU-a", "GPU-b"), True)
    third = ranks_of({**GIVEN, "JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "1234"})
    assert (third.first, third.coordinates, third.master) == (4, False, ("job-0.job", 1234))


@pytest.mark.parametrize("environment", [{}, {shim_gpu.ENV_FOLDER: "/gpus"}])
def test_a_pod_without_simulated_gpus_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(shim_gpu.NoGpus, match=shim_gpu.ENV_FOLDER):
        ranks_of(environment)


def test_a_pod_without_gpus_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(shim_gpu.ENV_FOLDER, raising=False)
    assert main(["--profile", "x.csv", *JOB]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert shim_gpu.ENV_FOLDER in line


def test_what_it_says_is_the_mean_of_what_has_ended() -> None:
    samples: queue.SimpleQueue[PipelineIteration] = queue.SimpleQueue()
    assert report(samples) == ""
    samples.put(PipelineIteration(0, 7, 0, 900_000, 1_000_000, 2_000_000))
    samples.put(PipelineIteration(1, 8, 0, 900_000, 2_000_000, 4_000_000))
    assert report(samples) == "iteration 8: 1.500 s, 3000 J for each pipeline"
    assert samples.empty()


class Pods:
    """Two pods of two GPUs each, on two nodes that are folders."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._folder = folder
        self.gpus = [folder / f"node-{number}" for number in range(2)]
        self.uuids = [make_gpus(gpus, gpus.name, 2, MODELS["a100"], library).uuids for gpus in self.gpus]
        (folder / "profile.csv").write_text(profile_csv(2, forward_s=0.02))
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, number: int, port: int, *options: str) -> None:
        environment = {
            **os.environ,
            shim_gpu.ENV_FOLDER: str(self.gpus[number]),
            "NVIDIA_VISIBLE_DEVICES": ",".join(self.uuids[number]),
            "NODE_RANK": str(number),
            "MASTER_PORT": str(port),
        }
        command = [
            sys.executable,
            "-m",
            "perseus_sim.training.pod_job",
            f"--profile={self._folder}/profile.csv",
            *JOB,
            *options,
        ]
        with (self._folder / f"log-{number}").open("w") as log:
            self.running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def log(self, number: int) -> str:
        return (self._folder / f"log-{number}").read_text()

    def iterations(self) -> list[int]:
        return [int(found) for found in re.findall(r"iteration (\d+):", self.log(0))]

    def energy_mj(self, number: int) -> int:
        return sum(values["energy_mj"] for values in shim_gpu.describe(self.gpus[number]).values())

    def stop(self) -> list[int]:
        for pod in self.running:
            pod.send_signal(signal.SIGTERM)
        return [pod.wait(PATIENCE_S) for pod in self.running]


@pytest.fixture
def pods(nvml_library: Path, tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, nvml_library)
    yield pods
    for pod in pods.running:
        if pod.poll() is None:
            pod.kill()
            pod.wait()


def test_it_trains_over_pods_and_begins_again_when_a_rank_has_died(pods: Pods) -> None:
    port = free_port()
    for number in range(2):
        pods.start(number, port)
    eventually(pods.iterations)
    before = pods.energy_mj(1)
    eventually(lambda: pods.energy_mj(1) > before + 10_000)
    model = MODELS["a100"]
    unlocked = {model.max_clock_mhz, model.plateau_mhz}  # waiting, or at the power limit
    assert {values["clock_mhz"] for values in shim_gpu.describe(pods.gpus[1]).values()} <= unlocked

    [rank] = [pid for pid in children(pods.running[1].pid) if pods.uuids[1][0] in command_line(pid)]
    os.kill(rank, signal.SIGKILL)
    eventually(lambda: "begins again" in pods.log(0))
    last = pods.iterations()[-1]
    eventually(lambda: pods.iterations()[-1] > last + 1)

    assert pods.stop() == [0, 0], pods.log(0) + pods.log(1)


def test_an_elastic_job_trains_the_pipelines_that_are_there(pods: Pods) -> None:
    port = free_port()
    pods.start(0, port, "--elastic")
    eventually(pods.iterations)

    pods.start(1, port, "--elastic")
    eventually(lambda: "begins again" in pods.log(0))
    before = pods.energy_mj(1)
    eventually(lambda: pods.energy_mj(1) > before + 10_000)

    joined = pods.running.pop()
    joined.send_signal(signal.SIGTERM)
    assert joined.wait(PATIENCE_S) == 0, pods.log(1)
    last = pods.iterations()[-1]
    eventually(lambda: pods.iterations()[-1] > last + 1)
    assert pods.stop() == [0], pods.log(0)
    # Nobody leads the GPUs any more: they idle.
    assert all(values["clock_mhz"] < 300 for values in shim_gpu.describe(pods.gpus[0]).values())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_heat_slows_the_clock_and_says_why(
    nvml_library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = make_gpus(tmp_path, "node", 2, MODELS["a100"], nvml_library)
    gpu = shim_gpu.ShimGpu(tmp_path, gpus.uuids[1])
    gpu.advance(gpu.physics())
    shim_gpu.main(["--gpus", str(tmp_path), gpus.uuids[1], "cap_mhz=900", "reasons=64"])
    said = json.loads(capsys.readouterr().out)
    assert said[gpus.uuids[1]]["clock_mhz"] == 900
    assert said[gpus.uuids[0]]["cap_mhz"] == 0
    assert gpu.capped() == (900, 64)
    with pytest.raises(shim_gpu.NoGpus, match="GPU-x"):
        shim_gpu.ShimGpu(tmp_path, "GPU-x")
