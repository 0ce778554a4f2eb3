"""A pod that only carries the label runs at the clock that its PerseusJob names: real operator, agents and kubelet.

Nothing in the pod talks to an agent; what the simulated GPUs are locked at is read from the GPUs themselves.
"""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from kubernetes import client
from tests.e2e.world import absent
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.kubelet import AdmittedPod
from perseus_sim.gpus.model import MODELS

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
JOBS = (keys.API_GROUP, keys.API_VERSION, "default", keys.PLURAL)
CLOCKS_MHZ = (900, 1200, 1410)
LEASE_TTL_S = 9


class System:
    """Two nodes of two GPUs, and pods that hold them."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self._custom = client.CustomObjectsApi(cluster.api)
        cluster.apply(CRDS)
        eventually(
            lambda: not absent(lambda: self._custom.list_namespaced_custom_object(*JOBS)), "the CRD is not served"
        )
        self.start_operator()
        self.nodes = [cluster.add_node(f"node-{n}", 2, MODELS["a100"], clocks_mhz=CLOCKS_MHZ) for n in range(2)]

    def start_operator(self) -> None:
        flags = ("--lease-ttl-s", str(LEASE_TTL_S), "--log-format", "text", "--status-interval-s", "0.2")
        self.cluster.start_operator(*flags, "--agent-timeout-s", "3", "--agent-poll-s", "0.3")

    def run_pod(self, name: str, node: int, gpus: slice = slice(None)) -> AdmittedPod:
        """A pod with GPUs and the label, in which no process is connected."""
        where = self.nodes[node]
        uid = self.cluster.run_pod("default", name, where.name, {keys.LABEL_JOB: "any"}, [])
        pod = AdmittedPod(uid, "default", name, tuple(gpu.spec.uuid for gpu in where.gpus[gpus]))
        where.kubelet.admit(pod)
        return pod

    def end_pod(self, pod: AdmittedPod, node: int) -> None:
        self.nodes[node].kubelet.remove(pod.uid)
        self.cluster.core.delete_namespaced_pod(pod.name, "default", grace_period_seconds=0)

    def apply(self, mhz: int) -> None:
        spec = {"objective": {"type": "FixedClock", "clockMegahertz": mhz}}
        version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        self.cluster.apply({"apiVersion": version, "kind": keys.KIND, "metadata": {"name": "any"}, "spec": spec})

    def patch(self, objective: dict[str, Any]) -> None:
        self._custom.patch_namespaced_custom_object(*JOBS, "any", {"spec": {"objective": objective}})

    def delete(self) -> None:
        self._custom.delete_namespaced_custom_object(*JOBS, "any")

    def condition(self, kind: str) -> tuple[str, str]:
        found = self._custom.get_namespaced_custom_object(*JOBS, "any").get("status", {}).get("conditions", [])
        return next(((c["reason"], c["message"]) for c in found if c["type"] == kind), ("", ""))

    def until_locked(self, *clocks: int) -> None:
        """What the four GPUs are locked at; 0: their default clocks."""
        eventually(lambda: self.locked == list(clocks), f"the GPUs are not locked at {clocks}")

    @property
    def locked(self) -> list[int]:
        return [gpu.locked_mhz for node in self.nodes for gpu in node.gpus]


def test_a_label_is_enough_and_every_gpu_is_given_back(cluster: SimulatedCluster) -> None:
    system = System(cluster)
    system.apply(900)
    first = system.run_pod("train-0", 0)
    system.run_pod("train-1", 1, slice(1))
    system.until_locked(900, 900, 900, 0)
    eventually(lambda: system.condition("Ready")[0] == "Ready", "not ready")
    said = "3 GPUs locked at 900 MHz. Iterations are not measured: no slowdown is promised."
    assert system.condition("PlanApplied") == ("ClockInForce", said)
    with urllib.request.urlopen(f"http://{system.nodes[0].metrics_address}/metrics") as page:
        lines = page.read().decode().splitlines()
    [held] = [line for line in lines if line.startswith("perseus_node_job_gpus{")]
    assert 'job_name="any"' in held
    assert held.endswith(" 2.0")
    [forgotten] = [line for line in lines if line.startswith("perseus_node_gpus_locked_without_rank{")]
    assert forgotten.endswith(" 0.0")

    system.patch({"clockMegahertz": 1200})
    system.until_locked(1200, 1200, 1200, 0)
    system.patch({"clockMegahertz": 1201})
    eventually(lambda: "no GPU of this node supports 1201 MHz" in system.condition("PlanApplied")[1], "it is not named")
    system.patch({"clockMegahertz": 1200})
    system.until_locked(1200, 1200, 1200, 0)

    system.end_pod(first, 0)
    system.until_locked(0, 0, 1200, 0)
    system.delete()
    system.until_locked(0, 0, 0, 0)


def test_the_clock_outlives_an_agent_but_not_its_lease(cluster: SimulatedCluster) -> None:
    system = System(cluster)
    system.apply(900)
    system.run_pod("train-0", 0)
    system.until_locked(900, 900, 0, 0)
    cluster.kill_agent(system.nodes[0])
    cluster.start_agent(system.nodes[0])
    system.until_locked(900, 900, 0, 0)
    eventually(lambda: system.condition("PlanApplied")[0] == "ClockInForce", "the new agent has not been asked")

    operator = cluster.operator
    assert operator is not None
    os.kill(operator.pid, signal.SIGKILL)
    operator.popen.wait()
    system.until_locked(0, 0, 0, 0)
    system.start_operator()
    system.until_locked(900, 900, 0, 0)
