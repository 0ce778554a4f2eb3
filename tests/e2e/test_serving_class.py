"""Servers of the chart's own class: from a Deployment's pods to clocks that follow the load, without an object of ours
that a user wrote. The pods are as the webhook labels them (tests/integration/test_webhook.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from tests.e2e.world import absent
from tests.waiting import PATIENCE_S, eventually

from perseus_core import keys
from perseus_sim.cluster.api_servers import Feature
from perseus_sim.cluster.live_engines import LiveEngines, start_engines
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.load import Chat

ROOT = Path(__file__).resolve().parents[2]
NAME = "chat"
POOLS = (keys.API_GROUP, keys.API_VERSION, "default", keys.POOL_PLURAL)
LABELS = {keys.LABEL_CLASS: "default", keys.LABEL_SERVING: "true", "pod-template-hash": "1a2b"}


def owned(cluster: SimulatedCluster, engines: LiveEngines) -> None:
    """Their ReplicaSet, as a Deployment makes it: a real controller adopts the pods that it finds."""
    labels = {"app": NAME, "pod-template-hash": LABELS["pod-template-hash"]}
    container = {"name": "main", "image": "simulated"}
    body = {
        "metadata": {"name": f"{NAME}-{LABELS['pod-template-hash']}", "labels": labels},
        "spec": {
            "replicas": len(engines.pods),
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    made = client.AppsV1Api(cluster.api).create_namespaced_replica_set("default", body)
    if Feature.CONTROLLERS in cluster.server.features:
        return
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": made.metadata.name, "uid": made.metadata.uid}
    for pod in engines.pods:
        patch = {"metadata": {"ownerReferences": [{**owner, "controller": True}]}}
        cluster.core.patch_namespaced_pod(pod, "default", patch)


def test_servers_of_the_charts_class_are_measured_and_then_follow_their_load(cluster: SimulatedCluster) -> None:
    custom = client.CustomObjectsApi(cluster.api)
    cluster.apply(ROOT / "deploy" / "crds")
    eventually(lambda: not absent(lambda: custom.list_namespaced_custom_object(*POOLS)), "the CRD is not served")
    values = yaml.safe_load((ROOT / "charts" / "perseus" / "values.yaml").read_text())
    head = {"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.CLASS_KIND}
    cluster.apply({**head, "metadata": {"name": "default"}, "spec": values["energyClass"]["spec"]})
    node = cluster.add_node("node-0", 2, MODELS["h100"], driver="h100")
    requests = [Chat(per_second=8.0).requests(1_800.0, seed=replica) for replica in range(2)]
    engines = start_engines(cluster, node, NAME, requests, gpu="h100", model="llama-3.1-8b", labels=LABELS)
    owned(cluster, engines)
    cluster.start_operator("--status-interval-s", "0.2", "--agent-poll-s", "0.3")

    def status() -> Any:
        return custom.get_namespaced_custom_object(*POOLS, NAME).get("status", {})

    def condition(kind: str) -> tuple[str, str, str]:
        found = (each for each in status().get("conditions", []) if each["type"] == kind)
        return next(((each["status"], each["reason"], each["message"]) for each in found), ("", "", ""))

    def soon(kind: str, reason: str, patience_s: float = PATIENCE_S) -> None:
        def seen() -> bool:
            shown = condition(kind)
            assert shown[1] == reason, f"{kind}: {shown}"
            return True

        eventually(seen, f"{kind} is not {reason}", 0.1, patience_s, (AssertionError,))

    def locked() -> list[int]:
        return [mhz for pod in engines.pods for mhz in engines.locked_mhz(pod)]

    try:
        eventually(lambda: not absent(lambda: custom.get_namespaced_custom_object(*POOLS, NAME)), "no pool is made")
        soon("ClocksApplied", "MeasuringBaseline")
        assert locked() == [0, 0], "a baseline is of default clocks"
        soon("ProfileReady", "Profiling")
        assert status()["baseline"]["timePerOutputToken"].endswith("ms")
        soon("ClocksApplied", "TableInForce", 300)
        eventually(lambda: status()["engine"].get("lowestMegahertz"), "the table has no lower clock", 0.1, 300)
        eventually(lambda: min(locked()) > 0, "no clock is locked on both", 0.02)
        soon("ObjectiveKept", "ObjectiveKept")
        made = custom.get_namespaced_custom_object(*POOLS, NAME)
        assert made["metadata"]["labels"][keys.LABEL_CLASS] == "default"
        assert made["metadata"]["ownerReferences"][0]["kind"] == "ReplicaSet"
    finally:
        engines.stop()
