"""Every call that operator, replicas and solver workers serve refuses a stranger before it does anything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from perseus_operator.servers.grpc_service import OperatorService
from perseus_operator.servers.peer_service import PeerService
from perseus_operator.servers.scaler_service import ScalerService
from perseus_operator.servers.solver.metrics import SolverMetrics
from perseus_operator.servers.solver.service import SolverService
from perseus_proto.externalscaler import externalscaler_pb2
from perseus_proto.v1alpha1 import operator_pb2, peer_pb2, solver_pb2

NAMES = frozenset({"perseus-operator"})


class Aborted(Exception):
    """What ``abort`` raises."""


class Context:
    """A call with a certificate of the right authority that carries these names."""

    def __init__(self, *names: bytes) -> None:
        self.names, self.code = names, None

    def auth_context(self) -> dict[str, Any]:
        return {"x509_subject_alternative_name": self.names} if self.names else {}

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"

    async def abort(self, code: Any, details: str, trailing_metadata: Any = ()) -> None:
        self.code = code
        raise Aborted(details)


async def never(*_: Any) -> Any:
    raise AssertionError("a stranger's request was carried out")


def never_read(*_: Any) -> Any:
    raise AssertionError("a stranger's request was carried out")


SERVED = {
    "Operator": (operator_pb2, OperatorService(never, NAMES, never)),
    "ExternalScaler": (externalscaler_pb2, ScalerService(never_read, NAMES)),
    "Peer": (peer_pb2, PeerService(never, never_read, "perseus-operator")),
    "Solver": (solver_pb2, SolverService(never, SolverMetrics(), version="1", allowed_sans=NAMES)),
}


async def answered(call: Any) -> None:
    """Await a call's answer, or the first of its stream."""
    await (anext(call) if isinstance(call, AsyncIterator) else call)


def calls() -> Iterator[Any]:
    for name, (module, service) in SERVED.items():
        for method in module.DESCRIPTOR.services_by_name[name].methods:
            yield pytest.param(getattr(service, method.name), method.input_type._concrete_class, id=method.full_name)


@pytest.mark.parametrize(("call", "request_type"), list(calls()))
@pytest.mark.parametrize(
    "names",
    [(), (b"",), (b"perseus-agent",), (b"perseus-operator.evil",), (b"PERSEUS-OPERATOR",), (b"\xff",), (b"a", b"b")],
)
async def test_a_stranger_is_refused(call: Any, request_type: Any, names: tuple[bytes, ...]) -> None:
    context = Context(*names)
    with pytest.raises(Aborted):
        await answered(call(request_type(), context))
    assert context.code is grpc.StatusCode.PERMISSION_DENIED


def test_no_service_is_left_out() -> None:
    assert {name for module, _ in SERVED.values() for name in module.DESCRIPTOR.services_by_name} == set(SERVED)
