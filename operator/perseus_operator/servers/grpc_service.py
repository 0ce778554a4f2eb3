"""The operator's own gRPC service, ``perseus.v1alpha1.Operator``: which clients may call it, and its status codes.

It is served with mutual TLS only. Requests are validated and converted here; ``controller.set_straggler`` carries them
out.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio

from perseus_core.units import s_from_ms
from perseus_operator.clients.peers import ERROR_METADATA
from perseus_operator.controller.set_straggler import Declared, StragglerRequest
from perseus_operator.errors import (
    InvalidSpec,
    KubeConflict,
    KubeError,
    KubeNotFound,
    NoAdvice,
    NotAllowed,
    OperatorError,
    StaleEpoch,
    UnknownJob,
)
from perseus_operator.servers.rpc_server import authorise
from perseus_proto.v1alpha1 import operator_pb2 as messages
from perseus_proto.v1alpha1 import operator_pb2_grpc as stubs

logger = logging.getLogger(__name__)

STATUS: Final[dict[type[OperatorError], grpc.StatusCode]] = {
    InvalidSpec: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownJob: grpc.StatusCode.NOT_FOUND,
    NoAdvice: grpc.StatusCode.UNAVAILABLE,
    KubeNotFound: grpc.StatusCode.NOT_FOUND,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    KubeConflict: grpc.StatusCode.ABORTED,
    KubeError: grpc.StatusCode.UNAVAILABLE,
}
"""The first row that fits counts. ABORTED and UNAVAILABLE: nothing was changed, try again."""

DeclareStraggler = Callable[[StragglerRequest], Awaitable[Declared]]
AskOthers = Callable[[messages.SetStragglerRequest], Awaitable[messages.SetStragglerResponse]]
"""Has the replica that serves the job carry out a request. Raises OperatorError; UnknownJob: none does."""


class OperatorService(stubs.OperatorServicer):
    """``perseus.v1alpha1.Operator``."""

    def __init__(
        self, declare: DeclareStraggler, allowed_sans: frozenset[str], ask_others: AskOthers | None = None
    ) -> None:
        """Serve callers of these names; ``ask_others`` None: there are no other replicas that could serve a job."""
        self._declare = declare
        self._allowed_sans = allowed_sans
        self._ask_others = ask_others

    async def SetStraggler(  # noqa: N802  # the wire's name
        self, request: messages.SetStragglerRequest, context: Any
    ) -> messages.SetStragglerResponse:
        """Declare a straggler; see operator.proto."""
        async with answering(context):
            authorise(context, self._allowed_sans)
            wanted = _parse(request)
            try:
                declared = await self._declare(wanted)
            except UnknownJob:
                if self._ask_others is None:
                    raise
                return await self._ask_others(request)
            ref, annotation = declared.ref, declared.annotation
            logger.info("%s: %s declared stragglers: %s", ref, context.peer(), annotation or "none")
            return messages.SetStragglerResponse(
                namespace=ref.namespace, job=ref.name, annotation=annotation, epoch=declared.epoch
            )
        raise AssertionError("the call was aborted")


@asynccontextmanager
async def answering(context: Any) -> AsyncIterator[None]:
    """End a call with the status code of the error that is raised inside, and the error's name in the metadata."""
    try:
        yield
    except OperatorError as error:
        code = next((code for kind, code in STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
        await context.abort(code, str(error), trailing_metadata=((ERROR_METADATA, type(error).__name__),))
        raise


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
