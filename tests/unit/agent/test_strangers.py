"""Every call of the agent's service, made by a stranger: refused by name before anything of the node is touched."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from perseus_agent.servers.grpc_service import ERROR_METADATA, AgentService
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs

CALLS = [*messages.DESCRIPTOR.services_by_name["Agent"].methods]
"""All that the service declares, so one that is added later is tried, too."""


class Untouchable:
    """A node that nobody may use."""

    def __init__(self) -> None:
        self.touched: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.touched.append(name)
        raise AssertionError(f"a stranger reached {name}")


@pytest.fixture
def node() -> Untouchable:
    return Untouchable()


@pytest.fixture
def stub(node: Untouchable, tmp_path: Path) -> Iterator[stubs.AgentStub]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service: Any = AgentService(node, "node", frozenset({"perseus-operator"}))  # type: ignore[arg-type]
    stubs.add_AgentServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{tmp_path / 'agent'}")
    server.start()
    with grpc.insecure_channel(f"unix:{tmp_path / 'agent'}") as channel:
        yield stubs.AgentStub(channel)  # type: ignore[no-untyped-call]
    server.stop(0).wait()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_stranger_is_refused_by_every_call(stub: stubs.AgentStub, node: Untouchable, call: Any) -> None:
    request = getattr(messages, call.input_type.name)()

    def ask() -> None:
        answer = getattr(stub, call.name)(iter([request]) if call.client_streaming else request, timeout=60)
        if call.server_streaming:
            list(answer)

    with pytest.raises(grpc.RpcError) as refusal:
        ask()
    error: Any = refusal.value
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert dict(error.trailing_metadata())[ERROR_METADATA] == "NotAuthorised"
    assert node.touched == []


class Caller:
    """A context of somebody whose certificate has these names."""

    def __init__(self, *names: bytes) -> None:
        self._names = names

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {"x509_subject_alternative_name": self._names}


@pytest.mark.parametrize(
    "names", [(), (b"perseus-agent",), (b"perseus-webhook", b"perseus-solver"), (b"\xff",), (b"perseus-operator.evil",)]
)
def test_other_names_that_our_own_authority_signed_may_not_command(node: Untouchable, names: tuple[bytes, ...]) -> None:
    service = AgentService(node, "node", frozenset({"perseus-operator"}))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="none of its names") as refusal:
        service.authorise(Caller(*names))  # type: ignore[arg-type]
    assert type(refusal.value).__name__ == "NotAuthorised"
    service.authorise(Caller(*names, b"perseus-operator"))  # type: ignore[arg-type]
