"""Talks to the agents of one job's nodes: sends the planner's commands, and reads telemetry while a lease is held.

Each command is one call to one agent. Its outcome becomes one event of the ``Node``; whether and when to try again is
the planner's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.clients.agent_messages import (
    EventsDropped,
    GpuSlowdown,
    RankJoined,
    RankLeft,
    StreamOpened,
    TelemetryEvent,
)
from perseus_operator.controller import tracing
from perseus_operator.controller.calibrator import Calibrator
from perseus_operator.controller.frontier_loader import FrontierLoader
from perseus_operator.controller.observer import Observer
from perseus_operator.controller.profiler import Profiler
from perseus_operator.controller.schedule_source import needs_schedule_from_ranks
from perseus_operator.controller.services import Services, backoff_s
from perseus_operator.controller.solve_inputs import SolveInputs
from perseus_operator.controller.wake import Wake
from perseus_operator.errors import AgentError, AgentFenced, AgentRefused, AgentUnavailable, KubeError
from perseus_operator.objects import Pod
from perseus_operator.planning.hardware import clocks_of
from perseus_operator.planning.iterations import JobIteration, Report
from perseus_operator.planning.latencies import ClockTimes
from perseus_operator.planning.named_gpus import NamedGpu, named_gpus
from perseus_operator.planning.node import Node
from perseus_operator.planning.node_actions import Acquire, NodeCommand, Push, Release, Renew, Select
from perseus_operator.planning.node_plans import StoredPlans
from perseus_operator.planning.state import JobState
from perseus_operator.solving.frontier import SolvedFrontier

logger = logging.getLogger(__name__)
_SLICES_S: Final = 2.0
"""How long a lease waits for a node's ResourceSlices."""


