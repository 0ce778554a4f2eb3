"""Controllers of workloads on a real cluster, built from their Go modules and installed by their charts or manifests.

Their versions are those of deploy/control-plane. The cluster has no way to a registry, so each image holds the one
program that was built.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from installation import PATIENCE_S
from journey import AGENTS, Journey
from training import CONFINED, PHYSICS, TRAINING, Training

from local_cluster.errors import ClusterError
from local_cluster.images import wrap
from perseus_core import keys
from perseus_sim.gpus.dynamic_resources import DRIVER
from perseus_sim.profiles import profile_csv

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "control-plane"))
import build

CLASS = (
    '{"objective":{"type":"MaxSlowdown","maxSlowdown":"5%"},"mode":"Enforce","comparison":{"everyIterations":0},'
    '"profiling":{"maxClocks":6,"iterationsPerClock":2}}'
)
INSTALL = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", "simulatedGpus.enabled=true,webhook.enabled=true,agent.settings.gpuMetrics=true"),
    *("--set-json", f"energyClass.spec={CLASS}"),
)
"""Our own release beside them: workloads of a class need no object of ours."""
USER: Final = 65532
"""Images of one program name no user, and the installations demand one that is not root."""


@dataclass(frozen=True)
class Controller:
    """How one is installed.

    Attributes:
        name: of the binary, the image and the release.
        folder: of the chart or the kustomization, in the module.
        values: of the chart; empty: it is a kustomization.
        base: the kustomization to begin with, in the folder.
        image: that the kustomization names.
        environment: that its container needs here.
        arguments: of its container.
        configuration: lines to add to the configuration file in the chart.
        omitted: a definition of the kustomization that another controller brings.
        home: its namespace, if it insists on one.
        companions: further programs of its module, each an image, that run beside it or in the pods of its users.
    """

    name: str
    folder: str
    values: str = ""
    base: str = "."
    image: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()
    configuration: str = ""
    omitted: str = ""
    home: str = ""
    companions: tuple[str, ...] = ()

    @property
    def namespace(self) -> str:
        return self.home or f"{self.name}-system"


RESTART_AGENT: Final = "in-place-restart-agent"
"""Of JobSet: it restarts the containers of its pod when those of another one have ended."""
JOB_SET: Final = Controller(
    "jobset",
    "charts/jobset",
    f"image.repository=local/jobset,image.tag=v1,image.pullPolicy=Never,controller.podSecurityContext.runAsUser={USER}",
    configuration="featureGates: {InPlaceRestart: true, ElasticJobSet: true}",
    companions=(RESTART_AGENT,),
)
CLAIMED: Final = "claimed-gpus"
"""What Kueue counts ResourceClaims of NVIDIA's class as."""
KUEUE: Final = Controller(
    "kueue",
    "charts/kueue",
    "controllerManager.featureGates[0].name=DynamicResourceAllocation,controllerManager.featureGates[0].enabled=true,"
    "controllerManager.featureGates[1].name=ElasticJobsViaWorkloadSlices,controllerManager.featureGates[1].enabled=true,"
    "controllerManager.manager.image.repository=local/kueue,controllerManager.manager.image.tag=v1,"
    f"controllerManager.manager.image.pullPolicy=Never,controllerManager.manager.podSecurityContext.runAsUser={USER}",
    configuration=f"resources: {{deviceClassMappings: [{{name: {CLAIMED}, deviceClassNames: [{DRIVER}]}}]}}",
)
TRAINER: Final = Controller(
    "trainer",
    "charts/kubeflow-trainer",
    "jobset.install=false,image.registry=docker.io,image.repository=local/trainer,image.tag=v1,image.pullPolicy=Never,"
    f"manager.securityContext.runAsUser={USER}",
)
LWS: Final = Controller(
    "lws",
    "charts/lws",
    "image.manager.repository=local/lws,image.manager.tag=v1,image.manager.pullPolicy=Never,"
    f"podSecurityContext.runAsUser={USER},resources.requests.cpu=100m,resources.requests.memory=128Mi",
)
KUBERAY: Final = Controller(
    "kuberay",
    "config",
    base="default",
    image="quay.io/kuberay/operator",
    environment=(("ENABLE_INIT_CONTAINER_INJECTION", "false"), ("ENABLE_PROBES_INJECTION", "false")),
)
"""It would have each pod run programs of a Ray image, to wait for the head and to see whether it lives."""
MPI: Final = Controller("mpi", "manifests/base", image="mpioperator/mpi-operator", home="mpi-operator")
TRAINING_OPERATOR: Final = Controller(
    "training-operator",
    "manifests",
    base="overlays/standalone",
    image="ghcr.io/kubeflow/training-v1/training-operator",
    arguments=("--enable-scheme=pytorchjob",),
    omitted="mpijobs.kubeflow.org",
    home="kubeflow",
)
"""Its MPIJobs are of an older version than those of the MPI operator."""
VOLCANO_SCHEDULER: Final = "volcano-scheduler"
VOLCANO: Final = Controller(
    "volcano",
    "installer/helm/chart/volcano",
    "basic.image_registry=docker.io,basic.controller_image_name=local/volcano,basic.image_tag_version=v1,"
    f"basic.scheduler_image_name=local/{VOLCANO_SCHEDULER},basic.image_pull_policy=Never,"
    f"custom.admission_enable=false,custom.default_sc.runAsUser={USER}",
    companions=(VOLCANO_SCHEDULER,),
)
"""Without its webhook, which has its certificate from a Job that runs a shell. No pod of a job is made before its
scheduler admits the job.
"""


