"""What is stored in the cluster, as values: for everybody who handles it without asking an API server for it.

Apart from ``kube``, whose client takes a second to import: the kubectl plugin has one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class ConfigMap:
    """The data of a ConfigMap."""

    name: str
    data: Mapping[str, str]
    binary: Mapping[str, bytes]
    uid: str = ""
    """Of the object that was read."""
    ours: bool = False
    """It was written by an operator."""
    owners: frozenset[str] = frozenset()
    """UIDs of those with whom it goes."""
