"""Talks to the agents of one job's nodes: sends the runner's commands, and reads telemetry while a lease is held.

Each command is one call to one agent. Its outcome becomes one event of the ``Node``; whether and when to try again is
decided in ``nodes.actions``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from perseus_core.iteration import IterationReport
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.clients.agents.engines import EngineJoined, EngineLeft
from perseus_operator.clients.agents.messages import (
    EventsDropped,
    GpuSlowdown,
    RankJoined,
    RankLeft,
    StreamOpened,
    TelemetryEvent,
)
from perseus_operator.errors import AgentError, AgentFenced, AgentRefused, AgentUnavailable, KubeError
from perseus_operator.jobs import tracing
from perseus_operator.jobs.family import Family
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.services import Services, backoff_s
from perseus_operator.jobs.wake import Wake
from perseus_operator.nodes.actions import Acquire, NodeCommand, Order, Push, Release, Renew, Select
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.nodes.named_gpus import NamedGpu, named_gpus
from perseus_operator.nodes.node import DeclaredSchedule, Node
from perseus_operator.nodes.plans import StoredPlans
from perseus_operator.objects.values import Pod

logger = logging.getLogger(__name__)
_MOST_SCHEDULES: Final = 2_048
"""Kept to be shared: a pipeline has no more stages, and what ranks that differ execute is kept with each."""
_SLICES_S: Final = 2.0
"""How long a lease waits for a node's ResourceSlices."""


