"""Every kind of workload on an API server: the operator finds its pods by their labels and owners, and no others.

The workloads' controllers do not run: the test makes stubs of their CRDs, and the pods. No node has an agent, so the
condition ``AgentsReady`` names the nodes of the pods that the operator takes for the job's workers. The requests to
agents are tested in tests/integration/operator_loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kubernetes import client
from tests.e2e.world import STAGES, World
from tests.waiting import eventually

from perseus_core import keys
from perseus_operator.api.workload import WorkloadKind
from perseus_operator.nodes.workloads import PRESETS
from perseus_sim.cluster.api_servers import Feature
from perseus_sim.profiles import profile_csv

pytestmark = pytest.mark.e2e

NAME = "train"
JOB_SET, KUBEFLOW, LWS = "jobset.sigs.k8s.io", "training.kubeflow.org", "leaderworkerset.sigs.k8s.io"


@dataclass(frozen=True)
class Made:
    """What controllers make of a workload: labels of a worker and of a pod that is none, and the owner of the pods."""

    plural: str
    worker: dict[str, str]
    idle: dict[str, str] | None = None
    owner: tuple[str, str, str] | None = None
    """apiVersion, kind and plural of the owner, if it is not the workload itself."""


JOBS = ("batch/v1", "Job", "jobs")
MADE: dict[str, Made] = {
    "Job": Made("jobs", {"batch.kubernetes.io/job-name": NAME, "batch.kubernetes.io/job-completion-index": "0"}),
    "JobSet": Made(
        "jobsets",
        {f"{JOB_SET}/jobset-name": NAME, f"{JOB_SET}/replicatedjob-name": "w", f"{JOB_SET}/restart-attempt": "0"},
        owner=JOBS,
    ),
    "PyTorchJob": Made("pytorchjobs", {f"{KUBEFLOW}/job-name": NAME, f"{KUBEFLOW}/replica-type": "worker"}),
    "TrainJob": Made(
        "trainjobs",
        {f"{JOB_SET}/jobset-name": NAME, f"{JOB_SET}/replicatedjob-name": "node", f"{JOB_SET}/restart-attempt": "0"},
        {f"{JOB_SET}/jobset-name": NAME, f"{JOB_SET}/replicatedjob-name": "dataset-initializer"},
        owner=JOBS,
    ),
    "MPIJob": Made(
        "mpijobs",
        {f"{KUBEFLOW}/job-name": NAME, f"{KUBEFLOW}/job-role": "worker"},
        {f"{KUBEFLOW}/job-name": NAME, f"{KUBEFLOW}/job-role": "launcher"},
    ),
    "VolcanoJob": Made(
        "jobs", {"volcano.sh/job-name": NAME, "volcano.sh/task-spec": "w", "volcano.sh/task-index": "0"}
    ),
    "RayJob": Made(
        "rayjobs",
        {"ray.io/cluster": f"{NAME}-x7k2p", "ray.io/node-type": "worker"},
        {"ray.io/cluster": f"{NAME}-x7k2p", "ray.io/node-type": "head"},
        owner=("ray.io/v1", "RayCluster", "rayclusters"),
    ),
    "RayCluster": Made(
        "rayclusters",
        {"ray.io/cluster": NAME, "ray.io/node-type": "worker"},
        {"ray.io/cluster": NAME, "ray.io/node-type": "head"},
    ),
    "LeaderWorkerSet": Made(
        "leaderworkersets",
        {f"{LWS}/name": NAME, f"{LWS}/group-index": "0", f"{LWS}/worker-index": "0"},
        owner=("apps/v1", "StatefulSet", "statefulsets"),
    ),
}


@pytest.fixture(scope="module")
def stubs(api: Any) -> Iterator[None]:
    """CRDs without schemas for the kinds that are not built in. CRDs that a cluster already has are not changed."""
    definitions, mine = client.ApiextensionsV1Api(api), []
    there = {item.metadata.name for item in definitions.list_custom_resource_definition().items}
    for kind, made in MADE.items():
        group, _, version = PRESETS[WorkloadKind(kind)].group.rpartition("/")
        name = f"{made.plural}.{group}"
        if group == "batch" or name in there:
            continue
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        names = {"kind": kind.removeprefix("Volcano"), "plural": made.plural, "singular": made.plural[:-1]}
        versions = [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}]
        spec = {"group": group, "scope": "Namespaced", "names": names, "versions": versions}
        definitions.create_custom_resource_definition({"metadata": {"name": name}, "spec": spec})
        mine.append(name)

    def established(name: str) -> bool:
        status = definitions.read_custom_resource_definition(name).status
        return any((c.type, c.status) == ("Established", "True") for c in (status.conditions if status else None) or ())

    eventually(lambda: all(map(established, mine)), "the stubs are not established", every_s=0.1)
    yield
    for name in mine:
        definitions.delete_custom_resource_definition(name)


class Cluster:
    """Workloads and their pods, in the namespace of a world."""

    def __init__(self, world: World, api: Any) -> None:
        self.world, self.api = world, api

    def make(self, api_version: str, kind: str, plural: str, name: str) -> dict[str, Any]:
        """Make a workload that no controller handles; return the reference by which it owns pods."""
        body: dict[str, Any] = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}}
        if api_version in ("batch/v1", "apps/v1"):
            template = {
                "metadata": {"labels": {"a": "b"}},
                "spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]},
            }
            body["spec"] = {"template": template, "suspend": True}
            if kind == "StatefulSet":
                template["spec"]["restartPolicy"] = "Always"
                body["spec"] = {
                    "template": template,
                    "replicas": 0,
                    "serviceName": "s",
                    "selector": {"matchLabels": {"a": "b"}},
                }
        group, _, version = api_version.rpartition("/")
        made: Any = self.world.custom.create_namespaced_custom_object(
            group, version, self.world.namespace, plural, body
        )
        about = {"apiVersion": api_version, "kind": kind, "name": name, "uid": made["metadata"]["uid"]}
        return {**about, "controller": True}

    def owner_of(self, kind: str, name: str = NAME) -> dict[str, Any]:
        """Make the owner of the pods of a workload of this kind; return the reference to it."""
        made = MADE[kind]
        if made.owner is not None:
            return self.make(*made.owner, f"{kind.lower()}-{name}-owner")
        return self.make(PRESETS[WorkloadKind(kind)].group, kind.removeprefix("Volcano"), made.plural, name)

    def pod(self, name: str, labels: dict[str, str], owner: dict[str, Any], *, node: str = "") -> None:
        metadata = {"name": name, "labels": {keys.LABEL_JOB: "gpt3", **labels}, "ownerReferences": [owner]}
        spec = {
            "nodeName": node or f"node-of-{name}",
            "containers": [{"name": "main", "image": "x"}],
            "automountServiceAccountToken": False,
        }
        self.world.core.create_namespaced_pod(self.world.namespace, {"metadata": metadata, "spec": spec})

    def until_chosen(self, pod: str) -> None:
        """Wait until the operator takes this pod, or another one of its node, for a worker of the job."""
        self.until_reported(f"Node node-of-{pod} runs pods of the job but no Perseus agent.")

    def until_reported(self, message: str) -> None:
        """Wait until the condition's message contains this; the message may change later than the status."""

        def reported() -> bool:
            return message in self.world.conditions().get("AgentsReady", {}).get("message", "")

        self.world.until(f"reported: {message}", reported)


