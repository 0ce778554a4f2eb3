"""Kinds of workloads as their real controllers make them: each trains on the cluster, is planned, and leaves nothing.

The namespace has a class, so no PerseusJob is written and no pod has a label of ours: what the operator knows of a
workload is what its controller wrote on the pods. Kueue and JobSet have a suite of their own, test_controllers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from controllers import (
    JOB_SET,
    KUBERAY,
    LWS,
    MPI,
    TRAINER,
    TRAINING_OPERATOR,
    install_for_workloads,
    installed,
)
from installation import PATIENCE_S
from journey import TRAINING, Journey, Training

from local_cluster.errors import ClusterError
from perseus_proto import keys

pytestmark = pytest.mark.timeout(900)

JOB = Training("train", stages=2, pipelines=1, microbatches=4)
PROFILE = "shared"
Manifest = dict[str, Any]


def template(master: str, rank: Any = None, *, gpus: int = 1) -> Manifest:
    """A pod of the job: where its first rank is, and which one this is, if no launcher says so."""
    [_, job] = JOB.indexed_job()
    pod = job["spec"]["template"]["spec"]
    del pod["subdomain"]
    [container] = pod["containers"]
    container["env"] = [{"name": "MASTER_ADDR", "value": master}]
    if rank is not None:
        container["env"].append({"name": "NODE_RANK", **rank})
    container["resources"]["limits"] = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    annotations = {keys.ANNOTATION_PROFILE: PROFILE}
    return {"metadata": {"labels": {"app": JOB.name}, "annotations": annotations}, "spec": pod}


def label(name: str) -> Manifest:
    return {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{name}']"}}}


def workload(api_version: str, kind: str, spec: Manifest) -> Manifest:
    metadata = {"name": JOB.name, "namespace": TRAINING}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def train_job() -> list[Manifest]:
    """A TrainJob of two nodes, by a runtime of our own as a platform has them."""
    api = "trainer.kubeflow.org/v1alpha1"
    pods = template(f"{JOB.name}-node-0-0.{JOB.name}.{TRAINING}.svc.cluster.local")
    pods["spec"]["containers"][0]["name"] = "node"
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": pods},
        },
    }
    runtime = workload(api, "TrainingRuntime", {"mlPolicy": {"numNodes": 2}, "template": {"spec": {}}})
    runtime["metadata"]["name"] = "simulated"
    runtime["spec"]["template"]["spec"] = {"replicatedJobs": [node]}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "simulated"}
    return [runtime, workload(api, "TrainJob", {"runtimeRef": reference, "trainer": {"numNodes": 2}})]


def leader_worker_set() -> list[Manifest]:
    """One group: a leader, which is a worker as well, and one worker."""
    index = label("leaderworkerset.sigs.k8s.io/worker-index")
    pods = template(f"{JOB.name}-0.{JOB.name}.{TRAINING}.svc.cluster.local", index)
    pods["spec"]["restartPolicy"] = "Always"
    groups = {"replicas": 1, "leaderWorkerTemplate": {"size": 2, "workerTemplate": pods}}
    return [workload("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", groups)]


def ray_cluster() -> list[Manifest]:
    """A head that trains as well, and a group of one worker; what runs in them is ours and not Ray."""
    spec = {"clusterIP": "None", "selector": {"ray.io/cluster": JOB.name, "ray.io/node-type": "head"}}
    service = workload("v1", "Service", {**spec, "publishNotReadyAddresses": True})
    master = f"{JOB.name}.{TRAINING}.svc.cluster.local"
    head, worker = (template(master, {"value": rank}) for rank in "01")
    for pods in (head, worker):
        pods["spec"]["restartPolicy"] = "Always"
        pods["spec"]["containers"][0]["command"] = ["python", "-m", "perseus_sim.training.pod_job"]
    group = {"groupName": "workers", "replicas": 1, "minReplicas": 1, "maxReplicas": 1, "rayStartParams": {}}
    ray = workload(
        "ray.io/v1",
        "RayCluster",
        {
            "headGroupSpec": {"rayStartParams": {}, "template": head},
            "workerGroupSpecs": [{**group, "template": worker}],
        },
    )
    ray["metadata"]["annotations"] = {"ray.io/overwrite-container-cmd": "true"}
    return [service, ray]


def mpi_job() -> list[Manifest]:
    """Two workers, and a launcher that has no GPU and only waits."""
    master = f"{JOB.name}-worker-0.{JOB.name}.{TRAINING}.svc.cluster.local"
    workers = template(master, label("training.kubeflow.org/replica-index"))
    launcher = template(master, gpus=0)
    launcher["spec"]["containers"][0] |= {"command": ["python", "-c", "import time; time.sleep(3600)"]}
    launcher["spec"]["containers"][0]["args"] = []
    replicas = {
        "Launcher": {"replicas": 1, "template": launcher},
        "Worker": {"replicas": 2, "template": workers},
    }
    spec = {"slotsPerWorker": 1, "runPolicy": {"cleanPodPolicy": "All"}, "mpiReplicaSpecs": replicas}
    return [workload("kubeflow.org/v2beta1", "MPIJob", spec)]


def pytorch_job() -> list[Manifest]:
    """Two workers; a master would make the others wait for it in a container whose image is not here."""
    master = f"{JOB.name}-worker-0.{TRAINING}.svc.cluster.local"
    workers = template(master, label("training.kubeflow.org/replica-index"))
    workers["spec"]["containers"][0]["name"] = "pytorch"
    replicas = {"Worker": {"replicas": 2, "restartPolicy": "OnFailure", "template": workers}}
    return [workload("kubeflow.org/v1", "PyTorchJob", {"pytorchReplicaSpecs": replicas})]


@dataclass(frozen=True)
class Kind:
    """A kind of workload: its manifests, how kubectl calls it, and the pods that are no workers."""

    manifests: Callable[[], list[Manifest]]
    resource: str
    idle: int = 0


KINDS = {
    "TrainJob": Kind(train_job, "trainjobs.trainer.kubeflow.org"),
    "LeaderWorkerSet": Kind(leader_worker_set, "leaderworkersets.leaderworkerset.x-k8s.io"),
    "RayCluster": Kind(ray_cluster, "rayclusters.ray.io"),
    "MPIJob": Kind(mpi_job, "mpijobs.kubeflow.org", idle=1),
    "PyTorchJob": Kind(pytorch_job, "pytorchjobs.kubeflow.org"),
}


@pytest.fixture(scope="module")
def controllers(cluster: Any, helm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("controllers")
    with installed(
        cluster, helm, folder, (JOB_SET, TRAINER, LWS, KUBERAY, MPI, TRAINING_OPERATOR), patience_s=PATIENCE_S
    ):
        yield


@pytest.fixture(scope="module")
def journey(controllers: None, cleared_journey: Journey) -> Iterator[Journey]:
    journey = cleared_journey
    install_for_workloads(journey, JOB)
    yield journey
    for kind in KINDS.values():  # while their controllers run
        with contextlib.suppress(ClusterError):
            journey.kubectl("-n", TRAINING, "delete", kind.resource, "--all", "--timeout=60s")


def perseus_jobs(journey: Journey) -> list[Any]:
    return list(journey.read("-n", TRAINING, "get", keys.PLURAL)["items"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_workload_of_its_controller_is_planned_and_leaves_nothing(journey: Journey, kind: str) -> None:
    asked = KINDS[kind]

    def accepted() -> bool:
        """Webhooks of controllers answer a moment after their Deployments are ready."""
        with contextlib.suppress(ClusterError):
            journey.apply(*asked.manifests())
            return True
        return False

    journey.eventually(f"the {kind} is accepted", accepted, PATIENCE_S)
    journey.eventually("its PerseusJob is made", lambda: perseus_jobs(journey), PATIENCE_S)
    [made] = perseus_jobs(journey)
    assert made["metadata"]["name"] == JOB.name
    assert made["spec"]["workload"]["reference"]["name"] == JOB.name
    journey.follow(JOB, "PlanApplied")
    journey.clocks_are_the_plans(JOB)
    pods = journey.core.list_namespaced_pod(TRAINING).items
    assert len([pod for pod in pods if pod.status.phase == "Running"]) == JOB.ranks + asked.idle
    assert f"{JOB.ranks} pods" in journey.condition(JOB, "Active")[2], "and no launcher among them"

    journey.kubectl("-n", TRAINING, "delete", asked.resource, JOB.name)
    journey.eventually("no PerseusJob is left", lambda: not perseus_jobs(journey), PATIENCE_S)
    journey.eventually("no GPU is locked", lambda: journey.locked() == [], PATIENCE_S)
    journey.eventually("no pod is left", lambda: not journey.core.list_namespaced_pod(TRAINING).items, PATIENCE_S)
    journey.kubectl("-n", TRAINING, "delete", "services", "--all")
