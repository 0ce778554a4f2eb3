"""Serving engines as pods of a simulated cluster: one process for each replica, on simulated GPUs of a node.

Each serves its part of a load in real time (``perseus_sim.serving.engine_process``). Figures come from what the engines
write and from their GPUs, not from the agent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perseus_core import keys
from perseus_sim.cluster.simulated_cluster import SimulatedCluster, SimulatedNode
from perseus_sim.gpus.kubelet import AdmittedPod
from perseus_sim.gpus.shared_gpu import SharedGpu
from perseus_sim.processes import Child
from perseus_sim.serving.engine_process import EngineSpec
from perseus_sim.serving.load import write_trace
from perseus_sim.serving.requests import Request


@dataclass(frozen=True)
class Ended:
    """One request that has ended, in seconds: when it came, since its engine began, and what it got."""

    arrival_s: float
    first_token_s: float
    per_token_s: float
    tokens: int


@dataclass
class LiveEngines:
    """The replicas of one pool."""

    name: str
    node: SimulatedNode
    pods: dict[str, AdmittedPod]
    children: dict[str, Child]
    gpus: dict[str, list[SharedGpu]]
    results: dict[str, Path]

    def ended(self, pod: str) -> list[Ended]:
        """Requests of a replica that have ended, in that order."""
        return [Ended(*one) for one in self._read(pod).get("requests", ())]

    def joules(self, pod: str) -> float:
        """What the GPUs of a replica have drawn, by their own counters."""
        return sum(gpu.physics().energy_uj for gpu in self.gpus[pod]) / 1e6

    def locked_mhz(self, pod: str) -> list[int]:
        """The clocks that are locked on a replica's GPUs; 0: the default clocks."""
        return [gpu.locked_mhz for gpu in self.gpus[pod]]

    def kill(self, pod: str) -> None:
        """End a replica's process as a crash would."""
        self.children[pod].popen.kill()

    def stop(self) -> None:
        """End all replicas, as deleted pods would."""
        for child in self.children.values():
            child.stop()

    def _read(self, pod: str) -> Mapping[str, Any]:
        path = self.results[pod]
        found: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


def start_engines(
    cluster: SimulatedCluster,
    node: SimulatedNode,
    name: str,
    requests: Sequence[Sequence[Request]],
    *,
    gpu: str,
    model: str,
    gpus_each: int = 1,
    namespace: str = "default",
    plugin: bool = True,
) -> LiveEngines:
    """Start the replicas of a pool: one pod and one process for each.

    Args:
        cluster: must be running.
        node: must hold enough free GPUs.
        name: of the ServingPool that the pods opt in to, and of the pods.
        requests: of each replica.
        gpu: the kind of GPU, one of ``machine.GPUS``.
        model: one of ``machine.MODELS``.
        gpus_each: of one replica.
        namespace: of the pods.
        plugin: whether the engines tell the agent what they do.

    Raises:
        ValueError: the node has too few free GPUs.
    """
    free = [one for one in node.gpus if one.spec.uuid not in node.allocated]
    if len(free) < len(requests) * gpus_each:
        raise ValueError(f"{node.name} has {len(free)} free GPUs, {name} needs {len(requests) * gpus_each}")
    folder = cluster.folder / name
    folder.mkdir()
    engines = LiveEngines(name, node, {}, {}, {}, {})
    for replica, own in enumerate(requests):
        pod_name = f"{name}-{replica}"
        gpus = free[replica * gpus_each : (replica + 1) * gpus_each]
        node.allocated |= {one.spec.uuid for one in gpus}
        trace, results = folder / f"{replica}.csv", folder / f"{replica}.json"
        write_trace(trace, own)
        spec = EngineSpec(tuple(str(one.path) for one in gpus), gpu, model, str(trace), str(results))
        labels = {"app": name, keys.LABEL_JOB: name}
        uid = cluster.run_pod(namespace, pod_name, node.name, labels, [])
        pod = AdmittedPod(uid, namespace, pod_name, tuple(one.spec.uuid for one in gpus))
        node.kubelet.admit(pod)
        child = cluster.processes.start(
            pod_name,
            [
                *(sys.executable, "-m", "perseus_sim.serving.engine_process"),
                str(spec.write(folder / f"{replica}.spec.json")),
            ],
            environment={keys.ENV_SOCKET: str(node.socket)} if plugin else {},
        )
        node.kubelet.place([child.pid], uid)
        engines.pods[pod_name], engines.children[pod_name] = pod, child
        engines.gpus[pod_name], engines.results[pod_name] = gpus, results
    return engines
