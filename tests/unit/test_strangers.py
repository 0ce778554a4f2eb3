"""Every call that one of our services answers is refused to a caller without an allowed name, before anything is done.

The calls are those of the wire's own descriptions, so one that is added later is asked too.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from perseus_agent.servers.grpc_service import AgentService
from perseus_operator.servers.grpc_service import OperatorService
from perseus_operator.servers.peer_service import PeerService
from perseus_operator.servers.solver.service import SolverService
from perseus_proto import v1alpha1

ALLOWED = "perseus-operator"


class Reached(Exception):
    """The service has gone on to do what was asked."""


class Work:
    """Stands for whatever a service works with; touching it is doing what was asked."""

    def __getattr__(self, name: str) -> Any:
        raise Reached(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Reached


class Refused(Exception):
    """The call was aborted."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class Call:
    """A call's context: whose certificate it came with."""

    def __init__(self, *names: str) -> None:
        self.names = [name.encode() for name in names]

    def auth_context(self) -> dict[str, list[bytes]]:
        # The common name counts for nothing.
        return {"x509_subject_alternative_name": self.names, "x509_common_name": [ALLOWED.encode()]}

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Says which error it was."""

    def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        raise Refused(code, details)

    def is_active(self) -> bool:
        return True


class AsyncCall(Call):
    """As grpc.aio has it."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:  # type: ignore[override]
        super().abort(code, details, trailing_metadata)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """The work has begun."""
        raise Reached


def service_named(name: str) -> Any:
    """A service whose work is not there."""
    work: Any = Work()
    match name:
        case "Agent":
            return AgentService(work, "node", frozenset({ALLOWED}))
        case "Operator":
            return OperatorService(work, frozenset({ALLOWED}))
        case "Peer":
            return PeerService(work, work, ALLOWED)
        case "Solver":
            return SolverService(work, work, version="", allowed_sans=frozenset({ALLOWED}))
    raise AssertionError(f"service {name} is new: say here how it is made")


def described() -> Iterator[ServiceDescriptor]:
    for module in pkgutil.iter_modules(v1alpha1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"{v1alpha1.__name__}.{module.name}").DESCRIPTOR
            yield from descriptor.services_by_name.values()


METHODS = [pytest.param(method, id=method.full_name) for service in described() for method in service.methods]


def ask(method: MethodDescriptor, *names: str) -> None:
    """Call a method of a new service as a caller with these names."""
    service = service_named(method.containing_service.name)
    call = getattr(service, method.name)
    request: Any = GetMessageClass(method.input_type)()
    if method.client_streaming:
        request = iter([request])
    asynchronous = inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call)
    context = AsyncCall(*names) if asynchronous else Call(*names)

    async def answer() -> None:
        answers = call(request, context)
        if inspect.isawaitable(answers):
            await answers
        elif hasattr(answers, "__aiter__"):
            await anext(answers)
        elif method.server_streaming:
            next(answers)

    asyncio.run(answer())
    raise AssertionError(f"{method.name} was answered")


@pytest.mark.parametrize("method", METHODS)
def test_a_stranger_is_refused_before_anything_is_done(method: MethodDescriptor) -> None:
    for names in ((), ("another-workload",), (f"{ALLOWED}.evil.example", "x")):
        with pytest.raises(Refused, match="certificate: none of its names") as refused:
            ask(method, *names)
        assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED


def test_the_operator_is_let_through() -> None:
    """Or the test above would pass whoever calls."""
    for param in METHODS:
        method: Any = param.values[0]
        with pytest.raises((Reached, Refused, AssertionError)) as ended:
            ask(method, "x", ALLOWED)
        assert "certificate" not in str(ended.value)


def test_every_service_of_ours_is_asked() -> None:
    assert {service.name for service in described()} == {"Agent", "Operator", "Peer", "Solver"}
