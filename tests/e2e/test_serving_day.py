"""A day of load on the whole product, compressed into minutes: the real KEDA makes as many replicas as are advised.

The API server, its controllers, the HorizontalPodAutoscaler, KEDA, the operator with its door for KEDA, and the agent
are real. Engines are simulated and say themselves what became of their requests; in the place of a kubelet the test
starts and ends their processes as the pods of the Deployment come and go. It takes twenty minutes, so it runs where
PERSEUS_DAY=900 (seconds) is set; skipped where KEDA is not built (``make binaries``).
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.doubles.serving_day import (
    FIRST_TOKEN_S,
    GPU,
    MODEL,
    PER_TOKEN_S,
    LoadRouter,
    Watched,
    requests_of_the_day,
)
from tests.e2e.keda import CALLER, assets_with_keda, install, scaled_object
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster.api_servers import real_server
from perseus_sim.cluster.live_engines import LiveEngines, start_engine
from perseus_sim.cluster.pki import Authority
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.processes import free_port
from perseus_sim.serving.engine_process import EngineSpec

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
POOL, NAMESPACE, NODE = "chat", "default", "node-0"
POOLS = (keys.API_GROUP, keys.API_VERSION, NAMESPACE, keys.POOL_PLURAL)
MOST = 4
DRAINED_S = 5.0
"""A pod that is to end gets no requests and serves what it has for so long, as a preStop hook has it do."""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(3_000),
    pytest.mark.skipif("PERSEUS_DAY" not in os.environ, reason="twenty minutes: set PERSEUS_DAY=900"),
]


@dataclass
class Pods:
    """In the place of a kubelet: an engine's process for each pod of the Deployment."""

    cluster: SimulatedCluster
    engines: LiveEngines
    ports: dict[str, int] = field(default_factory=dict)
    """By pod, of all that were started."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Of the replicas that take requests, by pod."""
    ending: dict[str, float] = field(default_factory=dict)
    """When each pod was to end."""
    ended: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Start and end what is due."""
        core, now_s = self.cluster.core, time.monotonic()
        for pod in core.list_namespaced_pod(NAMESPACE, label_selector=f"app={POOL}").items:
            name = pod.metadata.name
            if pod.metadata.deletion_timestamp is not None:
                self.addresses.pop(name, None)
                if now_s - self.ending.setdefault(name, now_s) > DRAINED_S and name not in self.ended:
                    self.ended.add(name)
                    self.engines.end(name)
                    core.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)
            elif name not in self.engines.pods:
                port = self.ports[name] = free_port()
                engine = EngineSpec((), GPU, MODEL, metrics_address=f"127.0.0.1:{port}")
                start_engine(self.cluster, self.engines, name, uid=pod.metadata.uid, engine=engine)
            elif name not in self.addresses and listens(self.ports[name]):
                ready = [{"type": "Ready", "status": "True"}]
                status = {"phase": "Running", "podIP": "127.0.0.1", "hostIP": "127.0.0.1", "conditions": ready}
                core.patch_namespaced_pod_status(name, NAMESPACE, {"status": status})
                self.addresses[name] = f"127.0.0.1:{self.ports[name]}"

    def takers(self) -> list[str]:
        return list(self.addresses.values())


def listens(port: int) -> bool:
    """Whether an engine has started, as a readiness probe asks."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def deployment() -> dict[str, Any]:
    """Its pods are bound to the node: there is no scheduler."""
    labels = {"app": POOL, keys.LABEL_JOB: POOL}
    pod = {"nodeName": NODE, "containers": [{"name": "main", "image": "simulated"}]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": POOL}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": POOL}, "spec": spec}


