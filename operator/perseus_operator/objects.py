"""Kubernetes objects as plain values: which PerseusJob, a training pod, the data of a ConfigMap.

They are apart from ``clients.kube``, whose library takes a second to import: the kubectl plugin has a lighter client.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from perseus_operator.errors import KubeError

Json = dict[str, Any]
"""An object as the API server sends it, parsed from JSON."""
FIELD_MANAGER: Final = "perseus-operator"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
"""Label whose value ``FIELD_MANAGER`` marks the objects that an operator wrote."""


@dataclass(frozen=True)
class JobRef:
    """Which PerseusJob."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def frontier_config_map(self) -> str:
        """Name of the ConfigMap that stores the frontier."""
        return f"{self.name}-frontier"

    @property
    def profiling_config_map(self) -> str:
        """Name of the ConfigMap that stores an unfinished measurement of the profile."""
        return f"{self.name}-profiling"


@dataclass(frozen=True)
class Pod:
    """A training pod that is bound to a node and has not ended."""

    uid: str
    namespace: str
    name: str
    node: str
    job: str
    """Name of the PerseusJob that the pod opted in to."""
    labels: Mapping[str, str] = field(hash=False)
    owner_uid: str = ""
    """UID of the controller that made the pod; empty: none."""
    created: str = ""
    asks_for_gpu: bool = False
    containers: frozenset[tuple[str, str]] = frozenset()
    """Identifier and name of each container of a pod with several: agents let only those with a GPU drive it."""


@dataclass(frozen=True)
class ConfigMap:
    """The data of a ConfigMap."""

    name: str
    data: Mapping[str, str]
    binary: Mapping[str, bytes]
    uid: str = ""
    """UID of the object that was read; empty: it was not read."""
    ours: bool = False
    """An operator wrote it."""
    owners: frozenset[str] = frozenset()
    """UIDs of the owners: the object is garbage-collected with them."""

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
        return cls(
            name,
            raw.get("data") or {},
            binary,
            metadata["uid"],
            (metadata.get("labels") or {}).get(MANAGED_BY) == FIELD_MANAGER,
            frozenset(owner["uid"] for owner in metadata.get("ownerReferences") or ()),
        )
