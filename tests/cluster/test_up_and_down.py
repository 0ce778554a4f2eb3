"""A cluster is made, repaired by a second `up`, and removed completely, wherever an `up` was killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.waiting import eventually

from local_cluster import cgroups, preflight
from local_cluster.cluster import Cluster
from local_cluster.errors import CannotRun, NotUp
from local_cluster.machine import CONTROL_PLANE, processes, running
from local_cluster.preflight import require

CODE = Path(__file__).resolve().parents[2] / "deploy" / "cluster"
COMMAND = [sys.executable, str(CODE / "cluster.py")]
PATIENCE_S = 240


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """A separate cluster, not yet made; whatever a test leaves of it is removed."""
    try:
        require()
        cluster = Cluster(tmp_path / "state")
        _ = cluster.assets
    except CannotRun as error:
        pytest.skip(f"no cluster on this machine: {error}")
    yield cluster
    cluster.down()


def run_cluster(cluster: Cluster, *words: str, command: Sequence[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    command = [*command, "--state", str(cluster.state), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def outside() -> tuple[str, ...]:
    """Return the machine's own network configuration, which no cluster may change."""
    return tuple(
        subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout
        for words in (("-brief", "address"), ("route",), ("netns",))
    )


KINDS = ("pid", "net")
"""Kinds of namespaces by which the processes of a machine are found."""


def namespaces(cluster: Cluster, *kinds: str) -> Iterator[Path]:
    """Return the namespaces of the cluster's machines."""
    machines = [cluster.control_plane.pid]
    with contextlib.suppress(NotUp):
        machines += [machine.pid for machine in cluster.nodes]
    return (Path(f"/proc/{pid}/ns/{kind}") for pid in machines if pid for kind in kinds)


@contextlib.contextmanager
def held(cluster: Cluster) -> Iterator[set[str]]:
    """Return the names of the namespaces, and keep them open, so that the kernel does not use the names again."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(space.open("rb")) for space in namespaces(cluster, *KINDS)]
        yield {os.readlink(f"/proc/self/fd/{file.fileno()}") for file in files}


def remains(cluster: Cluster, spaces: set[str]) -> list[str]:
    """Return what exists of a cluster: processes, mounts, namespaces, control groups and files."""
    found = []
    for pid, arguments in processes():
        theirs = set()
        for kind in KINDS:
            try:
                theirs.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
            except OSError:
                continue
        if running(pid) and (theirs & spaces or str(cluster.state) in arguments):
            found.append(f"process {pid}: {' '.join(arguments)[:120]}")
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    found += [f"mount {line}" for line in mounts if str(cluster.state) in line]
    found += [f"control group {group}" for group in cgroups.groups(cluster.group)]
    return found + ([f"files in {cluster.state}"] if cluster.state.exists() else [])


@pytest.mark.timeout(600)
def test_a_cluster_runs_pods_is_repaired_and_leaves_nothing(own: Cluster, tmp_path: Path) -> None:
    before = outside()
    made = run_cluster(own, "up", "--nodes", "1")
    assert made.returncode == 0, made.stderr
    assert f"export KUBECONFIG={own.kubeconfig}" in made.stdout
    own.control_plane.spawn("failing", ["date"])
    spaces = {space.readlink() for space in namespaces(own, *KINDS, "mnt")}
    assert len(spaces) == 6, "two machines with three namespaces each"

    runs_a_pod(own)
    assert own.kubectl("get", "service", "kubernetes", "-o", "jsonpath={.spec.clusterIP}") == "10.96.0.1"
    assert resolved(own) == "10.96.0.1"

    started = {name: own.machine("node-1").find(own.assets.joinpath(name).as_posix()) for name in ("kubelet",)}
    assert own.signal("node-1", "containerd", signal.SIGKILL) == 1
    assert own.signal(CONTROL_PLANE, "etcd", signal.SIGKILL) == 1
    manager = own.assets.joinpath("kube-controller-manager").as_posix()
    (ended,) = own.control_plane.find(manager)
    os.kill(ended, signal.SIGKILL)
    again = lambda: [pid for pid in own.control_plane.find(manager) if pid != ended]  # noqa: E731
    eventually(again, "a part that ended by itself was not started again")
    assert not own.running(CONTROL_PLANE, "etcd"), "a part that was killed on purpose is not started again"
    eventually(lambda: not own.control_plane.supervises("date"), "a program that cannot run is still started again")
    assert len(own.control_plane.log("failing").read_text().splitlines()) == 5
    repaired = run_cluster(own, "up", "--nodes", "1")
    assert repaired.returncode == 0, repaired.stderr
    assert own.running("node-1", "containerd")
    assert own.machine("node-1").find(own.assets.joinpath("kubelet").as_posix()) == started["kubelet"]
    assert "sleeper" in own.kubectl("get", "pods"), "etcd was started from its disk"
    for other in (["--nodes", "2"], ["--nodes", "1", "--ipv6"]):
        assert "has 1 nodes and IPv4: take it down first" in run_cluster(own, "up", *other).stderr

    assert outside() == before, "the machine's own network is unchanged"
    another_checkout = [sys.executable, str(shutil.copytree(CODE, tmp_path / "copy") / "cluster.py")]
    with held(own) as names:
        assert run_cluster(own, "down", command=another_checkout).returncode == 0
        assert remains(own, names) == []
    assert outside() == before
    assert run_cluster(own, "down").returncode == 0, "a second `down` is no error"


@pytest.mark.timeout(600)
def test_a_cluster_with_only_ipv6(own: Cluster) -> None:
    try:
        require(ipv6=True)
    except CannotRun as error:
        pytest.skip(f"no IPv6 cluster on this machine: {error}")
    before = outside()
    made = run_cluster(own, "up", "--nodes", "1", "--ipv6")
    assert made.returncode == 0, made.stderr
    runs_a_pod(own)
    addresses = own.kubectl("get", "pods,services,nodes", "-A", "-o", "jsonpath={..podIP} {..clusterIP} {..address}")
    assert "fd00:10:88:1::" in addresses
    assert not re.search(r"\d+\.\d+\.\d+\.\d+", addresses), "no IPv4 address"
    assert resolved(own) == "fd00:10:96::1"
    with held(own) as names:
        assert run_cluster(own, "down").returncode == 0
        assert remains(own, names) == []
    assert outside() == before


def runs_a_pod(cluster: Cluster) -> None:
    """Check that the cluster runs a pod, and that logs can be read, which the kubelet's server provides."""
    cluster.kubectl("run", "sleeper", "--image=localhost/pause:1", "--image-pull-policy=Never")
    cluster.kubectl("wait", "pod/sleeper", "--for=condition=Ready", "--timeout=120s")
    assert "CoreDNS" in cluster.kubectl("-n", "kube-system", "logs", "deployment/coredns")


