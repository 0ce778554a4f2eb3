"""One job's hand: asks the planner, does what it says, and tells what came of it.

One ``JobRunner`` per PerseusJob, on the operator's event loop. Every call to an agent, every read, solve and write is a
task of its own, so nothing waits for anything slow; each ends by noting one fact in ``JobState`` and waking the loop.
No rule about *what* to do may live here: that is ``planner``'s, and what to say is ``status``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import parse_spec
from perseus_operator.clients.agents import Dropped, Event, GpuTrouble, Joined, Left, Opened
from perseus_operator.controller import release, schedule_source
from perseus_operator.controller.calibrator import Learner
from perseus_operator.controller.profiler import Profiler
from perseus_operator.controller.services import BACKOFF_S, Services
from perseus_operator.controller.set_straggler import Seen
from perseus_operator.controller.solve_inputs import Inputs
from perseus_operator.controller.status_writer import Reporter
from perseus_operator.controller.view import JobView
from perseus_operator.errors import (
    AgentError,
    AgentFenced,
    AgentRefused,
    AgentUnavailable,
    InvalidProfile,
    InvalidSpec,
    KubeError,
    SolveFailed,
    SolveTimeout,
)
from perseus_operator.objects import Json
from perseus_operator.planning import planner
from perseus_operator.planning.iterations import Report
from perseus_operator.planning.planner import (
    Acquire,
    Calibrate,
    NodeAction,
    Now,
    Push,
    ReadProfile,
    Release,
    Renew,
    Solve,
)
from perseus_operator.planning.power_allocation import Share
from perseus_operator.planning.profile_planner import BeginSweep, KeepProfile, SaveSweep
from perseus_operator.planning.restore import recall
from perseus_operator.planning.state import Fault, JobRef, JobState, Node, Pod
from perseus_operator.planning.stragglers.annotation import noticed, parse_annotation
from perseus_operator.planning.workloads import select
from perseus_operator.solving.frontier import (
    Solved,
    frontier_from_config_map,
    frontier_to_config_map,
    holds_frontier,
    open_frontier,
)
from perseus_operator.solving.request import SolveRequest
from perseus_proto import keys

logger = logging.getLogger(__name__)

_COALESCE_S: Final = 0.005
"""Reports of one iteration arrive together; one thought is enough for them. Or twice as long as a thought takes: a job
of thousands of ranks may not keep the loop to itself."""


class JobRunner:
    """Keeps one job as its PerseusJob says, from first sight until ``release`` or ``stop``."""

    def __init__(self, ref: JobRef, services: Services) -> None:
        self.ref = ref
        self.state = JobState(ref)
        self.next_thought_s = services.monotonic_s()
        """When the planner is due to be asked again, though nothing happens; for the liveness probe."""
        self._thought_s = 0.0
        self.gone = asyncio.Event()
        """The PerseusJob exists no more."""
        self._services = services
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._solved: Solved | None = None
        self._learner = Learner(self.state, services)
        self._profiler = Profiler(self.state, services)
        self._inputs = Inputs(self.state, services, self._learner, self._profiler)
        self._reporter = Reporter(ref, services, self._spawn)
        self._raw_spec: Any = None
        self._raw_annotation: str | None = None
        self.seen = Seen("", "")
        self.labels: Mapping[str, str] = {}

    # ------------------------------------------------------------------------------------------------ what is the case

    def observe(self, body: Mapping[str, Any]) -> bool:
        """The PerseusJob as it is now; whether anything about it is new. Most often only our own status is."""
        metadata, known = body["metadata"], (self.state.generation, self._raw_spec, self.seen.annotation, self.labels)
        first = self.state.generation == 0
        self.state.generation = int(metadata.get("generation", 1))
        annotations, version = metadata.get("annotations") or {}, metadata.get("resourceVersion", "")
        if first:
            self._recall(body.get("status") or {}, annotations, version)
        elif self._reporter.hear(body.get("status") or {}, annotations, version):
            self._wake.set()
        raw_spec = body.get("spec")
        if raw_spec != self._raw_spec:
            self._raw_spec = raw_spec
            try:
                spec = parse_spec(raw_spec)
            except InvalidSpec as error:
                self.state.spec_fault = Fault(Reason.SPEC_INVALID, str(error))
            else:
                if self.state.spec is None or spec.profile != self.state.spec.profile:
                    self.state.profile_read_at_s = None
                    self._profiler.edited()
                self.state.accept(spec)
        annotation = annotations.get(keys.ANNOTATION_STRAGGLER, "")
        self.seen = Seen(version, annotation)
        self.labels = metadata.get("labels") or {}
        self._observe_annotation(annotation)
        if (self.state.generation, raw_spec, annotation, self.labels) == known:
            return False
        self._wake.set()
        return True

    def _observe_annotation(self, text: str) -> None:
        if text == self._raw_annotation:
            return
        self._raw_annotation = text
        try:
            told = parse_annotation(text)
        except InvalidSpec as error:
            self.state.told_fault = Fault(Reason.ANNOTATION_INVALID, str(error))
        else:
            self.state.told_fault = None
            self.state.told = noticed(self.state.told, told, self._services.monotonic_s())

    def place(self, pods: Iterable[Pod], agents: Mapping[str, str]) -> None:
        """The pods that opted in to this job, and all agents, as they are now."""
        chosen = select(self.state.spec, pods)
        self.state.place(chosen.pods, agents, attempt=chosen.attempt, left_out=chosen.left_out)
        self._wake.set()

    @property
    def status(self) -> Mapping[str, Any]:
        """As stored, as far as is known."""
        return self._reporter.written

    def view(self) -> JobView:
        """What the web page may see."""
        return JobView(self.ref, self.state.spec, self._reporter.written, self._solved)

    def _recall(self, written: Json, annotations: Mapping[str, str], version: str) -> None:
        """What an operator before this one has written."""
        self._reporter.recall(written, annotations, version)
        recall(self.state, written, now_s=self._services.monotonic_s(), wall_s=self._services.wall_s())

    def grant(self, share: Share | None) -> None:
        """The job's share of a PowerBudget; None: no budget selects it."""
        if share != self.state.share:
            self.state.share = share
            self._wake.set()

    # ---------------------------------------------------------------------------------------------------- what to do

    async def run(self) -> None:
        """Think and act until cancelled. An error in one thought does not end the next."""
        try:
            while True:
                async with self._services.turn:
                    self._wake.clear()
                    try:
                        delay_s = self._think()
                    except Exception:  # the job must not be left alone for one unforeseen case
                        logger.exception("%s: unexpected error; trying again", self.ref)
                        self._services.metrics.errors.inc()
                        delay_s = BACKOFF_S[-1]
                self.next_thought_s = self._services.monotonic_s() + delay_s
                # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._wake.wait()
                await asyncio.sleep(max(_COALESCE_S, 2 * self._thought_s))
        finally:
            await self._stop_tasks()

    def _think(self) -> float:
        """One thought; seconds until the next is due."""
        services = self._services
        now = Now(services.monotonic_s(), services.wall_s())
        with services.metrics.reconcile_seconds.time():
            plan = planner.plan(self.state, now, services.limits)
            self.state.guard = plan.guard
            for action in plan.actions:
                self._start(action)
            retry_s = self._reporter.tell(self.state, plan, now)
        self._thought_s = services.monotonic_s() - now.monotonic_s
        return max(0.0, min(plan.wake_at_s - now.monotonic_s, retry_s))

    def _start(self, action: planner.Action) -> None:
        if isinstance(action, ReadProfile):
            self.state.reading = True
            self._spawn(self._inputs.read())
        elif isinstance(action, Solve):
            self.state.solving = action.digest
            self._spawn(self._solve(action.digest, self._inputs.request()))
        elif isinstance(action, Calibrate):
            learning = self.state.learning
            learning.running, learning.begun, learning.since = True, True, 0
            self._spawn(self._learner.calibrate(self._inputs.request(), self._inputs.profile_map))
        elif isinstance(action, BeginSweep):
            self._profiler.begin(action.sweep)
            self._wake.set()
        elif isinstance(action, SaveSweep | KeepProfile):
            self.state.profiling.busy = True
            self._spawn(self._profiler.write(action))
        else:
            node = self.state.nodes[action.node]
            node.busy = True
            self._spawn(self._command(node, action))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception:  # whatever it was, the runner must hear of it and go on
                logger.exception("%s: unexpected error", self.ref)
                self._services.metrics.errors.inc()
            finally:
                self._wake.set()

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop_tasks(self) -> None:
        tasks = [*self._tasks, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watches.clear()

    # ---------------------------------------------------------------------------------------- profile and frontier

    async def _solve(self, digest: str, request: SolveRequest) -> None:
        """Read the frontier back if it was solved from the same inputs before; else solve, and keep it."""
        state, metrics = self.state, self._services.metrics
        try:
            solved = await self._restore(digest, request)
            restored = solved is not None
            if solved is None:
                solved = await self._services.library.solved(digest, lambda: self._solve_anew(digest, request))
                assert solved is not None
                await self._keep(solved)
            else:
                metrics.restores.inc()
        except InvalidProfile as error:
            state.solve_fault = digest, Fault(Reason.PROFILE_INVALID, str(error))
        except SolveFailed as error:
            metrics.solves.labels("failed").inc()
            timeout = isinstance(error, SolveTimeout)
            state.solve_fault = digest, Fault(Reason.SOLVE_TIMEOUT if timeout else Reason.SOLVE_FAILED, str(error))
        else:
            self._solved, state.solve_fault = solved, None
            state.frontier = replace(solved.view, restored=restored)
            state.promises = solved.promises
        finally:
            state.solving = None

    async def _restore(self, digest: str, request: SolveRequest) -> Solved | None:
        try:
            kept = await self._services.kube.read_config_map(self.ref.namespace, self.ref.frontier_config_map)
        except KubeError:
            return None
        if not holds_frontier(kept, digest):
            return None

        async def read_back() -> Solved | None:
            return await asyncio.to_thread(frontier_from_config_map, kept, request, digest=digest)

        solved = await self._services.library.solved(digest, read_back)
        if solved is not None and self.ref.uid not in kept.owners:
            await self._keep(solved)  # it was kept for a job of the same name before this one, and will go with it
        return solved

    async def _solve_anew(self, digest: str, request: SolveRequest) -> Solved:
        data, seconds = await self._services.solver.solve(request)
        logger.info("%s: frontier solved in %.3f s", self.ref, seconds)
        self._services.metrics.solves.labels("solved").inc()
        return await asyncio.to_thread(
            open_frontier, data, request, digest=digest, solve_ms=round(1000 * seconds), restored=False
        )

    async def _keep(self, solved: Solved) -> None:
        config_map = frontier_to_config_map(self.ref.frontier_config_map, solved)
        if config_map is None:
            logger.warning("%s: frontier of %d bytes is too large to keep", self.ref, len(solved.data))
            return
        try:
            await self._services.kube.write_owned_config_map(self.ref, config_map)
        except KubeError as error:
            logger.warning("%s: frontier could not be kept, a restart will solve again: %s", self.ref, error)

    # ------------------------------------------------------------------------------------------------------- agents

    async def _command(self, node: Node, action: NodeAction) -> None:
        """One call to one agent, and what its outcome means for the node."""
        name = type(action).__name__.lower()
        result = "ok"
        try:
            await self._perform(node, action)
            node.fault, node.failures, node.retry_at_s = None, 0, 0.0
        except AgentFenced as error:
            result = "fenced"
            message = f"A newer operator commands this job; node {node.name}: {error}"
            self.state.fenced = Fault(Reason.FENCED, message)
            logger.warning("%s: %s: %s", self.ref, Reason.FENCED.value, message)
        except AgentError as error:
            refused = isinstance(error, AgentRefused)
            result = "refused" if refused else "unavailable"
            self._failed(node, action, error, refused=refused)
        finally:
            node.busy = False
            self._services.metrics.agent_calls.labels(name, result).inc()

    def _failed(self, node: Node, action: NodeAction, error: AgentError, *, refused: bool) -> None:
        now_s = self._services.monotonic_s()
        without_lease = refused and not isinstance(action, Acquire)
        if without_lease:
            node.failures = 0  # it answers: how long it was away is no reason to let it wait for its lease
        node.retry_at_s = now_s + BACKOFF_S[min(node.failures, len(BACKOFF_S) - 1)]
        node.failures += 1
        reason = Reason.AGENT_REFUSED if refused else Reason.AGENT_UNAVAILABLE
        node.fault = Fault(reason, f"Node {node.name}, {type(action).__name__}: {error}")
        if without_lease or node.expires_at_s <= now_s:
            # It may have restarted, or its lease has run out: it holds nothing for us any more. Begin with the lease.
            node.lost()
        if isinstance(action, Release) and not node.pods and node.expires_at_s <= now_s:
            self._forget(node)  # the lease has run out by itself

    async def _perform(self, node: Node, action: NodeAction) -> None:
        services, address = self._services, node.address
        assert address is not None
        command: dict[str, Any] = {"job_uid": self.ref.uid, "epoch": services.epoch}
        started_s = services.monotonic_s()
        ttl_s = services.limits.lease_ttl_s
        if isinstance(action, Acquire):
            pods = node.pods
            lease = await services.agents.acquire(
                address, **command, job_name=str(self.ref), ttl_s=ttl_s, pods=sorted(pods, key=lambda pod: pod.uid)
            )
            self._leased(node, started_s, ttl_s)
            # What was selected may be of a plan set before the one that is held: it is said again.
            node.leased_pods, node.plan_id, node.selected, node.driven = pods, lease.plan_id, {}, bool(lease.selected)
            self._follow(node)
            await self._describe(node)
        elif isinstance(action, Renew):
            await services.agents.renew(address, **command, ttl_s=ttl_s)
            self._leased(node, started_s, ttl_s)
            await self._describe(node)
        elif isinstance(action, Release):
            await services.agents.release(address, **command)
            node.lost()
            if not node.pods:
                self._forget(node)
        elif isinstance(action, Push):
            await self._push(node, action)
        else:
            plan_id, node.driven = node.plan_id, True  # even if no answer comes
            furthest = await services.agents.select(
                address, **command, plan_id=plan_id, points=action.points, from_iteration=action.from_iteration
            )
            if node.plan_id == plan_id:
                node.selected = {**node.selected, **dict(action.points)}
            node.from_iteration = max(action.from_iteration, furthest + 1)
            if furthest >= action.from_iteration:
                services.metrics.late_selections.inc()

    def _leased(self, node: Node, started_s: float, ttl_s: float) -> None:
        # Counted from before the call: the agent cannot have begun to count earlier.
        node.renew_at_s, node.expires_at_s = started_s + ttl_s / 3, started_s + ttl_s

    async def _push(self, node: Node, action: Push) -> None:
        solved, address = self._solved, node.address
        assert address is not None
        if solved is not None and solved.view.digest == action.plans:
            message = await self._services.library.plan_set(solved, action.stages)
        else:
            message = await asyncio.to_thread(self._profiler.plan_set, action.stages, self._inputs.request())
        if message.plan_id != node.plan_id:
            await self._services.agents.push(
                address, job_uid=self.ref.uid, epoch=self._services.epoch, plan_set=message
            )
            node.plan_id, node.selected = message.plan_id, {}
        node.pushed = action.plans, action.stages

    async def _describe(self, node: Node) -> None:
        """Bring ranks and GPUs up to date with what the agent says; what was missed in between is made good."""
        assert node.address is not None
        asking = schedule_source.wanted_from_ranks(self.state)
        info = await self._services.agents.describe(node.address, with_schedules=asking)
        uids = {pod.uid for pod in node.pods}
        ranks = [rank for rank in info.ranks if rank.pod_uid in uids]
        there = {rank.place for rank in ranks}
        for gone in [rank for place, rank in node.ranks.items() if place not in there]:
            self.state.left(node, gone)
        for rank in ranks:
            self.state.joined(node, rank)
        if asking:
            node.told = {rank.place: info.told.get((rank.pod_uid, rank.pid), ()) for rank in ranks}
            await self._inputs.hear()
        gpus = {rank.gpu_uuid for rank in ranks}
        node.clocks_mhz = {gpu: clocks for gpu, clocks in info.clocks_mhz.items() if gpu in gpus}
        node.uncontrollable = {gpu: why for gpu, why in info.uncontrollable.items() if gpu in gpus}

    def _forget(self, node: Node) -> None:
        if self.state.nodes.get(node.name) is node:
            del self.state.nodes[node.name]
        watch = self._watches.pop(node.name, None)
        if watch is not None:
            watch.cancel()

    def _follow(self, node: Node) -> None:
        """Read the node's telemetry for as long as it is leased."""
        watch = self._watches.get(node.name)
        if watch is None or watch.done():
            self._watches[node.name] = asyncio.create_task(self._read_telemetry(node))

    async def _read_telemetry(self, node: Node) -> None:
        failures = 0
        while node.leased_pods is not None and node.address is not None:
            try:
                async for event in self._services.agents.watch(node.address, self.ref.uid):
                    failures = 0
                    self._take(node, event)
                    self._wake.set()
            except AgentUnavailable:
                # Perhaps the agent has gone and with it the lease: ask now, not at the next renewal.
                node.renew_at_s = 0.0
            except AgentError as error:
                logger.warning("%s: telemetry of node %s: %s", self.ref, node.name, error)
            self._wake.set()
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1

    def _take(self, node: Node, event: Event) -> None:
        uids = {pod.uid for pod in node.pods}
        if isinstance(event, Report):
            self._profiler.take(node, event, self._inputs.request)
            iteration = self.state.reported(node, event)
            if iteration is not None:
                self._learner.take(iteration, self._solved)
                self._profiler.watch(iteration, self._solved, self._inputs.profile_map)
        elif isinstance(event, Opened):
            node.renew_at_s = 0.0  # a renewal asks for the ranks too: who came while nobody listened is not missed
        elif isinstance(event, Joined):
            if event.rank.pod_uid in uids:
                self.state.joined(node, event.rank)
                if schedule_source.wanted_from_ranks(self.state):
                    node.renew_at_s = 0.0  # ask what it runs
        elif isinstance(event, Left):
            self.state.left(node, event.rank)
        elif isinstance(event, GpuTrouble):
            if event.active:
                node.gpu_events[event.gpu_uuid, event.kind] = event.message
            else:
                node.gpu_events.pop((event.gpu_uuid, event.kind), None)
        elif isinstance(event, Dropped):
            self._services.metrics.telemetry_dropped.inc()

    # ------------------------------------------------------------------------------------------------- how it ends

    async def release(self) -> None:
        """Give every GPU of the job back to its default clocks: the PerseusJob is being deleted."""
        await release.release(self.state, self._services)
