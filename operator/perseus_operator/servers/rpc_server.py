"""A gRPC server with mutual TLS, and who may call it: the names in the caller's certificate decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from perseus_operator.clients.credentials import Credentials
from perseus_operator.errors import NotAllowed
from perseus_runtime.tls import CONNECTION_AGE, server_credentials

_SAN: Final = "x509_subject_alternative_name"
_OPTIONS: Final = (("grpc.so_reuseport", 0), CONNECTION_AGE)


def authorise(context: Any, allowed_sans: frozenset[str]) -> None:
    """Refuse a caller whose certificate carries none of these names. Raises NotAllowed."""
    names = {name.decode(errors="replace") for name in context.auth_context().get(_SAN, ())}
    if not names & allowed_sans:
        raise NotAllowed(f"certificate: none of its names {sorted(names)} is allowed here: {sorted(allowed_sans)}")


class RpcServer:
    """The gRPC server. It must be started in the event loop that it runs in."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address
        """host:port that is bound."""

    @classmethod
    async def start(
        cls,
        address: str,
        files: Credentials,
        add: Callable[[grpc.aio.Server], None],
        *,
        max_bytes: int = 64 << 10,
        most_calls: int | None = None,
    ) -> RpcServer:
        """Serve what ``add`` adds on ``host:port`` (port 0: any free one).

        Args:
            address: ``host:port``.
            files: for mutual TLS.
            add: registers the service.
            max_bytes: of a request.
            most_calls: at a time; further ones are refused with RESOURCE_EXHAUSTED. None: any number.

        Raises:
            OSError: the address cannot be bound, or a certificate cannot be read.
        """
        credentials = server_credentials(key=files.key, cert=files.cert, ca=files.ca)
        options = (*_OPTIONS, ("grpc.max_receive_message_length", max_bytes))
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most_calls)
        add(server)
        try:
            port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await server.start()
        return cls(server, f"{address.rpartition(':')[0]}:{port}")

    async def close(self, grace_s: float = 0.5) -> None:
        """Stop; calls in progress have so many seconds to end."""
        await self._server.stop(grace_s)
