"""Hundreds of nodes in one process: light agents, each a real gRPC ``Agent`` on its own port.

Real, and the agent's own code: leases, epochs and their expiry (``LeaseTable``), plan sets and selections by iteration
(``JobPlans``), error codes, TLS. Simulated: the journal is in memory, a GPU's clock is that of the plan in force,
processes are made up, and all ranks of a job train in step. There is no physics and no socket for trainers;
``perseus_sim.cluster`` has those.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from tests.doubles.light_job import LightJob, LightRank, Reports, durations_us, rank_of, report_of

from perseus_agent.clocks.journal import Journal, JournalState
from perseus_agent.clocks.plans import StagePlan
from perseus_agent.errors import AgentError, InvalidRequest
from perseus_agent.node.leases import JobLease, LeaseRequest, LeaseTable, PodName
from perseus_agent.servers.grpc_service import ERROR_METADATA, digest_of, status_of
from perseus_proto.planset import InvalidPlanSet, PlanPoint, decode_plan_set
from perseus_proto.v1alpha1 import agent_pb2 as pb
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs

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
            asked = self.leases.asked(wanted)
            self._journal.record_epoch(request.job_uid, request.epoch)
            return self._lease(self.leases.acquire(wanted, asked)[0])

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


class Fleet:
    """The agents and the jobs that run on their nodes. Use as a context, on the event loop that it shall run on."""

    def __init__(
        self, *, iteration_s: float | None = None, tls: Path | None = None, keeper_s: float = TIMER_INTERVAL_S
    ) -> None:
        """``iteration_s``: wall time of an iteration; None: only when ``step`` is called. ``tls``: a folder with
        ca.crt, perseus-agent.crt and .key; None: without TLS. ``keeper_s``: how often agents look for leases that have
        run out.
        """
        self.credentials = None if tls is None else _server_credentials(tls)
        self.agents: dict[str, LightAgent] = {}
        self.points: dict[str, tuple[PlanPoint, ...]] = {}
        """What the plan sets promise that any agent was given."""
        self._jobs: list[LightJob] = []
        self._jobs_on: dict[str, list[LightJob]] = {}
        self._iteration_s, self._keeper_s = iteration_s, keeper_s
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fleet:
        self._tasks.append(asyncio.create_task(self._keep()))
        if self._iteration_s is not None:
            self._tasks.append(asyncio.create_task(self._train(self._iteration_s)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))

    async def add(self, names: Iterable[str]) -> list[LightAgent]:
        """New nodes, their agents serving."""
        added = self.place(names)
        for agent in added:
            await agent.serve()
        return added

    def place(self, names: Iterable[str]) -> list[LightAgent]:
        """New nodes, whose agents serve nothing by themselves."""
        added = [LightAgent(name, self) for name in names]
        self.agents.update((agent.node, agent) for agent in added)
        return added

    def start(self, job: LightJob) -> None:
        """The job's processes say hello."""
        self._jobs.append(job)
        for node in job.ranks:
            self._jobs_on.setdefault(node, []).append(job)

    def end(self, job: LightJob) -> None:
        """The job's processes have gone."""
        for node, ranks in job.ranks.items():
            agent = self.agents[node]
            lease = agent.lease_of(job)
            uids = {(pod.namespace, pod.name): uid for uid, pod in lease.pods.items()} if lease else {}
            left = [rank_of(rank, uids.get((rank.namespace, rank.pod), ""), job.iteration) for rank in ranks]
            agent.end(job, [pb.TelemetryEvent(rank_left=rank) for rank in left])
            self._jobs_on[node].remove(job)
        self._jobs.remove(job)

    def jobs_on(self, node: str) -> Sequence[LightJob]:
        """The jobs with ranks on a node."""
        return self._jobs_on.get(node, ())

    def ranks(self, node: str) -> list[LightRank]:
        """All ranks on a node."""
        return [rank for job in self.jobs_on(node) for rank in job.ranks[node]]

    def plans(self, job: LightJob) -> dict[LightRank, StagePlan | None]:
        """What each rank of a job follows now; None: default clocks."""
        return {rank: plan for node in job.ranks for rank, plan in self.agents[node].plans(job).items()}

    def step(self, job: LightJob) -> None:
        """All ranks of the job finish an iteration and report it."""
        plans = {node: self.agents[node].plans(job) for node in job.ranks}
        spans: dict[int, int] = {}
        for ranks in plans.values():
            for rank, plan in ranks.items():
                planned_us = self._point(plan).iteration_time_us if plan else job.work.iteration_us
                span_us = round(planned_us * job.slowdowns.get(rank.dp, 1.0))
                spans[rank.dp] = max(span_us, spans.get(rank.dp, 0))
        time_us = max(spans.values())
        made: dict[object, Reports] = {}
        reports = []
        for node, ranks in plans.items():
            said = tuple((r.stage, r.tp, plan and (plan.plan_id, plan.point), spans[r.dp]) for r, plan in ranks.items())
            if said not in made:
                made[said] = Reports.of([self._report(job, r, plan, spans[r.dp], time_us) for r, plan in ranks.items()])
            reports.append((self.agents[node], tuple(ranks), made[said]))
        job.stepped_s = time.monotonic()
        for agent, at, said_by in reports:
            agent.report(job, at, said_by)
        job.iteration += 1

    def _report(self, job: LightJob, rank: LightRank, plan: StagePlan | None, span_us: int, time_us: int) -> Any:
        """What a rank reports, without who it is and of which iteration."""
        return pb.TelemetryEvent(
            iteration=pb.IterationReport(
                stage=rank.stage,
                tensor_parallel_rank=rank.tp,
                iteration_time_us=time_us,
                compute_span_us=span_us,
                energy_mj=(self._point(plan).energy_mj if plan else job.work.iteration_mj) // job.stages,
                has_energy=True,
                plan_id=plan.plan_id if plan else "",
                point=plan.point if plan else 0,
                planned=plan is not None,
                durations_us=durations_us(job.work, rank, plan),
            )
        )

    def _point(self, plan: StagePlan) -> PlanPoint:
        return self.points[plan.plan_id][plan.point]

    async def _keep(self) -> None:
        while True:
            for agent in self.agents.values():
                agent.expire()
            await asyncio.sleep(self._keeper_s)

    async def _train(self, iteration_s: float) -> None:
        """Each job's iterations, spread evenly over the time of one: real jobs have no common beat."""
        begun_s, done = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(0.02)
            now = (time.monotonic() - begun_s) / iteration_s
            for number, job in enumerate(list(self._jobs)):
                phase = number / max(1, len(self._jobs))
                if int(now + phase) > int(done + phase):
                    self.step(job)
            done = now


def _server_credentials(tls: Path) -> Any:
    with contextlib.suppress(FileNotFoundError):
        pair = (tls / "perseus-agent.key").read_bytes(), (tls / "perseus-agent.crt").read_bytes()
        return grpc.ssl_server_credentials([pair], (tls / "ca.crt").read_bytes(), require_client_auth=True)
    raise FileNotFoundError(f"{tls}: must hold ca.crt, perseus-agent.crt and perseus-agent.key")
