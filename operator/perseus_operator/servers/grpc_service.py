"""The operator's own gRPC service, ``perseus.v1alpha1.Operator``: which clients may call it, and its status codes.

It is served with mutual TLS only. Requests are validated and converted here; ``controller.set_straggler`` carries them
out.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from perseus_operator.clients.agents import Credentials
from perseus_operator.controller.set_straggler import Declared, StragglerRequest
from perseus_operator.errors import (
    InvalidSpec,
    KubeConflict,
    KubeError,
    KubeNotFound,
    NotAllowed,
    OperatorError,
    StaleEpoch,
    UnknownJob,
)
from perseus_proto.tls import CONNECTION_AGE, server_credentials
from perseus_proto.units import s_from_ms
from perseus_proto.v1alpha1 import operator_pb2 as messages
from perseus_proto.v1alpha1 import operator_pb2_grpc as stubs

logger = logging.getLogger(__name__)

STATUS: Final[dict[type[OperatorError], grpc.StatusCode]] = {
    InvalidSpec: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownJob: grpc.StatusCode.NOT_FOUND,
    KubeNotFound: grpc.StatusCode.NOT_FOUND,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    KubeConflict: grpc.StatusCode.ABORTED,
    KubeError: grpc.StatusCode.UNAVAILABLE,
}
"""The first row that fits counts. ABORTED and UNAVAILABLE: nothing was changed, try again."""
_ERROR_METADATA: Final = "perseus-error"
_SAN: Final = "x509_subject_alternative_name"
_MAX_BYTES: Final = 64 << 10
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_BYTES),
    CONNECTION_AGE,
)

DeclareStraggler = Callable[[StragglerRequest], Awaitable[Declared]]


class OperatorService(stubs.OperatorServicer):
    """``perseus.v1alpha1.Operator``."""

    def __init__(self, declare: DeclareStraggler, allowed_sans: frozenset[str]) -> None:
        self._declare = declare
        self._allowed_sans = allowed_sans

    async def SetStraggler(  # noqa: N802  # the wire's name
        self, request: messages.SetStragglerRequest, context: Any
    ) -> messages.SetStragglerResponse:
        """Declare a straggler; see operator.proto."""
        try:
            self._authorise(context)
            declared = await self._declare(_parse(request))
        except OperatorError as error:
            code = next((code for kind, code in STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
            await context.abort(code, str(error), trailing_metadata=((_ERROR_METADATA, type(error).__name__),))
            raise
        ref, annotation = declared.ref, declared.annotation
        logger.info("%s: %s declared stragglers: %s", ref, context.peer(), annotation or "none")
        return messages.SetStragglerResponse(
            namespace=ref.namespace, job=ref.name, annotation=annotation, epoch=declared.epoch
        )

    def _authorise(self, context: Any) -> None:
        names = {name.decode(errors="replace") for name in context.auth_context().get(_SAN, ())}
        if not names & self._allowed_sans:
            raise NotAllowed(f"certificate: none of its names {sorted(names)} is in --rpc-allowed-san")


def _parse(request: messages.SetStragglerRequest) -> StragglerRequest:
    if bool(request.namespace) != bool(request.job):
        raise InvalidSpec("namespace and job: must be given together")
    return StragglerRequest(
        id=request.id,
        slowdown=request.slowdown,
        delay_s=s_from_ms(request.delay_ms),
        delay_iterations=request.delay_iterations,
        job=(request.namespace, request.job) if request.job else None,
        epoch=request.epoch,
    )


class RpcServer:
    """The gRPC server. It must be started in the event loop that it runs in."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address
        """host:port that is bound."""

    @classmethod
    async def start(cls, address: str, files: Credentials, service: OperatorService) -> RpcServer:
        """Serve on ``host:port`` (port 0: any free one).

        Raises:
            OSError: the address cannot be bound, or a certificate cannot be read.
        """
        credentials = server_credentials(key=files.key, cert=files.cert, ca=files.ca)
        server = grpc.aio.server(options=_OPTIONS)
        stubs.add_OperatorServicer_to_server(service, server)
        try:
            port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await server.start()
        return cls(server, f"{address.rpartition(':')[0]}:{port}")

    async def close(self) -> None:
        """Stop; calls in progress have half a second to end."""
        await self._server.stop(0.5)
