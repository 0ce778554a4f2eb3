"""A workload whose pods name a class: its PerseusJob is made, planned and ended without an object of a user's.

The pods are as the webhook labels them (tests/integration/test_webhook.py); the whole way on a cluster with kubelets
and the chart's webhook: tests/cluster/test_energy_class.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubernetes import client
from tests.e2e.world import absent
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster.api_servers import Feature
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
A100 = MODELS["a100"]
CLOCKS_MHZ = A100.clocks_mhz[-1:39:-9]
GROUP = keys.API_GROUP, keys.API_VERSION
STEP_S, RANKS = 0.6, 2
PLUGINS = "scheduling.x-k8s.io"
POD_GROUPS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": f"podgroups.{PLUGINS}",
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"},
    },
    "spec": {
        "group": PLUGINS,
        "names": {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"},
        "scope": "Namespaced",
        "versions": [
            {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
        ],
    },
}
"""Their kind, without its schema."""
SPEC = {
    "objective": {"type": "MaxSlowdown", "maxSlowdown": "12%"},
    "mode": "Enforce",
    "profiling": {"iterationsPerClock": 2},
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}},
    "ttlSecondsAfterFinished": 0,
}


class System:
    """One node, an operator, and a class for the namespace ``default``."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self._custom = client.CustomObjectsApi(cluster.api)
        cluster.apply(CRDS)
        eventually(lambda: not absent(lambda: self.read(keys.CLASS_PLURAL)), "the CRD is not served")
        cluster.core.patch_namespace("default", {"metadata": {"labels": {"kubernetes.io/metadata.name": "default"}}})
        flags = ("--lease-ttl-s", "60", "--log-format", "text", "--status-interval-s", "0.2")
        cluster.start_operator(*flags, "--profile-retry-s", "0.5")
        cluster.add_node("node-0", 2 * RANKS, A100, clocks_mhz=CLOCKS_MHZ)

    def define(self, name: str, spec: dict[str, Any]) -> None:
        head = {"apiVersion": "/".join(GROUP), "kind": keys.CLASS_KIND, "metadata": {"name": name}}
        self.cluster.apply({**head, "spec": spec})

    def train(self, name: str, energy_class: str, **more: str) -> Any:
        rows = ["stage,instruction,frequency,time,energy"]
        for clock in CLOCKS_MHZ:
            time_s = STEP_S * A100.slowdown(clock)
            rows.append(f"0,step,{clock},{time_s:.6f},{time_s * A100.power_w(clock):.4f}")
        schedule = build_schedule("Steps", stages=1, microbatches=1)
        problem = build_problem(read_profile("\n".join(rows) + "\n"), schedule, blocking_power_w=A100.blocking_power_w)
        labels = {keys.LABEL_CLASS: energy_class, keys.LABEL_MODEL: "steps-1b", **more}
        simulation = {"speed": 5.0, "noise": 0.002, "wait_for_agent_s": 120.0}
        return self.cluster.start_job(name, problem, pipelines=RANKS, labels=labels, **simulation)

    def read(self, plural: str, name: str = "") -> Any:
        if plural == keys.CLASS_PLURAL:
            if not name:
                return self._custom.list_cluster_custom_object(*GROUP, plural)
            return self._custom.get_cluster_custom_object(*GROUP, plural, name)
        return self._custom.get_namespaced_custom_object(*GROUP, "default", plural, name)

    def reason(self, name: str, kind: str) -> str:
        conditions = self.read(keys.PLURAL, name).get("status", {}).get("conditions", [])
        return next((c["reason"] for c in conditions if c["type"] == kind), "")

    def events(self, pod: str) -> list[tuple[str, str]]:
        listed = self.cluster.core.list_namespaced_event("default").items
        return [(event.reason, event.message) for event in listed if event.involved_object.name == pod]


