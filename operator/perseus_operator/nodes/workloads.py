"""Which pods are the workers of a workload, by its kind, from the labels that its controller writes on the pods.

``PRESETS`` has one row for each kind. The workload itself is never read: its pods carry all that is needed, so the
operator needs no access to other APIs. Which rank a process is does not follow from its pod: a pod's index is not a
rank, and each process reports its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from perseus_operator.api.job import WorkSpec
from perseus_operator.api.workload import ServerKind, WorkloadKind
from perseus_operator.objects.values import Owner, Pod


@dataclass(frozen=True)
class Preset:
    """How to recognise the pods of one kind of workload.

    Attributes:
        group: API group and version of the workload.
        name_label: pod label that carries the workload's name.
        name_pattern: the value of that label, where it is not the name itself; ``{}`` stands for the name.
        not_workers: pod label and the values of it that mark pods which do not train, unless they ask for a GPU.
        uid_label: pod label that carries the workload's UID; empty: none does.
        restart_label: pod label that counts the workload's restarts; empty: every restart has another owner.
        owner_is_attempt: the owner of a pod is the same for all pods of one attempt, and another after a restart.
        suspended_by: field of the workload that suspends it; its controller then deletes the pods. Empty: none.
        owner_kind: of the controller whose name says the workload's; empty: a label of the pods does.
        suffix_label: pod label whose value, after a hyphen, ends that name; empty: it is the workload's.
    """

    group: str
    name_label: str
    name_pattern: str = "{}"
    not_workers: tuple[str, frozenset[str]] = ("", frozenset())
    uid_label: str = ""
    restart_label: str = ""
    owner_is_attempt: bool = False
    suspended_by: str = "spec.suspend"
    owner_kind: str = ""
    suffix_label: str = ""

    def workload_of(self, labels: Mapping[str, str], owner: Owner | None) -> str:
        """The workload's name, as a pod's labels and its controller say it; empty: they do not."""
        if not self.owner_kind:
            return labels.get(self.name_label, "")
        group = self.group.partition("/")[0]
        if owner is None or (owner.api_version.partition("/")[0], owner.kind) != (group, self.owner_kind):
            return ""
        if not self.suffix_label:
            return owner.name
        name, _, suffix = owner.name.rpartition("-")
        return name if suffix == labels.get(self.suffix_label) else ""


_RANDOM: Final = "bcdfghjklmnpqrstvwxz2456789"
"""What Kubernetes makes random ends of names from."""
_JOB_SET: Final = "jobset.sigs.k8s.io"
_KUBEFLOW: Final = "training.kubeflow.org"
_LWS: Final = "leaderworkerset.sigs.k8s.io"

PRESETS: Final[Mapping[WorkloadKind, Preset]] = {
    WorkloadKind.JOB: Preset(
        "batch/v1",
        "batch.kubernetes.io/job-name",
        owner_is_attempt=True,
    ),
    WorkloadKind.JOB_SET: Preset(
        "jobset.x-k8s.io/v1alpha2",
        f"{_JOB_SET}/jobset-name",
        uid_label=f"{_JOB_SET}/jobset-uid",
        restart_label=f"{_JOB_SET}/restart-attempt",
    ),
    WorkloadKind.PYTORCH_JOB: Preset(
        "kubeflow.org/v1",
        f"{_KUBEFLOW}/job-name",
        owner_is_attempt=True,
        suspended_by="spec.runPolicy.suspend",
    ),
    # A TrainJob becomes a JobSet of the same name.
    WorkloadKind.TRAIN_JOB: Preset(
        "trainer.kubeflow.org/v1alpha1",
        f"{_JOB_SET}/jobset-name",
        not_workers=(
            f"{_JOB_SET}/replicatedjob-name",
            frozenset({"dataset-initializer", "model-initializer", "launcher"}),
        ),
        restart_label=f"{_JOB_SET}/restart-attempt",
    ),
    # The launcher's pod belongs to a Job of its own.
    WorkloadKind.MPI_JOB: Preset(
        "kubeflow.org/v2beta1",
        f"{_KUBEFLOW}/job-name",
        not_workers=(f"{_KUBEFLOW}/job-role", frozenset({"launcher"})),
        suspended_by="spec.runPolicy.suspend",
    ),
    WorkloadKind.VOLCANO_JOB: Preset(
        "batch.volcano.sh/v1alpha1",
        "volcano.sh/job-name",
        owner_is_attempt=True,
        suspended_by="",
    ),
    # A RayJob's pods name its RayCluster: older releases put "-raycluster" before the five random characters. Each
    # attempt of a RayJob is another RayCluster.
    WorkloadKind.RAY_JOB: Preset(
        "ray.io/v1",
        "ray.io/cluster",
        name_pattern=rf"{{}}(-raycluster)?-[{_RANDOM}]{{{{5}}}}",
        not_workers=("ray.io/node-type", frozenset({"head"})),
        owner_is_attempt=True,
    ),
    WorkloadKind.RAY_CLUSTER: Preset(
        "ray.io/v1",
        "ray.io/cluster",
        not_workers=("ray.io/node-type", frozenset({"head"})),
        owner_is_attempt=True,
    ),
    # Groups restart one by one, and each has owners of its own. The leader trains, too.
    WorkloadKind.LEADER_WORKER_SET: Preset(
        "leaderworkerset.x-k8s.io/v1",
        f"{_LWS}/name",
        suspended_by="",
    ),
}

_SERVERS: Final[Mapping[ServerKind, Preset]] = {
    # Its pods belong to ReplicaSets, of which a rollout has two.
    ServerKind.DEPLOYMENT: Preset(
        "apps/v1", "", suspended_by="", owner_kind="ReplicaSet", suffix_label="pod-template-hash"
    ),
    ServerKind.STATEFUL_SET: Preset("apps/v1", "", suspended_by="", owner_kind="StatefulSet"),
    ServerKind.LEADER_WORKER_SET: PRESETS[WorkloadKind.LEADER_WORKER_SET],
}


def preset_of(kind: WorkloadKind | ServerKind) -> Preset:
    """How the pods of a kind are recognised."""
    return _SERVERS[kind] if isinstance(kind, ServerKind) else PRESETS[kind]


@dataclass(frozen=True)
class Selection:
    """The pods of a job.

    Attributes:
        pods: those chosen.
        attempt: which attempt of the workload they belong to; empty where that is not known.
        excluded: why pods that opted in are not among them, and how many.
        failed: the youngest pod that opted in and failed.
        finished: no pod runs any more, those of the latest attempt have succeeded, and none failed after them.
        let_alone: how many run of a suspended job, whose GPUs draw what they do at their default clocks.
    """

    pods: tuple[Pod, ...]
    attempt: str = ""
    excluded: Mapping[str, int] = field(default_factory=dict)
    failed: Pod | None = None
    finished: bool = False
    let_alone: int = 0


_OTHER_WORKLOAD: Final = "belong to another workload"
_NOT_WORKERS: Final = "are no workers"
_OLDER_ATTEMPT: Final = "are of an earlier attempt"
_FAILED: Final = "failed"


def select(spec: WorkSpec | None, pods: Iterable[Pod]) -> Selection:
    """The pods of the job among those that opted in to it. A job that is suspended has none."""
    there = list(pods)
    if spec is not None and spec.suspend:
        running = [pod for pod in there if not pod.failure and not pod.succeeded]
        return Selection((), let_alone=len(_of_job(spec, running).pods))
    failed = sorted((pod for pod in there if pod.failure), key=lambda pod: (pod.created, pod.name))
    chosen = _of_job(spec, [pod for pod in there if not pod.failure and not pod.succeeded])
    if not chosen.pods:
        succeeded = _of_job(spec, [pod for pod in there if pod.succeeded]).pods
        # A controller makes the pod that stands in for a failed one later.
        last = max((pod.created for pod in succeeded), default="")
        chosen = replace(chosen, finished=bool(succeeded) and not (failed and failed[-1].created >= last))
    if not failed:
        return chosen
    return replace(chosen, excluded={_FAILED: len(failed)} | dict(chosen.excluded), failed=failed[-1])


def _of_job(spec: WorkSpec | None, pods: Sequence[Pod]) -> Selection:
    workload = spec.pods if spec else None
    if workload is None:
        return Selection(tuple(pods))
    if workload.reference is not None:
        return _of_workload(pods, workload.reference.kind, workload.reference.name)
    wanted = workload.selector.match_labels if workload.selector else {}
    chosen = tuple(pod for pod in pods if all(pod.labels.get(name) == value for name, value in wanted.items()))
    return Selection(chosen, excluded=_counted({_OTHER_WORKLOAD: len(pods) - len(chosen)}))


def _of_workload(pods: Iterable[Pod], kind: WorkloadKind | ServerKind, name: str) -> Selection:
    """The workers of a workload, of its latest attempt alone."""
    preset = preset_of(kind)
    pattern = re.compile(preset.name_pattern.format(re.escape(name)))
    role_label, roles = preset.not_workers
    excluded = {_OTHER_WORKLOAD: 0, _NOT_WORKERS: 0, _OLDER_ATTEMPT: 0}
    attempts: dict[tuple[int, str], list[Pod]] = {}
    for pod in pods:
        if not pattern.fullmatch(preset.workload_of(pod.labels, pod.owner)):
            excluded[_OTHER_WORKLOAD] += 1
        elif pod.labels.get(role_label) in roles and not pod.asks_for_gpu:
            excluded[_NOT_WORKERS] += 1
        else:
            restarts = pod.labels.get(preset.restart_label, "")
            owner = pod.owner_uid if preset.owner_is_attempt else ""
            attempts.setdefault((int(restarts) if restarts.isdecimal() else 0, owner), []).append(pod)
    if not attempts:
        return Selection((), excluded=_counted(excluded))
    # The count of restarts decides; of two owners the one whose pods were made last.
    latest = max(attempts, key=lambda attempt: (attempt[0], max(pod.created for pod in attempts[attempt]), attempt[1]))
    excluded[_OLDER_ATTEMPT] = sum(len(former) for attempt, former in attempts.items() if attempt != latest)
    numbered = bool(preset.restart_label or preset.owner_is_attempt)
    return Selection(tuple(attempts[latest]), f"{latest[1]}/{latest[0]}" if numbered else "", _counted(excluded))


def _counted(excluded: Mapping[str, int]) -> dict[str, int]:
    return {why: number for why, number in excluded.items() if number}


@dataclass(frozen=True)
class PodWorkload:
    """The workload that a pod belongs to.

    Attributes:
        kind: of the workload.
        name: of the workload.
        owner: with which goes what belongs to the workload: itself, or where its pods do not say its UID, the
            controller that made the pod.
    """

    kind: WorkloadKind | ServerKind
    name: str
    owner: Owner


_MADE_BY: Final = (
    (WorkloadKind.JOB_SET, "batch", "Job"),
    (WorkloadKind.LEADER_WORKER_SET, "apps", "StatefulSet"),
    (WorkloadKind.PYTORCH_JOB, "kubeflow.org", "PyTorchJob"),
    (WorkloadKind.MPI_JOB, "kubeflow.org", "MPIJob"),
    (WorkloadKind.VOLCANO_JOB, "batch.volcano.sh", "Job"),
    (WorkloadKind.RAY_CLUSTER, "ray.io", "RayCluster"),
    (WorkloadKind.JOB, "batch", "Job"),
)
"""Kinds with the API group and kind of the controller that makes their pods. Those of a JobSet are made by a Job, too;
the JobSet of a TrainJob and the RayCluster of a RayJob have names and lives that follow theirs."""


def workload_of(labels: Mapping[str, str], owner: Owner | None) -> PodWorkload | None:
    """The workload of a pod; None: it is of no kind that is known here.

    Args:
        labels: of the pod.
        owner: the controller that made it.
    """
    if owner is None:
        return None
    made_by = owner.api_version.partition("/")[0], owner.kind
    for kind, *wanted in _MADE_BY:
        preset = PRESETS[kind]
        name = labels.get(preset.name_label, "")
        if name and made_by == tuple(wanted):
            uid = labels.get(preset.uid_label, "")
            return PodWorkload(kind, name, Owner(preset.group, kind.value, name, uid) if uid else owner)
    return None


def server_of(labels: Mapping[str, str], owner: Owner | None) -> PodWorkload | None:
    """The Deployment or StatefulSet whose replica a pod is; None: it is of neither, or of a workload that trains.

    Args:
        labels: of the pod.
        owner: the controller that made it; of a Deployment's pod a ReplicaSet.
    """
    if owner is None or workload_of(labels, owner) is not None:
        return None
    for kind in (ServerKind.DEPLOYMENT, ServerKind.STATEFUL_SET):
        if name := _SERVERS[kind].workload_of(labels, owner):
            return PodWorkload(kind, name, owner)
    return None


def asks_for_gpu(spec: Mapping[str, Any]) -> bool:
    """Whether a pod's spec asks for a device that a rank could run on."""
    resources = [container.get("resources") or {} for container in spec.get("containers") or ()]
    names = [name for each in resources for name in each.get("limits") or ()]
    return bool(spec.get("resourceClaims")) or any("gpu" in name or "nvidia.com/" in name for name in names)


def claims_devices(spec: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether a pod has devices by claims. An extended resource of a DeviceClass is one that the scheduler makes."""
    return bool(spec.get("resourceClaims") or status.get("extendedResourceClaimStatus"))


def containers_of(status: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Identifier and name of the containers of a pod that has several; none of one alone, which is the pod."""
    kinds = ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
    statuses = [each for kind in kinds for each in status.get(kind) or ()]
    named = ((each.get("containerID", "").rpartition("//")[2], each["name"]) for each in statuses)
    return (
        frozenset((identifier, name) for identifier, name in named if identifier) if len(statuses) > 1 else frozenset()
    )


def failure_of(status: Mapping[str, Any]) -> str:
    """How a failed pod ended: of its first container that did not end well, or the kubelet's reason, as Evicted."""
    if reason := status.get("reason"):
        return str(reason)
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        ended = (container.get("state") or {}).get("terminated") or {}
        if code := ended.get("exitCode"):
            return f"container {container.get('name')} exited with code {code}, {ended.get('reason') or 'no reason'}"
    return "its containers are unknown"
