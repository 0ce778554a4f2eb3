"""The labels of the namespaces that have PerseusJobs, read now and then: the operator watches no namespaces."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from perseus_operator.errors import KubeError, KubeNotFound

logger = logging.getLogger(__name__)

_FRESH_S: Final = 30.0
_AT_ONCE: Final = 16
"""Namespaces read in one go; more wait for the next."""


class NamespaceStore(Protocol):
    """What is needed of the API server."""

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Labels of a namespace. Raises KubeError."""
        ...


class NamespaceLabels:
    """Labels by namespace, at most half a minute old."""

    def __init__(self, kube: NamespaceStore) -> None:
        self._kube = kube
        self._known: dict[str, Mapping[str, str]] = {}
        self._read_at_s: dict[str, float] = {}

    def of(self, namespace: str) -> Mapping[str, str] | None:
        """The labels of a namespace; None: not known yet."""
        return self._known.get(namespace)

    async def refresh(self, namespaces: Iterable[str], now_s: float) -> None:
        """Read the labels of these that are not known or not fresh, and forget all others.

        Args:
            namespaces: that have PerseusJobs.
            now_s: monotonic.
        """
        wanted = set(namespaces)
        for gone in self._read_at_s.keys() - wanted:
            self._known.pop(gone, None)
            del self._read_at_s[gone]
        due = sorted(name for name in wanted if now_s - self._read_at_s.get(name, -_FRESH_S) >= _FRESH_S)
        await asyncio.gather(*(self._refresh(name, now_s) for name in due[:_AT_ONCE]))

    async def _refresh(self, namespace: str, now_s: float) -> None:
        try:
            self._known[namespace] = await self._kube.namespace_labels(namespace)
            self._read_at_s[namespace] = now_s
        except KubeNotFound:
            self._known.pop(namespace, None)  # it is being deleted, with its jobs
        except KubeError as error:  # what was read last stays
            logger.warning("namespace %s: its labels are not read: %s", namespace, error)