QUEUE: Final = "team"
_KUEUE_API: Final = "kueue.x-k8s.io/v1beta1"
JOB_SET_API: Final = "jobset.x-k8s.io/v1alpha2"
URGENT: Final = "urgent"
"""A priority: its workloads take the place of those that have none."""


@contextlib.contextmanager
def queued(journey: Journey, quotas: dict[str, str], namespace: str = TRAINING, name: str = QUEUE) -> Iterator[None]:
    """Let workloads of a namespace wait in a queue of Kueue, with what they may use together."""

    def served() -> bool:
        """The controllers' webhooks answer a moment after their Deployments are ready."""
        journey.apply(*queue(quotas, namespace, name))
        return True

    journey.eventually("the queue is made", served, PATIENCE_S)
    yield
    for kinds in (
        "jobset",
        "job",
        "localqueue",
        "clusterqueue",
        "resourceflavor",
        "workloadpriorityclass",
    ):  # while their controllers run
        with contextlib.suppress(ClusterError):
            journey.kubectl("-n", namespace, "delete", kinds, "--all", "--timeout=60s")


def queue(quotas: dict[str, str], namespace: str = TRAINING, name: str = QUEUE) -> list[dict[str, Any]]:
    """The manifests of a queue."""
    resources = [{"name": resource, "nominalQuota": quota} for resource, quota in quotas.items()]
    group = {"coveredResources": [*quotas], "flavors": [{"name": "gpus", "resources": resources}]}
    return [
        {"apiVersion": _KUEUE_API, "kind": "ResourceFlavor", "metadata": {"name": "gpus"}},
        {
            "apiVersion": _KUEUE_API,
            "kind": "ClusterQueue",
            "metadata": {"name": name},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [group],
                "preemption": {"withinClusterQueue": "LowerPriority"},
            },
        },
        {"apiVersion": _KUEUE_API, "kind": "WorkloadPriorityClass", "metadata": {"name": URGENT}, "value": 1000},
        {
            "apiVersion": _KUEUE_API,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterQueue": name},
        },
    ]


def job_set(job: Training, profile: str = "", priority: str = "") -> dict[str, Any]:
    """A JobSet of one Job with a pod for each rank, as a user of Kueue writes it.

    Args:
        job: what it trains.
        profile: that runs of its kind share; empty: there is not a word of ours.
        priority: a class of Kueue's; empty: none.
    """
    spec = job.indexed_job()[1]["spec"]
    pod = spec["template"]["spec"]
    del pod["subdomain"]
    [container] = pod["containers"]
    container["env"] = [{"name": "MASTER_ADDR", "value": f"{job.name}-w-0-0.{job.name}.{TRAINING}.svc.cluster.local"}]
    annotations = {keys.ANNOTATION_PROFILE: profile} if profile else {}
    spec["template"]["metadata"] = {"labels": {"app": job.name}, "annotations": annotations}
    labels = {"kueue.x-k8s.io/queue-name": QUEUE}
    if priority:
        labels["kueue.x-k8s.io/priority-class"] = priority
    metadata = {"name": job.name, "namespace": TRAINING, "labels": labels}
    replicated = {"name": "w", "replicas": 1, "template": {"spec": {**spec, "backoffLimit": 0}}}
    return {
        "apiVersion": JOB_SET_API,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {"failurePolicy": {"maxRestarts": 2}, "replicatedJobs": [replicated]},
    }


