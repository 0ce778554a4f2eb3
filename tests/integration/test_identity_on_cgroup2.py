"""Whose process is at a socket, on real control groups of version 2: real directories, processes and ``/proc``.

A mount shows the machine's one hierarchy of version 2, beside hierarchies of version 1 if there are any.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perseus_agent.errors import PeerRefused
from perseus_agent.pods.identity import PodProcess, identify_peer, parse_cgroup

UID, OTHER = "6f0f3a9e-3c5b-4b36-9f3a-5d3f5d2c9c11", "11111111-2222-3333-4444-555555555555"
ID = "ab" * 32
_BURSTABLE = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
CONTAINERS = {
    "containerd, systemd": f"{_BURSTABLE}/cri-containerd-{ID}.scope",
    "containerd, cgroupfs": f"kubepods/burstable/pod{UID}/{ID}",
    "containerd, cgroupfs, guaranteed": f"kubepods/pod{UID}/{ID}",
    "CRI-O, systemd": f"{_BURSTABLE}/crio-{ID}.scope/container",
    "CRI-O, cgroupfs": f"kubepods/burstable/pod{UID}/crio-{ID}",
    "kind": f"kubelet.slice/kubelet-{_BURSTABLE.replace('/', '/kubelet-')}/cri-containerd-{ID}.scope",
    "an init system in the container": f"{_BURSTABLE}/cri-containerd-{ID}.scope/init.scope",
}
CONNECT = """
import socket, sys
input()
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
input()
"""
READ = """
import json, sys
from pathlib import Path
from perseus_agent.pods.identity import parse_cgroup
found = parse_cgroup(Path(f"/proc/{sys.argv[1]}/cgroup").read_text())
print(json.dumps([found.pod_uid, found.container_id]))
"""


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A group of our own, in which others are made."""
    mounted = tmp_path_factory.mktemp("cgroup2")
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "cgroup2", "none", mounted], check=False).returncode:
        pytest.skip("control groups of version 2 cannot be mounted here")
    own = mounted / f"perseus-test-{os.getpid()}"
    own.mkdir()
    yield own
    for folder, _, _ in os.walk(own, topdown=False):
        os.rmdir(folder)
    subprocess.run(["umount", mounted], check=True)


@contextlib.contextmanager
def process_in(group: Path, path: Path) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A process of a group, and the connection that it has opened."""
    group.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(30)
        command = [sys.executable, "-c", CONNECT, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            (group / "cgroup.procs").write_text(str(process.pid))
            process.stdin.write("\n")
            process.stdin.flush()
            connection, _ = listener.accept()
            with connection:
                yield process, connection
            process.stdin.close()
            process.wait(PATIENCE_S)


@pytest.mark.parametrize("path", CONTAINERS.values(), ids=CONTAINERS)
def test_a_process_is_known_by_its_groups(groups: Path, tmp_path: Path, path: str) -> None:
    with process_in(groups / path, tmp_path / "s") as (process, connection):
        peer = identify_peer(connection)
        assert (peer.pid, peer.process) == (process.pid, PodProcess(UID, ID))
        lines = Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
        alone = "\n".join(line for line in lines if line.startswith("0::"))
        assert parse_cgroup(alone) == PodProcess(UID, ID), "where there is no version 1"
        if peer.pidfd is not None:
            os.close(peer.pidfd)


def test_an_agent_in_a_namespace_of_groups_sees_the_same(groups: Path, tmp_path: Path) -> None:
    """As a container that is not privileged: other pods' paths then begin above its own."""
    own = groups / f"kubepods/burstable/pod{OTHER}/{'cd' * 32}"
    own.mkdir(parents=True)
    with process_in(groups / CONTAINERS["containerd, cgroupfs"], tmp_path / "s") as (process, _):
        enter = f'echo $$ > {own}/cgroup.procs; exec unshare --cgroup "$0" -c "$1" {process.pid}'
        read = subprocess.run(["sh", "-c", enter, sys.executable, READ], capture_output=True, text=True, check=True)
    assert json.loads(read.stdout) == [UID, ID]


def test_a_process_that_makes_a_group_with_the_name_of_another_pod_is_refused(groups: Path, tmp_path: Path) -> None:
    inner = groups / CONTAINERS["containerd, systemd"] / f"pod{OTHER}" / ("cd" * 32)
    with process_in(inner, tmp_path / "s") as (_, connection), pytest.raises(PeerRefused, match="more than one pod"):
        identify_peer(connection)


@pytest.mark.parametrize("path", ["system.slice/sshd.service", "kubepods.slice/kubepods-burstable.slice"])
def test_a_process_of_no_pod_is_refused(groups: Path, tmp_path: Path, path: str) -> None:
    with process_in(groups / path, tmp_path / "s") as (_, connection), pytest.raises(PeerRefused, match="in no pod"):
        identify_peer(connection)
