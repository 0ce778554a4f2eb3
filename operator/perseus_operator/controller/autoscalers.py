"""HorizontalPodAutoscalers of the namespaces in which clocks are lowered beside them.

They are listed, not watched: an autoscaler looks each quarter of a minute and writes what it saw, so a watch would say
no more, of all namespaces, and need another right. One list serves all pools of a namespace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from perseus_operator.clients.kube.interface import Kube
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.errors import KubeError, KubeForbidden, KubeNotFound
from perseus_operator.objects.values import Json

logger = logging.getLogger(__name__)

AUTOSCALERS_S: Final = 15.0
"""As often as kube-controller-manager looks by default."""


class Autoscalers:
    """Reads them."""

    def __init__(self, kube: Kube, runners: Callable[[], Iterable[JobRunner]]) -> None:
        """``runners``: of the jobs that there are."""
        self._kube, self._runners = kube, runners
        self._refused = False
        """Whether it was said that they may not be read."""

    async def observe(self) -> None:
        """Let each job know that must, as of now. Where nothing can be read, what was observed last stays."""
        by_namespace: dict[str, list[JobRunner]] = {}
        for runner in self._runners():
            if runner.family.autoscalers_wanted:
                by_namespace.setdefault(runner.ref.namespace, []).append(runner)
        for namespace, wanting in by_namespace.items():
            bodies, complete = list[Json](), False
            try:
                bodies, complete = await self._kube.autoscalers(namespace)
            except (KubeForbidden, KubeNotFound) as error:
                self._warn(namespace, error)
            except KubeError as error:
                logger.warning("%s: HorizontalPodAutoscalers not read: %s", namespace, error)
                continue
            for runner in wanting:
                runner.observe_autoscalers(bodies, complete=complete)

    def _warn(self, namespace: str, error: KubeError) -> None:
        if not self._refused:
            self._refused = True
            logger.warning(
                "HorizontalPodAutoscalers of namespace %s, and maybe others, cannot be read, so clocks of serving pools"
                " are lowered beside them as if there were none: %s",
                namespace,
                error,
            )
