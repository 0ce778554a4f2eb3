"""The door to kopf for the admission webhook: it serves what ``injection`` decides, and nothing it meets denies a pod.

``handlers`` calls ``register`` and ``server`` if an address is set. The chart writes the webhook's configuration, with
failurePolicy Ignore; the operator has no right to. A pod is let through whatever happens here: kopf would make a denial
of an exception, which the failure policy does not cover, so none leaves the handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import kopf

from perseus_operator.servers.pod_injection import inject
from perseus_operator.settings import Settings
from perseus_proto import keys
from perseus_proto.addresses import EVERYWHERE, parse_address

WEBHOOK_ID: Final = "inject"
"""Path of the webhook, as in the chart's configuration."""
_RETRY_S: Final = 2.0
_RENEWAL_CHECK_S: Final = 5.0

logger = logging.getLogger(__name__)


def register(registry: kopf.OperatorRegistry, own: Settings) -> None:
    """Add the handler of pods that are created with the opt-in label."""

    @kopf.on.mutate(
        *("v1", "pods"),
        id=WEBHOOK_ID,
        operations=["CREATE"],
        labels={keys.LABEL_JOB: kopf.PRESENT},
        side_effects=False,
        ignore_failures=True,
        registry=registry,
    )
    async def pod_created(body: kopf.Body, patch: kopf.Patch, warnings: list[str], **_: Any) -> None:
        try:
            injected = inject(dict(body), own.agent_socket)
        except Exception:  # a pod of a shape that nobody thought of must be created all the same
            logger.exception("a pod is left as it is: unexpected error")
            return
        warnings.extend(injected.warnings)
        changed: Any = injected.pod
        patch.fns.append(lambda raw: raw.update(changed))


def server(own: Settings) -> Any:
    """What kopf runs to be asked by the API server.

    A certificate that is missing or wrong, or a port that is taken, is tried again: planning goes on meanwhile, and
    pods are created as they are. Renewed certificates are taken up in seconds.
    """
    host, port = parse_address(own.webhook_address)
    listening = kopf.WebhookServer(
        addr=None if host in EVERYWHERE else host,
        port=port,
        certfile=own.webhook_cert,
        pkeyfile=own.webhook_key,
        file_check_interval=_RENEWAL_CHECK_S,
    )

    async def serve(answer: Any) -> AsyncIterator[Any]:
        while True:
            attempt: Any = listening(answer)
            try:
                async with contextlib.aclosing(attempt) as configurations:
                    async for configuration in configurations:
                        logger.info("admission webhook served on %s", own.webhook_address)
                        yield configuration
            except OSError as error:  # TLS errors among them
                logger.warning("admission webhook: %s; trying again in %g s", error, _RETRY_S)
            await asyncio.sleep(_RETRY_S)

    return serve
