"""One ServingPool as ``kubectl perseus`` reads it, and the commands about it."""

from __future__ import annotations

import io
import json
from typing import Any

from perseus_core import keys
from perseus_operator.errors import KubeForbidden, KubeNotFound
from perseus_operator.objects.values import Json
from perseus_operator.plugin import cli

LIMITS: Json = {"timeToFirstToken": {"limit": "1s"}, "timePerOutputToken": {"limit": "50ms", "attainment": "99%"}}
HEALTHY = {
    "Accepted": ("True", "Accepted", "The manifest is valid."),
    "SignalsReady": ("True", "SignalsSeen", "2 replicas report."),
    "ProfileReady": ("True", "ProfileFitted", "812 windows, which the model explains within 2.11%."),
    "ClocksApplied": ("True", "TableInForce", "The clocks of 2 replicas follow their load."),
    "ObjectiveKept": ("True", "ObjectiveKept", "At least 99.00% of 12,345 requests kept each limit."),
    "Ready": ("True", "Ready", "Clocks follow the load."),
}
SAVINGS = {"energy": "31.40%", "low": "28.10%", "high": "34.60%", "blocks": 41, "millijoulesPerToken": 812}
REPLICAS = [
    {"pod": "llama-b", "clockMegahertz": 1200, "limitedBy": "Boost", "attainment": "99.12%"},
    {"pod": "llama-a", "clockMegahertz": 1000, "limitedBy": "Floor", "attainment": "99.90%"},
    {"pod": "llama-c", "clockMegahertz": 1100, "limitedBy": "Floor", "attainment": "99.95%"},
]


def pool(spec: Json | None = None, labels: Json | None = None, **said: tuple[str, str, str]) -> Json:
    """A pool that saves, unless a condition or the spec says otherwise."""
    found = [
        {"type": kind, "status": status, "reason": reason, "message": message}
        for kind, (status, reason, message) in (HEALTHY | said).items()
    ]
    return {
        "metadata": {"name": "llama", "namespace": "team", "labels": labels or {}},
        "spec": {
            "workload": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"},
            **({"objective": LIMITS, "mode": "Enforce"} if spec is None else spec),
        },
        "status": {
            "conditions": found,
            "replicaCount": 3,
            "replicas": REPLICAS,
            "attainment": {"requests": 12_345, "timeToFirstToken": "99.62%", "timePerOutputToken": "99.98%"},
            "engine": {"fingerprint": "f", "engine": "vllm 0.32.0", "model": "llama-70b", "windows": 812,
                       "lowestMegahertz": 900},
            "savings": SAVINGS,
        },
    }  # fmt: skip


class Cluster:
    """A namespace with pools; as the plugin reads it."""

    namespace = "team"

    def __init__(self, *pools: Json) -> None:
        self.stored_pools = list(pools)
        self.jobs_named: list[str] = []
        self.stored_pods: list[Json] = []
        self.workloads: dict[str, Json] = {}
        self.classes: dict[str, Json] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.refused: set[str] = set()

    def _may(self, what: str) -> None:
        if what in self.refused:
            raise KubeForbidden(f'User "eve" cannot get {what}')

    def job(self, namespace: str, name: str) -> Json:
        self._may("jobs")
        if namespace != "team" or name not in self.jobs_named:
            raise KubeNotFound(f'perseusjobs.perseus.energy "{name}" not found')
        return {"metadata": {"name": name, "namespace": namespace}, "spec": {"objective": {}}, "status": {}}

    def jobs(self, namespace: str | None) -> list[Json]:
        return [self.job("team", name) for name in self.jobs_named]

    def pool(self, namespace: str, name: str) -> Json:
        self._may("pools")
        for one in self.stored_pools:
            if (one["metadata"]["namespace"], one["metadata"]["name"]) == (namespace, name):
                return one
        raise KubeNotFound(f'servingpools.perseus.energy "{name}" not found')

    def pools(self, namespace: str | None) -> list[Json]:
        self._may("pools")
        return [one for one in self.stored_pools if namespace in (None, one["metadata"]["namespace"])]

    def pods(self, namespace: str | None, label: str) -> list[Json]:
        self._may("pods")
        if label == keys.LABEL_CLASS:
            return []
        assert label == f"{keys.LABEL_JOB}=llama"
        return self.stored_pods

    def workload(self, api_version: str, plural: str, namespace: str, name: str) -> Json:
        self._may("workloads")
        assert (api_version, plural, namespace) == ("apps/v1", "deployments", "team")
        if name not in self.workloads:
            raise KubeNotFound(f'deployments.apps "{name}" not found')
        return self.workloads[name]

    def energy_class(self, name: str) -> Json:
        if name not in self.classes:
            raise KubeNotFound(f'energyclasses.perseus.energy "{name}" not found')
        return {"metadata": {"name": name}, "spec": self.classes[name]}

    def namespace_labels(self, name: str) -> dict[str, str]:
        return self.labels.get(name, {})

    def namespaces(self, label: str) -> dict[str, dict[str, str]]:
        return {name: labels for name, labels in self.labels.items() if label in labels}


def command(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return cli.run(arguments, out, err), out.getvalue(), err.getvalue()


def answer(*arguments: str) -> Any:
    code, out, err = command(*arguments, "-o", "json")
    assert code == 0, err
    return json.loads(out)


def asked(document: Json) -> dict[str, Json]:
    return {step["question"]: step for step in document["steps"]}


SIGNALS = "Do its engines say what they do?"
PODS = "Do its pods run?"
MANIFEST = "Is the manifest valid, and its name free?"
PROMISED = "Were requests promised anything?"
MAY = "May clocks be set?"
