"""The process at the other end of a local socket, and the pod that it runs in, as the kernel reports them.

SO_PEERCRED gives the process that connected; ``/proc/<pid>/cgroup``, which the kernel writes, gives its pod. Nothing
that the peer sends is trusted. ``proc_root`` needs ``<pid>/cgroup`` and ``<pid>/stat`` as Linux writes them; the agent
must share the host's pid namespace (``hostPID: true``).
"""

from __future__ import annotations

import os
import re
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perseus_agent.errors import PeerRefused, PeerUnknown

MAX_CGROUP_BYTES: Final = 65_536
SO_PEERPIDFD: Final = 77  # Linux 6.5; socket has no name for it yet
_CREDENTIALS: Final = struct.Struct("3i")

_UID: Final = r"[0-9a-f]{8}(?P<dash>[-_]?)[0-9a-f]{4}(?P=dash)[0-9a-f]{4}(?P=dash)[0-9a-f]{4}(?P=dash)[0-9a-f]{12}"
_POD: Final = re.compile(
    rf"pod(?P<cgroupfs>{_UID})"  # kubepods/burstable/pod<uid>
    rf"|(?:[a-z0-9]+-)*kubepods(?:-burstable|-besteffort)?-pod(?P<systemd>{_UID.replace('dash', 'bar')})\.slice"
)
"""A path segment that is a pod's cgroup. Static pods have a hash of 32 digits for a UID; kind puts ``kubelet-`` in
front."""
_CONTAINER: Final = re.compile(r"(?:(?:cri-containerd|crio|docker)-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")


@dataclass(frozen=True)
class PodProcess:
    """Where a process runs, from the kernel."""

    pod_uid: str
    container_id: str | None
    """None where the runtime's naming is unknown."""


@dataclass(frozen=True)
class Peer:
    """The process that opened a connection."""

    pid: int
    user_id: int
    start_ticks: int
    """When the process started (clock ticks after boot): with the pid, a name that is never used twice."""
    process: PodProcess
    pidfd: int | None
    """Readable once the process has exited, even if a child keeps the connection open. The holder of this value
    closes it. None on kernels before 6.5."""


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a connected Unix socket."""
    pid, user_id, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, user_id


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end of a connected Unix socket; 0: it is outside the agent's pid namespace."""
    return peer_credentials(connection)[0]


def identify_peer(connection: socket.socket, proc_root: Path = Path("/proc")) -> Peer:
    """The peer of a connected Unix socket.

    Raises:
        PeerRefused: it is in no pod, in more than one, or gone.
        PeerUnknown: /proc cannot be read now.
    """
    pid, user_id = peer_credentials(connection)
    if pid == 0:
        raise PeerRefused("the process is outside the agent's pid namespace: the agent needs hostPID: true")
    pidfd = _peer_pidfd(connection)
    try:
        start_ticks = _start_ticks(proc_root, pid)
        process = parse_cgroup(_read(proc_root, pid, "cgroup"))
        # A pid is free for others once its process is reaped: if that happened, what was read may be a stranger's.
        if _start_ticks(proc_root, pid) != start_ticks or (pidfd is not None and _exited(pidfd)):
            raise PeerRefused(f"process {pid} has gone")
    except BaseException:
        if pidfd is not None:
            os.close(pidfd)
        raise
    return Peer(pid, user_id, start_ticks, process, pidfd)


def parse_cgroup(text: str) -> PodProcess:
    """Pod and container from ``/proc/<pid>/cgroup``: version 1 or 2, systemd or cgroupfs, containerd or CRI-O.

    All lines that name a pod must name the same one, and a path that holds two pods is refused: a pod that may write
    below its own cgroup could otherwise make a directory with another pod's name and move there.

    Raises:
        PeerRefused: no pod, or no agreement.
    """
    pods: set[str] = set()
    containers: set[str] = set()
    for line in text.splitlines():
        _, _, path = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        segments = re.split("[/:]", path)
        for position, segment in enumerate(segments):
            pod = _POD.fullmatch(segment)
            if pod is None:
                continue
            pods.add((pod["cgroupfs"] or pod["systemd"]).replace("_", "-"))
            for inner in segments[position + 1 :]:
                container = _CONTAINER.fullmatch(inner)
                if container is not None:
                    containers.add(container["id"])
                    break
    if not pods:
        raise PeerRefused("the process is in no pod")
    if len(pods) > 1 or len(containers) > 1:
        raise PeerRefused("the process is in more than one pod or container")
    return PodProcess(pods.pop(), containers.pop() if containers else None)


def _peer_pidfd(connection: socket.socket) -> int | None:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:  # an older kernel, or the process has been reaped, which reading /proc will find out
        return None


def _exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _start_ticks(proc_root: Path, pid: int) -> int:
    """Field 22 of stat; the second, the command's name, may hold anything, parentheses too."""
    try:
        return int(_read(proc_root, pid, "stat").rpartition(")")[2].split()[19])
    except (IndexError, ValueError):
        raise PeerUnknown(f"/proc/{pid}/stat cannot be understood") from None


def _read(proc_root: Path, pid: int, name: str) -> str:
    try:
        with (proc_root / str(pid) / name).open("rb") as file:
            data = file.read(MAX_CGROUP_BYTES + 1)
    except (FileNotFoundError, ProcessLookupError):
        raise PeerRefused(f"process {pid} has gone") from None
    except OSError as error:
        raise PeerUnknown(f"/proc/{pid}/{name} cannot be read: {error.strerror}") from error
    if len(data) > MAX_CGROUP_BYTES:
        raise PeerRefused(f"/proc/{pid}/{name} is longer than {MAX_CGROUP_BYTES} bytes")
    return data.decode(errors="replace")
