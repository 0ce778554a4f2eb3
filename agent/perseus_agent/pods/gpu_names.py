"""Which GPU a name means that others give it: a number is not an identity, and two programs count differently.

The UUID is the identity. NVIDIA's device plugin uses it as the name. GKE's plugin calls a GPU ``nvidia<minor number>``.
NVIDIA's DRA driver calls it ``gpu-<number>``: by NVML's index in versions before 25.8, by the minor number since. The
kubelet does not say which version gave the name. The driver's ResourceSlice does, with the UUID: the operator sends it
with a lease, and here it decides between the two GPUs that the name can mean. Without it such a name is known only
where both are the same GPU, as on most machines; elsewhere it might be another tenant's.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from perseus_agent.devices.base import DeviceIdentity

_GKE: Final = re.compile(r"nvidia(\d{1,4})(/.*)?")
_UUID: Final = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class Undrivable(enum.Enum):
    """Why a device that a pod holds may not be driven for that pod."""

    MIG = "a MIG instance: clocks belong to the whole GPU"
    SHARED = "shared with other pods by time-slicing or MPS"
    SEVERAL = (
        "held by several pods at once, as by one ResourceClaim: which of them computes now, nothing on the node says; "
        "it stays at its default clocks"
    )
    UNRESOLVED = "its name does not say which GPU it is"
    AMBIGUOUS = (
        "one GPU to versions of NVIDIA's DRA driver before 25.8, which count by NVML's index, and another to those "
        "since, which count by minor number; which of them gave the name is not known: let the operator read "
        "ResourceSlices (operator.settings.resourceSlices), and create the pod after the driver has published its own"
    )
    CONTRADICTED = (
        "another GPU in the node's ResourceSlice than to any version of NVIDIA's DRA driver, which count by NVML's "
        "index or by minor number"
    )


@dataclass(frozen=True)
class GpuNames:
    """The names of a node's GPUs: UUIDs by ``gpu-<number>``."""

    by_minor: Mapping[str, str] = field(default_factory=dict)
    by_index: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_node(cls, gpus: Iterable[DeviceIdentity]) -> Self:
        """As NVML numbers them."""
        identities = list(gpus)
        return cls(
            {f"gpu-{gpu.minor_number}": gpu.uuid for gpu in identities if gpu.minor_number is not None},
            {f"gpu-{gpu.nvml_index}": gpu.uuid for gpu in identities if gpu.nvml_index is not None},
        )

    def of_plugin(self, resource_name: str, device_id: str) -> str | Undrivable:
        """The GPU behind an ID of a device plugin, or why none may be driven.

        NVIDIA's are ``GPU-<uuid>``, ``MIG-<uuid>``, or a replica ``<either>::<n>``; GKE's ``nvidia<minor>``, or a part
        of it ``nvidia<minor>/gi<n>`` or ``nvidia<minor>/vgpu<n>``.
        """
        gke = _GKE.fullmatch(device_id)
        part = (gke[2] or "") if gke else ""
        if device_id.startswith("MIG-") or "/mig-" in resource_name or part.startswith("/gi"):
            return Undrivable.MIG
        if "::" in device_id or resource_name.endswith(".shared") or part.startswith("/vgpu"):
            return Undrivable.SHARED
        if gke and not part:
            return self.by_minor.get(f"gpu-{gke[1]}", Undrivable.UNRESOLVED)
        return device_id if _UUID.fullmatch(device_id) else Undrivable.UNRESOLVED

    def of_dra(self, device_name: str, published: str | None = None) -> str | Undrivable:
        """The GPU that NVIDIA's DRA driver calls so, or why none may be driven.

        Args:
            device_name: as the driver named it.
            published: its UUID in the driver's ResourceSlice; None: that is not known.
        """
        if "mig" in device_name:
            return Undrivable.MIG
        by_minor, by_index = self.by_minor.get(device_name), self.by_index.get(device_name)
        if by_minor is None and by_index is None:
            return Undrivable.UNRESOLVED
        if published is not None:
            return published if published in (by_minor, by_index) else Undrivable.CONTRADICTED
        return by_minor if by_minor is not None and by_minor == by_index else Undrivable.AMBIGUOUS
