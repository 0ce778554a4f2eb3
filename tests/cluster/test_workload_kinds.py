"""Kinds of workloads as their real controllers make them: each trains on the cluster, is planned, and leaves nothing.

The namespace has a class, so no PerseusJob is written and no pod has a label of ours: what the operator knows of a
workload is what its controller wrote on the pods. Kueue and JobSet have a suite of their own, test_controllers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from controllers import (
    JOB_SET,
    KUBERAY,
    LWS,
    MPI,
    TRAINER,
    TRAINING_OPERATOR,
    VOLCANO,
    install_for_workloads,
    installed,
)
from installation import PATIENCE_S, PROGRAMS, find
from journey import Journey
from training import TRAINING, Training

from local_cluster.errors import ClusterError
from perseus_core import keys

pytestmark = pytest.mark.timeout(900)

JOB = Training("train", stages=2, pipelines=1, microbatches=4)
PROFILE = "shared"
RAY = (Path(__file__).parent / "ray_stand_in.py").read_text(encoding="utf-8")
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
    service, spec = ray_pods(["python", "-m", PROGRAM], template(ray_master(), {"value": "0"}))
    return [service, overwriting(workload("ray.io/v1", "RayCluster", spec))]


def ray_job() -> list[Manifest]:
    """The same for one job: a third pod submits it, upon which the head begins to train."""
    head = template(ray_master(), {"value": "0"})
    [container] = head["spec"]["containers"]
    entrypoint = shlex.join(["python", "-m", PROGRAM, *container["args"]])
    container["args"] = ["head"]
    service, cluster = ray_pods(["python", "-c", RAY], head)
    submitter = template(ray_master(), gpus=0)
    submitter["spec"]["containers"][0] |= {
        "command": ["python", "-c", RAY],
        "args": ["submit"],
        "env": [{"name": "ENTRYPOINT", "value": entrypoint}],
    }
    job = workload(
        "ray.io/v1",
        "RayJob",
        {
            "entrypoint": entrypoint,
            "shutdownAfterJobFinishes": True,
            "submitterPodTemplate": submitter,
            "rayClusterSpec": cluster,
        },
    )
    return [service, overwriting(job)]


PROGRAM = PROGRAMS["trainer"]


def ray_master() -> str:
    return f"{JOB.name}.{TRAINING}.svc.cluster.local"


def overwriting(ray: Manifest) -> Manifest:
    """Keep the containers' commands, in place of those that start Ray."""
    ray["metadata"]["annotations"] = {"ray.io/overwrite-container-cmd": "true"}
    return ray


def ray_pods(command: list[str], head: Manifest) -> tuple[Manifest, Manifest]:
    """A Service by which workers find the head, and the specification of a RayCluster.

    Args:
        command: of the head.
        head: its pod, which trains as well.
    """
    selector = {"app": JOB.name, "ray.io/node-type": "head"}
    service = workload("v1", "Service", {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True})
    worker = template(ray_master(), {"value": "1"})
    for pods, started in ((head, command), (worker, ["python", "-m", PROGRAM])):
        pods["spec"]["restartPolicy"] = "Always"
        pods["spec"]["containers"][0]["command"] = started
    group = {"groupName": "workers", "replicas": 1, "minReplicas": 1, "maxReplicas": 1, "rayStartParams": {}}
    spec = {
        "headGroupSpec": {"rayStartParams": {}, "template": head},
        "workerGroupSpecs": [{**group, "template": worker}],
    }
    return service, spec


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


def volcano_job() -> list[Manifest]:
    """Two workers, with the Service of Volcano's plugin. What Volcano's webhook would set is written here, because it
    does not run: scheduler, queue, how many pods begin together, and how often they are restarted. When one fails, all
    are.
    """
    workers = template(f"{JOB.name}-worker-0.{JOB.name}.{TRAINING}.svc.cluster.local", label("volcano.sh/task-index"))
    together = {"minAvailable": 2, "maxRetry": 3}
    tasks = [{"name": "worker", "replicas": 2, **together, "template": workers}]
    policy = {"event": "PodFailed", "action": "RestartJob"}
    spec = {"schedulerName": "volcano", "queue": "default", **together, "plugins": {"svc": []}, "policies": [policy]}
    return [workload(VOLCANO_API, "Job", {**spec, "tasks": tasks})]