def test_a_job_of_a_class_is_made_planned_and_ended(cluster: SimulatedCluster) -> None:
    system = System(cluster)
    job = system.train("steps", "frugal")
    eventually(
        lambda: system.events("steps-0") or system.events("steps-1"), "the pod does not say that the class is absent"
    )
    [(reason, message)] = system.events("steps-0") + system.events("steps-1")
    assert (reason, message) == (
        "EnergyClassNotApplied",
        "The pod trains at default clocks: it asks for EnergyClass frugal, which does not exist.",
    )
    system.define("frugal", SPEC)
    eventually(lambda: not absent(lambda: system.read(keys.PLURAL, "steps")), "no PerseusJob is made")
    made = system.read(keys.PLURAL, "steps")
    assert made["metadata"]["labels"][keys.LABEL_CLASS] == "frugal"
    assert made["metadata"]["labels"][keys.LABEL_MODEL] == "steps-1b"
    [owner] = made["metadata"]["ownerReferences"]
    assert owner["name"] in job.pods
    eventually(lambda: system.reason("steps", "PlanApplied") == "PlanInForce", "no plan is in force", 0.1)
    status = system.read(keys.PLURAL, "steps")["status"]
    assert (status["shape"]["schedule"], status["shape"]["dataParallel"]) == ("Steps", RANKS)
    [profile_owner] = system.read(keys.PROFILE_PLURAL, "steps")["metadata"]["ownerReferences"]
    assert profile_owner["uid"] == made["metadata"]["uid"]
    eventually(lambda: system.read(keys.CLASS_PLURAL, "frugal")["status"]["jobs"] == 1, "the class counts no job")
    assert job.training.failure is None

    for name in job.pods:
        cluster.core.patch_namespaced_pod_status(name, "default", {"status": {"phase": "Succeeded"}})
    job.training.stop()
    eventually(lambda: absent(lambda: system.read(keys.PLURAL, "steps")), "the finished job is not deleted")
    if Feature.CONTROLLERS in cluster.server.features:
        eventually(lambda: absent(lambda: system.read(keys.PROFILE_PLURAL, "steps")), "its profile is not collected")
    eventually(lambda: system.read(keys.CLASS_PLURAL, "frugal")["status"]["jobs"] == 0, "the class counts a job")
    assert not any(gpu.locked_mhz for node in cluster.nodes.values() for gpu in node.gpus)


def test_a_job_of_pods_that_are_scheduled_together_goes_with_their_group(cluster: SimulatedCluster) -> None:
    """As the scheduler plugins do it, whose kind any API server can serve."""
    system = System(cluster)
    cluster.apply(POD_GROUPS)
    groups = client.CustomObjectsApi(cluster.api)
    where = PLUGINS, "v1alpha1", "default", "podgroups"
    eventually(lambda: not absent(lambda: groups.list_namespaced_custom_object(*where)), "the CRD is not served")
    head = {"apiVersion": f"{PLUGINS}/v1alpha1", "kind": "PodGroup", "metadata": {"name": "ranks"}}
    group = groups.create_namespaced_custom_object(*where, head)
    system.define("frugal", SPEC)
    job = system.train("steps", "frugal", **{f"{PLUGINS}/pod-group": "ranks"})
    eventually(lambda: not absent(lambda: system.read(keys.PLURAL, "steps")), "no PerseusJob is made")
    [owner] = system.read(keys.PLURAL, "steps")["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("PodGroup", group["metadata"]["uid"])
    job.training.stop()
    for name in job.pods:
        cluster.core.patch_namespaced_pod_status(name, "default", {"status": {"phase": "Succeeded"}})
    if Feature.CONTROLLERS in cluster.server.features:
        groups.delete_namespaced_custom_object(*where, "ranks")
    eventually(lambda: absent(lambda: system.read(keys.PLURAL, "steps")), "the job outlives its group")


def test_a_class_for_other_namespaces_is_not_applied(cluster: SimulatedCluster) -> None:
    system = System(cluster)
    system.define("gold", SPEC | {"namespaceSelector": {"matchLabels": {"tier": "gold"}}})
    system.train("steps", "gold")
    eventually(
        lambda: any(
            "is not for namespace default" in said for pod in ("steps-0", "steps-1") for _, said in system.events(pod)
        ),
        "no event says why",
    )
    assert absent(lambda: system.read(keys.PLURAL, "steps"))
