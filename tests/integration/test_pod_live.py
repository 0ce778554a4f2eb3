"""A real script in a pod with simulated GPUs: which GPU it moves, what it reports, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, eventually

from perseus_sim.gpus import shim_gpu
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.offer import make_gpus
from perseus_sim.training.pod_live import gpu_of, main

SCRIPT = """
import itertools, sys
import perseus_client
for _ in perseus_client.steps(itertools.count()):
    print("trains", *sys.argv[1:], flush=True)
"""


def test_a_rank_has_the_gpu_of_its_number_on_the_node(nvml_library: Path, tmp_path: Path) -> None:
    uuids = sorted(make_gpus(tmp_path, "node", 3, MODELS["a100"], nvml_library).uuids)[:2]
    environment = {shim_gpu.ENV_FOLDER: str(tmp_path), "NVIDIA_VISIBLE_DEVICES": ",".join(reversed(uuids))}
    assert gpu_of(environment).spec.uuid == uuids[0]
    assert gpu_of({**environment, "LOCAL_RANK": "1"}).spec.uuid == uuids[1]
    with pytest.raises(shim_gpu.NoGpus, match=r"LOCAL_RANK: is 2, and the container has 2 GPUs"):
        gpu_of({**environment, "LOCAL_RANK": "2"})


def test_a_pod_without_gpus_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(shim_gpu.ENV_FOLDER, raising=False)
    assert main(["train.py"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert shim_gpu.ENV_FOLDER in line


def test_iterations_take_the_gpus_time_and_energy_at_its_clock_until_the_pod_ends(
    nvml_library: Path, tmp_path: Path
) -> None:
    model = MODELS["a100"]
    [uuid] = make_gpus(tmp_path, "node", 1, model, nvml_library).uuids
    shim = shim_gpu.open_shim(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {
        **os.environ, shim_gpu.ENV_FOLDER: str(tmp_path), "NVIDIA_VISIBLE_DEVICES": uuid, "PERSEUS_SOCKET": "/nowhere",
    }  # fmt: skip
    command = [sys.executable, "-m", "perseus_sim.training.pod_live", "--step=0.05", "--report=0"]
    log = tmp_path / "log"
    with log.open("w") as output:
        pod = subprocess.Popen(
            [*command, str(tmp_path / "train.py"), "fast"], env=environment, stdout=output, stderr=output
        )
    try:
        eventually(lambda: "iteration 5:" in log.read_text())
        before_mj = shim.get(0, "energy_mj")
        eventually(lambda: shim.get(0, "energy_mj") > before_mj + 5_000)
    finally:
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(PATIENCE_S) == 0, log.read_text()
    said = log.read_text()
    assert "trains fast" in said
    times_s = [float(found) for found in re.findall(r"iteration \d+: (\S+) s", said)]
    assert all(time_s >= 0.05 for time_s in times_s)
    assert f"the last at {model.max_clock_mhz} MHz" in said
    assert shim.get(0, "clock_mhz") < 300, "the GPU idles at once"
    shim.close()
