"""``perseus-bench`` from start to end: real processes, the unmodified nvidia-ml-py, the shim's GPUs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.recording_node import wait_for
from tests.waiting import PATIENCE_S

from perseus_agent.clocks.journal import JournalLock, decode_journal
from perseus_agent.devices.nvml import may_write
from perseus_bench.report import SCHEMA
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.nvml_shim import ENV_STATE, Shim
from perseus_sim.gpus.offer import make_gpus
from perseus_sim.gpus.shared_gpu import GpuSpec, SharedGpu
from perseus_sim.gpus.shim_gpu import STATE, describe

ACCEPT = [sys.executable, "-m", "perseus_bench"]
WORKLOAD = "--workload=tests.doubles.clocked_workload:open_workload"
controls = pytest.mark.skipif(not may_write(), reason="the agent rightly refuses to set clocks without CAP_SYS_ADMIN")


@pytest.fixture
def shim(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shim]:
    """Two GPUs under load whose clocks take 5 ms to change."""
    shim = Shim(nvml_library, tmp_path / "nvml-state", create_gpus=2)
    for gpu in range(2):
        shim.set(gpu, busy_permille=1000, energy_period_us=10_000, transition_us=5_000)
    monkeypatch.setenv(ENV_STATE, str(shim.state))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_library.parent))
    yield shim
    shim.close()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.json"


@pytest.fixture
def accept(shim: Shim, journal: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*flags: str, gpu: str = "0", minutes: float = 0.1) -> subprocess.Popen[str]:
        given = [f"--gpu={gpu}", f"--minutes={minutes}", f"--journal={journal}", WORKLOAD, *flags]
        return subprocess.Popen([*ACCEPT, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def finished(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, errors
    return output, errors


def locks(shim: Shim) -> list[int]:
    return [shim.get(gpu, "locked_mhz") for gpu in range(2)]


@controls
def test_a_run_ends_with_a_complete_report_and_default_clocks(
    accept: Callable[..., subprocess.Popen[str]], shim: Shim, journal: Path, tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("json", "hardware")}
    output, _ = finished(accept("--other-gpus=1", *(f"--{name}={path}" for name, path in files.items())), 0)
    assert locks(shim) == [0, 0]
    assert decode_journal(journal.read_bytes()).locked == frozenset()
    report: dict[str, Any] = json.loads(files["json"].read_text())
    assert report["schema"] == SCHEMA
    assert report["complete"]
    assert report["simulated"]
    assert report["restoration"]["survived_kill"]
    assert report["restoration"]["restored_s"] > 0
    assert report["restoration"]["journal_empty"]
    assert report["switches"]["reported"]["p50_s"] >= 0.005  # as long as the GPU takes
    assert report["calls"]["other_gpus"] == 1
    assert report["pipeline"]["items_at_plan_share"] > 0.5
    assert json.loads(files["hardware"].read_text())["model"] == report["gpu_model"]
    assert report["gpu_model"] in output
    assert "GPU-" not in output


@controls
def test_the_gpus_of_a_simulated_node_show_their_plateau_and_their_latency(
    nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, h100 = tmp_path / "gpus", MODELS["h100"]
    make_gpus(gpus, "node", 3, h100, nvml_library)
    monkeypatch.setenv(ENV_STATE, str(gpus / STATE))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(gpus))
    files = [f"--json={tmp_path / 'report'}", f"--journal={tmp_path / 'state' / 'journal.json'}"]
    words = ["--gpu=0", "--other-gpus=1,2", "--minutes=0.25", f"{WORKLOAD}:h100", *files]
    finished(subprocess.Popen([*ACCEPT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), 0)
    report = json.loads((tmp_path / "report").read_text())
    assert {gpu["locked_mhz"] for gpu in describe(gpus).values()} == {0}
    assert report["scan"]["top_usable_mhz"] == h100.plateau_mhz
    assert report["calls"]["other_gpus"] == 2
    latency = h100.driver.latency
    assert report["switches"]["reported"]["p50_s"] >= latency.p50_s / 3
    assert report["switch_latency"]["call_s"] >= latency.call_s / 2


@controls
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_returns_the_clocks_and_writes_what_is_known(
    number: signal.Signals, accept: Callable[..., subprocess.Popen[str]], shim: Shim, journal: Path
) -> None:
    process = accept(minutes=5)
    wait_for(lambda: shim.get(0, "lock_calls") > 20, "it has begun")
    process.send_signal(number)
    output, _ = finished(process, 5)
    assert locks(shim) == [0, 0]
    assert decode_journal(journal.read_bytes()).locked == frozenset()
    assert "interrupted" in output


@controls
def test_after_kill_9_the_journal_lists_the_gpu(
    accept: Callable[..., subprocess.Popen[str]], shim: Shim, journal: Path
) -> None:
    process = accept(minutes=5)
    wait_for(lambda: shim.get(0, "locked_mhz"), "it has locked a clock")
    process.kill()
    process.communicate()
    assert len(decode_journal(journal.read_bytes()).locked) == 1  # so the node's next agent resets it
    finished(accept(), 0)  # and nothing of it is in the way of the next run
    assert locks(shim) == [0, 0]


def refusal(process: subprocess.Popen[str], shim: Shim, code: int = 4) -> str:
    _, errors = finished(process, code)
    assert [shim.get(gpu, "lock_calls") + shim.get(gpu, "reset_calls") for gpu in range(2)] == [0, 0]
    assert len(errors.strip().splitlines()) == 1
    return errors


@controls
@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"mig": 1}, "its clocks cannot be set: MIG"),
        ({"mps": 1}, "its clocks cannot be set: processes share the GPU"),
        ({"processes": 1}, "in use by 1 process;"),
        ({"processes": 2}, "in use by 2 processes;"),
    ],
)
def test_a_gpu_that_is_not_free_is_refused(
    state: dict[str, int],
    sentence: str,
    accept: Callable[..., subprocess.Popen[str]],
    shim: Shim,
) -> None:
    shim.set(0, **state)
    assert sentence in refusal(accept(), shim)
    shim.set(0, **dict.fromkeys(state, 0))
    shim.set(1, **state)
    assert sentence in refusal(accept("--other-gpus=1"), shim)


@pytest.mark.parametrize(
    ("controllability", "sentence"),
    [
        ("YES", "its time stands still"),
        ("NO_PERMISSION", "its clocks cannot be set"),
        ("LOST", "its clocks cannot be set"),
    ],
)
def test_a_simulated_gpu_in_a_trainer_s_time_is_refused(
    controllability: str, sentence: str, journal: Path, tmp_path: Path
) -> None:
    spec = GpuSpec("GPU-0", "simulated", (900, 1200), 80_000, controllability=controllability)
    gpu = SharedGpu.create(tmp_path / "gpus", spec)
    devices = f"--devices=perseus_sim.gpus.devices:open_devices:{tmp_path / 'gpus'}"
    refused = subprocess.run(
        [*ACCEPT, devices, f"--journal={journal}", "--workload=none"], capture_output=True, text=True, check=False
    )
    assert (refused.returncode, gpu.history()) == (4, [])
    assert sentence in refused.stderr
    gpu.close()


def test_a_node_with_an_agent_is_refused(
    accept: Callable[..., subprocess.Popen[str]], shim: Shim, journal: Path
) -> None:
    lock = JournalLock(journal)
    assert lock.take()
    assert "an agent runs on this node" in refusal(accept(), shim)
    lock.release()


def test_the_gpu_of_a_container_is_found(
    accept: Callable[..., subprocess.Popen[str]], shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim.set(1, mig=1)
    shim.set_text(1, uuid="GPU-given")
    assert "--gpu: must name one of 2 GPUs" in refusal(accept(gpu=""), shim, 2)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-given")
    assert "GPU-given: its clocks cannot be set" in refusal(accept(gpu=""), shim)


def test_a_gpu_that_is_not_there_is_an_error(accept: Callable[..., subprocess.Popen[str]], shim: Shim) -> None:
    assert "neither the UUID nor the index" in refusal(accept(gpu="7"), shim, 2)
    assert "a GPU is named twice" in refusal(accept("--other-gpus=0"), shim, 2)


def test_the_node_s_agent_waits_while_a_run_holds_the_journal(journal: Path) -> None:
    """The lock is the agent's own."""
    first, second = JournalLock(journal), JournalLock(journal)
    assert first.take()
    assert not second.take()
    first.release()
    assert second.take()
    second.release()
