"""The control groups of a cluster: one group for the cluster, and below it one for each node.

With version 1 of control groups they exist in every hierarchy, with version 2 in the single one. Kubelets make their
groups below the node's; ``remove`` takes all of them. This module never changes groups of other programs, with one
exception: on version 2 it makes the root delegate controllers, which has no effect on the other groups below it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from local_cluster.errors import CannotRun, StartFailed

_MOUNT = Path("/sys/fs/cgroup")
_NEEDED = ("cpu", "cpuset", "memory", "pids")
_WEIGHT = 32
"""CPU weight of a cluster, in ordinary processes. With the default weight all pods together would count as one process,
and would starve beside other programs on a busy machine."""


def is_v2() -> bool:
    return (_MOUNT / "cgroup.controllers").exists()


def _roots() -> list[Path]:
    """Return the root folder of every hierarchy; ``cpu`` may be a link to ``cpu,cpuacct``, so links are resolved."""
    if is_v2():
        return [_MOUNT]
    if not _MOUNT.is_dir():
        return []
    return sorted({each.resolve() for each in _MOUNT.iterdir() if (each / "cgroup.procs").exists()})


def require() -> None:
    """Check that this process can use the controllers that a kubelet needs.

    Raises:
        CannotRun: a controller is missing, or cannot be delegated, or the file system is read-only.
    """
    if is_v2():
        available = (_MOUNT / "cgroup.controllers").read_text(encoding="ascii").split()
    else:
        available = [each for each in _NEEDED if (_MOUNT / each / "cgroup.procs").exists()]
    if missing := [each for each in _NEEDED if each not in available]:
        raise CannotRun(f"no control groups for {', '.join(missing)} below {_MOUNT}")
    if is_v2():
        try:
            _delegate(_MOUNT)
        except OSError as refused:
            raise CannotRun(f"the control groups in {_MOUNT} cannot be delegated: {refused.strerror}") from refused
    for root in _roots():
        if not os.access(root, os.W_OK):
            raise CannotRun(f"{root} is read-only")


def make(cluster: str, node: str) -> str:
    """Make the group of a node, ready for a kubelet.

    Returns:
        Path of the group, as the value of the kubelet's ``cgroupRoot``.
    """
    weights = {"cpu.weight": 100 * _WEIGHT} if is_v2() else {"cpu.shares": 1024 * _WEIGHT}
    for root in _roots():
        for group in (root / cluster, root / cluster / node):
            group.mkdir(exist_ok=True)
            if is_v2():
                _delegate(group)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if not is_v2() and (group / setting).exists():  # empty in a new group of v1: nothing can run
                    (group / setting).write_bytes((group.parent / setting).read_bytes())
        for setting, weight in weights.items():
            if (root / cluster / setting).exists():
                (root / cluster / setting).write_text(str(weight), encoding="ascii")
    return f"/{cluster}/{node}"


def _delegate(group: Path) -> None:
    available = (group / "cgroup.controllers").read_text(encoding="ascii").split()
    delegated = (group / "cgroup.subtree_control").read_text(encoding="ascii").split()
    for controller in available:
        if controller not in delegated:
            with contextlib.suppress(OSError) if controller not in _NEEDED else contextlib.nullcontext():
                (group / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")


def remove(cluster: str) -> None:
    """Remove the cluster's groups. Its processes have ended, but the kernel may need a moment to free their groups.

    Raises:
        StartFailed: a group is still in use after 30 s.
    """
    deadline = time.monotonic() + 30
    while left := [group for group in groups(cluster) if not _removed(group)]:
        if time.monotonic() > deadline:
            raise StartFailed(f"control groups still in use: {', '.join(map(str, left[:3]))}")
        time.sleep(0.1)


def groups(cluster: str) -> list[Path]:
    """Return all groups of a cluster, inner groups before outer ones."""
    found = []
    for root in _roots():
        for folder, _, _ in os.walk(root / cluster, topdown=False):
            found.append(Path(folder))
    return found


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
