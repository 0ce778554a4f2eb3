"""What a worker answers: one piece of work at a time, and the same work once for all who ask for it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from perseus_operator.errors import NotAllowed
from perseus_operator.servers.rpc_server import authorise
from perseus_operator.servers.solver.metrics import SolverMetrics
from perseus_operator.solving.messages import BEGUN_METADATA, MAX_BYTES, response_of, task_of
from perseus_operator.solving.pool import digest_of
from perseus_operator.solving.process import Outcome, Task, Verdict
from perseus_proto.v1alpha1 import solver_pb2, solver_pb2_grpc

_KEPT_BYTES: Final = MAX_BYTES
_KEPT: Final = 256
"""Of the latest answers: replicas of the operator, and jobs that come again, ask for the same."""

Run = Callable[[Task, bytes], Awaitable[Verdict]]


@dataclass(eq=False)
class _Work:
    """A piece of work under way, and how many callers wait for it."""

    digest: bytes
    ends: asyncio.Task[Verdict]
    callers: int = 0


class SolverService(solver_pb2_grpc.SolverServicer):
    """``perseus.v1alpha1.Solver``."""

    def __init__(self, run: Run, metrics: SolverMetrics, *, version: str, allowed_sans: frozenset[str]) -> None:
        """Serve callers of these names and of this version alone.

        Args:
            run: does a piece of work.
            metrics: of the worker.
            version: of the distribution. Another one may solve otherwise.
            allowed_sans: names of callers' certificates.
        """
        self._run = run
        self._metrics = metrics
        self._version = version
        self._allowed_sans = allowed_sans
        self._work: _Work | None = None
        self._done: OrderedDict[bytes, Verdict] = OrderedDict()
        self._ended_s = time.monotonic()
        self.stopping = False
        """Whether new work is refused."""

    @property
    def idle_s(self) -> float:
        """For how long there has been no work."""
        return 0.0 if self._work else time.monotonic() - self._ended_s

    async def Work(self, request: solver_pb2.WorkRequest, context: Any) -> solver_pb2.WorkResponse:  # noqa: N802
        """Do a piece of work; see solver.proto."""
        try:
            authorise(context, self._allowed_sans)
        except NotAllowed as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        if request.version != self._version:
            message = f"version: the worker is {self._version}, the caller {request.version[:100]!r}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        task = task_of(request.task)
        if task is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"task: {request.task} is none of a worker's")
        assert task is not None
        digest = digest_of(task, request.request)
        verdict = self._done.get(digest)
        if verdict is None:
            work = self._work or (None if self.stopping else self._begin(digest, task, request.request))
            if work is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker stops")
            assert work is not None
            if work.digest != digest:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the worker does another piece of work")
            await context.send_initial_metadata(((BEGUN_METADATA, "1"),))
            verdict = await self._outcome(work)
        return response_of(verdict)

    async def ended(self) -> None:
        """Wait until no work is under way."""
        while self._work is not None:
            await asyncio.wait([self._work.ends])
            await asyncio.sleep(0)

    def _begin(self, digest: bytes, task: Task, request: bytes) -> _Work:
        work = self._work = _Work(digest, asyncio.create_task(self._do(digest, task, request)))
        work.ends.add_done_callback(lambda _: self._end(work))
        return work

    def _end(self, work: _Work) -> None:
        if self._work is work:
            self._work, self._ended_s = None, time.monotonic()

    async def _outcome(self, work: _Work) -> Verdict:
        """Wait for a piece of work. One that nobody waits for any more is given up, such as a deleted job's."""
        work.callers += 1
        try:
            return await asyncio.shield(work.ends)
        finally:
            work.callers -= 1
            if not work.callers:
                self._end(work)
                work.ends.cancel()

    async def _do(self, digest: bytes, task: Task, request: bytes) -> Verdict:
        with self._metrics.working():
            verdict = await self._run(task, request)
        self._metrics.ended(task, verdict)
        if verdict.outcome is not Outcome.DIED:
            self._done[digest] = verdict
            while sum(len(one.answer) for one in self._done.values()) > _KEPT_BYTES or len(self._done) > _KEPT:
                self._done.popitem(last=False)
        return verdict
