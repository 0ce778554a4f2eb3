"""Which GPU a device of NVIDIA's DRA driver is, as the driver's ResourceSlices say it.

The kubelet tells an agent that a pod holds ``gpu-0``; versions of the driver count differently (``pods.gpu_names`` of
the agent). The slice has the UUID, of the version that runs now. A pod whose devices were prepared by an earlier one
may mean another GPU by the same name: of a pod that is older than what the slice says, nothing is said. Both times are
the API server's: a node's clock may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from perseus_core import keys
from perseus_operator.objects.values import Pod

_UNKNOWN: Final[Mapping[str, str]] = {}
_MOST: Final = 128
"""Devices of a node's GPUs that are sent to its agent, which takes as many."""


@dataclass(frozen=True)
class NamedGpu:
    """A device and the GPU that it is."""

    pool: str
    device: str
    uuid: str


def named_gpus(slices: Iterable[Mapping[str, Any]], pods: Iterable[Pod]) -> tuple[NamedGpu, ...]:
    """What a node's slices say of its GPUs; nothing, where it may not be true for one of the pods.

    Args:
        slices: of any driver, as the API server sends them.
        pods: that hold devices by claims.
    """
    published = [each for each in slices if each["spec"].get("driver") == keys.DRA_DRIVER]
    written = [
        entry.get("time") or "" for each in published for entry in each["metadata"].get("managedFields") or [_UNKNOWN]
    ]
    # Stamps of one form, which sort as they follow each other. In the same second it is not known which was first.
    if not published or not all(written) or max(written) >= min((pod.created for pod in pods), default=""):
        return ()
    newest: dict[str, int] = {}
    for each in published:
        pool = each["spec"]["pool"]
        newest[pool["name"]] = max(newest.get(pool["name"], 0), pool["generation"])
    uuids = {}
    for each in published:
        pool = each["spec"]["pool"]
        if pool["generation"] < newest[pool["name"]]:
            continue  # left over: the driver has published another since
        for device in each["spec"].get("devices") or ():
            attributes = device.get("attributes") or {}
            values = {kind: (attributes.get(kind) or {}).get("string") for kind in ("type", "uuid")}
            if values["type"] == "gpu" and values["uuid"]:
                uuids[pool["name"], device["name"]] = values["uuid"]
    return tuple(NamedGpu(pool, device, uuid) for (pool, device), uuid in sorted(uuids.items())[:_MOST])
