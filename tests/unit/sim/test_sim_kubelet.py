"""The kubelet's double against the agent's production code: who a process is, and which GPUs its pod holds."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus_agent.errors import KubeletUnavailable, PeerRefused
from perseus_agent.pods.identity import identify_peer
from perseus_agent.pods.pod_resources import PodResources
from perseus_sim.gpus.kubelet import AdmittedPod, KubeletDouble

UID = "0a1b2c3d-0000-4000-8000-123456789abc"
GPUS = ("GPU-00000000-0000-4000-8000-000000000001", "GPU-00000000-0000-4000-8000-000000000002")


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletDouble]:
    double = KubeletDouble(tmp_path)
    double.start()
    yield double
    double.stop()


def test_the_agent_reads_allocations_from_it(kubelet: KubeletDouble) -> None:
    now_s = 0.0
    resources = PodResources(str(kubelet.socket), clock_s=lambda: now_s)
    assert resources.allocation("default", "train-0") is None
    kubelet.admit(AdmittedPod(UID, "default", "train-0", GPUS))
    now_s = 10.0
    found = resources.allocation("default", "train-0")
    assert found is not None
    assert found.gpu_uuids == GPUS
    kubelet.stop()
    now_s = 20.0
    assert resources.allocation("default", "train-0") == found  # the last good answer stands
    with pytest.raises(KubeletUnavailable):
        resources.allocation("default", "train-1")
    resources.close()


def test_a_gpu_belongs_to_one_pod(kubelet: KubeletDouble) -> None:
    kubelet.admit(AdmittedPod(UID, "default", "train-0", GPUS))
    with pytest.raises(ValueError, match="belong to pod default/train-0"):
        kubelet.admit(AdmittedPod("another", "default", "train-1", GPUS[:1]))
    kubelet.remove(UID)
    kubelet.admit(AdmittedPod("another", "default", "train-1", GPUS[:1]))


def test_the_agent_finds_a_process_pod_from_its_control_group(kubelet: KubeletDouble, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        talk = f"import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect({path!r}); sys.stdin.read()"
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", talk], stdin=subprocess.PIPE) as process:
            connection, _ = listener.accept()
            with connection:
                with pytest.raises(PeerRefused):
                    identify_peer(connection, kubelet.proc_root)
                kubelet.place([process.pid], UID)
                peer = identify_peer(connection, kubelet.proc_root)
                assert (peer.pid, peer.process.pod_uid) == (process.pid, UID)
                process.kill()
                process.wait()
                with pytest.raises(PeerRefused):
                    identify_peer(connection, kubelet.proc_root)
