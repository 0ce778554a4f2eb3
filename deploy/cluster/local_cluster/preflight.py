"""Checks what this machine must have to run a cluster: everything at once, and before anything is started.

Each missing thing is one sentence that says what to do. The checks change and install nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from local_cluster import cgroups
from local_cluster.errors import CannotRun
from local_cluster.machine import PATH

PACKAGES = {
    "runc": "runc",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mount": "mount",
}
"""Programs, and the Debian packages that contain them."""
_PLUGIN_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
_PLUGINS = ("ptp", "host-local", "loopback", "portmap")
_LEAST_MIB = 3 * 1024
_NAMESPACES = {"network": 0x40000000, "mount": 0x00020000, "process": 0x20000000}


def require(*, ipv6: bool = False) -> None:
    """Check that this machine can run a cluster.

    Args:
        ipv6: whether the cluster's addresses are IPv6.

    Raises:
        CannotRun: something is missing; the message lists all of it.
    """
    if sys.platform != "linux":
        raise CannotRun("a cluster needs Linux: its nodes are namespaces of the kernel")
    if os.geteuid() != 0:
        raise CannotRun("a cluster needs root, to make namespaces: use sudo")
    problems = []
    missing = sorted({package for program, package in PACKAGES.items() if not shutil.which(program, path=PATH)})
    without_plugins = [] if _plugins() else ["containernetworking-plugins"]
    if packages := " ".join([*without_plugins, *missing]):
        problems.append(f"not installed: {packages}; on Debian: apt-get install --no-install-recommends {packages}")
    try:
        cgroups.require()
    except CannotRun as without:
        problems.append(str(without))
    problems += [
        f"the kernel refuses a new {name} namespace" for name, flag in _NAMESPACES.items() if not _allows(flag)
    ]
    if not missing and (refused := _firewall_refuses("ip6" if ipv6 else "ip")):
        problems.append(f"nftables with NAT does not work in a network namespace: {refused}")
    if not missing and ipv6 and (refused := _refuses("ip", "address", "add", "fd00::1/64", "dev", "lo")):
        problems.append(f"a network namespace has no IPv6: {refused}")
    available_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    if available_mib < _LEAST_MIB:
        problems.append(f"{available_mib} MiB of memory: a cluster needs {_LEAST_MIB}")
    if problems:
        raise CannotRun("; ".join(problems))


def plugins() -> Path:
    """Return the folder of the CNI plugins.

    Raises:
        CannotRun: no folder has all plugins that a node needs.
    """
    if folder := _plugins():
        return folder
    raise CannotRun("not installed: containernetworking-plugins")


def _plugins() -> Path | None:
    folders = (one for one in _PLUGIN_FOLDERS if all((one / plugin).exists() for plugin in _PLUGINS))
    return next(folders, None)


def snapshotter(state: Path) -> str:
    """Return containerd's snapshotter for a folder: ``overlayfs``, or ``native`` where the file system cannot.

    The file system of a container is itself an overlay and usually cannot hold another; ``native`` copies the layers.
    """
    with tempfile.TemporaryDirectory(dir=state) as folder:
        for name in ("lower", "upper", "work", "merged"):
            Path(folder, name).mkdir()
        layers = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
        command = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", layers, f"{folder}/merged"]
        return "overlayfs" if subprocess.run(command, capture_output=True, check=False).returncode == 0 else "native"


def _allows(namespace: int) -> bool:
    # In a child process, because a process cannot leave the namespace again.
    script = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(int(sys.argv[1])) != 0)"
    return subprocess.run([sys.executable, "-I", "-S", "-c", script, str(namespace)], check=False).returncode == 0


def _firewall_refuses(family: str) -> str:
    rules = (
        f"add table {family} t; add chain {family} t c {{ type nat hook postrouting priority 100; }}; "
        f"add rule {family} t c numgen random mod 100 < 1 masquerade"
    )
    return _refuses("nft", rules)


def _refuses(*command: str) -> str:
    """Run a command in a new network namespace; return the first line of its error, or nothing if it succeeds."""
    alone = ["unshare", "--net", *command]
    tried = subprocess.run(alone, capture_output=True, text=True, check=False, env={"PATH": PATH})
    return tried.stderr.strip().splitlines()[0] if tried.returncode != 0 else ""
