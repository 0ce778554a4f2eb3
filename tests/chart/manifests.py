"""What the chart renders, and where to look in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.chart.conftest import Objects

OPERATOR, AGENT = ("Deployment", "perseus-operator"), ("DaemonSet", "perseus-agent")
POLICY = ("NetworkPolicy", "perseus-operator")
SIMULATOR = ("DaemonSet", "perseus-gpu-sim")
Render = Callable[..., Objects]


def pod(objects: Objects, key: tuple[str, str]) -> Any:
    return objects[key]["spec"]["template"]["spec"]


def container(objects: Objects, key: tuple[str, str]) -> Any:
    return pod(objects, key)["containers"][0]


def environment(container: Any) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", ())}


def kinds(objects: Objects) -> set[str]:
    return {kind for kind, _ in objects}


def pods(objects: Objects) -> Iterator[Any]:
    for (kind, _), body in objects.items():
        if kind in ("Deployment", "DaemonSet"):
            yield body["spec"]["template"]["spec"]
        elif kind == "Pod":
            yield body["spec"]


def named(peers: list[Any]) -> list[str]:
    return [peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in peers]


GPU_LABELS = [
    {"feature.node.kubernetes.io/pci-10de.present": "true"},
    # NVIDIA/k8s-device-plugin issue 1213, siderolabs/talos issue 12103: as Node Feature Discovery installs itself
    {"feature.node.kubernetes.io/pci-0302_10de.present": "true"},
    {"feature.node.kubernetes.io/pci-0300_10de.present": "true"},
    {"feature.node.kubernetes.io/cpu-model.vendor_id": "NVIDIA"},
    {"nvidia.com/gpu.present": "true"},
    {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
    {"kubernetes.azure.com/accelerator": "nvidia"},
    {"karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia"},
    {"eks.amazonaws.com/instance-gpu-manufacturer": "nvidia"},
]
