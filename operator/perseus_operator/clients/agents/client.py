"""The operator's client of the node agents.

``AgentPool`` has one channel per address, shared by all jobs. Every call has a deadline. One table maps gRPC's status
codes to the agent errors of ``errors``. Messages are converted to and from the operator's own types, so that no planner
sees protobuf (``agent_messages``).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from perseus_core.latency import SwitchLatency
from perseus_core.serving import EngineOrders
from perseus_core.units import ms_from_s
from perseus_operator.clients.agents.channels import Channel, Channels
from perseus_operator.clients.agents.engines import orders_request
from perseus_operator.clients.agents.messages import (
    EventsDropped,
    LeaseInfo,
    NodeInfo,
    StreamOpened,
    TelemetryEvent,
    event_of,
    is_valid,
    lease_of,
    named_gpu_message,
    node_of,
    pod_message,
)
from perseus_operator.clients.agents.telemetry import TornBatch, dropped_of, events_of
from perseus_operator.clients.agents.validation import MAX_ITERATION, MAX_NAME
from perseus_operator.clients.credentials import Credentials
from perseus_operator.errors import AgentError, AgentFenced, AgentRefused, AgentUnavailable
from perseus_operator.nodes.named_gpus import NamedGpu
from perseus_operator.objects.values import Pod
from perseus_operator.solving.slots import FairSlots
from perseus_proto.planset import encode_changes
from perseus_proto.v1alpha1 import agent_pb2

T = TypeVar("T")
logger = logging.getLogger(__name__)

ERRORS: Final[dict[grpc.StatusCode, type[AgentError]]] = {
    grpc.StatusCode.UNAVAILABLE: AgentUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: AgentUnavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: AgentUnavailable,
    grpc.StatusCode.ABORTED: AgentUnavailable,
    grpc.StatusCode.CANCELLED: AgentUnavailable,
    grpc.StatusCode.INTERNAL: AgentUnavailable,
    grpc.StatusCode.UNKNOWN: AgentUnavailable,
}
"""Any other code is AgentRefused: the same request would get the same answer."""
_WATCH: Final = "/perseus.v1alpha1.Agent/WatchTelemetry"
_DESCRIBE: Final = "/perseus.v1alpha1.Agent/DescribeNode"
_BYTES_A_TURN: Final = 64 << 10
"""Of telemetry that is read in one turn of the event loop, or of a description that is read on it."""
_LARGEST_DESCRIPTION: Final = 24 << 20
"""Bytes: 56 ranks, as many as eight GPUs have parts, with the longest schedules."""
_QUOTED: Final = 500
"""Characters of an event that cannot be."""
_ERROR_METADATA: Final = "perseus-error"
_EPOCH_METADATA: Final = "perseus-epoch"
_EPOCH_DIGITS: Final = 19
"""Of the highest epoch that fits its field."""
_FENCED: Final = "StaleEpoch"
"""What the agent's trailing metadata calls the error, where a status code has more than one meaning."""

_AT_ONCE: Final = 64
"""Calls at the same time. After a restart on a busy machine a thousand agents called at once would all exceed their
deadlines and be called again; one group after another takes a second."""

_RENEWALS_AT_ONCE: Final = 32
"""Renewals that wait for a turn beside others: leases of a large job are renewed together, and no selection may wait
for more than these. A lease stands for two thirds of its time meanwhile."""


