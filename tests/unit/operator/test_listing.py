"""Pods are read page by page, whole or not at all; what the watch tells meanwhile counts; errors keep their meaning."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import kubernetes.aio.client as k8s
import pytest
from aiohttp import web
from tests.unit.operator.conftest import operator_of

from perseus_core import keys
from perseus_operator.clients.kube.client import KubeClient
from perseus_operator.clients.kube.pods import agent_of, pod_of
from perseus_operator.errors import KubeError, KubeForbidden, KubeUnavailable
from perseus_operator.jobs.metrics import Metrics

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
        metadata = {"resourceVersion": "100", **({"continue": str(last)} if last < PODS else {})}
        return web.json_response({"metadata": metadata, "items": [pod(n) for n in range(first, last)]})


@asynccontextmanager
async def served(pages: Pages | Watched) -> AsyncIterator[KubeClient]:
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
        begins = [int(asked.get("continue", 0)) for asked in pages.asked]
        assert begins == sorted(set(begins)), "none twice"
        assert begins[1] <= 50, "a small page first: it tells how large pods are"
        assert len(begins) <= 1 + -(-PODS // 400)
        assert {asked["labelSelector"] for asked in pages.asked} == {keys.LABEL_JOB}
        agents = dict((await anext(kube.watch_agents("perseus-system"))).values())
        assert len(agents) == PODS
        assert agents["n251"] == "10.0.1.1:9000"
        assert len(await kube.training_pods(["a", "b"])) == 2 * PODS


class LargePods(Pages):
    """Each has as many annotations as a pod may have."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(dict(request.query))
        first, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        last = min(first + limit, 200)
        pods = [
            {**pod(n), "metadata": {**pod(n)["metadata"], "annotations": {"a": "x" * 250_000}}}
            for n in range(first, last)
        ]
        metadata = {"resourceVersion": "100", **({"continue": str(last)} if last < 200 else {})}
        text = json.dumps({"metadata": metadata, "items": pods})
        self.sizes.append(len(text))
        return web.Response(text=text, content_type="application/json")


async def test_after_one_page_of_large_pods_pages_are_small() -> None:
    """All jobs wait while a page is parsed: a tenant may fill the annotations of each of its pods."""
    pages = LargePods()
    async with served(pages) as kube:
        assert len(await kube.training_pods([])) == 200
    assert max(pages.sizes[1:]) < 4 << 20
    assert {asked["limit"] for asked in pages.asked[1:]} == {"10"}


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
    operator = operator_of(kube)
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
    operator = operator_of(kube)
    operator._runners = {uid: cast(Any, Runner(uid)) for uid in ("kept", "deleted")}
    for uid in operator._runners:
        operator._jobs.observe({"metadata": {"namespace": "ns", "name": uid, "uid": uid}})
    poll = asyncio.create_task(operator._poll_jobs())
    await asyncio.wait_for(asked.wait(), 60)
    operator._runners["made while the list was read"] = cast(Any, Runner("made while the list was read"))
    may_answer.set()
    await poll
    await asyncio.gather(*operator._endings)
    assert released == ["deleted"]
    assert set(operator._runners) == {"kept", "made while the list was read"}


async def test_an_api_server_that_does_not_answer_leaves_what_was_seen() -> None:
    """Unknown is not empty: a job whose pods are not known to be gone goes on."""
    asked = 0

    async def away(_: Any) -> Any:
        nonlocal asked
        asked += 1
        raise KubeUnavailable("503")

    async def watch(_: Any) -> AsyncIterator[Any]:
        await away(_)
        yield {}

    kube = SimpleNamespace(training_pods=away, watch_agents=watch)
    operator = operator_of(kube)
    operator.observe_pod(pod(0), deleted=False)
    operator._agent_pods = {"u": ("n0", "10.0.0.1:9000")}
    operator._agents = {"n0": "10.0.0.1:9000"}
    works = (operator._poll_pods, operator._watch_agents, operator._pass_agents)
    polls = [asyncio.create_task(operator._every(0.0, work)) for work in works]
    while asked < 6:
        await asyncio.sleep(0)
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    assert set(operator._pods) == set(operator._pods_of["training", "gpt3"]) == {"u0"}
    assert operator._agents == {"n0": "10.0.0.1:9000"}


