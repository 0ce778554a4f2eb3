"""The operator's gRPC service on a real socket with real certificates: who is served, and what an error looks like."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.waiting import PATIENCE_S

from perseus_operator.clients.credentials import Credentials
from perseus_operator.controller.set_straggler import Declared, StragglerRequest
from perseus_operator.errors import (
    InvalidSpec,
    KubeConflict,
    KubeForbidden,
    KubeNotFound,
    KubeUnavailable,
    OperatorError,
    StaleEpoch,
    UnknownJob,
)
from perseus_operator.objects.values import JobRef
from perseus_operator.servers.grpc_service import STATUS, OperatorService
from perseus_operator.servers.rpc_server import RpcServer
from perseus_proto.v1alpha1 import operator_pb2 as messages
from perseus_proto.v1alpha1 import operator_pb2_grpc as stubs
from perseus_sim.cluster.pki import Authority

ALLOWED = "perseus-infrastructure"
PROTO = Path(__file__).resolve().parents[2] / "proto" / "perseus_proto" / "v1alpha1" / "operator.proto"


def write(folder: Path, authority: Authority, name: str) -> Credentials:
    pair = authority.issue(name, hosts=(name,), client=True)
    for end, data in (("crt", pair.certificate), ("key", pair.key)):
        (folder / f"{name}.{end}").write_bytes(data)
    (folder / "ca.crt").write_bytes(authority.certificate)
    return Credentials(str(folder / f"{name}.crt"), str(folder / f"{name}.key"), str(folder / "ca.crt"), name)


class Operator:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[StragglerRequest] = []
        self.error: OperatorError | None = None

    async def tell(self, request: StragglerRequest) -> Declared:
        if self.error is not None:
            raise self.error
        self.told.append(request)
        return Declared(JobRef("team", "gpt3", "uid"), f"{request.id}:{request.delay_s:g}:{request.slowdown:g}", 7)


def serving(operator: Operator) -> Any:
    service = OperatorService(operator.tell, frozenset({ALLOWED}))
    return partial(stubs.add_OperatorServicer_to_server, service)


class Service:
    """A running service and its callers."""

    def __init__(self, folder: Path, authority: Authority, operator: Operator, address: str) -> None:
        self.folder, self.authority, self.operator, self.address = folder, authority, operator, address

    async def call(
        self, request: messages.SetStragglerRequest, name: str, *, authority: Authority | None = None
    ) -> Any:
        pair = (authority or self.authority).issue(name, hosts=(name,), client=True)
        credentials = grpc.ssl_channel_credentials(self.authority.certificate, pair.key, pair.certificate)
        options = (("grpc.ssl_target_name_override", "perseus-operator"),)
        async with grpc.aio.secure_channel(self.address, credentials, options=options) as channel:
            return await stubs.OperatorStub(channel).SetStraggler(request, timeout=PATIENCE_S)

    async def refusal(self, request: messages.SetStragglerRequest, name: str = ALLOWED, **further: Any) -> Any:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.call(request, name, **further)
        return refused.value


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    authority, operator = Authority("test"), Operator()
    own = write(tmp_path, authority, "perseus-operator")
    server = await RpcServer.start("127.0.0.1:0", own, serving(operator))
    yield Service(tmp_path, authority, operator, server.address)
    await server.close()


async def test_who_carries_an_allowed_name_is_served(service: Service) -> None:
    request = messages.SetStragglerRequest(id="GPU-a", delay_ms=2500, slowdown=1.2)
    answer = await service.call(request, ALLOWED)
    assert (answer.namespace, answer.job, answer.epoch) == ("team", "gpt3", 7)
    assert answer.annotation == "GPU-a:2.5:1.2"
    request = messages.SetStragglerRequest(
        id="1", delay_iterations=4, slowdown=2, namespace="team", job="gpt3", epoch=6
    )
    await service.call(request, ALLOWED)
    assert service.operator.told == [
        StragglerRequest("GPU-a", 1.2, delay_s=2.5),
        StragglerRequest("1", 2.0, delay_iterations=4, job=("team", "gpt3"), epoch=6),
    ]


async def test_no_other_caller_is_served(service: Service) -> None:
    request = messages.SetStragglerRequest(id="GPU-a", slowdown=1.2)
    for name in ("perseus-agent", "perseus-operator", "perseus-infrastructure.evil"):
        error = await service.refusal(request, name)
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert name in error.details()
    error = await service.refusal(request, authority=Authority("another"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE, "the handshake fails"
    async with grpc.aio.insecure_channel(service.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stubs.OperatorStub(channel).SetStraggler(request, timeout=PATIENCE_S)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert service.operator.told == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidSpec("degree must be"), grpc.StatusCode.INVALID_ARGUMENT),
        (UnknownJob("no such job"), grpc.StatusCode.NOT_FOUND),
        (KubeNotFound("gone meanwhile"), grpc.StatusCode.NOT_FOUND),
        (StaleEpoch("a newer one"), grpc.StatusCode.FAILED_PRECONDITION),
        (KubeConflict("busy"), grpc.StatusCode.ABORTED),
        (KubeUnavailable("503"), grpc.StatusCode.UNAVAILABLE),
        (KubeForbidden("RBAC"), grpc.StatusCode.UNAVAILABLE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, OperatorError) else "",
)
async def test_every_error_has_its_code_and_name(service: Service, error: OperatorError, code: Any) -> None:
    service.operator.error = error
    answered = await service.refusal(messages.SetStragglerRequest(id="GPU-a", slowdown=1.2))
    assert (answered.code(), answered.details()) == (code, str(error))
    assert dict(answered.trailing_metadata())["perseus-error"] == type(error).__name__


async def test_a_job_is_named_whole_or_not_at_all(service: Service) -> None:
    error = await service.refusal(messages.SetStragglerRequest(id="1", slowdown=1.2, job="gpt3"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "namespace and job: must be given together" in error.details()


async def test_a_renewed_certificate_is_taken_up(service: Service) -> None:
    renewed = Authority("renewed")
    write(service.folder, renewed, "perseus-operator")
    request = messages.SetStragglerRequest(id="GPU-a", slowdown=1.2)
    await service.refusal(request)
    service.authority = renewed
    assert (await service.call(request, ALLOWED)).job == "gpt3"


async def test_an_address_that_is_taken_is_an_error(service: Service, tmp_path: Path) -> None:
    own = write(tmp_path, service.authority, "perseus-operator")
    service_ = serving(service.operator)
    with pytest.raises(OSError, match=service.address.rpartition(":")[2]):
        await RpcServer.start(service.address, own, service_)


def test_the_proto_names_every_code() -> None:
    said = set(re.findall(r"[A-Z]+(?:_[A-Z]+)+|ABORTED|UNAVAILABLE", PROTO.read_text()))
    assert {code.name for code in STATUS.values()} <= said
