"""The door for KEDA on a real socket with real certificates: who may ask, for which pools, and what no answer means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.integration.test_operator_rpc import write
from tests.waiting import PATIENCE_S

from perseus_core import keys
from perseus_operator.controller.advised import advised_replicas
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.controller.settings import InvalidSetting, parse_settings
from perseus_operator.servers import scaler_service
from perseus_operator.servers.rpc_server import RpcServer
from perseus_operator.servers.scaler_service import METRIC, ScalerService
from perseus_operator.servers.serving import Serving
from perseus_proto.externalscaler import externalscaler_pb2 as messages
from perseus_proto.externalscaler import externalscaler_pb2_grpc as stubs
from perseus_sim.cluster.pki import Authority

ALLOWED, HOST = "perseus-keda", "perseus-scaler.perseus-system.svc"
Code = grpc.StatusCode


def pool(jobs: KnownJobs, namespace: str = "team", name: str = "chat", **status: Any) -> None:
    """A pool as the watch delivers it."""
    metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}"}
    jobs.observe({"kind": keys.POOL_KIND, "metadata": metadata, "status": status}, keys.POOL_KIND)


def advice(replicas: int | None) -> dict[str, Any]:
    known = {} if replicas is None else {"replicas": replicas, "since": "2030-01-31T18:00:00Z"}
    return {"why": "In words.", **known}


def ref(namespace: str = "team", **metadata: str) -> messages.ScaledObjectRef:
    return messages.ScaledObjectRef(name="chat", namespace=namespace, scalerMetadata={"pool": "chat", **metadata})


def metrics(of: messages.ScaledObjectRef, name: str = METRIC) -> messages.GetMetricsRequest:
    return messages.GetMetricsRequest(scaledObjectRef=of, metricName=name)


class Door:
    """The service, and its callers."""

    def __init__(self, authority: Authority, jobs: KnownJobs, address: str) -> None:
        self.authority, self.jobs, self.address = authority, jobs, address

    def channel(self, name: str = ALLOWED) -> grpc.aio.Channel:
        pair = self.authority.issue(name, hosts=(name,), client=True)
        credentials = grpc.ssl_channel_credentials(self.authority.certificate, pair.key, pair.certificate)
        options = (("grpc.ssl_target_name_override", HOST),)
        return grpc.aio.secure_channel(self.address, credentials, options=options)

    async def call(self, method: str, request: Any, name: str = ALLOWED) -> Any:
        async with self.channel(name) as channel:
            return await getattr(stubs.ExternalScalerStub(channel), method)(request, timeout=PATIENCE_S)

    async def refusal(self, method: str, request: Any, name: str = ALLOWED) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.call(method, request, name)
        return refused.value.code(), str(refused.value.details())


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    authority, jobs = Authority("test"), KnownJobs(10)
    service = ScalerService(partial(advised_replicas, jobs), frozenset({ALLOWED}))
    add = partial(stubs.add_ExternalScalerServicer_to_server, service)
    server = await RpcServer.start("127.0.0.1:0", write(tmp_path, authority, HOST), add, most_calls=2)
    yield Door(authority, jobs, server.address)
    await server.close(0.0)


async def test_the_metric_is_the_number_of_replicas_for_each_of_which_the_target_is_one(door: Door) -> None:
    pool(door.jobs, advice=advice(7))
    [spec] = (await door.call("GetMetricSpec", ref())).metricSpecs
    assert (spec.metricName, spec.targetSizeFloat) == (METRIC, 1.0)
    [value] = (await door.call("GetMetrics", metrics(ref()))).metricValues
    assert (value.metricName, value.metricValueFloat) == (METRIC, 7.0)
    assert (await door.call("IsActive", ref(namespace="team"))).result
    assert (await door.call("IsActive", messages.ScaledObjectRef.FromString(ref().SerializeToString()))).result


async def test_without_advice_there_is_an_error_and_never_a_zero(door: Door) -> None:
    for status in ({}, {"advice": advice(None)}, {"advice": {"replicas": 0, "why": "Nobody writes that."}}):
        pool(door.jobs, **status)
        for method, request in (("GetMetrics", metrics(ref())), ("IsActive", ref())):
            code, details = await door.refusal(method, request)
            assert code is Code.UNAVAILABLE
            assert "ServingPool team/chat: no number of replicas is advised" in details
    assert (await door.call("GetMetricSpec", ref())).metricSpecs, "an HPA can be made before anything is known"


async def test_a_scaled_object_asks_for_pools_of_its_own_namespace_alone(door: Door) -> None:
    pool(door.jobs, namespace="other", advice=advice(3))
    code, details = await door.refusal("GetMetrics", metrics(ref(namespace="team")))
    assert code is Code.NOT_FOUND
    assert "no ServingPool chat is served in namespace team" in details
    for method, request in (
        ("GetMetrics", metrics(_naming("other"))),
        ("IsActive", _naming("other")),
        ("GetMetricSpec", _naming("other")),
    ):
        assert await door.refusal(method, request) == (
            Code.PERMISSION_DENIED,
            "metadata.namespace: must be that of the ScaledObject, team, or left out",
        )
    pool(door.jobs, advice=advice(2))
    assert (await door.call("IsActive", _naming("team"))).result, "its own may be named"


def _naming(namespace: str) -> messages.ScaledObjectRef:
    return messages.ScaledObjectRef(
        name="chat", namespace="team", scalerMetadata={"pool": "chat", "namespace": namespace}
    )


async def test_only_kedas_certificate_may_ask(door: Door) -> None:
    pool(door.jobs, advice=advice(2))
    for name in ("perseus-agent", "perseus-infrastructure"):
        for method, request in (("GetMetricSpec", ref()), ("GetMetrics", metrics(ref())), ("IsActive", ref())):
            code, _ = await door.refusal(method, request, name)
            assert code is Code.PERMISSION_DENIED
    async with grpc.aio.insecure_channel(door.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stubs.ExternalScalerStub(channel).IsActive(ref(), timeout=PATIENCE_S)
    assert refused.value.code() is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ref(pool=""), "metadata.pool: must be the name of a ServingPool"),
        (ref(pool="Chat"), "metadata.pool: must be the name of a ServingPool"),
        (ref(pool="a" * 254), "metadata.pool: must be the name of a ServingPool"),
        (ref(namespace=""), "namespace: must be the name of a namespace"),
    ],
)
async def test_a_bad_name_is_refused_with_the_field_and_the_rule(door: Door, request_: Any, message: str) -> None:
    for method in ("GetMetricSpec", "IsActive"):
        assert await door.refusal(method, request_) == (Code.INVALID_ARGUMENT, message)


async def test_another_metric_and_a_large_request_are_refused(door: Door) -> None:
    pool(door.jobs, advice=advice(2))
    assert await door.refusal("GetMetrics", metrics(ref(), "cpu")) == (
        Code.INVALID_ARGUMENT,
        f"metricName: must be {METRIC}",
    )
    code, _ = await door.refusal("IsActive", ref(padding="x" * 100_000))
    assert code is Code.RESOURCE_EXHAUSTED


async def test_a_stream_says_active_and_ends_with_the_advice(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler_service, "_AGAIN_S", 0.01)
    pool(door.jobs, advice=advice(2))
    async with door.channel() as channel:
        stream = stubs.ExternalScalerStub(channel).StreamIsActive(ref(), timeout=PATIENCE_S)
        assert (await stream.read()).result
        pool(door.jobs, advice=advice(None))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert ended.value.code() is Code.UNAVAILABLE


async def test_calls_at_a_time_are_bounded(door: Door) -> None:
    pool(door.jobs, advice=advice(2))
    async with door.channel() as channel:
        stub = stubs.ExternalScalerStub(channel)
        streams = [stub.StreamIsActive(ref(), timeout=PATIENCE_S) for _ in range(2)]
        await asyncio.gather(*(stream.read() for stream in streams))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.IsActive(ref(), timeout=PATIENCE_S)
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED


async def test_an_operator_serves_it_at_the_address_of_its_settings(tmp_path: Path) -> None:
    authority = Authority("test")
    files = write(tmp_path, authority, HOST)
    flags = ["--insecure", "--scaler-address=127.0.0.1:0"]
    with pytest.raises(InvalidSetting, match="--scaler-cert, --scaler-key, --scaler-ca: all are needed"):
        parse_settings(flags, {})
    flags += [f"--scaler-cert={files.cert}", f"--scaler-key={files.key}", f"--scaler-ca={files.ca}"]
    nothing: Any = None
    operator: Any = SimpleNamespace(advised=lambda _namespace, _name: 4)
    server = await Serving(parse_settings(flags, {}), nothing, nothing)._scaler_server(operator)
    assert server is not None
    answer = await Door(authority, KnownJobs(1), server.address).call("GetMetrics", metrics(ref()))
    assert answer.metricValues[0].metricValueFloat == 4.0
    await server.close(0.0)
