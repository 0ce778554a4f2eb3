"""The door to the node agents: the only module of the operator that knows grpc.

``AgentPool`` keeps one channel per address, shared by all jobs. Every call has a deadline. gRPC's status codes become
the agent errors of ``errors`` by one table. Messages are turned into the operator's own values here, both ways; nothing
is decided.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from perseus_operator.clients.validation import MAX_ITERATION, is_valid_rank, is_valid_report
from perseus_operator.errors import AgentError, AgentFenced, AgentRefused, AgentUnavailable
from perseus_operator.objects import Pod
from perseus_operator.planning.iterations import Report
from perseus_operator.planning.node import DeclaredSchedule, Rank
from perseus_proto.tls import CallerCredentials
from perseus_proto.v1alpha1 import agent_pb2, agent_pb2_grpc

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
"""Anything else is AgentRefused: asking again would bring the same answer."""
_ERROR_METADATA: Final = "perseus-error"
_FENCED: Final = "StaleEpoch"
"""What the agent's trailing metadata calls the error, where a status code has more than one meaning."""

_AT_ONCE: Final = 64
"""Calls under way. A thousand agents that are all called at once, after a restart, on a machine with little to spare,
answer too late all of them, are asked again, and so on; in turn they are a second's work."""

_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 20_000),  # a node that went dark is noticed by the telemetry stream
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True)
class LeaseInfo:
    """What the agent says it holds for the job."""

    remaining_s: float
    plan_id: str
    selected: dict[int, int]


@dataclass(frozen=True)
class NodeInfo:
    """What the agent says about its node."""

    ranks: tuple[Rank, ...]
    uncontrollable: dict[str, str]
    clocks_mhz: dict[str, tuple[int, ...]]
    """GPU UUID → supported clocks."""
    schedules: dict[tuple[str, int], DeclaredSchedule]
    """(kind, microbatch, chunk) in order, by the rank's pod UID and process; empty unless asked for."""


@dataclass(frozen=True)
class StreamOpened:
    """The stream stands: from here on nothing is missed."""


@dataclass(frozen=True)
class RankJoined:
    """A rank has said hello."""

    rank: Rank


@dataclass(frozen=True)
class RankLeft:
    """A rank has gone."""

    rank: Rank


@dataclass(frozen=True)
class GpuSlowdown:
    """A GPU reports that something slows it, or that it has gone."""

    gpu_uuid: str
    kind: str
    active: bool
    message: str


@dataclass(frozen=True)
class EventsDropped:
    """Events that this reader was too slow for, since the stream began."""

    count: int


TelemetryEvent = StreamOpened | RankJoined | RankLeft | Report | GpuSlowdown | EventsDropped


@dataclass(frozen=True)
class Credentials:
    """Files for mutual TLS."""

    cert: str
    key: str
    ca: str
    server_name: str


@dataclass(eq=False)
class _Line:
    """A channel, and how many calls and streams are on it."""

    channel: grpc.aio.Channel
    uses: int = 0


