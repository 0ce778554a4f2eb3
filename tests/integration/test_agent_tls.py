"""mTLS both ways: only a certificate of the right authority and name commands, and a rotation needs no restart."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.doubles.recording_node import JOB, RecordingNode, gpu_uuid, wait_for
from tests.waiting import PATIENCE_S

from perseus_agent.servers.grpc_service import ERROR_METADATA
from perseus_operator.clients.agents.client import AgentPool
from perseus_operator.clients.agents.messages import StreamOpened
from perseus_operator.clients.credentials import Credentials
from perseus_operator.errors import AgentUnavailable
from perseus_operator.objects.values import Pod
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs
from perseus_sim.cluster.pki import Authority, KeyPair

HOSTS = ("127.0.0.1", "agent.perseus.svc")


class Secret:
    """The agent's mounted certificate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags = [f"--tls-{name}={folder / name}" for name in ("cert", "key", "ca")]

    def write(self, authority: Authority, pair: KeyPair) -> None:
        for name, data in (("cert", pair.certificate), ("key", pair.key), ("ca", authority.certificate)):
            (self.folder / f"{name}.new").write_bytes(data)
            (self.folder / f"{name}.new").replace(self.folder / name)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("cluster")


@pytest.fixture
def secret(tmp_path: Path, authority: Authority) -> Secret:
    secret = Secret(tmp_path)
    secret.write(authority, authority.issue("perseus-agent", hosts=HOSTS))
    return secret


@pytest.fixture
def node(tmp_path: Path, secret: Secret) -> Iterator[RecordingNode]:
    with RecordingNode.open(tmp_path / "node", gpus=1) as node:
        node.start_agent(*secret.flags, "--allowed-san=perseus-operator,spiffe://unused", secure=True)
        yield node


@contextmanager
def caller(node: RecordingNode, trusted: Authority, pair: KeyPair | None) -> Iterator[Any]:
    credentials = grpc.ssl_channel_credentials(
        trusted.certificate, pair.key if pair else None, pair.certificate if pair else None
    )
    with grpc.secure_channel(node.addresses["grpc"], credentials) as channel:
        yield stubs.AgentStub(channel)


def operator(authority: Authority, **changes: Any) -> KeyPair:
    return authority.issue("operator", hosts=("perseus-operator",), client=True, **changes)


def code_of(stub: Any) -> tuple[grpc.StatusCode, str]:
    pod = messages.Pod(uid="uid", namespace="ns", name="pod")
    lease = messages.AcquireLeaseRequest(job_uid=JOB, job_name="a/b", epoch=1, ttl_ms=1000, pods=[pod])
    with pytest.raises(grpc.RpcError) as error:
        stub.AcquireLease(lease, timeout=PATIENCE_S)
    return error.value.code(), dict(error.value.trailing_metadata() or ()).get(ERROR_METADATA, "")


def test_only_the_operator_may_command(node: RecordingNode, authority: Authority) -> None:
    with caller(node, authority, operator(authority)) as stub:
        assert stub.DescribeNode(messages.DescribeNodeRequest(), timeout=PATIENCE_S).node_name == "node-under-test"
    for wrong in (
        authority.issue("somebody", hosts=("another-workload",), client=True),
        authority.issue("perseus-operator", client=True),  # the common name counts for nothing
    ):
        with caller(node, authority, wrong) as stub:
            assert code_of(stub) == (grpc.StatusCode.PERMISSION_DENIED, "NotAuthorised")
            with pytest.raises(grpc.RpcError, match="PERMISSION_DENIED"):
                next(stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid=JOB), timeout=PATIENCE_S))
    stranger = Authority("elsewhere")
    for pair in (None, operator(stranger)):
        with caller(node, authority, pair) as stub:
            assert code_of(stub)[0] is grpc.StatusCode.UNAVAILABLE
    with caller(node, stranger, operator(authority)) as stub:  # and the agent must prove itself, too
        assert code_of(stub)[0] is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(node.addresses["grpc"]) as channel:
        assert code_of(stubs.AgentStub(channel))[0] is grpc.StatusCode.UNAVAILABLE
    assert "DescribeNode" not in node.log()


def test_a_rotation_needs_no_restart_and_a_broken_one_keeps_the_old_certificate(
    node: RecordingNode, authority: Authority, secret: Secret
) -> None:
    successor = Authority("cluster, renewed")
    secret.write(successor, successor.issue("perseus-agent", hosts=HOSTS))
    with caller(node, successor, operator(successor)) as stub:
        stub.DescribeNode(messages.DescribeNodeRequest(), timeout=PATIENCE_S)
    with caller(node, authority, operator(authority)) as stub:
        assert code_of(stub)[0] is grpc.StatusCode.UNAVAILABLE
    (secret.folder / "key").unlink()
    with caller(node, successor, operator(successor)) as stub:
        stub.DescribeNode(messages.DescribeNodeRequest(), timeout=PATIENCE_S)
    assert "certificates unreadable" in node.log()