@pytest.fixture
def cluster(world: World, api: Any, stubs: None) -> Cluster:
    world.until_pods_can_be_made()
    world.profile(profile_csv=profile_csv(STAGES))
    return Cluster(world, api)


def refer(kind: str) -> dict[str, Any]:
    return {"workload": {"reference": {"kind": kind, "name": NAME}}}


def test_the_workers_of_every_kind_are_distinguished_from_all_other_pods(cluster: Cluster) -> None:
    """All nine workloads have the same name, and their pods have the same opt-in label."""
    assert set(MADE) == set(WorkloadKind)
    world = cluster.world
    for kind, made in MADE.items():
        if kind == "TrainJob":
            continue  # its pods are those of a JobSet of its name: see the next test
        owner = cluster.owner_of(kind)
        cluster.pod(kind.lower(), made.worker, owner)
        if made.idle is not None:
            cluster.pod(f"{kind.lower()}-idle", made.idle, owner)
    world.create(**refer("Job"))
    for kind in [*MADE, "Job"]:
        if kind in ("TrainJob", "PyTorchJob", "MPIJob"):
            continue  # two kinds that share labels
        world.patch({"spec": refer(kind)})
        cluster.until_chosen(kind.lower())


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob", "MPIJob"])
def test_kinds_whose_pods_carry_the_labels_of_another_kind(cluster: Cluster, kind: str) -> None:
    made, world = MADE[kind], cluster.world
    owner = cluster.owner_of(kind)
    if made.idle is not None:
        cluster.pod("idle", made.idle, owner)
        world.create(**refer(kind))
        cluster.until_reported(": of the pods that opted in, 1 are no workers")
        cluster.pod("worker", made.worker, owner)
    else:
        cluster.pod("worker", made.worker, owner)
        world.create(**refer(kind))
    cluster.until_chosen("worker")


def test_only_the_latest_attempt_counts(cluster: Cluster) -> None:
    """A JobSet restarts: its jobs are made again, and pods of the old ones may exist for a while longer."""
    made, world = MADE["JobSet"], cluster.world
    owner = cluster.owner_of("JobSet")
    cluster.pod("old", made.worker, owner)
    world.create(**refer("JobSet"))
    cluster.until_chosen("old")
    cluster.pod("new", made.worker | {f"{JOB_SET}/restart-attempt": "1"}, owner)
    cluster.until_chosen("new")


def test_a_job_is_suspended_and_resumed(cluster: Cluster) -> None:
    world = cluster.world
    cluster.pod("worker", MADE["Job"].worker, cluster.owner_of("Job"))
    world.create(**refer("Job"))
    cluster.until_chosen("worker")
    world.patch({"spec": {"suspend": True}})
    world.until_condition("AgentsReady", "False", "Suspended")
    world.until_condition("Ready", "True", "Ready")  # in mode Recommend, which needs no agents
    world.patch({"spec": {"suspend": None}})
    cluster.until_chosen("worker")


@pytest.mark.needs(Feature.CONTROLLERS)
def test_pods_of_a_deleted_workload_do_not_count(cluster: Cluster) -> None:
    """The same holds when it is suspended. No kubelet ends the pods, so they stay in the state Terminating."""
    world = cluster.world
    cluster.pod("worker", MADE["PyTorchJob"].worker, cluster.owner_of("PyTorchJob"))
    world.create(**refer("PyTorchJob"))
    cluster.until_chosen("worker")
    place = ("kubeflow.org", "v1", world.namespace, "pytorchjobs", NAME)
    world.custom.delete_namespaced_custom_object(*place)
    cluster.until_reported("No worker of PyTorchJob train with the label of the job is running")

    # A new workload of the same name is another attempt.
    cluster.pod("worker-again", MADE["PyTorchJob"].worker, cluster.owner_of("PyTorchJob"))
    cluster.until_chosen("worker-again")