class NodeSession:
    """The agents of one job. ``wake`` lets the planner look again; ``exceeds_bound``: whether that is urgent after an
    iteration.
    """

    def __init__(
        self,
        state: JobState,
        services: Services,
        *,
        inputs: SolveInputs,
        frontier: FrontierLoader,
        calibrator: Calibrator,
        profiler: Profiler,
        observer: Observer,
        wake: Wake,
        exceeds_bound: Callable[[JobIteration], bool],
    ) -> None:
        self._state = state
        self._services = services
        self._inputs = inputs
        self._frontier = frontier
        self._calibrator = calibrator
        self._profiler = profiler
        self._observer = observer
        self._wake = wake
        self._exceeds_bound = exceeds_bound
        self._streams: dict[str, asyncio.Task[None]] = {}

    @property
    def _epoch(self) -> int:
        return max(self._services.epochs.of(self._state.ref.uid), self._state.raised_epoch)

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
        state = self._state
        try:
            epoch = await self._services.epochs.above(error.seen, state.ref.uid)
        except KubeError as unread:
            unknown = f"the agent has seen epoch {error.seen}, and the counter is not known: {unread}"
            self._failed(node, action, AgentUnavailable(unknown), refused=False)
            return
        if epoch is None:
            message = f"A newer operator commands this job; node {node.name}: {error}"
            state.fenced_by(Explanation(Reason.FENCED, message))
            logger.warning("%s: %s: %s", state.ref, Reason.FENCED.value, message)
            return
        logger.warning("%s: node %s has seen epoch %s: going on under %d", state.ref, node.name, error.seen, epoch)
        state.epoch_raised(epoch)
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
        command: dict[str, Any] = {"job_uid": self._state.ref.uid, "epoch": self._epoch}
        started_s, ttl_s = self._services.monotonic_s(), self._services.limits.lease_ttl_s
        if isinstance(action, Acquire):
            pods = node.pods
            lease = await agents.acquire(
                address,
                **command,
                job_name=str(self._state.ref),
                ttl_s=ttl_s,
                pods=sorted(pods, key=lambda pod: pod.uid),
                clock_mhz=action.resting.mhz,
                keep_clock_s=action.resting.keep_s,
                named_gpus=await self._named_gpus(node.name, pods),
            )
            node.lease_acquired(
                pods,
                plan_id=lease.plan_id,
                following=bool(lease.selected),
                started_s=started_s,
                ttl_s=ttl_s,
                resting=action.resting,
                clock=lease.clock,
            )
            self._read(node)
            await self._describe(node, lease.description)
        elif isinstance(action, Renew):
            lease = await agents.renew(address, **command, ttl_s=ttl_s)
            node.lease_renewed(started_s=started_s, ttl_s=ttl_s, clock=lease.clock)
            if not node.is_described(lease.description) or needs_schedule_from_ranks(self._state):
                await self._describe(node, lease.description)
        elif isinstance(action, Release):
            await agents.release(address, **command)
            node.lease_lost()
            if not node.pods:
                self._forget(node)
        elif isinstance(action, Push):
            await self._push(node, address, action)
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
            logger.warning("%s: the ResourceSlices of node %s are unknown: %s", self._state.ref, node_name, error)
            return ()

    async def _push(self, node: Node, address: str, action: Push) -> None:
        solved = self._frontier.find(action.plans)
        if solved is not None:
            plan_set = await self._services.cache.plan_set(solved, action.stages)
        else:
            plan_set = await asyncio.to_thread(self._profiler.plan_set, action.stages, self._inputs.request())
        changes = self._changes(solved, plan_set.clocks_mhz)
        pushed = node.plans.pushed
        # The same plans of another frontier may have been rehearsed under other latencies.
        if plan_set.plan_id != node.plans.plan_id or (changes and pushed is not None and pushed.digest != action.plans):
            await self._services.agents.push(
                address, job_uid=self._state.ref.uid, epoch=self._epoch, plan_set=plan_set, changes=changes
            )
        frontier = self._state.frontier  # may have been adopted meanwhile
        beside = action.beside and (frontier is None or frontier.digest != action.plans)
        noted = node.plans.stored_beside if beside else node.plans.stored
        noted(StoredPlans(plan_set.plan_id, action.plans, action.stages))

    def _changes(self, solved: SolvedFrontier | None, clocks_mhz: Iterable[int]) -> list[ClockTimes]:
        """How long changes to these clocks take under which a frontier was rehearsed; for plans that were not rehearsed
        what is known now.
        """
        in_use, wanted = self._state.hardware.in_use, set(clocks_mhz)
        known = clocks_of(solved.view.hardware) if solved is not None and solved.view.hardware else None
        if known is None:
            known = in_use.clocks if in_use is not None else ()
        return [times for times in known if times.mhz in wanted]

    async def _select(self, node: Node, address: str, action: Select) -> None:
        plan_id = node.plans.plan_id
        node.plans.selection_sent()
        furthest = await self._services.agents.select(
            address,
            job_uid=self._state.ref.uid,
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
        with_schedules = needs_schedule_from_ranks(self._state)
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
            self._state.rank_left(node, gone)
        for rank in ranks:
            self._state.rank_joined(node, rank)
        if with_schedules:
            node.schedules_declared({rank.id: info.schedules.get((rank.pod_uid, rank.pid), ()) for rank in ranks})
            await self._inputs.collect_schedule()
        gpus = node.gpu_uuids
        node.gpus_described(
            {gpu: clocks for gpu, clocks in info.clocks_mhz.items() if gpu in gpus},
            {gpu: why for gpu, why in info.uncontrollable.items() if gpu in gpus},
            {uuid: gpu for uuid, gpu in info.gpus.items() if uuid in gpus},
        )

    def _forget(self, node: Node) -> None:
        self._state.node_forgotten(node)
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
            single = self._state.single_ranks_wanted
            job = self._state.ref
            events = self._services.agents.watch(
                node.address, job.uid, namespace=job.namespace, combine_ranks=not single
            )
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        failures = 0
                        if isinstance(event, Report):
                            self._observe_report(node, event)
                        else:
                            self._observe(node, event)
                            self._wake.now()
                        if self._state.single_ranks_wanted != single:
                            break
            except AgentUnavailable:
                # The agent may be gone, and the lease with it.
                node.renewal_requested()
            except AgentError as error:
                logger.warning("%s: telemetry of node %s: %s", self._state.ref, node.name, error)
            self._wake.now()
            await asyncio.sleep(backoff_s(failures))
            failures += 1

    def _observe_report(self, node: Node, report: Report) -> None:
        state, slowdowns = self._state, self._state.detector.slowdowns
        self._profiler.observe(node, report, self._inputs.request)
        self._observer.observe(report, self._inputs.request)
        iteration = state.iteration_reported(node, report)
        if iteration is not None:
            self._services.metrics.count_iteration(state.ref, iteration.energy_mj, state.without_plan)
            self._calibrator.record(iteration, self._frontier.solved)
            self._profiler.observe_drift(iteration, self._frontier.solved, self._inputs.profile)
            if state.detector.slowdowns != slowdowns or self._exceeds_bound(iteration):
                self._wake.now()
        if iteration is not None or state.shape_wanted:
            self._wake.in_turn()

    def _observe(self, node: Node, event: TelemetryEvent) -> None:
        if isinstance(event, StreamOpened | RankJoined | RankLeft | EventsDropped):
            node.description_outdated()
        if isinstance(event, StreamOpened):
            node.renewal_requested()  # a renewal also asks for the ranks: some may have joined before the stream stood
        elif isinstance(event, RankJoined):
            if event.rank.pod_uid in {pod.uid for pod in node.pods}:
                self._state.rank_joined(node, event.rank)
                if event.rank.gpu_uuid not in node.gpus or needs_schedule_from_ranks(self._state):
                    node.renewal_requested()  # a renewal also describes GPUs and schedules
        elif isinstance(event, RankLeft):
            self._state.rank_left(node, event.rank)
        elif isinstance(event, GpuSlowdown):
            if event.active:
                node.gpu_slowed(event.gpu_uuid, event.kind, event.message)
            else:
                node.gpu_recovered(event.gpu_uuid, event.kind)
        elif isinstance(event, EventsDropped):
            self._services.metrics.telemetry_dropped.inc()
