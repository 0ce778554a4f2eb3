"""Keeps one job as its PerseusJob says: asks the planner, starts what it decides, reports what came of it.

There is one ``JobRunner`` for each PerseusJob, on the operator's event loop. Every call to an agent, every read, solve
and write is a task of its own, so nothing waits for anything slow. Each task ends with an event in ``JobState`` and
wakes the runner. What to do is decided in ``planning``, what to report in ``reporting``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import parse_spec
from perseus_operator.api.pipeline import Pipeline
from perseus_operator.api.power_status import DrawStatus
from perseus_operator.controller.calibrator import Calibrator
from perseus_operator.controller.frontier_loader import FrontierLoader
from perseus_operator.controller.node_session import NodeSession
from perseus_operator.controller.observer import Observer
from perseus_operator.controller.profiler import Profiler
from perseus_operator.controller.release import release_job
from perseus_operator.controller.schedule_source import needs_schedule_from_ranks
from perseus_operator.controller.services import BACKOFF_S, Services
from perseus_operator.controller.set_straggler import ObservedJob
from perseus_operator.controller.solve_inputs import SolveInputs
from perseus_operator.controller.status_writer import StatusWriter
from perseus_operator.controller.tracing import EditTrace
from perseus_operator.controller.view import JobView
from perseus_operator.controller.wake import Wake
from perseus_operator.errors import InvalidSpec, KubeError, KubeNotFound
from perseus_operator.objects import JobRef, Pod
from perseus_operator.planning.aim import Now
from perseus_operator.planning.canary import JudgeCanary
from perseus_operator.planning.comparisons import BeginComparison, EndComparison, ResumePlan
from perseus_operator.planning.frontier_inputs import Calibrate, ReadInputs, Solve
from perseus_operator.planning.lifecycle import DeleteJob
from perseus_operator.planning.node import Node
from perseus_operator.planning.node_actions import AwaitRenewal, NodeCommand, Renew, Select
from perseus_operator.planning.planner import Action, decide
from perseus_operator.planning.power_allocation import Share
from perseus_operator.planning.profile_planner import BeginSweep, SaveSweep, StoreProfile
from perseus_operator.planning.restore import restore_from_status
from perseus_operator.planning.shape import shape_of_ranks
from perseus_operator.planning.state import JobState
from perseus_operator.planning.stragglers.annotation import parse_annotation
from perseus_operator.planning.workloads import select
from perseus_operator.reporting.status import current_measurement
from perseus_proto import keys

logger = logging.getLogger(__name__)

_DELETE_AGAIN_S: Final = 30.0
_COALESCE_S: Final = 0.005
"""Reports of one iteration arrive together, and one reconciliation is enough for them. Between two of them the pause is
at least twice as long as they take: a job of thousands of ranks may not occupy the loop."""


class JobRunner:
    """Reconciles one job from the first time it is observed until it is stopped or released."""

    def __init__(self, ref: JobRef, services: Services) -> None:
        self.ref = ref
        self.state = JobState(ref)
        self.next_reconcile_s = services.monotonic_s()
        """When the next reconciliation is due though nothing happens (monotonic); for the liveness probe."""
        self.observed = ObservedJob("", "")
        self.labels: Mapping[str, str] = {}
        self.taken_over_s = -math.inf
        """When it was observed first, if an operator or replica before has served it (monotonic)."""
        self._services = services
        self._reconcile_duration_s = 0.0
        self._raw_spec: Any = None
        self._annotation: str | None = None
        self._wake = Wake(services.looks_pace, services.monotonic_s)
        self._awaited: set[str] = set()
        """Nodes whose renewal the planner waits for, as it said last."""
        self._selecting = 0
        """Selections that are under way."""
        self._bound_us = math.inf
        """Of an iteration, as the planner said last."""
        self._running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calibrator = Calibrator(self.state, services)
        self._profiler = Profiler(self.state, services)
        self._observer = Observer(self.state, services)
        self._inputs = SolveInputs(self.state, services, self._calibrator, self._profiler, self._observer)
        self._frontier = FrontierLoader(self.state, services)
        self._status = StatusWriter(ref, services, lambda write: self._spawn(write, otherwise=self._written))
        self._trace = EditTrace()
        self._nodes = NodeSession(
            self.state,
            services,
            inputs=self._inputs,
            frontier=self._frontier,
            calibrator=self._calibrator,
            profiler=self._profiler,
            observer=self._observer,
            wake=self._wake,
            exceeds_bound=lambda iteration: iteration.time_us > self._bound_us,
        )

    # -------------------------------------------------------------------------------------------------------- observe

    def observe(self, body: Mapping[str, Any]) -> bool:
        """Take in the PerseusJob as it is now.

        Args:
            body: the object as the API server sends it.

        Returns:
            Whether anything about it is new. Most often only the status has changed, which the operator wrote itself.
        """
        metadata = body["metadata"]
        before = (self.state.generation, self._raw_spec, self.observed.annotation, self.labels)
        first = self.state.generation == 0
        self.state.generation_observed(int(metadata.get("generation", 1)))
        annotations, version = metadata.get("annotations") or {}, metadata.get("resourceVersion", "")
        status = body.get("status") or {}
        if self.state.generation != before[0]:
            took_over = first and bool(status)
            self._trace.begin(self.ref, self.state.generation, annotations, edited=not took_over)
        if first:
            self._status.restore(status, annotations, version)
            now_s, wall_s = self._services.monotonic_s(), self._services.wall_s()
            if status:
                self.taken_over_s = now_s
            restore_from_status(self.state, status, now_s=now_s, wall_s=wall_s)
        elif self._status.observe(status, annotations, version):
            self._wake.now()
        self._observe_spec(body.get("spec"))
        annotation = annotations.get(keys.ANNOTATION_STRAGGLER, "")
        self._observe_annotation(annotation)
        self.observed = ObservedJob(version, annotation)
        self.labels = metadata.get("labels") or {}
        self.state.class_observed(self.labels.get(keys.LABEL_CLASS, ""))
        if (self.state.generation, self._raw_spec, annotation, self.labels) == before:
            return False
        self._wake.now()
        return True

    def _observe_spec(self, raw_spec: Any) -> None:
        if raw_spec == self._raw_spec:
            return
        self._raw_spec = raw_spec
        try:
            self.state.spec_accepted(parse_spec(raw_spec))
        except InvalidSpec as error:
            self.state.spec_rejected(Explanation(Reason.SPEC_INVALID, str(error)))

    def _observe_annotation(self, text: str) -> None:
        if text == self._annotation:
            return
        self._annotation = text
        try:
            declarations = parse_annotation(text)
        except InvalidSpec as error:
            self.state.declarations_rejected(Explanation(Reason.ANNOTATION_INVALID, str(error)))
        else:
            self.state.declarations_observed(declarations, now_s=self._services.monotonic_s())

    def observe_pods(self, pods: Iterable[Pod], agents: Mapping[str, str]) -> None:
        """Take in the pods that opted in to this job, and the addresses of all agents by node, as they are now."""
        chosen = select(self.state.spec, pods)
        self.state.pods_observed(
            chosen.pods,
            agents,
            attempt=chosen.attempt,
            excluded=chosen.excluded,
            failed=chosen.failed,
            finished_at_s=self._services.wall_s() if chosen.finished else None,
        )
        self._wake.now()

    def grant(self, share: Share | None) -> None:
        """Take in the job's share of a PowerBudget; None: no budget selects the job."""
        if share != self.state.share:
            self.state.share_granted(share)
            self._wake.now()

    def publish_draw(self, draw: DrawStatus | None) -> None:
        """Write what the job draws into its status; None: no other replica needs to know."""
        if draw != self.state.draw:
            self.state.draw_published(draw)
            self._wake.in_turn()

    @property
    def epoch(self) -> int:
        """The highest epoch under which this replica commands the job."""
        return self._services.epochs.drawn(self.ref.uid)

    @property
    def status(self) -> Mapping[str, Any]:
        """The status as stored in the cluster, as far as is known."""
        return self._status.stored

    def view(self) -> JobView:
        """What the web page may show."""
        return JobView(self.ref, self.state.spec, self._status.stored, self._frontier.solved)

    # ------------------------------------------------------------------------------------------------------ reconcile

    def start(self) -> None:
        """Begin to reconcile."""
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Reconcile no more; the leases stay."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        """Reconcile until cancelled. An error in one reconciliation does not end the next."""
        try:
            while True:
                await self._services.turns.loop_turn(self.ref.namespace)
                self._wake.looking()
                try:
                    delay_s = self._reconcile()
                except Exception:  # one unforeseen case must not leave the job alone
                    logger.exception("%s: unexpected error; trying again", self.ref)
                    self._services.metrics.errors.inc()
                    delay_s = BACKOFF_S[-1]
                reconciled_s = self._services.monotonic_s()
                self.next_reconcile_s = reconciled_s + delay_s
                await self._wake.wait(delay_s)
                rested_s = self._services.monotonic_s() - reconciled_s
                await asyncio.sleep(max(_COALESCE_S, 2 * self._reconcile_duration_s - rested_s))
        finally:
            self._wake.cancel()
            await self._stop_tasks()

    def _reconcile(self) -> float:
        """Decide, start what was decided, report; seconds until the next reconciliation is due."""
        services = self._services
        services.metrics.set_class(self.ref, self.labels.get(keys.LABEL_CLASS, ""))
        now = Now(services.monotonic_s(), services.wall_s())
        self._take_shape()
        with services.metrics.reconcile_seconds.time():
            decision = decide(self.state, now, services.limits)
            if decision.adopt:  # decided again, for what is reported must be of one frontier
                self._frontier.adopt()
                decision = decide(self.state, now, services.limits)
            self._bound_us = decision.bound_us or math.inf
            self.state.guard_updated(decision.guard)
            self.state.hardware_adopted(decision.hardware)
            self._awaited.clear()
            for action in decision.actions:
                self._start(action)
            baseline = self.state.baseline_measured()
            measured = current_measurement(self.state, decision)
            if measured is not None:
                self.state.end.plan_measured(measured)
            report_s = self._status.report(self.state, decision, now, new_baseline=baseline)
            self._trace.reported(self._status.stored, self.state.generation)
        self._reconcile_duration_s = services.monotonic_s() - now.monotonic_s
        self._wake.looked(self._reconcile_duration_s)
        return max(0.0, min(decision.wake_at_s - now.monotonic_s, report_s))

    def _take_shape(self) -> None:
        """Plan for the shape that the training processes report, where the spec leaves it to them."""
        if not self.state.shape_wanted:
            return
        shape = shape_of_ranks(self.state)
        if isinstance(shape, Pipeline):
            self.state.shape_learned(shape)
            if needs_schedule_from_ranks(self.state):
                self._spawn(self._inputs.collect_schedule())

    def _start(self, action: Action) -> None:
        state = self.state
        if isinstance(action, ReadInputs):
            state.inputs.read_started()
            self._spawn(self._inputs.read(), self._trace.step("read inputs"))
        elif isinstance(action, Solve):
            state.solve_started(action.digest, action.basis)
            work = self._frontier.load(action.digest, self._inputs.request())
            self._spawn(work, self._trace.step("solve", **{"perseus.frontier.digest": action.digest}))
        elif isinstance(action, Calibrate):
            state.calibration.run_started()
            work = self._calibrator.calibrate(self._inputs.request(), self._inputs.profile)
            self._spawn(work, self._trace.step("calibrate"))
        elif isinstance(action, BeginComparison | ResumePlan | EndComparison):
            state.comparisons.decided(action, iteration=state.furthest_iteration)
            self._wake.now()
        elif isinstance(action, JudgeCanary):
            state.canary_judged(action.verdict)
            self._wake.now()
        elif isinstance(action, BeginSweep):
            self._profiler.begin(action.sweep)
            self._wake.now()
        elif isinstance(action, DeleteJob):
            state.end.deletion_asked(self._services.monotonic_s() + _DELETE_AGAIN_S)
            self._spawn(self._delete())
        elif isinstance(action, SaveSweep | StoreProfile):
            state.profiling.write_started()
            self._spawn(self._profiler.write(action))
        elif isinstance(action, AwaitRenewal):
            self._awaited.add(action.node)
        else:
            node = state.nodes[action.node]
            if isinstance(action, Renew):
                node.renewal_started()
                self._spawn(self._renew(node, action), otherwise=lambda: self._renewed(node))
                return
            node.command_started()
            name = type(action).__name__.lower()
            command = self._select if isinstance(action, Select) else self._nodes.command
            self._spawn(command(node, action), self._trace.step(name, **{"k8s.node.name": action.node}))

    async def _renew(self, node: Node, action: Renew) -> bool:
        """Renew a lease; whether the planner must look at once: something has changed, or waits for this."""
        inputs = self.state.inputs
        before = node.leased_pods, node.clock, node.description, node.fault, inputs.schedule_csv, inputs.schedule_fault
        await self._nodes.command(node, action)
        after = node.leased_pods, node.clock, node.description, node.fault, inputs.schedule_csv, inputs.schedule_fault
        return after != before or node.fault is not None or node.name in self._awaited

    def _renewed(self, node: Node) -> None:
        """Look no later than the next renewal is due; in turn if the agent has described its node once more."""
        if node.description == 0 or needs_schedule_from_ranks(self.state):
            self._wake.in_turn()
        self.next_reconcile_s = min(self.next_reconcile_s, node.renew_at_s)
        self._wake.at(node.renew_at_s)

    def _written(self) -> None:
        """The status is stored, and there is nothing more to report."""
        self._trace.reported(self._status.stored, self.state.generation)

    async def _select(self, node: Node, action: NodeCommand) -> bool:
        """Select on a node; whether the planner must look at once: the last of many has ended, or one has failed."""
        self._selecting += 1
        try:
            await self._nodes.command(node, action)
        finally:
            self._selecting -= 1
        return self._selecting == 0 or node.fault is not None

    async def _delete(self) -> None:
        """Delete the PerseusJob: it has finished, and its time is over."""
        try:
            await self._services.kube.delete_job(self.ref)
            logger.info("%s: deleted: it has finished, and ttlSecondsAfterFinished is over", self.ref)
        except KubeNotFound:
            pass
        except KubeError as error:
            logger.warning("%s: not deleted: %s", self.ref, error)

    def _spawn(
        self,
        work: Coroutine[Any, Any, bool | None],
        step: contextlib.AbstractContextManager[object] | None = None,
        *,
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        """Do something in a task of its own, and look at the job once it is done.

        Args:
            work: returns False if it leaves nothing that is urgent.
            step: of the trace; None: it is none.
            otherwise: in place of a look in turn if nothing is urgent.
        """

        async def guarded() -> None:
            urgent = True
            try:
                with step or contextlib.nullcontext():
                    urgent = await work is not False
            except Exception:  # whatever it was, the runner goes on
                logger.exception("%s: unexpected error", self.ref)
                self._services.metrics.errors.inc()
            finally:
                (self._wake.now if urgent else otherwise or self._wake.in_turn)()

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop_tasks(self) -> None:
        tasks = [*self._tasks, *self._nodes.streams]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -------------------------------------------------------------------------------------------------------- release

    async def transfer(self) -> None:
        """Reconcile no more, and forget the job: another replica serves it. The leases stay for that one."""
        await self.stop()
        self._services.metrics.forget_job(self.ref)
        self._services.epochs.forget(self.ref.uid)

    async def release(self) -> None:
        """Reconcile no more, and return every GPU of the job to its default clocks: the PerseusJob is deleted."""
        await self.stop()
        await release_job(self.state, self._services)