class Watched:
    """An API server with one list of agents, and watches that each tell what is scripted and end."""

    def __init__(self, listed: list[dict[str, Any]], *watches: list[dict[str, Any]]) -> None:
        self.listed, self.watches = listed, list(watches)
        self.asked: list[dict[str, str]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": self.listed})
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.watches.pop(0) if self.watches else []:
            line = json.dumps(event).encode() + b"\n"
            for part in (line[: len(line) // 2], line[len(line) // 2 :]):  # a line comes in pieces
                await response.write(part)
        if not self.watches:
            await asyncio.sleep(60)
        return response


def agent_pod(number: int, node: str, version: int, **status: Any) -> dict[str, Any]:
    raw = pod(number)
    raw["spec"]["nodeName"] = node
    raw["metadata"]["resourceVersion"] = str(version)
    raw["status"] |= status
    return raw


async def test_agents_are_listed_once_and_followed_from_there() -> None:
    old, new = agent_pod(1, "a", 10), agent_pod(2, "a", 12)
    large = agent_pod(3, "b", 13)
    large["metadata"]["annotations"] = {"long": "x" * 300_000}
    api = Watched(
        [old],
        [
            {"type": "ADDED", "object": agent_pod(2, "a", 11, podIP="")},
            {"type": "MODIFIED", "object": new},
            {"type": "ADDED", "object": large},
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}, "spec": {"containers": None}}},
        ],
        [{"type": "DELETED", "object": agent_pod(1, "a", 21)}, {"type": "MODIFIED", "object": agent_pod(3, "b", 22)}],
        [{"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}],
        [],
    )
    seen = []
    async with served(api) as kube:

        async def follow() -> None:
            async for pods in kube.watch_agents("perseus-system"):
                seen.append(dict(pods.values()))

        with pytest.raises(KubeError, match="410 too old resource version"):
            await follow()
    first, second, third = (agent_of(each)[1] for each in (old, new, large))  # type: ignore[index]
    assert seen == [{"a": first}, {"a": second}, {"a": second, "b": third}, {"a": second, "b": third}]
    assert [asked.get("resourceVersion") for asked in api.asked] == [None, "10", "20", "22"]


async def test_jobs_hear_of_agents_together_and_of_those_that_are_listed_anew() -> None:
    lists = [{"u1": ("a", "1:1")}, {"u2": ("b", "2:2"), "u3": ("c", "3:3")}]
    forgotten: list[set[str]] = []
    passed: list[dict[str, str]] = []

    async def watch(_: Any) -> AsyncIterator[Any]:
        pods: dict[str, tuple[str, str]] = {}
        for uid, agent in (lists.pop(0) if lists else {}).items():
            pods[uid] = agent
            yield pods
        if lists:
            raise KubeUnavailable("410")
        await asyncio.sleep(60)

    async def forget(addresses: set[str]) -> None:
        forgotten.append(addresses)

    operator = operator_of(SimpleNamespace(watch_agents=watch), agents=SimpleNamespace(forget=forget))
    operator._pass_pods_to_all = lambda: passed.append(dict(operator._agents))  # type: ignore[method-assign]
    following = asyncio.create_task(operator._every(0.0, operator._watch_agents))
    await operator._pass_agents()
    while len(operator._agent_pods) < 2:
        await asyncio.sleep(0)
    await operator._pass_agents()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert passed == [{"a": "1:1"}, {"b": "2:2", "c": "3:3"}]
    assert forgotten == [set(), {"1:1"}]


async def test_an_unforeseen_answer_ends_no_poll(caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    async def strange(_: Any) -> AsyncIterator[Any]:
        nonlocal asked
        asked += 1
        raise TypeError("'NoneType' object is not iterable")
        yield {}

    metrics = Metrics()
    operator = operator_of(SimpleNamespace(watch_agents=strange), metrics=metrics)
    poll = asyncio.create_task(operator._every(0.0, operator._watch_agents))
    while asked < 3:
        await asyncio.sleep(0)
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    assert "watch_agents: unexpected error; trying again" in caplog.text
    assert metrics.errors._value.get() >= 2
