"""Pod and container of a process, from cgroup paths as runtimes really write them, and from real sockets."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.errors import PeerRefused, PeerUnknown
from perseus_agent.pods import identity
from perseus_agent.pods.identity import PodProcess, identify_peer, parse_cgroup

UID = "2c48913c-b29f-11e7-9350-020968147796"
SYSTEMD_UID = UID.replace("-", "_")
STATIC_UID = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
CID = "9bca8d63d5fa610783847915bcff0ecac1273e5b4bed3f6fa1b07350e0135961"
OTHER_UID = "11111111-b29f-11e7-9350-020968147796"
OTHER_CID = "a" * 64

SHAPES = {
    "v2 systemd containerd, burstable": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{CID}.scope",
        UID,
        CID,
    ),
    "v2 systemd containerd, guaranteed": (
        f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{CID}.scope",
        UID,
        CID,
    ),
    "v2 systemd CRI-O, best effort": (
        f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD_UID}.slice/crio-{CID}.scope",
        UID,
        CID,
    ),
    "v2 CRI-O with crun's own group below": (
        f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/crio-{CID}.scope/container",
        UID,
        CID,
    ),
    "v2 docker shim": (f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/docker-{CID}.scope", UID, CID),
    "v2 cgroupfs, burstable": (f"0::/kubepods/burstable/pod{UID}/{CID}", UID, CID),
    "v2 cgroupfs, guaranteed": (f"0::/kubepods/pod{UID}/{CID}", UID, CID),
    "v2 cgroupfs, static pod": (f"0::/kubepods/burstable/pod{STATIC_UID}/{CID}", STATIC_UID, CID),
    "v2 systemd, static pod": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC_UID}.slice/cri-containerd-{CID}.scope",
        STATIC_UID,
        CID,
    ),
    "v2 private cgroup namespace, systemd": (
        f"0::/../../kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{CID}.scope",
        UID,
        CID,
    ),
    "v2 private cgroup namespace, cgroupfs": (f"0::/../../pod{UID}/{CID}", UID, CID),
    "v2 kind": (
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
        f"kubelet-kubepods-besteffort-pod{SYSTEMD_UID}.slice/cri-containerd-{CID}.scope",
        UID,
        CID,
    ),
    "v1 kind in docker": (
        f"12:cpu,cpuacct:/docker/{OTHER_CID}/kubelet/kubepods/besteffort/pod{UID}/{CID}\n"
        f"1:name=systemd:/docker/{OTHER_CID}/kubelet/kubepods/besteffort/pod{UID}/{CID}\n",
        UID,
        CID,
    ),
    "v1 cgroupfs with controllers elsewhere": (
        f"11:hugetlb:/kubepods/burstable/pod{UID}/{CID}\n10:devices:/kubepods/burstable/pod{UID}/{CID}\n"
        "2:freezer:/\n1:name=systemd:/system.slice/containerd.service\n0::/\n",
        UID,
        CID,
    ),
    "v1 systemd": (
        f"11:memory:/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{CID}.scope\n0::/\n",
        UID,
        CID,
    ),
    "containerd's colon form": (
        f"0::/system.slice/containerd.service/kubepods-besteffort-pod{SYSTEMD_UID}.slice:cri-containerd:{CID}",
        UID,
        CID,
    ),
    "a runtime that is not known": (f"0::/kubepods/pod{UID}/sandbox-7", UID, None),
    "a pod's own group": (f"0::/kubepods/pod{UID}", UID, None),
}


@pytest.mark.parametrize(("text", "uid", "container"), SHAPES.values(), ids=SHAPES.keys())
def test_a_path_as_runtimes_write_it_names_pod_and_container(text: str, uid: str, container: str | None) -> None:
    assert parse_cgroup(text) == PodProcess(uid, container)


REFUSED = {
    "nothing": "",
    "a login session": "0::/user.slice/user-1000.slice/session-3.scope",
    "plain docker": f"0::/docker/{CID}",
    "CRI-O seen from its own pod": f"0::/../crio-{CID}.scope",
    "not a UID": "0::/kubepods/podcast/" + CID,
    "a UID with something behind it": f"0::/kubepods/pod{UID}x/{CID}",
    "a UID with something in front of it": f"0::/kubepods/mypod{UID}/{CID}",
    "a systemd slice of something else": f"0::/evil-pod{SYSTEMD_UID}.slice/{CID}",
    "a short UID": f"0::/kubepods/pod{UID[:-1]}/{CID}",
    "a container's name that spells a pod": f"0::/system.slice/run-kubepods-pod{SYSTEMD_UID}.slice.scope",
    "a deleted group": f"0::/kubepods/pod{UID} (deleted)",
    "no hierarchy": f"/kubepods/pod{UID}/{CID}",
    "binary": "\x00\x01\ufffd",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED.keys())
def test_anything_else_is_in_no_pod(text: str) -> None:
    with pytest.raises(PeerRefused, match="in no pod"):
        parse_cgroup(text)


FORGED = {
    "a pod below a pod": f"0::/kubepods/pod{UID}/{CID}/kubepods/pod{OTHER_UID}/{OTHER_CID}",
    "a pod below a container, systemd": (
        f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{CID}.scope/"
        f"kubepods-pod{OTHER_UID.replace('-', '_')}.slice/cri-containerd-{OTHER_CID}.scope"
    ),
    "lines that disagree on the pod": f"2:cpu:/kubepods/pod{UID}/{CID}\n1:memory:/kubepods/pod{OTHER_UID}/{CID}\n",
    "lines that disagree on the container": (
        f"2:cpu:/kubepods/pod{UID}/{CID}\n1:memory:/kubepods/pod{UID}/{OTHER_CID}\n"
    ),
}


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED.keys())
def test_a_process_in_two_pods_is_in_none(text: str) -> None:
    with pytest.raises(PeerRefused, match="more than one pod or container"):
        parse_cgroup(text)


@given(st.text(alphabet="0123456789abcdef-_/:.\nkubepods", max_size=300))
def test_any_text_is_a_pod_or_refused(text: str) -> None:
    try:
        found = parse_cgroup(text)
    except PeerRefused:
        return
    assert len(found.pod_uid.replace("-", "")) == 32


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


def proc_tree(root: Path, pid: int, cgroup: str) -> Path:
    """A /proc with one process: its real stat and a cgroup of our choice."""
    folder = root / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(Path(f"/proc/{pid}/stat").read_text())
    (folder / "cgroup").write_text(cgroup)
    return root


def test_the_peer_is_who_the_kernel_says(pair: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    peer = identify_peer(pair[0], proc_tree(tmp_path, os.getpid(), SHAPES["v2 cgroupfs, guaranteed"][0]))
    assert (peer.pid, peer.user_id, peer.process) == (os.getpid(), os.getuid(), PodProcess(UID, CID))
    assert peer.start_ticks > 0
    if peer.pidfd is not None:
        os.close(peer.pidfd)


def test_a_process_that_is_in_no_pod_is_refused_and_nothing_leaks(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    root = proc_tree(tmp_path, os.getpid(), REFUSED["a login session"])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerRefused, match="in no pod"):
        identify_peer(pair[0], root)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_with_spaces_and_parentheses_does_not_shift_the_fields(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    root = proc_tree(tmp_path, os.getpid(), SHAPES["v2 cgroupfs, guaranteed"][0])
    fields = " ".join(["S", *map(str, range(4, 53))])
    (root / str(os.getpid()) / "stat").write_text(f"{os.getpid()} (a) b (c) 9 9) {fields}\n")
    peer = identify_peer(pair[0], root)
    assert peer.start_ticks == 22
    if peer.pidfd is not None:
        os.close(peer.pidfd)


def test_a_peer_of_another_pid_namespace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Outside:
        def getsockopt(self, level: int, option: int, size: int = 0) -> bytes:
            assert option == socket.SO_PEERCRED
            return struct.pack("3i", 0, 1000, 1000)

    with pytest.raises(PeerRefused, match="hostPID"):
        identify_peer(Outside())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stat", "cgroup", "error"),
    [
        (None, SHAPES["v2 cgroupfs, guaranteed"][0], PeerRefused),
        ("garbage", SHAPES["v2 cgroupfs, guaranteed"][0], PeerUnknown),
        ("", None, PeerRefused),
        ("", "x" * (identity.MAX_CGROUP_BYTES + 1), PeerRefused),
    ],
)
def test_a_proc_that_does_not_answer_is_never_a_pod(
    pair: tuple[socket.socket, socket.socket],
    tmp_path: Path,
    stat: str | None,
    cgroup: str | None,
    error: type[Exception],
) -> None:
    root = proc_tree(tmp_path, os.getpid(), cgroup or "")
    folder = root / str(os.getpid())
    if stat is None:
        (folder / "stat").unlink()
    elif stat:
        (folder / "stat").write_text(stat)
    if cgroup is None:
        (folder / "cgroup").unlink()
    with pytest.raises(error):
        identify_peer(pair[0], root)


def test_a_proc_that_cannot_be_read_is_unknown_and_not_refused_for_good(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    root = proc_tree(tmp_path, os.getpid(), "")
    (root / str(os.getpid()) / "cgroup").unlink()
    (root / str(os.getpid()) / "cgroup").mkdir()
    with pytest.raises(PeerUnknown, match="cannot be read"):
        identify_peer(pair[0], root)


CONNECT_AND = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); {then}
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        yield listener


def test_a_pid_that_was_used_again_while_it_was_read_is_refused(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = proc_tree(tmp_path, os.getpid(), SHAPES["v2 cgroupfs, guaranteed"][0])
    starts = iter([100, 200])
    monkeypatch.setattr(identity, "_start_ticks", lambda *_: next(starts))
    with pytest.raises(PeerRefused, match="has gone"):
        identify_peer(pair[0], root)


def test_a_process_that_left_before_it_was_identified_is_refused(listener: socket.socket, tmp_path: Path) -> None:
    """Its /proc entry, kept here as if a stranger had got the pid, must not count."""
    child = subprocess.Popen(
        [sys.executable, "-c", CONNECT_AND.format(then="sys.stdin.read()"), listener.getsockname()],
        stdin=subprocess.PIPE,
    )
    connection, _ = listener.accept()
    with connection:
        root = proc_tree(tmp_path / "proc", child.pid, SHAPES["v2 cgroupfs, guaranteed"][0])
        child.communicate()
        if not has_peer_pidfd(connection):
            pytest.skip("this kernel has no SO_PEERPIDFD: a pid used again between connect and accept is not noticed")
        with pytest.raises(PeerRefused, match="has gone"):
            identify_peer(connection, root)


def test_the_pidfd_shows_that_the_process_ended_though_its_connection_is_open(
    listener: socket.socket, tmp_path: Path
) -> None:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            # A grandchild that never runs Python code keeps the connection open for ever.
            CONNECT_AND.format(
                then="s.set_inheritable(True); import subprocess;"
                "print(subprocess.Popen(['sleep', '60'], close_fds=False, stdout=2).pid, flush=True); sys.stdin.read()"
            ),
            listener.getsockname(),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    connection, _ = listener.accept()
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    try:
        root = proc_tree(tmp_path / "proc", child.pid, SHAPES["v2 cgroupfs, guaranteed"][0])
        if not has_peer_pidfd(connection):
            pytest.skip("this kernel has no SO_PEERPIDFD")
        peer = identify_peer(connection, root)
        assert peer.pidfd is not None
        assert not select.select([peer.pidfd], [], [], 0)[0]
        child.communicate()
        assert select.select([peer.pidfd], [], [], 10)[0]
        assert not select.select([connection], [], [], 0)[0]
        os.close(peer.pidfd)
    finally:
        os.kill(grandchild, 9)
        connection.close()
        child.communicate()


def has_peer_pidfd(connection: socket.socket) -> bool:
    try:
        os.close(connection.getsockopt(socket.SOL_SOCKET, identity.SO_PEERPIDFD))
    except OSError as error:
        return error.errno != 92  # ENOPROTOOPT; any other error is about the process
    return True
