"""Which nodes offer the agent's socket as an extended resource, and whether a pod that requests it can be scheduled.

A pod with the request waits for a node that offers it. So it is only added while every node with GPUs does: with one
missing, a job that needs that node's GPUs would wait for an agent, and training must never wait for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from perseus_core import keys

GPUS: Final = "nvidia.com/"
"""Beginning of the names of all resources that are GPUs, whole or in parts, which the agent might drive."""
_LABEL: Final = "nvidia.com/gpu.present"
"""Of GPU Feature Discovery, where it runs."""


@dataclass(frozen=True)
class _Node:
    """A node to which pods may be scheduled now."""

    has_gpus: bool
    offers: bool


class SocketOffers:
    """Nodes with GPUs to which pods may be scheduled now, as the API server last showed them.

    GPUs that are allocated by claims are no resource of a node: a driver publishes them in ResourceSlices.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._slices: dict[str, str] = {}
        """Nodes by the slices in which their GPUs are published."""

    def observe_node(self, node: Mapping[str, Any], *, deleted: bool) -> None:
        """Take in a node that was seen, changed or deleted."""
        name = node["metadata"]["name"]
        if deleted or not _schedulable(node):
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = _Node(_has_gpus(node), _some(node, keys.RESOURCE_AGENT))

    def observe_slice(self, published: Mapping[str, Any], *, deleted: bool) -> None:
        """Take in a ResourceSlice of any driver that was seen, changed or deleted."""
        name, spec = published["metadata"]["name"], published.get("spec") or {}
        if deleted or spec.get("driver") != keys.DRA_DRIVER or not spec.get("nodeName"):
            self._slices.pop(name, None)
        else:
            self._slices[name] = spec["nodeName"]

    def lacking(self) -> str:
        """Why a pod with the request might wait; empty: every node with GPUs offers the socket."""
        published = set(self._slices.values())
        offers = {name: node.offers for name, node in self._nodes.items() if node.has_gpus or name in published}
        missing = sorted(name for name, offered in offers.items() if not offered)
        if missing:
            return f"{len(missing)} of {len(offers)} GPU nodes do not offer it, such as {missing[0]}"
        return "" if offers else "no node with GPUs is known"


def _schedulable(node: Mapping[str, Any]) -> bool:
    if (node.get("spec") or {}).get("unschedulable"):
        return False
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _has_gpus(node: Mapping[str, Any]) -> bool:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    labelled = (node["metadata"].get("labels") or {}).get(_LABEL) == "true"
    return labelled or any(name.startswith(GPUS) and _some(node, name) for name in allocatable)


def _some(node: Mapping[str, Any], resource: str) -> bool:
    """Whether any is allocatable. A quantity may have a suffix (``10k``); of none it is ``0``."""
    return str(((node.get("status") or {}).get("allocatable") or {}).get(resource, "0")) != "0"
