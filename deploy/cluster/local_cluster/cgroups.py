"""The control groups of a cluster: one per node below one of the cluster, in every hierarchy (v1) or in the one (v2).

Used by ``cluster``. Kubelets make theirs below; removal takes all. Groups that are not ours are never touched, except
that on v2 the root is asked to delegate controllers, which changes nothing for its other groups.
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
"""How many processes of this machine a cluster counts for where processors are short: all its pods together would
count for one, and starve beside anything else that runs."""


def is_v2() -> bool:
    return (_MOUNT / "cgroup.controllers").exists()


def _roots() -> list[Path]:
    """The hierarchies; ``cpu`` may be a link to ``cpu,cpuacct``."""
    if is_v2():
        return [_MOUNT]
    if not _MOUNT.is_dir():
        return []
    return sorted({each.resolve() for each in _MOUNT.iterdir() if (each / "cgroup.procs").exists()})


def require() -> None:
    """Raises CannotRun: the kubelet's controllers are not there, or not ours to use."""
    if is_v2():
        there = (_MOUNT / "cgroup.controllers").read_text(encoding="ascii").split()
    else:
        there = [each for each in _NEEDED if (_MOUNT / each / "cgroup.procs").exists()]
    if missing := [each for each in _NEEDED if each not in there]:
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
    """The node's group, ready for a kubelet; returns its path as a kubelet's ``cgroupRoot``."""
    weights = {"cpu.weight": 100 * _WEIGHT} if is_v2() else {"cpu.shares": 1024 * _WEIGHT}
    for root in _roots():
        for group in (root / cluster, root / cluster / node):
            group.mkdir(exist_ok=True)
            if is_v2():
                _delegate(group)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if not is_v2() and (group / setting).exists():  # a new group of v1 has none, and runs nothing
                    (group / setting).write_bytes((group.parent / setting).read_bytes())
        for setting, weight in weights.items():
            if (root / cluster / setting).exists():
                (root / cluster / setting).write_text(str(weight), encoding="ascii")
    return f"/{cluster}/{node}"


def _delegate(group: Path) -> None:
    there = (group / "cgroup.controllers").read_text(encoding="ascii").split()
    delegated = (group / "cgroup.subtree_control").read_text(encoding="ascii").split()
    for controller in there:
        if controller not in delegated:
            with contextlib.suppress(OSError) if controller not in _NEEDED else contextlib.nullcontext():
                (group / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")


def remove(cluster: str) -> None:
    """Remove the cluster's groups; its processes have been ended, but the kernel may take a moment to let go.

    Raises:
        StartFailed: some are still in use.
    """
    deadline = time.monotonic() + 30
    while left := [group for group in groups(cluster) if not _removed(group)]:
        if time.monotonic() > deadline:
            raise StartFailed(f"control groups still in use: {', '.join(map(str, left[:3]))}")
        time.sleep(0.1)


def groups(cluster: str) -> list[Path]:
    """All of them, those within others first."""
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
