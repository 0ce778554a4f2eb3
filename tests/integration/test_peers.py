"""Replicas of the operator ask each other, on real sockets with real certificates: who answers for a job, and who may
ask."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.waiting import PATIENCE_S

from perseus_operator.clients.credentials import Credentials
from perseus_operator.clients.peers import Peers
from perseus_operator.controller.set_straggler import Declared, StragglerRequest
from perseus_operator.controller.view import JobView
from perseus_operator.errors import InvalidSpec, KubeUnavailable, OperatorError, UnknownJob
from perseus_operator.objects.values import JobRef
from perseus_operator.servers.grpc_service import OperatorService
from perseus_operator.servers.peer_service import PeerService
from perseus_operator.servers.rpc_server import RpcServer
from perseus_operator.servers.web.server import Pages
from perseus_proto.v1alpha1 import operator_pb2, operator_pb2_grpc, peer_pb2, peer_pb2_grpc
from perseus_sim.cluster.pki import Authority

NAME = "perseus-operator"


def credentials(folder: Path, authority: Authority, name: str) -> Credentials:
    pair = authority.issue(name, hosts=(name,), client=True)
    for end, data in (("crt", pair.certificate), ("key", pair.key)):
        (folder / f"{name}.{end}").write_bytes(data)
    (folder / "ca.crt").write_bytes(authority.certificate)
    return Credentials(str(folder / f"{name}.crt"), str(folder / f"{name}.key"), str(folder / "ca.crt"), NAME)


@dataclass
class Replica:
    """What one replica serves, and how often it was asked."""

    jobs: list[str]
    error: OperatorError | None = None
    asked: list[str] = field(default_factory=list)
    server: RpcServer | None = None

    async def declare(self, request: StragglerRequest) -> Declared:
        self.asked.append(request.id)
        if self.error is not None:
            raise self.error
        if request.job is None or request.job[1] not in self.jobs:
            raise UnknownJob("job: this operator serves none of that name")
        return Declared(JobRef(*request.job, "uid"), f"{request.id}:0:{request.slowdown:g}", 40 + len(self.jobs))

    def views(self) -> list[JobView]:
        status = {"plan": {"point": 3}}
        names = ("ada", "bell", "curie")
        return [JobView(JobRef("team", name, name), None, status, None, name not in self.jobs) for name in names]


class Site:
    """Two other replicas, and the clients that this one has."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority("test")
        self.files = credentials(folder, self.authority, NAME)
        self.others = [Replica(["ada"]), Replica(["bell", "curie"])]
        self.addresses: list[str] = []
        self.peers = Peers(self.files, lambda: self.addresses)

    async def start(self) -> None:
        for replica in self.others:
            service = PeerService(replica.declare, Pages(replica.views).own_document, NAME)
            add = partial(peer_pb2_grpc.add_PeerServicer_to_server, service)
            replica.server = await RpcServer.start("127.0.0.1:0", self.files, add)
            self.addresses.append(replica.server.address)

    async def close(self) -> None:
        for replica in self.others:
            if replica.server is not None:
                await replica.server.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    await site.start()
    yield site
    await site.close()


def request(job: str) -> operator_pb2.SetStragglerRequest:
    return operator_pb2.SetStragglerRequest(id="1", slowdown=1.2, namespace="team", job=job)


async def test_the_replica_that_serves_the_job_declares_the_straggler(site: Site) -> None:
    answer = await site.peers.declare(request("bell"))
    assert (answer.job, answer.annotation, answer.epoch) == ("bell", "1:0:1.2", 42)
    with pytest.raises(UnknownJob, match="no replica"):
        await site.peers.declare(request("nobody"))


