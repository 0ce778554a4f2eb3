"""Serving engines as pods of a simulated cluster: one process for each replica, on simulated GPUs of a node.

Each serves its part of a load in real time (``perseus_sim.serving.engine_process``). Figures come from what the engines
write and from their GPUs, not from the agent.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
    """One request that has ended, in seconds: when it came, by the machine's monotonic clock, and what it got."""

    arrival_s: float
    first_token_s: float
    per_token_s: float
    tokens: int


@dataclass(frozen=True)
class EngineResults:
    """What a replica says that it has done."""

    joules: float
    tokens: int
    ended: tuple[Ended, ...]


@dataclass
class LiveEngines:
    """The replicas of one pool."""

    name: str
    node: SimulatedNode
    pods: dict[str, AdmittedPod]
    children: dict[str, Child]
    gpus: dict[str, list[SharedGpu]]
    files: dict[str, Path]

    def results(self, pod: str) -> EngineResults | None:
        """What a replica has done so far; None: it has not said so yet."""
        path = self.files[pod]
        if not path.exists():
            return None
        document = json.loads(path.read_text())
        ended = tuple(Ended(document["begun_s"] + one[0], *one[1:]) for one in document["requests"])
        return EngineResults(document["joules"], document["tokens"], ended)

    def joules(self, pod: str) -> float:
        """What the GPUs of a replica have drawn, by their own counters."""
        return sum(gpu.physics().energy_uj for gpu in self.gpus[pod]) / 1e6

    def locked_mhz(self, pod: str) -> list[int]:
        """The clocks that are locked on a replica's GPUs; 0: the default clocks."""
        return [gpu.locked_mhz for gpu in self.gpus[pod]]

    def signal(self, pod: str, number: signal.Signals) -> None:
        """Send a signal to a replica's process: SIGKILL for a crash, SIGSTOP for a hang, SIGUSR1 for its burst."""
        self.children[pod].signal(number)

    def end(self, pod: str) -> None:
        """End a replica, as a deleted pod would, and leave its GPUs to others. What it has done stays known."""
        self.children[pod].stop()
        self.node.kubelet.remove(self.pods[pod].uid)
        self.node.allocated -= set(self.pods[pod].gpu_uuids)

    def stop(self) -> None:
        """End all replicas, as deleted pods would."""
        for child in self.children.values():
            child.stop()


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
    burst: Sequence[Request] = (),
    labels: Mapping[str, str] | None = None,
    kv_role: str = "",
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
        burst: requests that come to a replica with SIGUSR1.
        labels: further labels of the pods.
        kv_role: what they do of each request, as of ``EngineSpec``.

    Raises:
        ValueError: the node has too few free GPUs.
    """
    free = [one for one in node.gpus if one.spec.uuid not in node.allocated]
    if len(free) < len(requests) * gpus_each:
        raise ValueError(f"{node.name} has {len(free)} free GPUs, {name} needs {len(requests) * gpus_each}")
    engines = LiveEngines(name, node, {}, {}, {}, {})
    for replica, load in enumerate(requests):
        pod = f"{name}-{replica}"
        pod_labels = {"app": name, keys.LABEL_JOB: name, **(labels or {})}
        uid = cluster.run_pod(namespace, pod, node.name, pod_labels, [])
        engine = EngineSpec((), gpu, model, kv_role=kv_role)
        start_engine(
            cluster,
            engines,
            pod,
            uid=uid,
            requests=load,
            engine=engine,
            gpus_each=gpus_each,
            namespace=namespace,
            burst=burst,
        )
    return engines


def start_engine(
    cluster: SimulatedCluster,
    engines: LiveEngines,
    pod: str,
    *,
    uid: str,
    engine: EngineSpec,
    requests: Sequence[Request] = (),
    gpus_each: int = 1,
    namespace: str = "default",
    burst: Sequence[Request] = (),
) -> None:
    """Start the process of a pod that there is, on free GPUs of the node.

    Args:
        cluster: must be running.
        engines: of the pool.
        pod: its name.
        uid: its UID.
        engine: what it is; its GPUs and its files are those of the pod.
        requests: its own.
        gpus_each: that it gets.
        namespace: of the pod.
        burst: requests that come with SIGUSR1.
    """
    node = engines.node
    gpus = [one for one in node.gpus if one.spec.uuid not in node.allocated][:gpus_each]
    node.allocated |= {one.spec.uuid for one in gpus}
    folder = cluster.folder / engines.name
    folder.mkdir(exist_ok=True)
    trace, results, bursts = (folder / f"{pod}.{end}" for end in ("csv", "json", "burst.csv"))
    given = {}
    for field, path, load in (("trace", trace, requests), ("burst", bursts, burst)):
        if load:
            write_trace(path, load)
            given[field] = str(path)
    spec = replace(engine, gpus=tuple(str(one.path) for one in gpus), results=str(results), **given)
    admitted = AdmittedPod(uid, namespace, pod, tuple(one.spec.uuid for one in gpus))
    node.kubelet.admit(admitted)
    command = [sys.executable, "-m", "perseus_sim.serving.engine_process", str(spec.write(folder / f"{pod}.spec.json"))]
    child = cluster.processes.start(pod, command, environment={keys.ENV_SOCKET: str(node.socket)})
    node.kubelet.place([child.pid], uid)
    engines.pods[pod], engines.children[pod] = admitted, child
    engines.gpus[pod], engines.files[pod] = gpus, results
