"""Pods as the API server shows them: those that train, and those of agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from perseus_core import keys
from perseus_operator.nodes.workloads import asks_for_gpu, claims_devices, containers_of, failure_of
from perseus_operator.objects.values import Owner, Pod, PodGroup

_LONGEST_WATTS: Final = 16
_MOST_DIGITS: Final = 6
_PLUGINS_LABEL: Final = "scheduling.x-k8s.io/pod-group"


def pod_of(raw: Mapping[str, Any]) -> Pod | None:
    """Parse a training pod; None: not opted in, not bound to a node yet, or being deleted."""
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    labels, node = metadata.get("labels") or {}, spec.get("nodeName")
    annotations = metadata.get("annotations") or {}
    if not node or keys.LABEL_JOB not in labels or metadata.get("deletionTimestamp"):
        return None
    return Pod(
        metadata["uid"],
        metadata["namespace"],
        metadata["name"],
        node,
        labels[keys.LABEL_JOB],
        dict(labels),
        owner=owner_of(metadata),
        created=metadata.get("creationTimestamp") or "",
        asks_for_gpu=asks_for_gpu(spec),
        claims_devices=claims_devices(spec, status),
        containers=containers_of(status),
        succeeded=status.get("phase") == "Succeeded",
        failure=failure_of(status) if status.get("phase") == "Failed" else "",
        address="" if spec.get("hostNetwork") else status.get("podIP") or "",
        profile=annotations.get(keys.ANNOTATION_PROFILE, ""),
        group_size=_group_size(annotations),
        group=group_of(raw),
        power_limit=annotations.get(keys.ANNOTATION_POWER_LIMIT, "")[:_LONGEST_WATTS],
    )


def _group_size(annotations: Mapping[str, Any]) -> int:
    """0: the pod is of no group, or what it says is no number."""
    written = annotations.get(keys.ANNOTATION_GROUP_SIZE, "")
    return int(written) if written.isascii() and written.isdigit() and len(written) <= _MOST_DIGITS else 0


def group_of(raw: Mapping[str, Any]) -> PodGroup | None:
    """The PodGroup of a pod, by the field of Kubernetes 1.36 or the label of scheduler plugins; None: it names none."""
    name = ((raw.get("spec") or {}).get("schedulingGroup") or {}).get("podGroupName")
    if name:
        return PodGroup("scheduling.k8s.io", str(name))
    name = ((raw.get("metadata") or {}).get("labels") or {}).get(_PLUGINS_LABEL)
    return PodGroup("scheduling.x-k8s.io", name) if name else None


def owner_of(metadata: Mapping[str, Any]) -> Owner | None:
    """The controller that made an object; None: none."""
    controllers = (owner for owner in metadata.get("ownerReferences") or () if owner.get("controller"))
    return next((Owner(o["apiVersion"], o["kind"], o["name"], o["uid"]) for o in controllers), None)


def agent_of(raw: Mapping[str, Any]) -> tuple[str, str] | None:
    """Parse an agent's pod: node and host:port; None: it has no address yet, or is being deleted."""
    spec, address = raw.get("spec", {}), raw.get("status", {}).get("podIP")
    ports = [port for container in spec.get("containers", ()) for port in container.get("ports") or ()]
    port = next((p["containerPort"] for p in ports if p.get("name") == keys.AGENT_GRPC_PORT_NAME), None)
    if not spec.get("nodeName") or not address or not port or raw.get("metadata", {}).get("deletionTimestamp"):
        return None
    return spec["nodeName"], f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
