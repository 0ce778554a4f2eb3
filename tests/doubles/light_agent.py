"""One light agent: the real agent's leases, epochs, plan sets and selections behind real gRPC, and no GPU."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from tests.doubles.light_job import LightJob, LightRank, Reports, rank_of, report_of

from perseus_agent.clocks.journal import Journal, JournalState
from perseus_agent.clocks.plans import StagePlan
from perseus_agent.errors import AgentError, InvalidRequest
from perseus_agent.node.leases import JobLease, LeaseRequest, LeaseTable, PodName
from perseus_agent.servers.grpc_service import ERROR_METADATA, digest_of, status_of
from perseus_proto.planset import InvalidPlanSet, decode_plan_set
from perseus_proto.v1alpha1 import agent_pb2 as pb
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs

if TYPE_CHECKING:
    from tests.doubles.fleet import Fleet

TIMER_INTERVAL_S: Final = 0.1
_MOST_EVENTS: Final = 1_000
"""Kept for a reader that does not read; then the oldest are dropped and counted, as by the real agent."""
_OPTIONS: Final = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20))


class _MemoryJournal(Journal):
    """Outlives a crashed light agent as the file outlives a real one, and costs no disk."""

    def __init__(self) -> None:
        super().__init__(Path("in-memory"), "boot")

    def _write(self, state: JournalState) -> None:
        self._state = state


@dataclass
class Faults:
    """Faults that a test injects into one agent; none by default."""

    delay_s: float = 0.0
    """Delay of every answer, seconds."""
    partitioned: bool = False
    """Nothing arrives: calls hang until their deadline, and streams send nothing."""
    rewrite: Callable[[Any], Any] = field(default=lambda message: message)
    """Changes every answer and batch before it is sent, to make the agent report wrong values."""


class LightAgent(stubs.AgentServicer):
    """One node's agent."""

    def __init__(self, node: str, fleet: Fleet) -> None:
        self.node = node
        self.faults = Faults()
        self.port = 0
        self.selected_s: dict[str, float] = {}
        """By job UID: monotonic time of the last selection."""
        self._fleet = fleet
        self._journal = _MemoryJournal()
        self._readers: dict[str, list[_Reader]] = {}
        self._server: grpc.aio.Server | None = None
        self.leases = LeaseTable(self._journal, time.monotonic)

    # ------------------------------------------------------------------------------------------------- life

    async def serve(self) -> None:
        """Begin to serve; again after ``crash``, on the same port."""
        self._server = grpc.aio.server(options=_OPTIONS)
        stubs.add_AgentServicer_to_server(self, self._server)
        address, credentials = f"127.0.0.1:{self.port}", self._fleet.credentials
        self.port = (
            self._server.add_secure_port(address, credentials)
            if credentials
            else self._server.add_insecure_port(address)
        )
        await self._server.start()

    async def crash(self) -> None:
        """As after kill -9 and a restart: connections break, clocks go to default, only the journal is remembered."""
        await self.stop()
        self.leases = LeaseTable(self._journal, time.monotonic)

    async def stop(self) -> None:
        """Serve no more. Leases run on, and out."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        self._readers.clear()

    # ------------------------------------------------------------------------------------------------- what is so

    @property
    def epoch(self) -> int:
        """The highest seen of any job."""
        return max(self._journal._state.epochs.values(), default=0)

    def lease_of(self, job: LightJob) -> JobLease | None:
        """The lease under which a job's pods on this node are driven."""
        pods = {(rank.namespace, rank.pod) for rank in job.ranks.get(self.node, ())}
        for lease in self.leases.all():
            if any((pod.namespace, pod.name) in pods for pod in lease.pods.values()):
                return lease
        return None

    def plans(self, job: LightJob) -> dict[LightRank, StagePlan | None]:
        """What each rank of a job on this node follows now; None: default clocks."""
        ranks, lease = job.ranks.get(self.node, ()), self.lease_of(job)
        if lease is None:
            return dict.fromkeys(ranks)
        driven = {(pod.namespace, pod.name) for pod in lease.pods.values()}
        return {
            rank: lease.plans.follow(rank.dp, rank.stage, job.iteration)
            if (rank.namespace, rank.pod) in driven
            else None
            for rank in ranks
        }

    def expire(self) -> None:
        """Leases that have run out end."""
        self.leases.expired()

    def end(self, job: LightJob, events: Sequence[Any]) -> None:
        """Tell the job's readers how it ends, all in one batch."""
        for reader in self._readers_of(job):
            reader.put(events)

    def report(self, job: LightJob, ranks: Sequence[LightRank], reports: Reports) -> None:
        """Tell the job's readers of an iteration; those that asked for it get one report of each stage's ranks."""
        for reader in self._readers_of(job):
            known = reports.combined if reader.combines else reports.single
            reader.put([report_of(ranks[place], event, job.iteration) for place, event in known])

    def _readers_of(self, job: LightJob) -> Sequence[_Reader]:
        lease = self.lease_of(job)
        return self._readers.get(lease.job_uid, ()) if lease else ()

    # ------------------------------------------------------------------------------------------------- the service

    async def DescribeNode(self, request: Any, context: Any) -> Any:
        return await self._answer(context, self._describe)

    async def AcquireLease(self, request: Any, context: Any) -> Any:
        def act() -> Any:
            self.expire()
            pods = [PodName(pod.uid, pod.namespace, pod.name) for pod in request.pods]
            wanted = LeaseRequest(request.job_uid, request.job_name, request.epoch, request.ttl_ms / 1000, pods)
            self.leases.check(wanted)
            self._journal.record_epoch(request.job_uid, request.epoch)
            return self._lease(self.leases.acquire(wanted)[0])

        return await self._answer(context, act)

    async def RenewLease(self, request: Any, context: Any) -> Any:
        def act() -> Any:
            return self._lease(self.leases.renew(request.job_uid, request.epoch, request.ttl_ms / 1000))

        return await self._answer(context, act)

    async def ReleaseLease(self, request: Any, context: Any) -> Any:
        def act() -> Any:
            lease = self.leases.release(request.job_uid, request.epoch)
            pods = {(pod.namespace, pod.name) for pod in lease.pods.values()} if lease else set()
            ranks = [rank for rank in self._fleet.ranks(self.node) if (rank.namespace, rank.pod) in pods]
            return pb.ReleaseLeaseResponse(restored_gpu_uuids=sorted(rank.gpu_uuid for rank in ranks))

        return await self._answer(context, act)

    async def PushPlanSet(self, request: Any, context: Any) -> Any:
        def act() -> Any:
            try:
                plan_set = decode_plan_set(request.plan_set)
            except InvalidPlanSet as error:
                raise InvalidRequest(str(error)) from None
            self.leases.held(request.job_uid, request.epoch).plans.push(plan_set)
            self._fleet.points[plan_set.plan_id] = plan_set.points
            return pb.PushPlanSetResponse(plan_id=plan_set.plan_id)

        return await self._answer(context, act)

    async def SelectPlan(self, request: Any, context: Any) -> Any:
        def act() -> Any:
            lease = self.leases.held(request.job_uid, request.epoch)
            points = {each.data_parallel_rank: None if each.no_plan else each.point for each in request.selections}
            begun = self._begun(lease)
            lease.plans.select(request.plan_id, points, request.from_iteration, begun)
            self.selected_s[request.job_uid] = time.monotonic()
            return pb.SelectPlanResponse(furthest_iteration=max((b for b in begun.values() if b), default=0))

        return await self._answer(context, act)

    async def SelectPlans(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield await self.SelectPlan(request, context)

    async def WatchTelemetry(self, request: Any, context: Any) -> AsyncIterator[Any]:
        reader = _Reader(combines=request.combine_ranks)
        readers = self._readers.setdefault(request.job_uid, [])
        readers.append(reader)
        try:
            yield pb.TelemetryBatch()
            while True:
                batch = await reader.take()
                while self.faults.partitioned:
                    await asyncio.sleep(TIMER_INTERVAL_S)
                yield self.faults.rewrite(batch)
        finally:
            if reader in readers:
                readers.remove(reader)

    # ------------------------------------------------------------------------------------------------- inside

    async def _answer(self, context: Any, act: Callable[[], Any]) -> Any:
        while self.faults.partitioned:  # the caller's deadline ends this
            await asyncio.sleep(TIMER_INTERVAL_S)
        if self.faults.delay_s:
            await asyncio.sleep(self.faults.delay_s)
        try:
            return self.faults.rewrite(act())
        except AgentError as error:
            name = type(error).__name__
            await context.abort(status_of(error), str(error), trailing_metadata=((ERROR_METADATA, name),))

    def _describe(self) -> Any:
        uids = {(pod.namespace, pod.name): uid for lease in self.leases.all() for uid, pod in lease.pods.items()}
        gpus, ranks = [], []
        for job in self._fleet.jobs_on(self.node):
            for rank, plan in self.plans(job).items():
                locked = plan.clocks_mhz[0] if plan else 0
                gpus.append(pb.Gpu(uuid=rank.gpu_uuid, locked_clock_mhz=locked, controllability="CONTROLLABILITY_YES"))
                ranks.append(rank_of(rank, uids.get((rank.namespace, rank.pod), ""), job.iteration))
        return pb.NodeDescription(node_name=self.node, gpus=gpus, ranks=ranks)

    def _begun(self, lease: JobLease) -> dict[int, int | None]:
        pods = {(pod.namespace, pod.name) for pod in lease.pods.values()}
        return {
            rank.dp: job.iteration
            for job in self._fleet.jobs_on(self.node)
            for rank in job.ranks[self.node]
            if (rank.namespace, rank.pod) in pods
        }

    def _lease(self, lease: JobLease) -> Any:
        plan_set = lease.plans.plan_set
        return pb.Lease(
            job_uid=lease.job_uid,
            epoch=lease.epoch,
            remaining_ms=int(1000 * self.leases.remaining_s(lease)),
            plan_id=plan_set.plan_id if plan_set else "",
            selections=[
                pb.Selection(data_parallel_rank=dp, point=choice.point, no_plan=choice.point is None)
                for dp, choice in sorted(lease.plans.selections.items())
            ],
            description=digest_of(self._describe()),
        )


class _Reader:
    """A stream's ring: bounded, the oldest dropped and counted."""

    def __init__(self, *, combines: bool) -> None:
        self.combines = combines
        self._events: deque[Any] = deque(maxlen=_MOST_EVENTS)
        self._there = asyncio.Event()
        self._dropped = 0

    def put(self, events: Sequence[Any]) -> None:
        self._dropped += max(0, len(self._events) + len(events) - _MOST_EVENTS)
        self._events.extend(events)
        self._there.set()

    async def take(self) -> Any:
        await self._there.wait()
        self._there.clear()
        batch = pb.TelemetryBatch(dropped=self._dropped, events=self._events)
        self._events.clear()
        return batch
