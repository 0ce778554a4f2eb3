"""The API servers that end-to-end tests run against, and the features that each of them has.

A test requires a ``Feature``; where it is missing, the test is skipped with a sentence that names it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from perseus_sim.cluster.control_plane import ControlPlane, control_plane, find_assets
from perseus_sim.processes import Processes


class Feature(StrEnum):
    """What not every server has; the value completes "this server has no ..."."""

    CEL = "CEL rules"
    RBAC = "authentication and RBAC"
    CONTROLLERS = "controllers (service accounts, DaemonSets, garbage collection)"
    FAULTS = "processes that a test may kill and audit"


@dataclass(frozen=True)
class Server:
    """A server that answers, and that the bearer of the kubeconfig may do everything on."""

    name: str
    kubeconfig: Path
    features: frozenset[Feature]
    plane: ControlPlane | None = None
    """Its processes, where this program has started them."""


@contextmanager
def embedded_server(folder: Path) -> Iterator[Server]:
    """The embedded stand-in, as a process; starts in a moment, needs nothing.

    Raises:
        StartFailed: it did not start.
    """
    kubeconfig = folder / "kubeconfig"
    with Processes(folder) as processes:
        command = [sys.executable, "-m", "perseus_sim.apiserver", "--kubeconfig", str(kubeconfig)]
        processes.start("apiserver", command).wait_until(kubeconfig.exists)
        yield Server("embedded server", kubeconfig, frozenset())


@contextmanager
def real_server(folder: Path) -> Iterator[Server]:
    """A real Kubernetes: the cluster that KUBECONFIG_E2E names, else a new control plane on this machine.

    Raises:
        NoControlPlane: neither is there.
        StartFailed: the control plane did not start.
    """
    if given := os.environ.get("KUBECONFIG_E2E"):
        yield Server("cluster of KUBECONFIG_E2E", Path(given), frozenset(Feature) - {Feature.FAULTS})
        return
    with control_plane(find_assets(), folder) as plane:
        missing = set() if plane.has_controllers else {Feature.CONTROLLERS}
        yield Server("control plane", plane.kubeconfig, frozenset(Feature) - missing, plane)