VOLCANO_API = "batch.volcano.sh/v1alpha1"


@dataclass(frozen=True)
class Kind:
    """A kind of workload: its manifests, how kubectl calls it, the pods that are no workers, and what follows its name
    in that of its PerseusJob.
    """

    manifests: Callable[[], list[Manifest]]
    resource: str
    idle: int = 0
    suffix: str = ""


KINDS = {
    "TrainJob": Kind(train_job, "trainjobs.trainer.kubeflow.org"),
    "LeaderWorkerSet": Kind(leader_worker_set, "leaderworkersets.leaderworkerset.x-k8s.io"),
    "RayCluster": Kind(ray_cluster, "rayclusters.ray.io"),
    "RayJob": Kind(ray_job, "rayjobs.ray.io", idle=1, suffix="-[a-z0-9]{5}"),
    "MPIJob": Kind(mpi_job, "mpijobs.kubeflow.org", idle=1),
    "PyTorchJob": Kind(pytorch_job, "pytorchjobs.kubeflow.org"),
    "VolcanoJob": Kind(volcano_job, "jobs.batch.volcano.sh"),
}


@pytest.fixture(scope="module")
def controllers(cluster: Any, helm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("controllers")
    with installed(
        cluster, helm, folder, (JOB_SET, TRAINER, LWS, KUBERAY, MPI, TRAINING_OPERATOR, VOLCANO), patience_s=PATIENCE_S
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
    job = replace(JOB, name=made["metadata"]["name"])
    assert re.fullmatch(JOB.name + asked.suffix, job.name)
    assert made["spec"]["workload"]["reference"]["name"] == job.name
    journey.follow(job, "PlanApplied")
    journey.clocks_are_the_plans(job)
    pods = journey.core.list_namespaced_pod(TRAINING).items
    assert len([pod for pod in pods if pod.status.phase == "Running"]) == JOB.ranks + asked.idle
    assert f"{JOB.ranks} pods" in journey.condition(job, "Active")[2], "and no launcher among them"

    journey.kubectl("-n", TRAINING, "delete", asked.resource, JOB.name)
    journey.eventually("no PerseusJob is left", lambda: not perseus_jobs(journey), PATIENCE_S)
    journey.eventually("no GPU is locked", lambda: journey.locked() == [], PATIENCE_S)
    journey.eventually("no pod is left", lambda: not journey.core.list_namespaced_pod(TRAINING).items, PATIENCE_S)
    journey.kubectl("-n", TRAINING, "delete", "services", "--all")


def test_a_ray_job_stays_one_job_from_one_ray_cluster_to_the_next(journey: Journey) -> None:
    """Its PerseusJob is written: one of a class would go with the first RayCluster."""
    [service, ray] = ray_job()
    cluster = ray["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        group["template"]["metadata"]["labels"][keys.LABEL_JOB] = JOB.name
    spec = {
        "workload": {"reference": {"kind": "RayJob", "name": JOB.name}},
        "profile": {"profileRef": {"name": PROFILE}, "online": {"maxClocks": 6, "iterationsPerClock": 2}},
        "objective": {"type": "MaxSlowdown", "maxSlowdown": "5%"},
    }

    def suspend(suspended: bool) -> None:
        patch = json.dumps({"spec": {"suspend": suspended}})
        journey.say(f"$ kubectl patch rayjob {JOB.name} --type=merge -p '{patch}'")
        journey.kubectl("-n", TRAINING, "patch", "rayjobs.ray.io", JOB.name, "--type=merge", "-p", patch)

    def without_pods() -> bool:
        return journey.condition(JOB, "AgentsReady")[1] == "NoPods" and not journey.locked()

    journey.apply(JOB.perseus_job(**spec))
    journey.apply(service, ray)
    journey.follow(JOB, "PlanApplied")
    journey.clocks_are_the_plans(JOB)
    measured = journey.read("-n", TRAINING, "get", keys.PROFILE_PLURAL, PROFILE)["metadata"]["generation"]
    before = {pod.metadata.uid for pod in journey.training_pods(JOB)}

    suspend(True)
    journey.eventually("no pod is left, and no lock", without_pods, PATIENCE_S)
    suspend(False)
    journey.eventually("the plan is in force again", lambda: journey.in_force(JOB), PATIENCE_S)
    journey.clocks_are_the_plans(JOB)
    assert not before & {pod.metadata.uid for pod in journey.training_pods(JOB)}
    profile = journey.read("-n", TRAINING, "get", keys.PROFILE_PLURAL, PROFILE)
    assert profile["metadata"]["generation"] == measured, "nothing is measured again"

    [head] = [pod for pod in journey.training_pods(JOB) if pod.metadata.labels["ray.io/node-type"] == "head"]
    for pid in find(head, PROGRAM):
        os.kill(pid, signal.SIGTERM)
    journey.eventually("the RayJob is complete", lambda: status_of_ray_job(journey) == "Complete", PATIENCE_S)
    journey.eventually("no pod is left, and no lock", without_pods, PATIENCE_S)
    assert journey.condition(JOB, "Finished")[0] != "True", "KubeRay deletes the pods, and none has succeeded"
    journey.kubectl("-n", TRAINING, "delete", "rayjobs.ray.io", JOB.name)
    journey.kubectl("-n", TRAINING, "delete", keys.PLURAL, JOB.name)
    journey.kubectl("-n", TRAINING, "delete", "services", "--all")


def status_of_ray_job(journey: Journey) -> str:
    return str(journey.read("-n", TRAINING, "get", "rayjobs.ray.io", JOB.name)["status"]["jobDeploymentStatus"])


def test_a_volcano_job_that_is_aborted_or_restarted_keeps_its_perseus_job(journey: Journey) -> None:
    """Its pods have the same owner and the same names afterwards, and other UIDs."""
    resource = KINDS["VolcanoJob"].resource
    journey.apply(*volcano_job())
    journey.follow(JOB, "PlanApplied")
    found = journey.read("-n", TRAINING, "get", resource, JOB.name)
    target = {"apiVersion": VOLCANO_API, "kind": "Job", "name": JOB.name, "uid": found["metadata"]["uid"]}

    def command(action: str) -> None:
        metadata = {"name": action.lower(), "namespace": TRAINING}
        ordered = {"metadata": metadata, "action": action, "target": {**target, "controller": True}}
        journey.apply({"apiVersion": "bus.volcano.sh/v1alpha1", "kind": "Command", **ordered})

    def pods() -> dict[str, str]:
        return {pod.metadata.uid: pod.metadata.owner_references[0].uid for pod in journey.training_pods(JOB)}

    def without_pods() -> bool:
        return journey.condition(JOB, "AgentsReady")[1] == "NoPods" and not journey.locked()

    def planned_again() -> bool:
        return len(pods()) == JOB.ranks and not before.keys() & pods().keys() and journey.in_force(JOB)

    [made], before = perseus_jobs(journey), pods()
    measured = journey.read("-n", TRAINING, "get", keys.PROFILE_PLURAL, PROFILE)["metadata"]["generation"]
    command("AbortJob")
    journey.eventually("no pod is left, and no lock", without_pods, PATIENCE_S)
    command("ResumeJob")
    journey.eventually("the plan is in force on the pods of the resumed job", planned_again, PATIENCE_S)
    before = pods()
    for pid in find(journey.training_pods(JOB)[0], PROGRAM):
        os.kill(pid, signal.SIGKILL)
    journey.eventually("the plan is in force on the pods of the restarted job", planned_again, PATIENCE_S)
    journey.clocks_are_the_plans(JOB)
    assert set(pods().values()) == {target["uid"]}, "restarts are not another owner"
    assert [each["metadata"]["uid"] for each in perseus_jobs(journey)] == [made["metadata"]["uid"]]
    profile = journey.read("-n", TRAINING, "get", keys.PROFILE_PLURAL, PROFILE)
    assert profile["metadata"]["generation"] == measured, "nothing is measured again"
    journey.kubectl("-n", TRAINING, "delete", resource, JOB.name)
    journey.eventually("no PerseusJob is left", lambda: not perseus_jobs(journey), PATIENCE_S)
