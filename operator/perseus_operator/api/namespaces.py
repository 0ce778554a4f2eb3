"""Which namespaces a cluster-wide object is for."""

# the calls make dataclass fields

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perseus_operator.api.schema import labels


@dataclass(frozen=True, kw_only=True)
class NamespaceSelector:
    """Which namespaces."""

    match_labels: Mapping[str, str] = labels("Labels that the namespace carries.")

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a namespace with these labels is one of them."""
        return all(labels.get(label) == value for label, value in self.match_labels.items())