def test_the_operator_takes_up_renewed_certificates_while_it_listens(
    node: RecordingNode, authority: Authority, secret: Secret, tmp_path: Path
) -> None:
    own = Secret(tmp_path / "operator")
    own.folder.mkdir()
    own.write(authority, operator(authority))
    files = Credentials(*(str(own.folder / name) for name in ("cert", "key", "ca")), server_name=HOSTS[1])
    address = node.addresses["grpc"]

    async def renew() -> None:
        pool = AgentPool(files, timeout_s=PATIENCE_S)
        pod = Pod("uid", "ns", "pod", "node", "job", {})
        lease = {"job_uid": JOB, "job_name": "a/b", "ttl_s": 60.0, "pods": [pod]}
        await pool.acquire(address, epoch=1, **lease)
        stream = pool.watch(address, JOB, namespace="team")
        assert isinstance(await anext(stream), StreamOpened)
        successor = Authority("cluster, renewed")
        secret.write(successor, successor.issue("perseus-agent", hosts=HOSTS))
        own.write(successor, operator(successor))
        await pool.acquire(address, epoch=2, **lease)
        with pytest.raises(TimeoutError):  # the stream goes on
            await asyncio.wait_for(anext(stream), 0.2)
        # Whoever has only the old certificate is not heard any more.
        assert node.agent is not None
        node.agent.kill()
        node.agent.wait()
        node.start_agent(*secret.flags, f"--grpc-address={address}", secure=True)
        for attempt in itertools.count():
            try:
                await pool.acquire(address, epoch=3, **lease)
                break
            except AgentUnavailable:
                assert attempt < 600
                await asyncio.sleep(0.1)
        (own.folder / "key").unlink()
        await pool.renew(address, job_uid=JOB, epoch=3, ttl_s=60.0)
        await pool.close()

    asyncio.run(renew())


def test_an_expired_certificate_is_named_and_gpus_are_given_back_until_it_is_renewed(
    tmp_path: Path, authority: Authority
) -> None:
    """A lease lasts as long as it was renewed for; then its clock is gone, and comes back with the certificate."""
    over = timedelta(minutes=-1)
    agents, own = Secret(tmp_path / "agent"), Secret(tmp_path / "operator")
    for secret in (agents, own):
        secret.folder.mkdir()
    agents.write(authority, authority.issue("perseus-agent", hosts=HOSTS))
    own.write(authority, operator(authority))
    files = Credentials(*(str(own.folder / name) for name in ("cert", "key", "ca")), server_name=HOSTS[1])

    async def expire(node: RecordingNode) -> None:
        pod, address = node.add_pod(0, [0]), node.addresses["grpc"]
        lease: Any = {
            "job_uid": JOB,
            "job_name": "a/b",
            "pods": [Pod(pod.uid, pod.namespace, pod.name, "node", "job", {})],
        }
        pool = AgentPool(files, timeout_s=PATIENCE_S)
        await pool.acquire(address, epoch=1, ttl_s=60.0, clock_mhz=900, **lease)
        await asyncio.to_thread(wait_for, lambda: node.locked()[gpu_uuid(0)] == 900, "the clock is locked")
        await pool.renew(address, job_uid=JOB, epoch=1, ttl_s=1.0)
        await pool.close()  # as after the connection's hour
        own.write(authority, operator(authority, lifetime=over))
        pool = AgentPool(files, timeout_s=PATIENCE_S)
        named = rf"the own certificate {own.folder}/cert expired at 20\d\d-.*Z; renew it: UNAVAILABLE"
        with pytest.raises(AgentUnavailable, match=named):
            await pool.renew(address, job_uid=JOB, epoch=1, ttl_s=60.0)
        await asyncio.to_thread(wait_for, node.all_default, "the lease has run out")
        agents.write(authority, authority.issue("perseus-agent", hosts=HOSTS, lifetime=over))
        own.write(authority, operator(authority))
        other = AgentPool(files, timeout_s=PATIENCE_S)
        with pytest.raises(AgentUnavailable, match=r"^UNAVAILABLE.*CERTIFICATE_VERIFY_FAILED: certificate has expired"):
            await other.acquire(address, epoch=2, ttl_s=60.0, clock_mhz=900, **lease)
        await other.close()
        assert node.all_default()
        agents.write(authority, authority.issue("perseus-agent", hosts=HOSTS))
        for attempt in itertools.count():
            try:
                await pool.acquire(address, epoch=2, ttl_s=60.0, clock_mhz=900, **lease)
                break
            except AgentUnavailable:
                assert attempt < 600
                await asyncio.sleep(0.1)
        await asyncio.to_thread(wait_for, lambda: node.locked()[gpu_uuid(0)] == 900, "the clock is back")
        await pool.close()

    with RecordingNode.open(tmp_path / "node", gpus=1) as node:
        node.start_agent(*agents.flags, "--allowed-san=perseus-operator", secure=True)
        asyncio.run(expire(node))


def test_without_certificates_and_without_the_word_insecure_it_does_not_start(tmp_path: Path) -> None:
    with RecordingNode.open(tmp_path / "node", gpus=1) as node:
        assert node.start_agent(secure=True, wait=False).wait(PATIENCE_S) == 2
        missing = [f"--tls-{name}={tmp_path / 'nowhere'}" for name in ("cert", "key", "ca")]
        assert node.start_agent(*missing, secure=True, wait=False).wait(PATIENCE_S) == 2
        for flag in ("--tls-cert", "--tls-key", "--tls-ca"):  # all problems at once
            assert f"{flag}: cannot read" in node.log()
