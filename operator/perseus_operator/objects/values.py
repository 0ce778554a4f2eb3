"""Kubernetes objects as plain values: which PerseusJob, a training pod, the data of a ConfigMap, what is stored.

They are apart from ``clients.kube``, whose library takes a second to import: the kubectl plugin has a lighter client.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from perseus_core import keys
from perseus_operator.errors import KubeError

Json = dict[str, Any]
"""An object as the API server sends it, parsed from JSON."""
FIELD_MANAGER: Final = "perseus-operator"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
"""Label whose value ``FIELD_MANAGER`` marks the objects that an operator wrote."""


@dataclass(frozen=True)
class JobRef:
    """Which PerseusJob or ServingPool."""

    namespace: str
    name: str
    uid: str
    kind: str = keys.KIND

    @property
    def plural(self) -> str:
        """As the API server's paths have it."""
        return keys.POOL_PLURAL if self.kind == keys.POOL_KIND else keys.PLURAL

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Owner:
    """An object with which others are garbage-collected."""

    api_version: str
    kind: str
    name: str
    uid: str

    def reference(self, *, controller: bool | None = None) -> Json:
        """As an entry of ``ownerReferences``; ``controller`` None: left out."""
        named = {"apiVersion": self.api_version, "kind": self.kind, "name": self.name, "uid": self.uid}
        return {**named, "blockOwnerDeletion": False, **({} if controller is None else {"controller": controller})}


@dataclass(frozen=True)
class PodGroup:
    """Pods that are scheduled together, as one of them names the group in its namespace.

    Attributes:
        api_group: ``scheduling.k8s.io`` of Kubernetes, or ``scheduling.x-k8s.io`` of its scheduler plugins.
        name: of the PodGroup.
    """

    api_group: str
    name: str


@dataclass(frozen=True)
class User:
    """Who holds a token, as the API server says it."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Pod:
    """A training pod that is bound to a node and runs, has succeeded or has failed."""

    uid: str
    namespace: str
    name: str
    node: str
    job: str
    """Name of the PerseusJob or ServingPool that the pod opted in to."""
    labels: Mapping[str, str] = field(hash=False)
    owner: Owner | None = None
    """The controller that made the pod; None: none."""
    created: str = ""
    asks_for_gpu: bool = False
    claims_devices: bool = False
    """Whether it has devices by claims (DRA)."""
    containers: frozenset[tuple[str, str]] = frozenset()
    """Identifier and name of each container of a pod with several: agents let only those with a GPU drive it."""
    succeeded: bool = False
    failure: str = ""
    """How a pod that has failed ended, for people; empty: it has not failed."""
    profile: str = ""
    """PerseusProfile that a pod of an EnergyClass names; empty: none."""
    power_limit: str = field(default="", compare=False)
    """Watts of each of its GPUs that another program is to keep them to; empty: none."""
    group_size: int = field(default=0, compare=False)
    """Pods of its group, of a LeaderWorkerSet; 0: it is of none."""
    group: PodGroup | None = None
    """With which it is scheduled; None: by itself."""
    address: str = field(default="", compare=False)
    """Its IP address, where it has a network of its own; empty: none yet. A lease does not depend on it."""

    @property
    def owner_uid(self) -> str:
        """UID of the controller that made the pod; empty: none."""
        return self.owner.uid if self.owner else ""

    @property
    def energy_class(self) -> str:
        """Name of the EnergyClass of which its PerseusJob is made; empty: none."""
        return self.labels.get(keys.LABEL_CLASS, "")


@dataclass(frozen=True)
class ConfigMap:
    """The data of a ConfigMap, which belongs to a user: the operator only reads it."""

    name: str
    data: Mapping[str, str]
    binary: Mapping[str, bytes]
    uid: str = ""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ConfigMap:
        """Decode a ConfigMap as the API server sends it.

        Args:
            raw: the object, with ``metadata``; absent parts are empty.

        Raises:
            KubeError: a value of ``binaryData`` is not base64.
        """
        metadata = raw["metadata"]
        name = metadata.get("name", "")
        try:
            binary = {key: base64.b64decode(text, validate=True) for key, text in (raw.get("binaryData") or {}).items()}
        except binascii.Error as error:
            raise KubeError(f"ConfigMap {metadata.get('namespace', '')}/{name}: binaryData is not base64") from error
        return cls(name, raw.get("data") or {}, binary, metadata["uid"])


@dataclass(frozen=True)
class StoredObject:
    """A PerseusProfile or a PerseusFrontier as the API server sends it; spec and status are not checked.

    Attributes:
        job: name of the PerseusJob that an operator wrote it for; empty: for none, or a user wrote it.
        owners: UIDs of the owners: the object is garbage-collected with them.
    """

    name: str
    uid: str
    version: str
    spec: Json
    status: Json
    ours: bool = False
    job: str = ""
    owners: frozenset[str] = frozenset()

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StoredObject:
        """Decode an object; absent parts are empty."""
        metadata = raw["metadata"]
        labels = metadata.get("labels") or {}
        return cls(
            metadata["name"],
            metadata["uid"],
            metadata["resourceVersion"],
            raw.get("spec") or {},
            raw.get("status") or {},
            labels.get(MANAGED_BY) == FIELD_MANAGER,
            labels.get(keys.LABEL_JOB, ""),
            frozenset(owner["uid"] for owner in metadata.get("ownerReferences") or ()),
        )


@dataclass(frozen=True)
class Now:
    """The time by two clocks: monotonic for leases and retries, wall clock for a deadline by date."""

    monotonic_s: float
    wall_s: float
