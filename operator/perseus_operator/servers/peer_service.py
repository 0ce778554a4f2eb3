"""Answers other replicas of the operator: about jobs that this one serves, and to the operator's certificates alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from perseus_operator.servers.grpc_service import DeclareStraggler, OperatorService, answering
from perseus_operator.servers.rpc_server import authorise
from perseus_proto.v1alpha1 import operator_pb2 as operator_messages
from perseus_proto.v1alpha1 import peer_pb2 as messages
from perseus_proto.v1alpha1 import peer_pb2_grpc as stubs

ReadPage = Callable[[str], tuple[int, bytes]]
"""Status of HTTP and JSON of a path of the page, from this replica's jobs. Called in a thread. Raises UnknownJob."""


class PeerService(stubs.PeerServicer):
    """``perseus.v1alpha1.Peer``."""

    def __init__(self, declare: DeclareStraggler, read_page: ReadPage, own_name: str) -> None:
        """``own_name``: that every replica's certificate carries."""
        self._allowed_sans = frozenset({own_name})
        self._operator = OperatorService(declare, self._allowed_sans)
        self._read_page = read_page

    async def SetStraggler(  # noqa: N802  # the wire's name
        self, request: operator_messages.SetStragglerRequest, context: Any
    ) -> operator_messages.SetStragglerResponse:
        """Declare a straggler of a job of this replica; see peer.proto."""
        return await self._operator.SetStraggler(request, context)

    async def ReadPage(self, request: messages.ReadPageRequest, context: Any) -> messages.ReadPageResponse:  # noqa: N802
        """Read a document of the page; see peer.proto."""
        async with answering(context):
            authorise(context, self._allowed_sans)
            status, document = await asyncio.to_thread(self._read_page, request.path)
            return messages.ReadPageResponse(status=status, document=document)
        raise AssertionError("the call was aborted")