class AgentPool:
    """All agents this operator talks to."""

    def __init__(self, credentials: Credentials | None, *, timeout_s: float) -> None:
        """``credentials`` None: without TLS."""
        files = credentials
        self._server_name = files.server_name if files else ""
        self._files = CallerCredentials(key=files.key, cert=files.cert, ca=files.ca) if files else None
        self._credentials: grpc.ChannelCredentials | None = None
        self._timeout_s = timeout_s
        self._lines: dict[str, _Line] = {}
        self._coming: dict[str, asyncio.Task[None]] = {}
        """Attempts to connect with renewed certificates; what is open serves until they succeed."""
        self._retired: dict[str, set[_Line]] = {}
        """Opened with earlier certificates: their streams go on until the agent ends them, then they are closed."""
        self._turns, self._turns_of_silent = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)
        self._silent: set[str] = set()
        """Agents that did not answer the last time."""

    async def describe(self, address: str, *, with_schedules: bool = False) -> NodeInfo:
        """The node's ranks of all jobs, and the GPUs that may not be driven."""
        request = agent_pb2.DescribeNodeRequest(with_schedules=with_schedules)
        answer = await self._ask(address, lambda stub: stub.DescribeNode(request, timeout=self._timeout_s))
        fine = {agent_pb2.CONTROLLABILITY_YES, agent_pb2.CONTROLLABILITY_UNSPECIFIED}
        return NodeInfo(
            ranks=tuple(filter(is_valid_rank, map(_rank, answer.ranks))),
            uncontrollable={
                gpu.uuid: gpu.controllability_message or agent_pb2.Controllability.Name(gpu.controllability)
                for gpu in answer.gpus
                if gpu.controllability not in fine
            },
            clocks_mhz={gpu.uuid: tuple(gpu.supported_clocks_mhz) for gpu in answer.gpus},
            schedules={(r.pod_uid, r.pid): _schedule(r.schedule) for r in answer.ranks if r.HasField("schedule")},
        )

    async def acquire(
        self, address: str, *, job_uid: str, job_name: str, epoch: int, ttl_s: float, pods: Iterable[Pod]
    ) -> LeaseInfo:
        """Take the job's lease on a node."""
        request = agent_pb2.AcquireLeaseRequest(
            job_uid=job_uid,
            job_name=job_name,
            epoch=epoch,
            ttl_ms=round(1000 * ttl_s),
            pods=[_pod(pod) for pod in pods],
        )
        return _lease(await self._ask(address, lambda stub: stub.AcquireLease(request, timeout=self._timeout_s)))

    async def renew(self, address: str, *, job_uid: str, epoch: int, ttl_s: float) -> LeaseInfo:
        """Keep it."""
        request = agent_pb2.RenewLeaseRequest(job_uid=job_uid, epoch=epoch, ttl_ms=round(1000 * ttl_s))
        return _lease(await self._ask(address, lambda stub: stub.RenewLease(request, timeout=self._timeout_s)))

    async def release(self, address: str, *, job_uid: str, epoch: int) -> int:
        """Give the GPUs back now; how many were."""
        request = agent_pb2.ReleaseLeaseRequest(job_uid=job_uid, epoch=epoch)
        answer = await self._ask(address, lambda stub: stub.ReleaseLease(request, timeout=self._timeout_s))
        return len(answer.restored_gpu_uuids)

    async def push(self, address: str, *, job_uid: str, epoch: int, plan_set: agent_pb2.PlanSet) -> None:
        """Store a plan set. Larger than other messages, so given more time."""
        request = agent_pb2.PushPlanSetRequest(job_uid=job_uid, epoch=epoch, plan_set=plan_set)
        await self._ask(address, lambda stub: stub.PushPlanSet(request, timeout=3 * self._timeout_s))

    async def select(
        self,
        address: str,
        *,
        job_uid: str,
        epoch: int,
        plan_id: str,
        points: Iterable[tuple[int, int]],
        from_iteration: int,
    ) -> int:
        """Choose points for pipelines; the furthest iteration begun on the node."""
        request = agent_pb2.SelectPlanRequest(
            job_uid=job_uid,
            epoch=epoch,
            plan_id=plan_id,
            selections=[agent_pb2.Selection(data_parallel_rank=p, point=point) for p, point in points],
            from_iteration=from_iteration,
        )
        answer = await self._ask(address, lambda stub: stub.SelectPlan(request, timeout=self._timeout_s))
        if answer.furthest_iteration > MAX_ITERATION:
            raise AgentRefused(f"furthest_iteration: {answer.furthest_iteration} cannot be")
        return int(answer.furthest_iteration)

    async def watch(self, address: str, job_uid: str) -> AsyncIterator[TelemetryEvent]:
        """Telemetry of one job on one node, until the stream breaks.

        Raises:
            AgentError: it broke. A stream that the agent ends ends here without an error.
        """
        async with self._line(address) as stub:
            call = stub.WatchTelemetry(agent_pb2.WatchTelemetryRequest(job_uid=job_uid))
            dropped, opened, lied = 0, False, False
            try:
                async for batch in call:
                    if not opened:
                        opened = True
                        yield StreamOpened()
                    if batch.dropped > dropped:
                        dropped = batch.dropped
                        yield EventsDropped(dropped)
                    for event in batch.events:
                        translated = _event(event)
                        if translated is None:
                            continue
                        if _is_valid(translated):
                            yield translated
                        elif not lied:
                            lied = True
                            logger.warning("agent %s: left out what cannot be, from here on: %s", address, event)
            except grpc.aio.AioRpcError as error:
                raise _translate(error) from error
            finally:
                call.cancel()

    async def forget(self, addresses: Iterable[str]) -> None:
        """Close the channels of agents that are no longer there."""
        for address in set(addresses):
            if coming := self._coming.pop(address, None):
                coming.cancel()
            self._silent.discard(address)
            current = self._lines.pop(address, None)
            for line in (*self._retired.pop(address, ()), *filter(None, (current,))):
                await line.channel.close()

    async def close(self) -> None:
        """Close all channels."""
        await self.forget({*self._lines, *self._retired})

    async def _ask(self, address: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """The answer. Its deadline begins with its turn; agents that are silent hold up only each other."""
        async with self._turns_of_silent if address in self._silent else self._turns:
            try:
                async with self._line(address) as stub:
                    answer = await _call(lambda: call(stub))
            except AgentUnavailable:
                self._silent.add(address)
                raise
        self._silent.discard(address)
        return answer

    @asynccontextmanager
    async def _line(self, address: str) -> AsyncIterator[Any]:
        """A stub for one call or stream."""
        if self._files is not None and (renewed := self._files.renewed()):
            self._credentials = renewed
            for other in self._lines:
                if coming := self._coming.get(other):
                    coming.cancel()
                self._coming[other] = asyncio.create_task(self._switch_line(other))
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line(self._open(address))
        line.uses += 1
        try:
            yield agent_pb2_grpc.AgentStub(line.channel)
        finally:
            line.uses -= 1
            await self._close_unused(address, line)

    async def _switch_line(self, address: str) -> None:
        """To a connection with the certificates as they are now, once the agent takes them: it may be renewed later."""
        channel = self._open(address)
        try:
            await channel.channel_ready()
        except BaseException:
            await channel.close()
            raise
        line, self._lines[address] = self._lines[address], _Line(channel)
        self._retired.setdefault(address, set()).add(line)
        await self._close_unused(address, line)

    async def _close_unused(self, address: str, line: _Line) -> None:
        retired = self._retired.get(address, set())
        if line in retired and not line.uses:
            retired.remove(line)
            await line.channel.close()

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._files is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        if self._credentials is None:
            raise AgentUnavailable("--tls-cert, --tls-key, --tls-ca: cannot be read; the log says why")
        options = (*_OPTIONS, ("grpc.ssl_target_name_override", self._server_name))
        return grpc.aio.secure_channel(address, self._credentials, options=options)


async def _call(call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        raise _translate(error) from error
    except grpc.aio.UsageError as error:  # the channel was closed under us: its agent has gone
        raise AgentUnavailable(str(error)) from error
    except asyncio.InvalidStateError as error:
        raise AgentUnavailable("the channel was closed") from error


def _translate(error: grpc.aio.AioRpcError) -> AgentError:
    code, names = error.code(), dict(error.trailing_metadata() or ())
    kind = AgentFenced if names.get(_ERROR_METADATA) == _FENCED else ERRORS.get(code, AgentRefused)
    return kind(f"{code.name}: {(error.details() or '')[:300]}")


def _pod(pod: Pod) -> agent_pb2.Pod:
    containers = [agent_pb2.Container(id=identifier, name=name) for identifier, name in sorted(pod.containers)]
    return agent_pb2.Pod(uid=pod.uid, namespace=pod.namespace, name=pod.name, containers=containers)


def _lease(message: agent_pb2.Lease) -> LeaseInfo:
    return LeaseInfo(
        remaining_s=message.remaining_ms / 1000,
        plan_id=message.plan_id,
        selected={s.data_parallel_rank: s.point for s in message.selections},
    )


def _rank(message: agent_pb2.Rank) -> Rank:
    return Rank(
        pod_uid=message.pod_uid,
        gpu_uuid=message.gpu_uuid,
        dp=message.data_parallel_rank,
        stage=message.stage,
        tp=message.tensor_parallel_rank,
        pid=message.pid,
        iteration=message.iteration,
    )


def _schedule(schedule: agent_pb2.StageSchedule) -> tuple[tuple[int, int, int], ...]:
    return tuple(zip(schedule.kinds, schedule.microbatches, schedule.chunks, strict=False))


def _is_valid(event: TelemetryEvent) -> bool:
    if isinstance(event, Report):
        return is_valid_report(event)
    return is_valid_rank(event.rank) if isinstance(event, RankJoined) else True


def _event(event: agent_pb2.TelemetryEvent) -> TelemetryEvent | None:
    """None: a kind of event from a newer agent."""
    kind = event.WhichOneof("event")
    if kind == "rank_joined":
        return RankJoined(_rank(event.rank_joined))
    if kind == "rank_left":
        return RankLeft(_rank(event.rank_left))
    if kind == "gpu":
        name = agent_pb2.GpuEvent.Kind.Name(event.gpu.kind).removeprefix("KIND_")
        return GpuSlowdown(event.gpu.gpu_uuid, name, event.gpu.active, event.gpu.message)
    if kind == "iteration":
        report = event.iteration
        return Report(
            dp=report.data_parallel_rank,
            stage=report.stage,
            tp=report.tensor_parallel_rank,
            iteration=report.iteration,
            iteration_time_us=report.iteration_time_us,
            compute_span_us=report.compute_span_us,
            energy_mj=report.energy_mj if report.has_energy else None,
            point=report.point if report.planned else None,
            durations_us=array("I", report.durations_us),
            instruction_energies_mj=array("I", report.instruction_energy_mj),
            energy_iterations=report.instruction_energy_iterations,
            quiet_us=report.quiet_us,
            quiet_mj=report.quiet_energy_mj,
        )
    return None
