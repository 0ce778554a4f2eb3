"""A cluster of one job as ``kubectl perseus`` reads it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

from tests.doubles.stored_objects import stored_object

from perseus_operator.errors import KubeNotFound
from perseus_operator.objects.values import ConfigMap, Json, StoredObject
from perseus_operator.plugin import cli
from perseus_operator.solving.frontier import frontier_to_spec, open_frontier
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.worker import solve_in_process
from perseus_sim.profiles import profile_csv

STAGES, PIPELINES, TENSOR = 2, 3, 2
CSV = profile_csv(STAGES, imbalance=1.2)
REQUEST = SolveRequest(CSV, "1f1b", STAGES, 4, None, 83_640, 20)
SPEC: Json = {
    "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": 4}
    | {"dataParallel": PIPELINES, "tensorParallel": TENSOR},
    "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": 83_640},
    "objective": {"type": "MaxSlowdown", "maxSlowdown": "5%"},
    "points": 20,
}
DIGEST = hashlib.sha256(b"inputs").hexdigest()


def kept_frontier() -> StoredObject:
    """The job's PerseusFrontier, solved."""
    solved = open_frontier(solve_in_process(REQUEST), REQUEST, digest=DIGEST, solve_ms=1, restored=False)
    spec = frontier_to_spec(solved)
    assert spec is not None
    return stored_object("gpt3", spec)


class Stored:
    """A cluster of one job; as the plugin reads it."""

    namespace = "team"

    def __init__(self, kept: StoredObject) -> None:
        frontier = {"digest": DIGEST, "points": 20}
        said = {"type": "PlanApplied", "status": "True", "reason": "PlanInForce", "message": "Point 1 of 20."}
        self.body: Json = {
            "metadata": {"name": "gpt3", "namespace": "team", "resourceVersion": "7"},
            "spec": SPEC,
            "status": {
                "frontier": frontier,
                "plan": {"point": 1, "fromIteration": 12, "plannedSlowdown": "2.38%"},
                "predicted": {"iterationTimeMicroseconds": 600_000, "energyMillijoules": 2_000_000},
                "measured": {"iterationTimeMicroseconds": 610_000, "energyMillijoules": 2_100_000, "iterations": 15},
                "baseline": {"iterationTimeMicroseconds": 600_000, "energyMillijoules": 3_000_000, "iterations": 3},
                "savings": {"energy": "30.00%", "slowdown": "1.67%", "against": "Baseline"},
                "conditions": [said],
            },
        }
        self.maps = {"profile": ConfigMap("profile", {"profile.csv": CSV}, {})}
        self.objects = {("perseusfrontiers", "gpt3"): kept}
        self.rivals = 0
        """Edits by others, still to come."""
        self.labels: dict[str, dict[str, str]] = {"team": {}, "other": {}}
        """Of each namespace."""
        self.classes: dict[str, Json] = {}
        """Specs of the EnergyClasses."""
        self.stored_pods: dict[str, list[Json]] = {}
        """Of each namespace."""

    def job(self, namespace: str, name: str) -> Json:
        if (namespace, name) != ("team", "gpt3"):
            raise KubeNotFound(f'perseusjobs.perseus.energy "{name}" not found')
        return self.body

    def jobs(self, namespace: str | None) -> list[Json]:
        return [self.body] if namespace in (None, "team") else []

    def pool(self, namespace: str, name: str) -> Json:
        raise KubeNotFound(f'servingpools.perseus.energy "{name}" not found')

    def pools(self, namespace: str | None) -> list[Json]:
        return []

    def namespace_labels(self, name: str) -> dict[str, str]:
        return self.labels[name]

    def namespaces(self, label: str) -> dict[str, dict[str, str]]:
        return {name: labels for name, labels in self.labels.items() if label in labels}

    def pods(self, namespace: str | None, label: str) -> list[Json]:
        there = [one for name, pods in self.stored_pods.items() if namespace in (None, name) for one in pods]
        return [one for one in there if label in one["metadata"]["labels"]]

    def energy_class(self, name: str) -> Json:
        if name not in self.classes:
            raise KubeNotFound(f'energyclasses.perseus.energy "{name}" not found')
        return {"metadata": {"name": name}, "spec": self.classes[name]}

    def config_map(self, namespace: str, name: str) -> ConfigMap:
        if name not in self.maps:
            raise KubeNotFound(f'configmaps "{name}" not found')
        return self.maps[name]

    def stored(self, plural: str, namespace: str, name: str) -> StoredObject:
        if (plural, name) not in self.objects:
            raise KubeNotFound(f'{plural} "{name}" not found')
        return self.objects[plural, name]

    def edit_annotation(self, namespace: str, name: str, key: str, edit: Callable[[Json, str], str]) -> str:
        annotations = self.body["metadata"].setdefault("annotations", {})
        annotations[key] = edit(self.body, annotations.get(key, ""))
        return str(annotations[key])


def command(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return cli.run(arguments, out, err), out.getvalue(), err.getvalue()
