"""A session for kopf's requests that gives it JSON or an error, never an answer that is neither.

A proxy or a load balancer in front of the API server may answer 200 with a page of its own. kopf would parse that
outside of its retries, and end the operator.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from typing import Final

import aiohttp

logger = logging.getLogger(__name__)

_PAUSES_S: Final = (0.5, 1.0, 2.0, 5.0)
"""Until the same is asked again; the last repeats, until the request's own timeout."""


def json_session(
    *,
    tls: ssl.SSLContext | None,
    headers: Mapping[str, str] | None,
    auth: aiohttp.BasicAuth | None,
    proxy: str | None,
    trust_env: bool | None,
) -> aiohttp.ClientSession:
    """A session whose answers of status 200 are JSON, or a watch's lines of it.

    Args:
        tls: None: the system's own.
        headers: of every request.
        auth: of every request.
        proxy: URL; None: none.
        trust_env: whether the environment's proxies count.
    """
    connector = aiohttp.TCPConnector(limit=0, ssl=True if tls is None else tls)
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        auth=auth,
        proxy=proxy,
        trust_env=bool(trust_env),
        middlewares=(_only_json,),
    )


async def _only_json(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    attempt = 0
    while True:
        response = await handler(request)
        if response.status != 200 or await _is_json(request, response):
            return response
        logger.warning("%s: the answer is no JSON, but %s; asking again", request.url.path, response.content_type)
        response.release()
        await asyncio.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
        attempt += 1


async def _is_json(request: aiohttp.ClientRequest, response: aiohttp.ClientResponse) -> bool:
    if "json" not in response.content_type:
        return False
    if "watch" in request.url.query:
        return True
    body = (await response.read()).strip()  # read once: the caller gets it from the response
    return body.startswith((b"{", b"[")) and body.endswith((b"}", b"]"))
