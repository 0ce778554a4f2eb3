"""The admission webhook: serves ``pod_injection`` by kopf and never denies a pod.

The chart writes the webhook's configuration, with failurePolicy Ignore; the operator has no right to. kopf would turn
an exception of the handler into a denial, which the failure policy does not cover, so the handler catches
every exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import kopf

from perseus_core import keys
from perseus_operator.controller.settings import Settings
from perseus_operator.servers.class_labels import label_pod, wants_class
from perseus_operator.servers.pod_injection import Injected, inject, request
from perseus_operator.servers.socket_offers import SocketOffers
from perseus_runtime.addresses import EVERYWHERE, parse_address

WEBHOOK_ID: Final = "inject"
"""Path of the webhook, as in the chart's configuration: adds the mount of the socket's directory."""
REQUEST_ID: Final = "request"
"""The same for namespaces whose pods may not have that mount: adds the request for the extended resource."""
CLASS_ID: Final = "class"
"""The first: labels pods of an EnergyClass, for which the others are asked then."""
_RETRY_S: Final = 2.0
_RENEWAL_CHECK_S: Final = 5.0

logger = logging.getLogger(__name__)


def register(
    registry: kopf.OperatorRegistry,
    settings: Settings,
    namespace_labels: Callable[[str], Awaitable[Mapping[str, str]]],
    class_serves: Callable[[str], bool],
) -> None:
    """Add the handlers of pods that are created.

    Args:
        registry: to add them to.
        settings: the operator's settings.
        namespace_labels: reads the labels of a namespace.
        class_serves: whether ServingPools are made of an EnergyClass.
    """
    if not settings.namespace_list:  # EnergyClasses are cluster-wide
        _serve_classes(registry, namespace_labels, class_serves)
    _serve_pods(registry, WEBHOOK_ID, lambda pod: inject(pod, settings.agent_socket))
    if settings.webhook_resource:
        offers = SocketOffers()
        _serve_pods(registry, REQUEST_ID, lambda pod: request(pod, settings.agent_socket, offers.lacking()))

        @kopf.on.event("v1", "nodes", registry=registry)
        async def node_observed(body: kopf.Body, event: Any, **_: Any) -> None:
            offers.observe_node(body, deleted=event["type"] == "DELETED")

        @kopf.on.event("resource.k8s.io", "v1", "resourceslices", registry=registry)
        async def slice_observed(body: kopf.Body, event: Any, **_: Any) -> None:
            offers.observe_slice(body, deleted=event["type"] == "DELETED")


def _serve_classes(
    registry: kopf.OperatorRegistry,
    namespace_labels: Callable[[str], Awaitable[Mapping[str, str]]],
    class_serves: Callable[[str], bool],
) -> None:
    """Add the handler that names a PerseusJob or ServingPool on pods of a class. The handlers below it then give them
    the socket.
    """

    @kopf.on.mutate(
        *("v1", "pods"),
        id=CLASS_ID,
        operations=["CREATE"],
        side_effects=False,
        ignore_failures=True,
        registry=registry,
    )
    async def pod_of_class_created(body: kopf.Body, patch: kopf.Patch, warnings: list[str], **_: Any) -> None:
        try:
            pod = dict(body)
            if not wants_class(pod):
                return
            labels = await namespace_labels(str(body["metadata"]["namespace"]))
            labelled = label_pod(pod, labels.get(keys.LABEL_CLASS, ""), class_serves)
        except Exception:  # a pod must be created whatever is wrong
            logger.exception("a pod is created without its EnergyClass: unexpected error")
            return
        warnings.extend(labelled.warnings)
        changed: Any = labelled.pod
        patch.fns.append(lambda raw: raw.update(changed))


def _serve_pods(registry: kopf.OperatorRegistry, path: str, change: Callable[[dict[str, Any]], Injected]) -> None:
    """Add a handler that changes pods; asked at its path, only it answers."""

    @kopf.on.mutate(
        *("v1", "pods"),
        id=path,
        operations=["CREATE"],
        labels={keys.LABEL_JOB: kopf.PRESENT},
        side_effects=False,
        ignore_failures=True,
        registry=registry,
    )
    async def pod_created(body: kopf.Body, patch: kopf.Patch, warnings: list[str], **_: Any) -> None:
        try:
            injected = change(dict(body))
        except Exception:  # a pod of an unexpected shape must still be created
            logger.exception("a pod is created without the agent's socket: unexpected error")
            return
        warnings.extend(injected.warnings)
        changed: Any = injected.pod
        patch.fns.append(lambda raw: raw.update(changed))


def server(settings: Settings) -> Any:
    """Return the server that kopf runs for requests of the API server.

    A certificate that is missing or wrong, or a port that is taken, is tried again: planning goes on meanwhile, and
    pods are created as they are. Renewed certificates are taken up in seconds.
    """
    host, port = parse_address(settings.webhook_address)
    listening = kopf.WebhookServer(
        addr=None if host in EVERYWHERE else host,
        port=port,
        certfile=settings.webhook_cert,
        pkeyfile=settings.webhook_key,
        file_check_interval=_RENEWAL_CHECK_S,
    )

    async def serve(answer: Any) -> AsyncIterator[Any]:
        while True:
            attempt: Any = listening(answer)
            try:
                async with contextlib.aclosing(attempt) as configurations:
                    async for configuration in configurations:
                        logger.info("admission webhook served on %s", settings.webhook_address)
                        yield configuration
            except OSError as error:  # TLS errors among them
                logger.warning("admission webhook: %s; trying again in %g s", error, _RETRY_S)
            await asyncio.sleep(_RETRY_S)

    return serve
