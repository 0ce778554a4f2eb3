"""Requests to the API server by the official client. Errors become those of ``errors``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Final, Self

import aiohttp
import kubernetes.aio.client as k8s
import kubernetes.aio.config as k8s_config

from perseus_operator.clients.kube.kubeconfig import reading_kubeconfig
from perseus_operator.errors import (
    KubeConflict,
    KubeError,
    KubeForbidden,
    KubeNotFound,
    KubeUnavailable,
)

TIMEOUT_S: Final = 15.0
MERGE: Final = "application/merge-patch+json"
ATTEMPTS: Final = 20
"""Of a write that other writers were faster with."""
_AT_ONCE: Final = 16
"""Requests under way: hundreds of jobs that all write at once, after a restart, would time each other out."""
_config: Any = k8s_config  # its functions carry no types


class KubeRequests:
    """A connection. It must be created in the event loop that uses it."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._core = k8s.CoreV1Api(api)
        self._custom = k8s.CustomObjectsApi(api)
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    @classmethod
    async def connect(cls) -> Self:
        """Connect with the service account of this pod, or else with the kubeconfig.

        Raises:
            UnusableArgument: there is neither.
        """
        configuration = k8s.Configuration()
        try:
            _config.load_incluster_config(client_configuration=configuration)
        except _config.ConfigException:
            with reading_kubeconfig(_config.ConfigException):
                await _config.load_kube_config(client_configuration=configuration)
        return cls(k8s.ApiClient(configuration))

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def _patch(self, request: Any) -> str:
        return str((await self._request(request))["metadata"]["resourceVersion"])

    async def _request(self, request: Any) -> Any:
        """Await a request. Its deadline begins when it is sent: waiting for a turn does not count."""
        try:
            with contextlib.closing(request):  # not started if this task is cancelled while it waits
                async with self._at_once:
                    return await request
        except k8s.ApiException as error:
            raise translated(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:  # Runtime: the session is closed
            raise unavailable(error) from error


def unavailable(error: Exception) -> KubeUnavailable:
    """The error of a request that has no answer. Python's own timeouts say nothing."""
    return KubeUnavailable(f"{type(error).__name__}: {str(error) or 'the API server does not answer in time'}")


def translated(error: Any) -> KubeError:
    """The error that an answer of the API server means."""
    message = f"{error.status} {error.reason}: {str(error.body or '')[:300]}"
    kinds: dict[int, type[KubeError]] = {404: KubeNotFound, 409: KubeConflict, 401: KubeForbidden, 403: KubeForbidden}
    if error.status in kinds:
        return kinds[error.status](message)
    # 0: the client failed before an answer came.
    return (KubeUnavailable if error.status in (0, 429) or error.status >= 500 else KubeError)(message)


async def read_json(request: Any) -> Any:
    """Parse the JSON of a response that the client has not read."""
    return (await read_sized_json(request))[0]


async def read_sized_json(request: Any) -> tuple[Any, int]:
    """Parse the JSON of a response that the client has not read; and its size in bytes.

    Raises:
        KubeUnavailable: it is no JSON: something else has answered for the API server.
    """
    async with await checked(request) as answer:
        data = await answer.read()
    try:
        return json.loads(data), len(data)
    except (ValueError, RecursionError) as error:
        raise KubeUnavailable(f"the answer is no JSON: {str(error)[:100]}") from error


async def checked(request: Any) -> Any:
    """Return a response that the client has not read; raises as the client does if it is an error."""
    answer = await request
    if answer.status >= 300:
        async with answer:
            error = k8s.ApiException(status=answer.status, reason=answer.reason)
            error.body = (await answer.read()).decode(errors="replace")
            raise error
    return answer
