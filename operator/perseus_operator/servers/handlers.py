"""kopf: its handlers and its settings. Apart from ``servers.webhook``, no other module imports kopf.

kopf watches, lists again what a broken watch may have missed, and logs in. It writes nothing to the objects: no
progress, no events, no finalizer. A deletion never waits for an operator; leases give the clocks back without one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import kopf

from perseus_core import keys
from perseus_operator.clients.kube.json_answers import json_session
from perseus_operator.controller.operator import Operator
from perseus_operator.controller.settings import Settings
from perseus_operator.servers import webhook

_BUDGETS: Final = (keys.API_GROUP, keys.API_VERSION, keys.BUDGET_PLURAL)
_CLASSES: Final = (keys.API_GROUP, keys.API_VERSION, keys.CLASS_PLURAL)
_CHUNK: Final = 50
"""Objects in one answer of a list: each may have a MiB of annotations, and all jobs wait while it is parsed."""
_JOBS: Final = (keys.API_GROUP, keys.API_VERSION, keys.PLURAL)
_POOLS: Final = (keys.API_GROUP, keys.API_VERSION, keys.POOL_PLURAL)


def register(  # noqa: C901  # each handler is a function of its own
    configuration: Settings, *, start: Callable[[], Awaitable[Operator]], stop: Callable[[], Awaitable[None]]
) -> kopf.OperatorRegistry:
    """A registry with all handlers."""
    registry = kopf.OperatorRegistry()
    running: list[Operator] = []

    @kopf.on.startup(registry=registry)
    async def startup(settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings, configuration)
        running.append(await start())

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        await stop()

    @kopf.on.login(registry=registry, retries=3, backoff=1.0)
    async def login(**arguments: Any) -> kopf.AiohttpSession | None:
        session = kopf.login_with_service_account(**arguments)
        if session is None:
            session = await asyncio.to_thread(partial(kopf.login_via_client, **arguments))
        else:
            # The image leaves out the client that the other way needs. By address: logging in must not wait for DNS.
            host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
            session = replace(session, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")
        return None if session is None else _session(session)

    @kopf.on.event(*_JOBS, registry=registry)
    async def job_observed(body: kopf.Body, event: Any, **_: Any) -> None:
        if event["type"] == "DELETED":
            running[0].job_deleted(body["metadata"]["uid"])
        else:
            running[0].observe_job(body)
        _let_go(event)

    @kopf.on.event(*_POOLS, registry=registry)
    async def pool_observed(body: kopf.Body, event: Any, **_: Any) -> None:
        if event["type"] == "DELETED":
            running[0].job_deleted(body["metadata"]["uid"])
        else:
            running[0].observe_job(body, keys.POOL_KIND)
        _let_go(event)

    if not configuration.namespace_list:  # cluster-wide objects are seen by who serves all namespaces

        @kopf.on.event(*_BUDGETS, registry=registry)
        async def budget_observed(body: kopf.Body, event: Any, **_: Any) -> None:
            if event["type"] == "DELETED":
                running[0].budgets.deleted(body)
            else:
                running[0].budgets.observe(body)

        @kopf.on.event(*_CLASSES, registry=registry)
        async def class_observed(body: kopf.Body, event: Any, **_: Any) -> None:
            if event["type"] == "DELETED":
                running[0].classes.deleted(body)
            else:
                running[0].classes.observe(body)

    # Not filtered here by label: a pod that loses it must be heard of; the API server does the filtering.
    @kopf.on.event("v1", "pods", registry=registry)
    async def pod_observed(body: kopf.Body, event: Any, **_: Any) -> None:
        running[0].observe_pod(body, deleted=event["type"] == "DELETED")
        _let_go(event)

    if configuration.webhook_address:

        async def namespace_labels(namespace: str) -> Mapping[str, str]:
            return await running[0].namespace_labels(namespace)

        def class_serves(energy_class: str) -> bool:
            return running[0].classes.serves(energy_class)

        webhook.register(registry, configuration, namespace_labels, class_serves)
    return registry


def _session(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """The connection to the API server, whose answers are JSON."""
    session = json_session(
        tls=info.as_ssl_context(),
        headers=info.as_http_headers(),
        auth=info.as_aiohttp_basic_auth(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
    )
    return kopf.AiohttpSession(
        server=info.server,
        aiohttp_session=session,
        default_namespace=info.default_namespace,
        priority=info.priority,
        expiration=info.expiration,
    )


def _let_go(event: Any) -> None:
    """Drop what tenants filled an object with: kopf keeps the latest event of each object while its task idles, and
    needs no more than the object's identity and finalizers.
    """
    raw = event["object"]
    for part in ("spec", "status"):
        raw.pop(part, None)
    for part in ("annotations", "labels", "managedFields"):
        raw["metadata"].pop(part, None)


def _configure(settings: kopf.OperatorSettings, configuration: Settings) -> None:
    """Kopf's settings, each with its reason."""
    settings.persistence.finalizer = keys.FINALIZER  # of releases before: kopf removes it, since no handler needs one
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=keys.API_GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=keys.API_GROUP)
    settings.posting.enabled = False  # events have a closed list of reasons and are posted by us
    settings.peering.standalone = True  # two operators at once are made safe by the epoch, not by peering
    settings.watching.label_selectors["v1", "pods"] = keys.LABEL_JOB  # filtered by the server, not by us
    # Limited to some namespaces, we may have no rights elsewhere, and kopf would ask for a minute before it begins.
    settings.scanning.disabled = bool(configuration.namespace_list)
    settings.watching.server_timeout = 10  # an integer: a real API server refuses "10.0"
    settings.watching.inactivity_timeout = 15.0  # a connection that is silently lost is noticed by then
    settings.watching.chunk_size = _CHUNK
    settings.watching.connect_timeout = 10.0
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 10.0
    # kopf keeps a task for each object that it has heard of within this time. To make one takes it several turns of the
    # event loop, in which it reads no further: an edit of each of hundreds of jobs would reach the last one late.
    settings.queueing.idle_timeout = 600.0
    settings.process.ultimate_exiting_timeout = 60.0
    if configuration.webhook_address:
        # What the API server knows of it is the chart's: we may not write any.
        settings.admission.server = webhook.server(configuration)


def run(settings: Settings, *, start: Callable[[], Awaitable[Operator]], stop: Callable[[], Awaitable[None]]) -> None:
    """Serve until SIGTERM or SIGINT."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    namespaces = settings.namespace_list
    kopf.run(
        registry=register(settings, start=start, stop=stop),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
    )
