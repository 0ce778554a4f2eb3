"""The other replicas of the operator, asked about jobs that they serve.

Requests are rare: a person looks at a page, or infrastructure declares a straggler. So each opens its own connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any, Final

import grpc
import grpc.aio

from perseus_operator import errors
from perseus_operator.clients.credentials import Credentials
from perseus_operator.errors import KubeUnavailable, OperatorError, UnknownJob
from perseus_proto.v1alpha1 import operator_pb2, peer_pb2, peer_pb2_grpc
from perseus_runtime import direct
from perseus_runtime.tls import CallerCredentials

logger = logging.getLogger(__name__)

ERROR_METADATA: Final = "perseus-error"
"""Names the exception of ``errors`` that an answer stands for."""
_TIMEOUT_S: Final = 4.0
_OPTIONS: Final = (("grpc.max_receive_message_length", 16 << 20), direct.GRPC)
"""Of a page's document: a plan of six thousand instructions is half a megabyte."""


class Peers:
    """The other replicas, as far as they live."""

    def __init__(self, credentials: Credentials, addresses: Callable[[], Collection[str]]) -> None:
        """Connect to nobody yet.

        Args:
            credentials: files for mutual TLS; the certificate of every replica carries ``server_name``.
            addresses: host:port of each other replica that lives now.
        """
        self._files = CallerCredentials(key=credentials.key, cert=credentials.cert, ca=credentials.ca)
        self._server_name = credentials.server_name
        self._credentials: grpc.ChannelCredentials | None = None
        self._addresses = addresses

    async def declare(self, request: operator_pb2.SetStragglerRequest) -> operator_pb2.SetStragglerResponse:
        """Have the replica that serves the job declare a straggler.

        Raises:
            UnknownJob: no other replica serves it.
            OperatorError: as that replica raised it, or KubeUnavailable: one did not answer, so it is not known.
        """
        answer = await self._first(lambda stub: stub.SetStraggler(request, timeout=_TIMEOUT_S))
        assert isinstance(answer, operator_pb2.SetStragglerResponse)
        return answer

    async def page(self, path: str) -> peer_pb2.ReadPageResponse:
        """Read a document of the page about a job that another replica serves. Raises like ``declare``."""
        request = peer_pb2.ReadPageRequest(path=path)
        answer = await self._first(lambda stub: stub.ReadPage(request, timeout=_TIMEOUT_S))
        assert isinstance(answer, peer_pb2.ReadPageResponse)
        return answer

    async def _first(self, call: Callable[[Any], Any]) -> Any:
        """The answer of the one replica that serves the job."""
        outcomes = await asyncio.gather(
            *(self._ask(address, call) for address in self._addresses()), return_exceptions=True
        )
        failed: OperatorError = UnknownJob("job: no replica of the operator serves it")
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                return outcome
            if not isinstance(outcome, OperatorError):
                raise outcome
            if not isinstance(outcome, UnknownJob):
                failed = outcome
        raise failed

    async def _ask(self, address: str, call: Callable[[Any], Any]) -> Any:
        self._credentials = self._files.renewed() or self._credentials
        if self._credentials is None:
            raise KubeUnavailable("--tls-cert, --tls-key, --tls-ca: the files cannot be read; the log has the reason")
        options = (*_OPTIONS, ("grpc.ssl_target_name_override", self._server_name))
        async with grpc.aio.secure_channel(address, self._credentials, options=options) as channel:
            try:
                return await call(peer_pb2_grpc.PeerStub(channel))
            except grpc.aio.AioRpcError as error:
                raise _translated(error, address, self._files.expired) from error


def _translated(error: grpc.aio.AioRpcError, address: str, expired: str) -> OperatorError:
    name = str(dict(error.trailing_metadata() or ()).get(ERROR_METADATA, ""))
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, OperatorError):
        return kind((error.details() or "")[:300])
    return KubeUnavailable(f"the replica at {address} did not answer: {expired or error.code().name}")