def pool() -> dict[str, Any]:
    limits = {
        "timeToFirstToken": {"limit": f"{1000 * FIRST_TOKEN_S:.0f}ms"},
        "timePerOutputToken": {"limit": f"{1000 * PER_TOKEN_S:.0f}ms"},
    }
    head = {"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.POOL_KIND}
    workload = {"apiVersion": "apps/v1", "kind": "Deployment", "name": POOL}
    return {**head, "metadata": {"name": POOL}, "spec": {"workload": workload, "objective": limits, "mode": "Enforce"}}


def door(folder: Path, authority: Authority) -> tuple[str, list[str]]:
    """Where KEDA asks, and the operator's flags for it."""
    pair = authority.issue("scaler", hosts=("localhost",))
    for name, data in (("crt", pair.certificate), ("key", pair.key), ("ca", authority.certificate)):
        (folder / f"scaler.{name}").write_bytes(data)
    port = free_port()
    files = {"cert": "crt", "key": "key", "ca": "ca"}
    flags = [part for flag, file in files.items() for part in (f"--scaler-{flag}", str(folder / f"scaler.{file}"))]
    return f"localhost:{port}", [*flags, "--scaler-address", f"127.0.0.1:{port}", "--scaler-allowed-san", CALLER]


@pytest.fixture
def cluster() -> Any:
    assets_with_keda()
    with SimulatedCluster(server=real_server) as running:
        yield running


def test_replicas_follow_a_day_of_load_and_requests_keep_their_limits(cluster: SimulatedCluster) -> None:
    custom, apps = client.CustomObjectsApi(cluster.api), client.AppsV1Api(cluster.api)
    authority = Authority("perseus-scaler")
    address, flags = door(cluster.folder, authority)
    cluster.apply(CRDS)
    install(cluster.api, authority, cluster.server.kubeconfig, assets_with_keda(), cluster.folder, cluster.processes)
    cluster.start_operator("--status-interval-s", "0.5", "--agent-poll-s", "0.3", *flags)
    node = cluster.add_node(NODE, MOST, MODELS[GPU], driver=GPU)
    engines = LiveEngines(POOL, node, {}, {}, {}, {})
    pods = Pods(cluster, engines)
    cluster.apply(deployment())

    def begun() -> bool:
        pods.look()
        return bool(pods.addresses)

    eventually(begun, "no engine starts", 0.5)

    def status() -> Any:
        return custom.get_namespaced_custom_object(*POOLS, POOL).get("status", {})

    def condition(kind: str) -> str:
        found = (each for each in status().get("conditions", []) if each["type"] == kind)
        return next((f"{each['reason']}: {each['message']}" for each in found), "")

    cluster.apply(pool())
    watched, applied, said = Watched([]), False, dict[str, str]()
    with LoadRouter(requests_of_the_day(), pods.takers) as router:
        while not watched.replicas or not watched.over(router.now_s):
            pods.look()
            advice = status().get("advice", {})
            if advice.get("replicas") and not applied:
                cluster.apply(scaled_object(POOL, address, most=MOST))
                applied = True
            lowered = any(any(engines.locked_mhz(name)) for name in pods.addresses)
            if watched.look(int(apps.read_namespaced_deployment(POOL, NAMESPACE).spec.replicas or 0), lowered=lowered):
                print(f"{router.now_s:5.0f} s  {watched.replicas[-1]} replicas: {advice.get('why')}")
            for kind in ("ProfileReady", "ClocksApplied", "ObjectiveKept"):
                message = condition(kind)
                if message.partition(":")[0] != said.get(kind, "").partition(":")[0]:
                    print(f"{router.now_s:5.0f} s  {kind} {message}")
                    said[kind] = message
            time.sleep(0.5)
        lasted_s = router.now_s
    assert router.refused == 0
    eventually(partial(drained, engines, router), "requests are lost", 0.5, not_yet=(AssertionError,))
    results = [found for name in engines.pods if (found := engines.results(name)) is not None]
    ended = [one for each in results for one in each.ended]
    kept = sum(one.first_token_s <= FIRST_TOKEN_S and one.per_token_s <= PER_TOKEN_S for one in ended)
    joules = sum(each.joules for each in results)
    print(watched.check(joules, kept, len(ended), lasted_s))
    engines.stop()


def drained(engines: LiveEngines, router: LoadRouter) -> bool:
    """Whether every request that was sent has ended."""
    results = [engines.results(name) for name in engines.pods]
    ended = sum(len(each.ended) for each in results if each is not None)
    assert ended == len(router.sent), f"{ended} of {len(router.sent)} requests have ended"
    return True
