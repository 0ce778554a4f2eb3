"""Replicas of the operator on the cluster: who holds which shards, and faults of one of them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from faults import End, cut_off_from_all, nothing
from installation import PROGRAMS, SYSTEM, Installation, find
from kubernetes import client

from perseus_operator.replicas.shard import SHARDS, shard_lease


class Replicas:
    """The replicas of an installation, by the names of their pods."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._leases = client.CoordinationV1Api(installation.api)

    def holders(self) -> list[str]:
        """The pod that holds each shard, with the process in it; empty: none does."""
        found = self._leases.list_namespaced_lease(SYSTEM).items
        held = {lease.metadata.name: lease.spec.holder_identity or "" for lease in found}
        return [held.get(shard_lease(shard), "") for shard in range(SHARDS)]

    def even(self) -> bool:
        """Whether every ready replica holds its part, and nobody else holds any."""
        pods = self._installation.operators()
        counts = Counter(holder.rpartition("_")[0] for holder in self.holders())
        return set(counts) == {pod.metadata.name for pod in pods} and max(counts.values()) == -(-SHARDS // len(pods))

    def taken_after(self, pod: Any, struck: float) -> float:
        """Wait until none of the shards that a pod's process held is still its; the seconds since ``struck``."""
        name = pod.metadata.name
        before = {holder for holder in self.holders() if holder.startswith(f"{name}_")}
        gone = lambda: not before & set(self.holders())  # noqa: E731
        self._installation.eventually(f"other processes hold the shards of {name}", gone)
        return time.monotonic() - struck

    def fault(self, number: int, dice: random.Random) -> tuple[str, Any, End]:
        """Begin one fault after the other, of any replica; its name, the replica's pod, and what ends it."""
        pod = dice.choice(self._installation.operators())
        what = list(_FAULTS)[number % len(_FAULTS)]
        return f"{what} {pod.metadata.name}", pod, _FAULTS[what](self._installation, pod)


def _signal(pod: Any, number: signal.Signals) -> list[int]:
    pids = find(pod, PROGRAMS["operator"])
    for pid in pids:
        os.kill(pid, number)
    return pids


def _kill(_: Installation, pod: Any) -> End:
    assert _signal(pod, signal.SIGKILL)
    return nothing


def _freeze(_: Installation, pod: Any) -> End:
    frozen = _signal(pod, signal.SIGSTOP)

    def thaw() -> None:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)

    return thaw


def _delete(installation: Installation, pod: Any) -> End:
    installation.core.delete_namespaced_pod(pod.metadata.name, SYSTEM)
    return nothing


def _cut_off(installation: Installation, pod: Any) -> End:
    [node] = [node for node in installation.cluster.nodes if node.name == pod.spec.node_name]
    return cut_off_from_all(node, pod.status.pod_ip)


_FAULTS: dict[str, Callable[[Installation, Any], End]] = {
    "kill": _kill,
    "cut off": _cut_off,
    "delete": _delete,
    "freeze": _freeze,
}
