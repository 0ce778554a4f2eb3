"""Pods are read page by page, whole or not at all; what the watch tells meanwhile counts; errors keep their meaning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import kubernetes.aio.client as k8s
import pytest
from aiohttp import web

from perseus_operator.clients.kube import KubeClient
from perseus_operator.clients.pods import agent_of, pod_of
from perseus_operator.controller.operator import Operator
from perseus_operator.errors import KubeForbidden, KubeUnavailable
from perseus_operator.reporting.metrics import Metrics
from perseus_operator.settings import Settings
from perseus_proto import keys

PODS = 1_234


def pod(number: int) -> dict[str, Any]:
    ports = [{"name": "metrics", "containerPort": 1}, {"name": keys.AGENT_GRPC_PORT_NAME, "containerPort": 9000}]
    return {
        "metadata": {
            "uid": f"u{number}",
            "namespace": "training",
            "name": f"p{number}",
            "labels": {keys.LABEL_JOB: "gpt3"},
        },
        "spec": {"nodeName": f"n{number}", "containers": [{"name": "init"}, {"name": "c", "ports": ports}]},
        "status": {"podIP": f"10.0.{number // 250}.{number % 250}", "phase": "Running"},
    }


class Pages:
    """An API server that has pods, until it has none of them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.refuse_at, self.status = -1, 200

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(dict(request.query))
        if len(self.asked) - 1 == self.refuse_at:
            return web.json_response({"message": "not now"}, status=self.status)
        first, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        last = min(first + limit, PODS)
        metadata = {"continue": str(last)} if last < PODS else {}
        return web.json_response({"metadata": metadata, "items": [pod(n) for n in range(first, last)]})


@asynccontextmanager
async def served(pages: Pages) -> AsyncIterator[KubeClient]:
    app = web.Application()
    app.router.add_get("/{path:.*}", pages.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = k8s.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    kube = KubeClient(k8s.ApiClient(configuration))
    try:
        yield kube
    finally:
        await kube.close()
        await runner.cleanup()


async def test_every_page_is_read_once() -> None:
    pages = Pages()
    async with served(pages) as kube:
        found = await kube.training_pods([])
        assert [p.uid for p in found] == [f"u{n}" for n in range(PODS)]
        assert [asked.get("continue") for asked in pages.asked] == [None, "500", "1000"]
        assert {asked["labelSelector"] for asked in pages.asked} == {keys.LABEL_JOB}
        addresses = await kube.agent_addresses("perseus-system")
        assert len(addresses) == PODS
        assert addresses["n251"] == "10.0.1.1:9000"
        assert len(await kube.training_pods(["a", "b"])) == 2 * PODS


@pytest.mark.parametrize(("status", "kind"), [(403, KubeForbidden), (503, KubeUnavailable), (429, KubeUnavailable)])
async def test_half_a_list_is_none(status: int, kind: type[Exception]) -> None:
    pages = Pages()
    pages.refuse_at, pages.status = 1, status
    async with served(pages) as kube:
        with pytest.raises(kind, match=f"{status}.*not now"):
            await kube.training_pods([])


def test_an_agent_has_an_address_from_its_pods_address_to_its_end() -> None:
    there = pod(1)
    assert agent_of(there) == ("n1", "10.0.0.1:9000")
    assert agent_of({**there, "status": {"podIP": "fd00::1"}}) == ("n1", "[fd00::1]:9000")
    assert agent_of({**there, "status": {}}) is None
    assert agent_of({**there, "spec": {**there["spec"], "nodeName": None}}) is None
    assert agent_of({**there, "spec": {"nodeName": "n1", "containers": [{"name": "c"}]}}) is None
    assert agent_of({**there, "metadata": {**there["metadata"], "deletionTimestamp": "2030-01-01T00:00:00Z"}}) is None


async def test_few_requests_are_under_way_at_once_and_waiting_is_not_counted_against_any() -> None:
    running, most = 0, 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return web.json_response({"metadata": {}, "items": []})

    pages = Pages()
    pages.answer = slow  # type: ignore[method-assign]
    async with served(pages) as kube:
        await asyncio.gather(*(kube.training_pods([]) for _ in range(200)))
    assert 1 < most <= 16


async def test_what_the_watch_tells_while_pods_are_listed_is_newer_than_the_list() -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def training_pods(_: Any) -> list[Any]:
        asked.set()
        await may_answer.wait()
        return [found for number in (0, 1, 2) if (found := pod_of(pod(number))) is not None]

    kube = SimpleNamespace(training_pods=training_pods)
    operator = Operator(Settings(insecure=True), cast(Any, kube), cast(Any, SimpleNamespace(metrics=Metrics())))
    for number in (0, 1):
        operator.observe_pod(pod(number), deleted=False)
    poll = asyncio.create_task(operator._poll_pods())
    await asyncio.wait_for(asked.wait(), 60)
    operator.observe_pod(pod(7), deleted=False)
    operator.observe_pod(pod(1), deleted=True)
    may_answer.set()
    await poll
    assert set(operator._pods) == {"u0", "u2", "u7"}
    assert set(operator._pods_of["training", "gpt3"]) == {"u0", "u2", "u7"}
    await operator._poll_pods()
    assert set(operator._pods) == {"u0", "u1", "u2"}, "nothing was told since: the list is right"


async def test_a_job_whose_deletion_the_watch_has_missed_is_released() -> None:
    released: list[str] = []
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def job_uids(_: Any) -> set[str]:
        asked.set()
        await may_answer.wait()
        return {"kept"}

    class Runner:
        def __init__(self, uid: str) -> None:
            self.uid = uid

        async def release(self) -> None:
            released.append(self.uid)

    kube = SimpleNamespace(job_uids=job_uids)
    operator = Operator(Settings(insecure=True), cast(Any, kube), cast(Any, SimpleNamespace(metrics=Metrics())))
    operator._runners = {uid: cast(Any, Runner(uid)) for uid in ("kept", "deleted")}
    poll = asyncio.create_task(operator._poll_jobs())
    await asyncio.wait_for(asked.wait(), 60)
    operator._runners["made while the list was read"] = cast(Any, Runner("made while the list was read"))
    may_answer.set()
    await poll
    await asyncio.gather(*operator._releases)
    assert released == ["deleted"]
    assert set(operator._runners) == {"kept", "made while the list was read"}


async def test_an_api_server_that_does_not_answer_leaves_what_was_seen() -> None:
    """Unknown is not empty: a job whose pods are not known to be gone goes on."""
    asked = 0

    async def away(_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise KubeUnavailable("503")

    kube = SimpleNamespace(training_pods=away, agent_addresses=away)
    operator = Operator(Settings(insecure=True), cast(Any, kube), cast(Any, SimpleNamespace(metrics=Metrics())))
    operator.observe_pod(pod(0), deleted=False)
    operator._agents = {"n0": "10.0.0.1:9000"}
    polls = [asyncio.create_task(operator._every(0.0, poll)) for poll in (operator._poll_pods, operator._poll_agents)]
    while asked < 4:
        await asyncio.sleep(0)
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    assert set(operator._pods) == set(operator._pods_of["training", "gpt3"]) == {"u0"}
    assert operator._agents == {"n0": "10.0.0.1:9000"}
