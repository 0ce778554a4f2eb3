"""One PerseusJob in a namespace of its own, and an operator, for end-to-end tests; and a training that it can plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import urllib3
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.waiting import PATIENCE_S

from perseus_core import keys
from perseus_sim.cluster.api_servers import Feature, Server
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.processes import Child, Processes
from perseus_sim.profiles import profile_csv
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

STAGES, MICROBATCHES = 2, 4
A100 = MODELS["a100"]
SPEC: dict[str, Any] = {
    "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES},
    "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": 83640},
    "mode": "Recommend",
    "points": 20,
}
BUDGETS = (keys.API_GROUP, keys.API_VERSION, keys.BUDGET_PLURAL)
CLASSES = (keys.API_GROUP, keys.API_VERSION, keys.CLASS_PLURAL)


def absent(read: Callable[[], Any]) -> bool:
    """Return whether an object does not exist: whether reading it gives the status 404."""
    try:
        read()
    except ApiException as error:
        if error.status != 404:
            raise
        return True
    return False


def train_two_stages(cluster: SimulatedCluster, **training: float) -> dict[str, Any]:
    """Train a pipeline of two stages that differ, on a node of its own, as fast as tests want it.

    Args:
        cluster: that gets the node, the training and the profile in a ConfigMap.
        training: options of ``start_job``.

    Returns:
        The spec of its PerseusJob ``gpt3``.
    """
    cluster.add_node("node-0", STAGES, A100)
    profile = profile_csv(stages=STAGES, imbalance=1.2)
    schedule = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
    problem = build_problem(read_profile(profile, stages=STAGES), schedule, blocking_power_w=A100.blocking_power_w)
    cluster.start_job("gpt3", problem, pipelines=1, speed=10.0, wait_for_agent_s=20.0, **training)
    data = {"profile.csv": profile}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "profile"}, "data": data})
    return {
        "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES},
        "profile": {
            "configMapRef": {"name": "profile"},
            "blockingPowerMilliwatts": round(1000 * A100.blocking_power_w),
        },
        "points": 20,
        "baselineIterations": 0,
        "comparison": {"everyIterations": 0},  # one would give clocks back for some iterations, at any moment
    }


class World:
    """One PerseusJob in a separate namespace, and an operator."""

    def __init__(self, api: Any, namespace: str, kubeconfig: Path, folder: Path, processes: Processes) -> None:
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.namespace, self.kubeconfig, self.folder, self.processes = namespace, kubeconfig, folder, processes
        self.place = (keys.API_GROUP, keys.API_VERSION, namespace, keys.PLURAL)
        self.frontiers = (*self.place[:3], keys.FRONTIER_PLURAL)
        self.operator: Child | None = None

    absent = staticmethod(absent)
    classes = CLASSES

    def start_operator(self, *arguments: str) -> None:
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "perseus_operator", "--insecure", "--log-format", "text"),
            *("--metrics-address", "127.0.0.1:0", "--ready-file", str(ready)),
            *("--profile-retry-s", "0.2", "--status-interval-s", "0.2", "--release-timeout-s", "2"),
            *arguments,
        ]
        self.operator = self.processes.start("operator", command, environment={"KUBECONFIG": str(self.kubeconfig)})
        self.operator.wait_until(ready.exists, PATIENCE_S)

    def stop_operator(self) -> None:
        assert self.operator is not None
        assert self.operator.stop(30) == 0, self.operator.tail()
        self.operator = None

    def kill_operator(self) -> None:
        assert self.operator is not None
        self.operator.popen.kill()
        self.operator.popen.wait()
        self.operator = None

    def profile(self, **data: str) -> None:
        body: Any = {
            "metadata": {"name": "profile"},
            "data": {key.replace("_", "."): text for key, text in data.items()},
        }
        if absent(lambda: self.core.read_namespaced_config_map("profile", self.namespace)):
            self.core.create_namespaced_config_map(self.namespace, body)
        else:
            self.core.replace_namespaced_config_map("profile", self.namespace, body)

    def create(self, **changes: Any) -> Any:
        api_version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        body = {"apiVersion": api_version, "kind": keys.KIND, "metadata": {"name": "gpt3"}, "spec": {**SPEC, **changes}}
        return self.custom.create_namespaced_custom_object(*self.place, body)

    def patch(self, patch: dict[str, Any]) -> Any:
        kind = "application/merge-patch+json"
        return self.custom.patch_namespaced_custom_object(*self.place, "gpt3", patch, _content_type=kind)

    def job(self) -> Any:
        return self.custom.get_namespaced_custom_object(*self.place, "gpt3", _request_timeout=10)

    def until_pods_can_be_made(self) -> None:
        """A server with controllers refuses them until the service account exists."""

        def has_account() -> bool:
            kinds = self.core.list_namespace(field_selector="metadata.name=kube-system").items
            return not kinds or bool(self.core.list_namespaced_service_account(self.namespace).items)

        self.until("an account", has_account)

    def finish_pod(self) -> None:
        """Make a pod of the job that has succeeded."""
        self.pod("finished", "Succeeded", {keys.LABEL_JOB: "gpt3"})

    def pod(self, name: str, phase: str, labels: dict[str, str]) -> None:
        """Make a pod of this phase; no kubelet runs here."""
        spec = {
            "nodeName": f"node-of-{name}",
            "containers": [{"name": "main", "image": "x"}],
            "automountServiceAccountToken": False,
        }
        self.until_pods_can_be_made()
        metadata = {"name": name, "labels": labels}
        self.core.create_namespaced_pod(self.namespace, {"metadata": metadata, "spec": spec})
        self.core.patch_namespaced_pod_status(name, self.namespace, {"status": {"phase": phase}})

    def replica(self, revision: str, energy_class: str, server: Server) -> None:
        """Make a pod of the Deployment ``chat``, as the webhook labels it, by a ReplicaSet if there are controllers."""
        name, claim = f"chat-{revision}", {"pod-template-hash": revision}
        ours = {keys.LABEL_JOB: "chat", keys.LABEL_CLASS: energy_class, keys.LABEL_SERVING: "true"}
        spec = {
            "nodeName": f"node-of-{name}",
            "containers": [{"name": "main", "image": "x"}],
            "automountServiceAccountToken": False,
        }
        template = {"metadata": {"labels": claim | ours}, "spec": spec}
        self.until_pods_can_be_made()
        if Feature.CONTROLLERS in server.features:
            body = {"metadata": {"name": name}, "spec": {"selector": {"matchLabels": claim}, "template": template}}
            client.AppsV1Api(self.core.api_client).create_namespaced_replica_set(self.namespace, body)
            return
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "uid": f"u-{name}", "controller": True}
        metadata = {"name": f"{name}-0", "labels": claim | ours, "ownerReferences": [owner]}
        self.core.create_namespaced_pod(self.namespace, {"metadata": metadata, "spec": spec})

    def pool_owners(self, name: str) -> list[str]:
        """Names of what a ServingPool goes with; none: it does not exist."""
        where = (keys.API_GROUP, keys.API_VERSION, self.namespace, keys.POOL_PLURAL, name)
        try:
            pool: Any = self.custom.get_namespaced_custom_object(*where)
        except ApiException as error:
            if error.status != 404:
                raise
            return []
        return [owner["name"] for owner in pool["metadata"].get("ownerReferences") or ()]

    def energy_class(self, name: str, **spec: Any) -> None:
        """Make a class for this namespace, unless the spec says otherwise."""
        selector = {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}}
        body = {
            "apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}",
            "kind": keys.CLASS_KIND,
            "metadata": {"name": name},
            "spec": {"namespaceSelector": selector, **spec},
        }
        self.custom.create_cluster_custom_object(*CLASSES, body)

    def delete_class(self, name: str) -> None:
        self.custom.delete_cluster_custom_object(*CLASSES, name)

    def frontier(self, name: str = "gpt3") -> Any:
        return self.custom.get_namespaced_custom_object(*self.frontiers, name)

    def budget(self, name: str, watts: int, **selector: Any) -> None:
        body = {
            "apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}",
            "kind": keys.BUDGET_KIND,
            "metadata": {"name": name},
            "spec": {"watts": watts, "selector": {"namespaces": [self.namespace], **selector}},
        }
        self.custom.create_cluster_custom_object(*BUDGETS, body)

    def read_budget(self, name: str) -> Any:
        return self.custom.get_cluster_custom_object(*BUDGETS, name)

    def delete_budget(self, name: str) -> None:
        self.custom.delete_cluster_custom_object(*BUDGETS, name)

    def gone(self) -> bool:
        return absent(self.job)

    def delete(self) -> None:
        self.custom.delete_namespaced_custom_object(*self.place, "gpt3")

    def conditions(self) -> dict[str, dict[str, Any]]:
        return {found["type"]: found for found in self.job().get("status", {}).get("conditions", [])}

    def events(self) -> list[Any]:
        return [e for e in self.core.list_namespaced_event(self.namespace).items if e.involved_object.name == "gpt3"]

    def until(self, what: str, check: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait until a check returns true; fail with the operator's log after ``timeout_s`` or when it ends."""
        deadline = time.monotonic() + timeout_s

        def holds() -> bool:
            try:
                return check()
            except urllib3.exceptions.HTTPError:  # the API server is slow, or is starting again
                return False

        while not holds():
            ended = self.operator is not None and not self.operator.running
            if ended or time.monotonic() > deadline:
                log = self.operator.tail(40) if self.operator else "no operator runs"
                pytest.fail(f"not {what} {'before the operator ended' if ended else f'after {timeout_s:g} s'}\n{log}")
            time.sleep(0.1)

    def until_condition(self, kind: str, status: str, reason: str) -> str:
        def reported() -> bool:
            found = self.conditions().get(kind, {})
            return (found.get("status"), found.get("reason")) == (status, reason)

        self.until(f"{kind}={status} for {reason}", reported)
        return str(self.conditions()[kind]["message"])
