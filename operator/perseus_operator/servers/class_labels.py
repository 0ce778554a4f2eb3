"""Labels a pod whose namespace or own label names an EnergyClass, so that a PerseusJob or a ServingPool is made for its
workload.

A namespace's class is for training: pods with GPUs of the workloads that are known here; and for servers, pods with
GPUs of Deployments and StatefulSets, if it has ``spec.serving``. Notebooks and others with GPUs in the same namespace
run as they did; a pod's own label claims any pod with a GPU.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from perseus_core import keys
from perseus_operator.clients.kube.pods import group_of, owner_of
from perseus_operator.nodes.workloads import asks_for_gpu, server_of, workload_of
from perseus_operator.objects.values import Json
from perseus_operator.servers.pod_injection import Injected

_LONGEST: Final = 63
"""Characters of a label's value."""


def wants_class(pod: Mapping[str, Any]) -> bool:
    """Whether the class of its namespace matters to a pod."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return keys.LABEL_JOB not in labels and asks_for_gpu(pod.get("spec") or {})


def label_pod(pod: Mapping[str, Any], namespace_class: str, serves: Callable[[str], bool]) -> Injected:
    """Name its class and its PerseusJob or ServingPool on a pod.

    Args:
        pod: as the API server sends it for admission.
        namespace_class: of its namespace; empty: none.
        serves: whether ServingPools are made of a class.

    Returns:
        A changed copy of the pod; the same if it has no class, or names its job itself.
    """
    labelled: Json = copy.deepcopy(dict(pod))
    metadata = labelled.setdefault("metadata", {})
    labels = metadata.get("labels") or {}
    asked = labels.get(keys.LABEL_CLASS, "")
    energy_class = asked or namespace_class
    if energy_class in ("", keys.NO_CLASS) or not wants_class(labelled):
        return Injected(labelled)
    owner = owner_of(metadata)
    server = server_of(labels, owner) if serves(energy_class) else None
    workload = server or workload_of(labels, owner)
    if workload is None and not asked:
        return Injected(labelled)
    name = workload.name if workload else _own_name(labelled)
    if not name:
        return Injected(labelled, (f"{keys.LABEL_CLASS}: a pod without a name and a controller has no EnergyClass",))
    metadata["labels"] = labels | {keys.LABEL_CLASS: energy_class, keys.LABEL_JOB: _shortened(name)}
    if server is not None:  # the class may have no spec.serving any more when the operator sees the pod
        metadata["labels"][keys.LABEL_SERVING] = "true"
    return Injected(labelled)


def _own_name(pod: Mapping[str, Any]) -> str:
    """The name of a pod's job where its workload is of no kind that is known here; empty: it has none."""
    metadata = pod["metadata"]
    group, owner = group_of(pod), owner_of(metadata)
    return group.name if group else owner.name if owner else str(metadata.get("name", ""))


def _shortened(name: str) -> str:
    if len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST - len(digest) - 1].rstrip('-.')}-{digest}"