class NodeSession:
    """The agents of one job."""

    def __init__(self, job: Job, services: Services, *, family: Callable[[], Family], wake: Wake) -> None:
        """Talk to nobody yet.

        Args:
            job: whose agents these are.
            services: of the operator.
            family: returns the job's.
            wake: has the job looked at again.
        """
        self._job = job
        self._services = services
        self._family = family
        self._wake = wake
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._schedules: dict[DeclaredSchedule, DeclaredSchedule] = {}
        """What ranks execute: the same for all replicas of a stage, and kept once."""

    @property
    def _epoch(self) -> int:
        return max(self._services.epochs.of(self._job.ref.uid), self._job.raised_epoch)

    @property
    def streams(self) -> list[asyncio.Task[None]]:
        """The tasks that read telemetry."""
        return list(self._streams.values())

    async def command(self, node: Node, action: NodeCommand) -> None:
        """Send one command to one agent, and note the outcome."""
        name, result = type(action).__name__, "ok"
        try:
            await self._perform(node, action)
            node.command_succeeded()
        except AgentFenced as error:
            result = "fenced"
            await self._fenced(node, action, error)
        except AgentError as error:
            refused = isinstance(error, AgentRefused)
            result = "refused" if refused else "unavailable"
            self._failed(node, action, error, refused=refused)
        finally:
            (node.renewal_ended if isinstance(action, Renew) else node.command_ended)()
            self._services.metrics.agent_calls.labels(name.lower(), result).inc()

    async def _fenced(self, node: Node, action: NodeCommand, error: AgentFenced) -> None:
        """Go on under a higher epoch if the counter was lost; stop if a newer operator commands."""
        job = self._job
        try:
            epoch = await self._services.epochs.above(error.seen, job.ref.uid)
        except KubeError as unread:
            unknown = f"the agent has seen epoch {error.seen}, and the counter is not known: {unread}"
            self._failed(node, action, AgentUnavailable(unknown), refused=False)
            return
        if epoch is None:
            message = f"A newer operator commands this job; node {node.name}: {error}"
            job.fenced_by(Explanation(Reason.FENCED, message))
            logger.warning("%s: %s: %s", job.ref, Reason.FENCED.value, message)
            return
        logger.warning("%s: node %s has seen epoch %s: going on under %d", job.ref, node.name, error.seen, epoch)
        job.epoch_raised(epoch)
        node.lease_lost()  # whatever it holds was acquired under another epoch

    def _failed(self, node: Node, action: NodeCommand, error: AgentError, *, refused: bool) -> None:
        tracing.failed(error)
        now_s = self._services.monotonic_s()
        # An agent that refuses anything but a lease does not know of ours: it has restarted, or the lease has expired.
        without_lease = refused and not isinstance(action, Acquire)
        if without_lease:
            node.answered()
        reason = Reason.AGENT_REFUSED if refused else Reason.AGENT_UNAVAILABLE
        fault = Explanation(reason, f"Node {node.name}, {type(action).__name__}: {error}")
        node.command_failed(fault, retry_at_s=now_s + backoff_s(node.failures))
        if without_lease or node.expires_at_s <= now_s:
            node.lease_lost()
        if isinstance(action, Release) and not node.pods and node.expires_at_s <= now_s:
            self._forget(node)

    async def _perform(self, node: Node, action: NodeCommand) -> None:
        agents, metrics, address = self._services.agents, self._services.metrics, node.address
        assert address is not None
        command: dict[str, Any] = {"job_uid": self._job.ref.uid, "epoch": self._epoch}
        started_s, ttl_s = self._services.monotonic_s(), self._services.limits.lease_ttl_s
        if isinstance(action, Acquire):
            pods = node.pods
            named_gpus = await self._named_gpus(node.name, pods)
            node.lease_requested()
            lease = await agents.acquire(
                address,
                **command,
                job_name=str(self._job.ref),
                ttl_s=ttl_s,
                pods=sorted(pods, key=lambda pod: pod.uid),
                clock_mhz=action.resting.mhz,
                keep_clock_s=action.resting.keep_s,
                named_gpus=named_gpus,
            )
            node.lease_acquired(
                pods,
                plan_id=lease.plan_id,
                following=bool(lease.selected),
                started_s=started_s,
                ttl_s=ttl_s,
                resting=action.resting,
                clock=lease.clock,
                orders_id=lease.orders_id,
                engine_faults=lease.engine_faults,
                energies_mj=lease.energies_mj,
            )
            self._read(node)
            await self._describe(node, lease.description)
        elif isinstance(action, Renew):
            lease = await agents.renew(address, **command, ttl_s=ttl_s)
            node.lease_renewed(
                started_s=started_s,
                ttl_s=ttl_s,
                clock=lease.clock,
                orders_id=lease.orders_id,
                engine_faults=lease.engine_faults,
                energies_mj=lease.energies_mj,
            )
            asked = node.asked_for_schedules or not self._family().schedules_wanted
            if not node.is_described(lease.description) or not asked:
                await self._describe(node, lease.description)
        elif isinstance(action, Release):
            await agents.release(address, **command)
            node.lease_lost()
            if not node.pods:
                self._forget(node)
        elif isinstance(action, Push):
            await self._push(node, address, action)
        elif isinstance(action, Order):
            node.engines.accepted(action.orders, await agents.order(address, **command, orders=action.orders))
        else:
            await self._select(node, address, action)
            if node.plans.from_iteration > action.from_iteration:
                metrics.late_selections.inc()

    async def _named_gpus(self, node_name: str, pods: Iterable[Pod]) -> Sequence[NamedGpu]:
        """Of the pods that have devices by claims; none, if that is not known. The lease must not wait for it."""
        claiming = [pod for pod in pods if pod.claims_devices]
        if not claiming or not self._services.resource_slices:
            return ()
        try:
            async with asyncio.timeout(_SLICES_S):
                slices = await self._services.kube.resource_slices(node_name)
            return named_gpus(slices, claiming)
        except (KubeError, TimeoutError) as error:
            logger.warning("%s: the ResourceSlices of node %s are unknown: %s", self._job.ref, node_name, error)
            return ()

    async def _push(self, node: Node, address: str, action: Push) -> None:
        source = self._family().plan_source
        assert source is not None, "a family without a source intends no plans"
        plans = await source.plans(action)
        plan_set, pushed = plans.plan_set, node.plans.pushed
        # The same plans of another frontier may have been rehearsed under other latencies.
        others = plans.changes and pushed is not None and pushed.digest != action.plans
        if plan_set.plan_id != node.plans.plan_id or others:
            await self._services.agents.push(
                address, job_uid=self._job.ref.uid, epoch=self._epoch, plan_set=plan_set, changes=plans.changes
            )
        beside = action.beside and not source.follows(action.plans)  # they may have been adopted meanwhile
        noted = node.plans.stored_beside if beside else node.plans.stored
        noted(StoredPlans(plan_set.plan_id, action.plans, action.stages))

    async def _select(self, node: Node, address: str, action: Select) -> None:
        plan_id = node.plans.plan_id
        node.plans.selection_sent()
        furthest = await self._services.agents.select(
            address,
            job_uid=self._job.ref.uid,
            epoch=self._epoch,
            plan_id=plan_id,
            points=action.points,
            from_iteration=action.from_iteration,
        )
        # A rank that has begun that iteration already runs the selection from the next one on.
        from_iteration = max(action.from_iteration, furthest + 1)
        node.plans.selection_accepted(dict(action.points), plan_id=plan_id, from_iteration=from_iteration)

    async def _describe(self, node: Node, description: int) -> None:
        """Bring ranks and GPUs up to date with the agent's description; it makes good for missed telemetry.

        Args:
            node: to describe.
            description: what the agent called it before it was asked: if it changes meanwhile, it is asked again.
        """
        assert node.address is not None
        with_schedules = self._family().schedules_wanted
        node.described(description)  # now: telemetry that comes meanwhile outdates it
        try:
            info = await self._services.agents.describe(node.address, with_schedules=with_schedules)
        except AgentError:
            node.description_outdated()
            raise
        uids = {pod.uid for pod in node.pods}
        ranks = [rank for rank in info.ranks if rank.pod_uid in uids]
        present = {rank.id for rank in ranks}
        for gone in [rank for rank_id, rank in node.ranks.items() if rank_id not in present]:
            self._family().rank_left(node, gone)
        for rank in ranks:
            self._family().rank_joined(node, rank)
        engines = {engine.process: engine for engine in info.engines if engine.pod_uid in uids}
        for lost in [engine for process, engine in node.engines.by_process.items() if process not in engines]:
            self._family().engine_left(node, lost)
        for engine in engines.values():
            self._family().engine_joined(node, engine)
        if with_schedules:
            node.schedules_declared({rank.id: self._shared(info.schedules.get(rank.process[:2], ())) for rank in ranks})
            await self._family().schedules_declared()
        gpus = node.gpu_uuids
        node.gpus_described(
            {gpu: clocks for gpu, clocks in info.clocks_mhz.items() if gpu in gpus},
            {gpu: why for gpu, why in info.uncontrollable.items() if gpu in gpus},
            {uuid: gpu for uuid, gpu in info.gpus.items() if uuid in gpus},
        )

    def _shared(self, schedule: DeclaredSchedule) -> DeclaredSchedule:
        if len(self._schedules) >= _MOST_SCHEDULES:
            self._schedules.clear()
        return self._schedules.setdefault(schedule, schedule)

    def _forget(self, node: Node) -> None:
        self._job.nodes.forget(node)
        stream = self._streams.pop(node.name, None)
        if stream is not None:
            stream.cancel()

    # ------------------------------------------------------------------------------------------------------ telemetry

    def _read(self, node: Node) -> None:
        """Read the node's telemetry for as long as its lease is held."""
        stream = self._streams.get(node.name)
        if stream is None or stream.done():
            self._streams[node.name] = asyncio.create_task(self._read_telemetry(node))

    async def _read_telemetry(self, node: Node) -> None:
        failures = 0
        while node.leased_pods is not None and node.address is not None:
            single = self._family().single_ranks_wanted
            job = self._job.ref
            events = self._services.agents.watch(
                node.address, job.uid, namespace=job.namespace, combine_ranks=not single
            )
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        failures = 0
                        if isinstance(event, IterationReport | EngineWindow):
                            self._observe_report(node, event)
                        else:
                            self._observe(node, event)
                            self._wake.now()
                        if self._family().single_ranks_wanted != single:
                            break
            except AgentUnavailable:
                # The agent may be gone, and the lease with it.
                node.renewal_requested()
            except AgentError as error:
                logger.warning("%s: telemetry of node %s: %s", self._job.ref, node.name, error)
            self._wake.now()
            await asyncio.sleep(backoff_s(failures))
            failures += 1

    def _observe_report(self, node: Node, report: IterationReport | EngineWindow) -> None:
        family = self._family()
        if isinstance(report, EngineWindow):
            engine = node.engines.by_process.get((report.pod_uid, report.pid))
            gpus = 0 if engine is None else len(engine.gpu_uuids)
            self._job.energy_reported(report.energy_mj, gpus * report.time_us)
            urgent = family.window_reported(node, report)
        else:
            self._job.energy_reported(report.energy_mj, len(report.rank_ids) * report.iteration_time_us)
            urgent = family.reported(node, report)
        if urgent is not None:
            (self._wake.now if urgent else self._wake.in_turn)()

    def _observe(self, node: Node, event: TelemetryEvent) -> None:
        if isinstance(event, StreamOpened | RankJoined | RankLeft | EngineJoined | EngineLeft | EventsDropped):
            node.description_outdated()
        if isinstance(event, StreamOpened):
            node.renewal_requested()  # a renewal also asks for the ranks: some may have joined before the stream stood
        elif isinstance(event, RankJoined):
            if event.rank.pod_uid in {pod.uid for pod in node.pods}:
                self._family().rank_joined(node, event.rank)
                if event.rank.gpu_uuid not in node.gpus or self._family().schedules_wanted:
                    node.renewal_requested()  # a renewal also describes GPUs and schedules
        elif isinstance(event, RankLeft):
            self._family().rank_left(node, event.rank)
        elif isinstance(event, EngineJoined | EngineLeft):
            self._observe_engine(node, event)
        elif isinstance(event, GpuSlowdown):
            if event.active:
                node.gpu_slowed(event.gpu_uuid, event.kind, event.message)
            else:
                node.gpu_recovered(event.gpu_uuid, event.kind)
        elif isinstance(event, EventsDropped):
            self._services.metrics.telemetry_dropped.inc()

    def _observe_engine(self, node: Node, event: EngineJoined | EngineLeft) -> None:
        if isinstance(event, EngineLeft):
            self._family().engine_left(node, event.engine)
        elif event.engine.pod_uid in {pod.uid for pod in node.pods}:
            self._family().engine_joined(node, event.engine)
            if not node.gpus.keys() >= set(event.engine.gpu_uuids):
                node.renewal_requested()  # a renewal also describes GPUs
