"""Pods that a PerseusJob asks for and that carry the label of another one: a pod belongs to the one that it names."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from perseus_core import keys
from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.errors import InvalidSpec, KubeError
from perseus_operator.nodes.workloads import select
from perseus_operator.objects.formatting import counted
from perseus_operator.objects.values import Json


class Reader(Protocol):
    """What is asked of the API server."""

    def pods(self, namespace: str, label: str) -> list[Json]:
        """Read pods that carry a label. Raises KubeError."""
        ...


def taken_pods(reader: Reader, job: Json) -> str:
    """Say to which PerseusJob the pods belong that a job without pods asks for.

    Args:
        reader: of the API server; what the user may not read is not said.
        job: as it is stored.

    Returns:
        A sentence; empty: the job has pods, or asks for none, or none of another one would be its own.
    """
    reasons = {condition.get("reason") for condition in (job.get("status") or {}).get("conditions", ())}
    if Reason.NO_PODS not in reasons:
        return ""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    try:
        spec = parse_spec(JobSpec, job["spec"])
        stored = reader.pods(namespace, keys.LABEL_JOB) if spec.pods is not None else []
    except (InvalidSpec, KubeError):
        return ""
    pods = [pod for pod in map(pod_of, stored) if pod is not None]
    owners = Counter(pod.job for pod in select(spec, pods).pods if pod.job != name)
    if not owners:
        return ""
    owner, number = owners.most_common(1)[0]
    return (
        f"{counted(number, 'pod')} of its workload {'carry' if number > 1 else 'carries'} the label"
        f" {keys.LABEL_JOB}: {owner}, and so belong{'' if number > 1 else 's'} to that PerseusJob."
    )