async def test_a_caller_of_any_replica_is_answered(site: Site, tmp_path: Path) -> None:
    """A caller with a certificate for infrastructure calls a replica that serves none of the jobs."""
    own = Replica([])
    service = OperatorService(own.declare, frozenset({"perseus-infrastructure"}), site.peers.declare)
    add = partial(operator_pb2_grpc.add_OperatorServicer_to_server, service)
    server = await RpcServer.start("127.0.0.1:0", site.files, add)
    pair = site.authority.issue("perseus-infrastructure", hosts=("perseus-infrastructure",), client=True)
    channel_credentials = grpc.ssl_channel_credentials(site.authority.certificate, pair.key, pair.certificate)
    options = (("grpc.ssl_target_name_override", NAME),)
    async with grpc.aio.secure_channel(server.address, channel_credentials, options=options) as channel:
        stub: Any = operator_pb2_grpc.OperatorStub(channel)
        answer = await stub.SetStraggler(request("ada"), timeout=PATIENCE_S)
        assert (answer.job, answer.epoch) == ("ada", 41)
        site.others[1].error = InvalidSpec("slowdown: must be 1 to 100")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.SetStraggler(request("bell"), timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "slowdown: must be 1 to 100"
    assert dict(refused.value.trailing_metadata() or ())["perseus-error"] == "InvalidSpec"
    await server.close()


async def test_a_replica_that_does_not_answer_may_be_the_one_that_serves_the_job(site: Site) -> None:
    dead = site.others[0].server
    assert dead is not None
    await dead.close()
    assert (await site.peers.declare(request("bell"))).job == "bell"
    with pytest.raises(KubeUnavailable, match="did not answer"):
        await site.peers.declare(request("ada"))


async def test_two_replicas_that_both_take_a_job_for_theirs_are_one_answer(site: Site) -> None:
    """After a partition: what they declare goes to one PerseusJob, and its agents obey the later epoch alone."""
    site.others[0].jobs.append("bell")
    assert (await site.peers.declare(request("bell"))).job == "bell"
    assert [replica.asked for replica in site.others] == [["1"], ["1"]]
    site.others[0].error = KubeUnavailable("cut off from the API server")
    assert (await site.peers.declare(request("bell"))).job == "bell"
    status = json.loads((await site.peers.page("/api/jobs/team/bell")).document)
    assert status["name"] == "bell"


async def test_a_request_is_passed_on_once(site: Site) -> None:
    with pytest.raises(UnknownJob):
        await site.peers.declare(request("nobody"))
    assert [replica.asked for replica in site.others] == [["1"], ["1"]]


@pytest.mark.parametrize("name", ["perseus-agent", "perseus-infrastructure"])
async def test_nobody_else_may_ask(site: Site, tmp_path: Path, name: str) -> None:
    stranger = credentials(tmp_path, site.authority, name)
    peers = Peers(stranger, lambda: site.addresses)
    with pytest.raises(OperatorError, match=f"none of its names.*{name}"):
        await peers.declare(request("bell"))
    with pytest.raises(OperatorError, match=f"none of its names.*{name}"):
        await peers.page("/api/jobs/team/bell")
    assert not any(replica.asked for replica in site.others)


async def test_the_page_of_any_replica_shows_every_job(site: Site) -> None:
    loop = asyncio.get_running_loop()

    def elsewhere(path: str) -> tuple[int, bytes]:
        answer = asyncio.run_coroutine_threadsafe(site.peers.page(path), loop).result(30)
        return answer.status, answer.document

    pages = Pages(Replica([]).views, elsewhere)

    def read(path: str, may_see: bool = True) -> tuple[int, Any]:
        status, _, document = pages.document(path, lambda *_: may_see)
        return status, json.loads(document)

    status, found = await asyncio.to_thread(read, "/api/jobs/team/curie")
    assert (status, found["name"], found["plan"]) == (200, "curie", {"point": 3})
    status, found = await asyncio.to_thread(read, "/api/jobs/team/curie/plans/3")
    assert (status, found) == (404, {"error": "the job has no frontier yet"})
    with pytest.raises(Exception, match="that you may see"):
        await asyncio.to_thread(read, "/api/jobs/team/curie", may_see=False)


async def test_no_other_path_is_read(site: Site) -> None:
    for path in ("/api/jobs", "/", "/api/jobs/team/nobody", "/api/jobs/team/" + "x" * 5000):
        with pytest.raises(UnknownJob):
            await site.peers.page(path)
    assert isinstance(await site.peers.page("/api/jobs/team/ada"), peer_pb2.ReadPageResponse)
