"""The control plane that tests start: its data survives its processes, and no process outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml
from kubernetes import client
from tests.waiting import PATIENCE_S, eventually

from perseus_sim.cluster.api_servers import Feature, Server
from perseus_sim.cluster.control_plane import NoControlPlane, control_plane, find_assets
from perseus_sim.processes import StartFailed

pytestmark = pytest.mark.e2e


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def gone(pid: int) -> bool:
    try:  # a zombie has ended, though its parent has not reaped it yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def assets() -> Path:
    try:
        return find_assets()
    except NoControlPlane as missing:
        pytest.skip(f"no control plane to start: {missing}")


@pytest.mark.needs(Feature.FAULTS)
@pytest.mark.parametrize("victim", ["kube-apiserver", "etcd"])
def test_what_was_written_survives_a_killed_process(server: Server, api: Any, namespace: str, victim: str) -> None:
    assert server.plane is not None
    core = client.CoreV1Api(api)
    core.create_namespaced_config_map(namespace, {"metadata": {"name": "kept"}, "data": {"plan": "7"}})
    server.plane.kill(victim)
    server.plane.start(victim)

    def read() -> bool:
        try:
            return core.read_namespaced_config_map("kept", namespace, _request_timeout=10).data == {"plan": "7"}
        except client.ApiException as error:
            if error.status < 500:
                raise
            return False  # the API server reconnects to etcd
        except urllib3.exceptions.HTTPError:  # or it does not answer meanwhile
            return False

    eventually(read)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_owner(assets: Path, tmp_path: Path, end: signal.Signals) -> None:
    kubeconfig = tmp_path / "out" / "kubeconfig"
    command = [sys.executable, "-m", "perseus_sim.cluster.control_plane", "--kubeconfig", str(kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert "serving on https://127.0.0.1:" in owner.stdout.readline()
        assert yaml.safe_load(kubeconfig.read_text())["current-context"]
        children = children_of(owner.pid)
        assert len(children) >= 2
        owner.send_signal(end)
        owner.wait(PATIENCE_S)
        eventually(lambda: all(gone(child) for child in children))
        if end != signal.SIGKILL:
            assert owner.returncode == 0
            assert not kubeconfig.exists()


def test_a_control_plane_that_cannot_start_reports_why_and_leaves_nothing(assets: Path, tmp_path: Path) -> None:
    broken = tmp_path / "assets"
    broken.mkdir()
    (broken / "etcd").symlink_to(assets / "etcd")
    (broken / "kube-apiserver").write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 2\n")
    (broken / "kube-apiserver").chmod(0o755)
    before = children_of(os.getpid())
    with (
        pytest.raises(StartFailed, match=r"kube-apiserver ended with code 2:\nno such flag"),
        control_plane(broken, tmp_path / "state"),
    ):
        pass
    assert set(children_of(os.getpid())) <= set(before)