def restarting_in_place(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Let a JobSet restart the containers of its pods in place of the pods, with the agent that it needs in each, and
    the agent's rights.
    """
    [replicated] = workload["spec"]["replicatedJobs"]
    workload["spec"]["failurePolicy"] = {"maxRestarts": 3, "restartStrategy": "InPlaceRestart"}
    job = replicated["template"]["spec"]
    job |= {"backoffLimit": 2**31 - 1, "podReplacementPolicy": "Failed"}
    pod = job["template"]["spec"]
    [trainer] = pod["containers"]
    trainer |= {"restartPolicy": "Never", "restartPolicyRules": [_restart_all("NotIn", 0)]}
    fields = {"POD_NAME": "metadata.name", "JOBSET_NAME": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}
    agent = {
        "name": "restart-agent",
        "image": f"local/{RESTART_AGENT}:v1",
        "imagePullPolicy": "Never",
        "restartPolicy": "Always",
        "restartPolicyRules": [_restart_all("In", _RESTART_CODE)],
        "startupProbe": {
            "httpGet": {"path": "/barrier-is-down", "port": 8081},
            "periodSeconds": 1,
            "failureThreshold": 99,
        },
        "env": [
            {"name": "IN_PLACE_RESTART_EXIT_CODE", "value": str(_RESTART_CODE)},
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        ],
        "securityContext": {**CONFINED, "runAsUser": USER},
    }
    pod |= {"initContainers": [agent], "automountServiceAccountToken": True}
    rights = {"namespace": TRAINING, "name": RESTART_AGENT}
    rbac = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
    ]
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": TRAINING}
    role = {"apiGroup": rbac, "kind": "Role", "name": RESTART_AGENT}
    return [
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": rights, "rules": rules},
        {"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": rights, "subjects": [subject], "roleRef": role},
        workload,
    ]


_RESTART_CODE: Final = 42
"""With which the agent ends for its pod's containers to be restarted."""


def _restart_all(operator: str, code: int) -> dict[str, Any]:
    return {"action": "RestartAllContainers", "exitCodes": {"operator": operator, "values": [code]}}


@contextlib.contextmanager
def installed(
    cluster: Any, helm: Callable[..., str], folder: Path, controllers: tuple[Controller, ...], *, patience_s: float
) -> Iterator[None]:
    """Install controllers for a while, in this order."""
    if shutil.which("go") is None:
        pytest.skip("no Go on this machine to build the controllers")
    binaries = build.folder()
    build.build([name for each in controllers for name in (each.name, *each.companions)], binaries)
    for each in controllers:
        manager = folder / each.name / "manager"  # as most of them are started
        manager.parent.mkdir()
        shutil.copy(binaries / each.name, manager)
        for name, program in (each.name, manager), *((name, binaries / name) for name in each.companions):
            wrap(program, f"local/{name}:v1", folder / f"{name}.tar")
            cluster.load(folder / f"{name}.tar")
        source = writable(build.source(each.name) / each.folder, folder / "sources" / each.name)
        if each.values:
            _without_dependencies(source / "Chart.yaml")
            _configure(source, each.configuration)
            where = ("--namespace", each.namespace, "--create-namespace")
            helm("install", each.name, str(source), *where, "--set", each.values)
        else:
            overlay = _overlay(each, source)
            cluster.kubectl("create", "namespace", each.namespace)
            cluster.kubectl("apply", "--server-side", "--kustomize", str(overlay))
    for each in controllers:
        cluster.kubectl("-n", each.namespace, "rollout", "status", "deployment", f"--timeout={patience_s:.0f}s")
    _forget_apis_that_do_not_answer(cluster)
    yield
    for each in reversed(controllers):
        with contextlib.suppress(AssertionError, ClusterError):
            if each.values:
                helm("uninstall", each.name, "--namespace", each.namespace, "--wait", "--timeout=60s")
            else:
                overlay = folder / "sources" / f"{each.name}-overlay"
                cluster.kubectl("delete", "--ignore-not-found", "--timeout=60s", "--kustomize", str(overlay))
                cluster.kubectl("delete", "namespace", each.namespace, "--ignore-not-found", "--timeout=60s")


def install_for_workloads(journey: Journey, *jobs: Training, flags: tuple[str, ...] = ()) -> None:
    """Install the release, let the training namespace opt in to its class, and give the GPUs what these jobs do."""
    confined = ("--set", "operator.hostUsers=false") if has_user_namespaces(journey) else ()
    journey.install(*INSTALL, *confined, *flags)
    journey.kubectl("label", "namespace", TRAINING, f"{keys.LABEL_CLASS}=default")
    data = {f"{job.name}.csv": profile_csv(job.stages, imbalance=1.25, forward_s=0.02) for job in jobs}
    journey.core.create_namespaced_config_map(TRAINING, {"metadata": {"name": PHYSICS}, "data": data})


def has_user_namespaces(journey: Journey) -> bool:
    """Whether the container runtime of every node gives pods user namespaces of their own."""
    handlers = [handler for node in journey.core.list_node().items for handler in node.status.runtime_handlers or ()]
    return bool(handlers) and all(each.features and each.features.user_namespaces for each in handlers)


def writable(source: Path, copy: Path) -> Path:
    """Copy a folder of the module cache, whose files nobody may write."""
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return copy


def _without_dependencies(chart: Path) -> None:
    """Charts of others would be fetched from a registry; what of them is needed is installed before."""
    found = yaml.safe_load(chart.read_text(encoding="utf-8"))
    found.pop("dependencies", None)
    chart.write_text(yaml.safe_dump(found), encoding="utf-8")


def _configure(chart: Path, lines: str) -> None:
    """Add lines to the configuration file of a controller, which is in its chart's values or in a template."""
    template = chart / "templates" / "controller" / "configmap.yaml"
    if lines and template.exists():
        template.write_text(f"{template.read_text(encoding='utf-8')}    {lines}\n", encoding="utf-8")
    elif lines:
        values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
        values["managerConfig"]["controllerManagerConfigYaml"] += f"\n{lines}\n"
        (chart / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")


def _overlay(controller: Controller, source: Path) -> Path:
    """A kustomization of our own over the controller's: namespace, image, user and environment."""
    base = source / controller.base
    overlay = source.parent / f"{controller.name}-overlay"
    overlay.mkdir()
    environment = [{"name": name, "value": value} for name, value in controller.environment]
    wanted = {"securityContext": {"runAsUser": USER}, "env": environment, "args": list(controller.arguments)}
    container = [
        {"op": "add", "path": f"/spec/template/spec/containers/0/{field}", "value": value}
        for field, value in wanted.items()
        if value
    ]
    patches = [{"target": {"kind": "Deployment"}, "patch": yaml.safe_dump(container)}]
    if controller.omitted:
        gone = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "$patch": "delete"}
        patches.append({"patch": yaml.safe_dump({**gone, "metadata": {"name": controller.omitted}})})
    kustomization = {
        "namespace": controller.namespace,
        "resources": [f"../{base.relative_to(source.parent)}"],
        "images": [{"name": controller.image, "newName": f"local/{controller.name}", "newTag": "v1"}],
        "patches": patches,
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    return overlay


def _forget_apis_that_do_not_answer(cluster: Any) -> None:
    """Kueue's own API server needs a cluster whose API server signs requests to such; while it is listed and does not
    answer, no namespace can be deleted.
    """
    listed = cluster.kubectl("get", "apiservice", "-o", "name").split()
    silent = [name for name in listed if re.search(r"visibility\.kueue", name)]
    if silent:
        cluster.kubectl("delete", *silent)