class AgentPool:
    """Calls all agents of this operator.

    Every call raises ``AgentUnavailable`` if the agent does not answer in time, ``AgentFenced`` if the agent has seen a
    newer operator for this job, and ``AgentRefused`` if it rejects the request.
    """

    def __init__(self, credentials: Credentials | None, *, timeout_s: float) -> None:
        """Create a pool without connections.

        Args:
            credentials: files for mutual TLS; None: without TLS.
            timeout_s: deadline of a call.
        """
        self._channels = Channels(credentials, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._turns, self._turns_of_silent = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)
        self._turns_of_renewals = asyncio.Semaphore(_RENEWALS_AT_ONCE)
        self._reading = FairSlots(1)
        """Turns of the event loop to read telemetry, by namespace: however many ranks one has."""
        self._numbers = itertools.count(1)
        """Of commands: an agent refuses one that comes after a later one. Each process has an epoch of its own."""
        self._silent: set[str] = set()
        """Agents that did not answer the last time."""

    async def describe(self, address: str, *, with_schedules: bool = False) -> NodeInfo:
        """Describe a node: ranks of all jobs, GPUs and their clocks.

        Args:
            address: host:port of the agent.
            with_schedules: also return the schedules that the ranks declare.

        Raises:
            AgentError: the agent did not answer.
        """
        request = agent_pb2.DescribeNodeRequest(with_schedules=with_schedules)
        data = await self._request(
            address,
            lambda entry: entry.channel.unary_unary(_DESCRIBE, agent_pb2.DescribeNodeRequest.SerializeToString, bytes)(
                request, timeout=self._timeout_s
            ),
        )
        if len(data) > _LARGEST_DESCRIPTION:
            raise AgentRefused(f"a description of {len(data)} bytes is larger than any can be; check the agent")
        try:
            return await asyncio.to_thread(node_of, data) if len(data) > _BYTES_A_TURN else node_of(data)
        except DecodeError as error:
            raise AgentRefused(f"its description cannot be read: {error}; check the agent") from error

    async def acquire(
        self,
        address: str,
        *,
        job_uid: str,
        job_name: str,
        epoch: int,
        ttl_s: float,
        pods: Iterable[Pod],
        clock_mhz: int = 0,
        keep_clock_s: float = 0,
        named_gpus: Iterable[NamedGpu] = (),
    ) -> LeaseInfo:
        """Acquire the job's lease on a node.

        Args:
            address: host:port of the agent.
            job_uid: of the PerseusJob.
            job_name: namespace/name, for the agent's log and metrics.
            epoch: of this operator.
            ttl_s: how long the lease lasts without renewal, seconds.
            pods: of the job on that node.
            clock_mhz: of all GPUs of the pods while no plan wants another; 0: none.
            keep_clock_s: how long it stays after the lease has run out.
            named_gpus: what is published of the node's devices, and true for all of the pods.

        Raises:
            AgentError: the lease was not granted.
        """
        request = agent_pb2.AcquireLeaseRequest(
            job_uid=job_uid,
            job_name=job_name,
            epoch=epoch,
            ttl_ms=ms_from_s(ttl_s),
            pods=[pod_message(pod) for pod in pods],
            clock_mhz=clock_mhz,
            keep_clock_ms=ms_from_s(keep_clock_s),
            named_gpus=map(named_gpu_message, named_gpus),
            number=next(self._numbers),
        )
        return lease_of(
            await self._request(address, lambda entry: entry.stub.AcquireLease(request, timeout=self._timeout_s))
        )

    async def renew(self, address: str, *, job_uid: str, epoch: int, ttl_s: float) -> LeaseInfo:
        """Renew the job's lease on a node for another ``ttl_s`` seconds.

        Raises:
            AgentError: the lease was not renewed.
        """
        request = agent_pb2.RenewLeaseRequest(job_uid=job_uid, epoch=epoch, ttl_ms=ms_from_s(ttl_s))
        async with contextlib.nullcontext() if self.is_silent(address) else self._turns_of_renewals:
            return lease_of(
                await self._request(address, lambda entry: entry.stub.RenewLease(request, timeout=self._timeout_s))
            )

    async def release(self, address: str, *, job_uid: str, epoch: int) -> int:
        """Release the job's lease on a node: its GPUs return to default clocks now.

        Returns:
            The number of GPUs that returned.

        Raises:
            AgentError: the lease was not released; it ends with its time.
        """
        request = agent_pb2.ReleaseLeaseRequest(job_uid=job_uid, epoch=epoch)
        answer = await self._request(address, lambda entry: entry.stub.ReleaseLease(request, timeout=self._timeout_s))
        return len(answer.restored_gpu_uuids)

    async def push(
        self,
        address: str,
        *,
        job_uid: str,
        epoch: int,
        plan_set: agent_pb2.PlanSet,
        changes: Mapping[int, SwitchLatency],
    ) -> None:
        """Store a plan set on an agent. It is larger than other messages, so the deadline is three times as long.

        Args:
            address: host:port of the agent.
            job_uid: of the PerseusJob.
            epoch: of this operator.
            plan_set: to be stored.
            changes: under which the plans were rehearsed, by the clock that is changed to, MHz.

        Raises:
            AgentError: it was not stored.
        """
        request = agent_pb2.PushPlanSetRequest(
            job_uid=job_uid,
            epoch=epoch,
            plan_set=plan_set,
            changes=encode_changes(changes),
            number=next(self._numbers),
        )
        await self._request(address, lambda entry: entry.stub.PushPlanSet(request, timeout=3 * self._timeout_s))

    async def select(
        self,
        address: str,
        *,
        job_uid: str,
        epoch: int,
        plan_id: str,
        points: Iterable[tuple[int, int | None]],
        from_iteration: int,
    ) -> int:
        """Select the points that pipelines run.

        Args:
            address: host:port of the agent.
            job_uid: of the PerseusJob.
            epoch: of this operator.
            plan_id: of the plan set that the points are of.
            points: data-parallel rank and point; None: no plan.
            from_iteration: the first iteration that runs them.

        Returns:
            The furthest iteration that a rank of the job on the node has begun.

        Raises:
            AgentError: they were not selected, or the answer is invalid.
        """
        request = agent_pb2.SelectPlanRequest(
            job_uid=job_uid,
            epoch=epoch,
            plan_id=plan_id,
            selections=[
                agent_pb2.Selection(data_parallel_rank=dp, point=point, no_plan=point is None) for dp, point in points
            ],
            from_iteration=from_iteration,
            number=next(self._numbers),
        )
        answer = await self._request(address, lambda entry: self._select(entry, request))
        if answer.furthest_iteration > MAX_ITERATION:
            raise AgentRefused(
                f"furthest_iteration must be at most {MAX_ITERATION}, not {answer.furthest_iteration}; check the agent"
            )
        return int(answer.furthest_iteration)

    async def order(self, address: str, *, job_uid: str, epoch: int, orders: EngineOrders | None) -> str:
        """Say at which clocks the engines of a job run, None: at their default clocks; return how the agent calls that.

        Raises:
            AgentError: it holds what it held before.
        """
        request = orders_request(job_uid, epoch, orders)
        request.number = next(self._numbers)
        answer = await self._request(address, lambda entry: entry.stub.OrderEngines(request, timeout=self._timeout_s))
        return str(answer.orders_id[:MAX_NAME])

    async def watch(
        self, address: str, job_uid: str, *, namespace: str, combine_ranks: bool = False
    ) -> AsyncGenerator[TelemetryEvent, None]:
        """Yield the telemetry of one job on one node. Events with impossible values are discarded; the first is logged.

        Args:
            address: host:port of the agent.
            job_uid: of the PerseusJob.
            namespace: whose turns of the event loop are taken to read it.
            combine_ranks: let the agent report the tensor-parallel ranks of a stage together; an older one does not.

        Raises:
            AgentError: the stream broke. A stream that the agent ends is over without an error.
        """
        async with self._channels.use(address) as entry:
            request = agent_pb2.WatchTelemetryRequest(job_uid=job_uid, combine_ranks=combine_ranks)
            call = entry.channel.unary_stream(_WATCH, agent_pb2.WatchTelemetryRequest.SerializeToString, bytes)(request)
            dropped, opened, reported = 0, False, False
            try:
                async for batch in call:
                    if not opened:
                        opened = True
                        yield StreamOpened()
                    if (lost := dropped_of(batch)) > dropped:
                        dropped = lost
                        yield EventsDropped(dropped)
                    left = 0
                    for event, size in events_of(batch):
                        left -= size
                        if left < 0:
                            await self._reading.loop_turn(namespace)
                            left = _BYTES_A_TURN - size
                        translated = None if event is None else event_of(event)
                        if translated is not None and is_valid(translated):
                            yield translated
                        elif not reported and (event is None or translated is not None):
                            reported = self._discarded(address, event)
            except grpc.aio.AioRpcError as error:
                raise _translate(error) from error
            except TornBatch as error:
                raise AgentRefused(f"its telemetry cannot be read: {error}; check the agent") from error
            finally:
                call.cancel()

    def _discarded(self, address: str, event: agent_pb2.TelemetryEvent | None) -> bool:
        said = "one larger than any can be" if event is None else str(event)[:_QUOTED]
        logger.warning("agent %s: discarded an impossible event, the first: %s", address, said)
        return True

    def is_silent(self, address: str) -> bool:
        """Whether an agent did not answer the last time."""
        return address in self._silent

    async def forget(self, addresses: Iterable[str]) -> None:
        """Close the channels to agents that no longer exist."""
        gone = set(addresses)
        self._silent -= gone
        await self._channels.forget(gone)

    async def close(self) -> None:
        """Close all channels."""
        await self._channels.close()

    async def _select(self, entry: Channel, request: agent_pb2.SelectPlanRequest) -> agent_pb2.SelectPlanResponse:
        """Select on the agent's stream, or by a call where that breaks."""
        answer = await entry.selections.select(request)
        return answer or await entry.stub.SelectPlan(request, timeout=self._timeout_s)

    async def _request(self, address: str, call: Callable[[Channel], Awaitable[T]]) -> T:
        """Call an agent. The deadline begins when the call is sent; agents without an answer delay only each other."""
        async with self._turns_of_silent if self.is_silent(address) else self._turns:
            try:
                async with self._channels.use(address) as entry:
                    answer = await _call(lambda: call(entry))
            except AgentUnavailable as error:
                self._silent.add(address)
                if expired := self._channels.expired:
                    raise AgentUnavailable(f"{expired}: {error}") from error
                raise
        self._silent.discard(address)
        return answer


async def _call(call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        raise _translate(error) from error
    except grpc.aio.UsageError as error:  # the channel was closed meanwhile: the agent no longer exists
        raise AgentUnavailable(str(error)) from error
    except asyncio.InvalidStateError as error:
        raise AgentUnavailable("the channel was closed") from error


def _translate(error: grpc.aio.AioRpcError) -> AgentError:
    code, names = error.code(), dict(error.trailing_metadata() or ())
    message = f"{code.name}: {(error.details() or '')[:300]}"
    if names.get(_ERROR_METADATA) == _FENCED:
        seen = str(names.get(_EPOCH_METADATA, ""))
        return AgentFenced(message, int(seen) if seen.isdecimal() and len(seen) <= _EPOCH_DIGITS else None)
    return ERRORS.get(code, AgentRefused)(message)
