"""Something else answers for the API server: a page of HTML with status 200 ends nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from perseus_operator.clients.kube import json_answers
from perseus_operator.clients.kube.json_answers import json_session
from perseus_operator.clients.kube.requests import read_sized_json, unavailable
from perseus_operator.errors import KubeUnavailable

ANSWERS: list[tuple[str, bytes]] = []


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestServer]:
    monkeypatch.setattr(json_answers, "_PAUSES_S", (0.0,))

    async def answer(_: web.Request) -> web.Response:
        kind, body = ANSWERS.pop(0)
        return web.Response(body=body, content_type=kind)

    application = web.Application()
    application.router.add_get("/api", answer)
    async with TestServer(application) as started:
        yield started


@pytest.mark.parametrize(
    "wrong",
    [
        ("text/html", b"<html>"),
        ("application/json", b""),
        ("application/json", b"<html>"),
        ("application/json", b'{"a":'),
    ],
)
async def test_what_is_no_json_is_asked_again(server: TestServer, wrong: tuple[str, bytes]) -> None:
    ANSWERS[:] = [wrong, wrong, ("application/json", b'{"kind": "APIResourceList"}\n')]
    async with json_session(tls=None, headers={}, auth=None, proxy=None, trust_env=False) as session:
        response = await session.get(server.make_url("/api"))
        assert await response.json() == {"kind": "APIResourceList"}
    assert not ANSWERS


async def test_a_watch_is_not_read_before_it_is_passed_on(server: TestServer) -> None:
    ANSWERS[:] = [("application/json", b'{"type": "ADDED"}\n{"type"')]
    async with json_session(tls=None, headers={}, auth=None, proxy=None, trust_env=False) as session:
        response = await session.get(server.make_url("/api").with_query(watch="true"))
        assert (await response.read()).startswith(b'{"type": "ADDED"}')


class Raw:
    """A response of the client that it has not read."""

    status = 200

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def read(self) -> bytes:
        return self.body


@pytest.mark.parametrize("body", [b"", b"<html>", b"[" * 100_000])
async def test_the_operators_own_requests_fail_as_if_there_was_no_answer(body: bytes) -> None:
    async def answered() -> Raw:
        return Raw(body)

    with pytest.raises(KubeUnavailable):
        await read_sized_json(answered())


def test_a_request_without_an_answer_says_so() -> None:
    assert str(unavailable(TimeoutError())) == "TimeoutError: the API server does not answer in time"
    assert str(unavailable(OSError("refused"))) == "OSError: refused"