def resolved(cluster: Cluster) -> str:
    """Return the address of the API server's Service, by a DNS query from the node through kube-proxy."""
    return cluster.machine("node-1").run("python3", "-c", _RESOLVE, cluster.network.dns).stdout.strip()


_RESOLVE = """
import socket, sys, time
name = "kubernetes.default.svc.cluster.local"
words = b"".join(bytes([len(w)]) + w.encode() for w in name.split(".")) + b"\\0"
family, kind, length = (socket.AF_INET6, 28, 16) if ":" in sys.argv[1] else (socket.AF_INET, 1, 4)
query = socket.socket(family, socket.SOCK_DGRAM)
query.settimeout(1)
for attempt in range(60):  # kube-proxy may still be writing its rules, and refuses until it has an endpoint
    try:
        query.sendto(bytes([0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]) + words + bytes([0, kind, 0, 1]), (sys.argv[1], 53))
        print(socket.inet_ntop(family, query.recv(512)[-length:]))
        break
    except OSError:
        time.sleep(1)
"""

POINTS: dict[str, Callable[[Cluster], bool]] = {
    "its folder exists": lambda own: own.state.exists(),
    "its keys are written": lambda own: own.kubeconfig.exists(),
    "its first machine runs": lambda own: own.control_plane.pid is not None,
    "etcd runs": lambda own: own.running(CONTROL_PLANE, "etcd"),
    "a container runtime runs": lambda own: own.running("node-1", "containerd"),
    "a kubelet runs": lambda own: own.running("node-1", "kubelet"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", POINTS)
def test_down_removes_everything_after_a_killed_up(own: Cluster, point: str) -> None:
    before = outside()
    command = [*COMMAND, "--state", str(own.state), "up", "--nodes", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as up:

        def reached() -> bool:
            try:
                return POINTS[point](own)
            except NotUp:
                return False

        there = lambda: reached() or up.poll() is not None  # noqa: E731
        eventually(there, f"`up` did not reach the point at which {point}", every_s=0.05, patience_s=PATIENCE_S)
        os.killpg(up.pid, signal.SIGKILL)
    assert up.returncode == -signal.SIGKILL, "it was killed before its end"
    with held(own) as names:
        assert remains(own, names), "something exists to be removed"
        assert run_cluster(own, "down").returncode == 0
        assert remains(own, names) == []
    assert outside() == before


@pytest.mark.timeout(600)
def test_an_up_after_an_interrupted_down_makes_a_new_cluster(own: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are left are not used again, because keys, disks and description must match."""
    assert run_cluster(own, "up", "--nodes", "1").returncode == 0
    original = own.kubeconfig.read_text()

    def killed(folder: Path) -> None:
        shutil.move(folder / "node-1", folder / "gone")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            own.down()
    assert run_cluster(own, "up", "--nodes", "1").returncode == 0
    assert own.kubeconfig.read_text() != original
    assert not (own.state / "gone").exists()


def test_missing_requirements_are_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotRun, match=r"^a cluster needs root, to make namespaces: use sudo$"):
        Cluster(tmp_path / "state").up(1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(preflight, "PATH", "/nonexistent")
    monkeypatch.setattr(preflight, "_PLUGIN_FOLDERS", (tmp_path,))
    packages = "containernetworking-plugins conntrack iproute2 mount nftables runc util-linux"
    command = f"apt-get install --no-install-recommends {packages}"
    with pytest.raises(CannotRun, match=rf"^not installed: {packages}; on Debian: {command}"):
        Cluster(tmp_path / "state").up(1)
    assert not (tmp_path / "state").exists(), "nothing was started"
