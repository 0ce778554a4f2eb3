"""Serves one job as its PerseusJob says: asks its family what to do, starts what it decides, reports what came of it.

There is one ``JobRunner`` for each PerseusJob, on the operator's event loop. Every call to an agent, every read, solve
and write is a task of its own, so nothing waits for anything slow. Each task ends with an event of the job or of a part
of it, and wakes the runner. What to do and what to report is the family's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

from perseus_core import keys
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec, WorkSpec
from perseus_operator.api.power_status import DrawStatus
from perseus_operator.api.schema import parse_spec
from perseus_operator.budgets.allocation import Share
from perseus_operator.budgets.member import Member
from perseus_operator.controller.node_session import NodeSession
from perseus_operator.controller.release import release_job, release_left_nodes
from perseus_operator.controller.set_straggler import ObservedJob
from perseus_operator.controller.status_writer import StatusWriter
from perseus_operator.controller.view import JobView
from perseus_operator.errors import InvalidSpec, KubeError, KubeNotFound
from perseus_operator.families.registry import FAMILIES, Kind, kinds_of
from perseus_operator.jobs.decision import Decision
from perseus_operator.jobs.family import Family, Surroundings, member_of
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.lifecycle import next_deletion
from perseus_operator.jobs.services import BACKOFF_S, Services
from perseus_operator.jobs.tracing import EditTrace
from perseus_operator.jobs.wake import Wake
from perseus_operator.nodes.actions import AwaitRenewal, NodeAction, NodeCommand, Push, Renew, Select, next_actions
from perseus_operator.nodes.node import Node
from perseus_operator.nodes.workloads import select
from perseus_operator.objects.values import JobRef, Json, Now, Pod

logger = logging.getLogger(__name__)

_NEVER_S: Final = 3600.0
"""How soon to look again at a job about which nothing is to be done."""
_DELETE_AGAIN_S: Final = 30.0
_COALESCE_S: Final = 0.005
"""Reports of one iteration arrive together, and one reconciliation is enough for them. Between two of them the pause is
at least twice as long as they take: a job of thousands of ranks may not occupy the loop."""


class JobRunner:
    """Reconciles one PerseusJob or ServingPool from the first time it is observed until it is stopped or released."""

    def __init__(self, ref: JobRef, services: Services, kinds: Sequence[Kind] = FAMILIES) -> None:
        self.ref = ref
        self.job = Job(ref)
        self.next_reconcile_s = services.monotonic_s()
        """When the next reconciliation is due though nothing happens (monotonic); for the liveness probe."""
        self.observed = ObservedJob("", "")
        self.labels: Mapping[str, str] = {}
        self.taken_over_s = -math.inf
        """When it was observed first, if an operator or replica before has served it (monotonic)."""
        self._services = services
        self._reconcile_duration_s = 0.0
        self._raw_spec: Any = None
        self._wake = Wake(services.looks_pace, services.monotonic_s)
        self._awaited: set[str] = set()
        """Nodes whose renewal must end before anything else is decided there."""
        self._selecting = 0
        """Selections that are under way."""
        self._running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._status = StatusWriter(ref, services, lambda write: self._spawn(write, otherwise=self._written))
        self._trace = EditTrace()
        self._kinds = kinds_of(kinds, ref.kind)
        self._kind = self._kinds[-1]
        self.family = self._made(self._kind)
        self._nodes = NodeSession(self.job, services, family=lambda: self.family, wake=self._wake)

    def _made(self, kind: Kind) -> Family:
        return kind.make(Surroundings(self.job, self._services, self._wake, self._spawn, self._trace))

    # -------------------------------------------------------------------------------------------------------- observe

    def observe(self, body: Mapping[str, Any]) -> bool:
        """Take in the object as it is now.

        Args:
            body: the object as the API server sends it.

        Returns:
            Whether anything about it is new. Most often only the status has changed, which the operator wrote itself.
        """
        metadata = body["metadata"]
        before = (self.job.generation, self._raw_spec, self.observed.annotation, self.labels)
        first = self.job.generation == 0
        self.job.generation_observed(int(metadata.get("generation", 1)))
        annotations, version = metadata.get("annotations") or {}, metadata.get("resourceVersion", "")
        status = body.get("status") or {}
        if self.job.generation != before[0]:
            took_over = first and bool(status)
            self._trace.begin(self.ref, self.job.generation, annotations, edited=not took_over)
        if first:
            self._status.restore(status, annotations, version)
            if status:
                self.taken_over_s = self._services.monotonic_s()
            self.job.end.restored(status)
            self.family.restored(status)
        elif self._status.observe(status, annotations, version):
            self._wake.now()
        self._observe_spec(body.get("spec"))
        annotation = annotations.get(keys.ANNOTATION_STRAGGLER, "")
        self.family.annotations_observed(annotations)
        self.observed = ObservedJob(version, annotation)
        self.labels = metadata.get("labels") or {}
        self.job.class_observed(self.labels.get(keys.LABEL_CLASS, ""))
        if (self.job.generation, self._raw_spec, annotation, self.labels) == before:
            return False
        self._wake.now()
        return True

    def _observe_spec(self, raw_spec: Any) -> None:
        if raw_spec == self._raw_spec:
            return
        self._raw_spec = raw_spec
        try:
            spec = parse_spec(self._kind.spec, raw_spec)
        except InvalidSpec as error:
            self.job.spec_rejected(Explanation(Reason.SPEC_INVALID, str(error)))
        else:
            self._choose_family(spec)
            self.family.spec_accepted(spec)

    def _choose_family(self, spec: WorkSpec) -> None:
        """The spec's first family; a spec changes it only where nobody has held it to the CRD's rules."""
        kind = next(kind for kind in self._kinds if kind.serves(spec))
        if kind is not self._kind:
            self._kind, self.family = kind, self._made(kind)
            self.family.restored(self._status.stored)

    def observe_pods(self, pods: Iterable[Pod], agents: Mapping[str, str], *, name_taken: bool = False) -> None:
        """Take in the pods that opted in to this job, and the addresses of all agents by node, as they are now.

        Args:
            pods: that opted in.
            agents: host:port, by node.
            name_taken: whether they are those of a PerseusJob of this name, and none is given.
        """
        self.job.name_observed(taken=name_taken)
        self.family.pods_observed(select(self.job.spec, pods), agents, wall_s=self._services.wall_s())
        self._wake.now()

    def observe_taken_pods(self, taken: tuple[str, int] | None) -> None:
        """Take in to which PerseusJob the pods belong that this one asks for, and how many; None: to none."""
        if taken != self.job.taken_pods:
            self.job.taken_pods_observed(taken)
            self._wake.now()

    def observe_autoscalers(self, bodies: Sequence[Json], *, complete: bool) -> None:
        """Take in HorizontalPodAutoscalers of the namespace, as they are now, and whether these are all."""
        if self.family.autoscalers_observed(bodies, complete=complete):
            self._wake.now()

    def member(self, now: Now, *, settled: bool) -> Member | None:
        """See ``member_of``."""
        return member_of(self.job, self.family, now, settled=settled)

    def grant(self, share: Share | None) -> None:
        """Take in the job's share of a PowerBudget; None: no budget selects the job."""
        before = self.job.share
        self.job.share_granted(share)
        if share != before:
            self._wake.now()

    def publish_draw(self, draw: DrawStatus | None) -> None:
        """Write what the job draws into its status; None: no other replica needs to know."""
        if draw != self.job.draw:
            self.job.draw_published(draw)
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
        spec = self.job.spec if isinstance(self.job.spec, JobSpec) else None
        return JobView(self.ref, spec, self._status.stored, self.family.solved)

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
        services, job = self._services, self.job
        services.metrics.set_info(
            self.ref, self.labels.get(keys.LABEL_CLASS, ""), self.labels.get(keys.LABEL_MODEL, "")
        )
        now = Now(services.monotonic_s(), services.wall_s())
        if job.fenced is not None:  # a newer operator commands and reports; leases that this one holds expire
            return _NEVER_S
        with services.metrics.reconcile_seconds.time():
            decision = self.family.decide(now)
            self.family.act(decision)
            wake_at_s = min(decision.wake_at_s, self._command_nodes(decision, now), self._delete_in_time(now))
            report_s = self._status.report(job, self.family.report(decision), now)
            self._trace.reported(self._status.stored, job.generation)
        self._reconcile_duration_s = services.monotonic_s() - now.monotonic_s
        self._wake.looked(self._reconcile_duration_s)
        return max(0.0, min(wake_at_s - now.monotonic_s, report_s))

    def _command_nodes(self, decision: Decision, now: Now) -> float:
        """Start what the nodes need to hold what is intended; when to look again at the latest (monotonic)."""
        self._awaited.clear()
        if decision.intent is None:
            return now.monotonic_s + _NEVER_S
        wakes_s = [now.monotonic_s + _NEVER_S]
        for action, wake_at_s in list(next_actions(self.job.nodes, decision.intent, now_s=now.monotonic_s)):
            wakes_s.append(wake_at_s)
            if action is not None:
                self._start(action)
        return min(wakes_s)

    def _delete_in_time(self, now: Now) -> float:
        """Delete a job that has finished and whose time is over; when to look again at the latest (monotonic)."""
        job = self.job
        if job.spec is None:
            return math.inf
        due, wake_at_s = next_deletion(job.end, job.spec, now_s=now.monotonic_s, wall_s=now.wall_s)
        if due:
            job.end.deletion_asked(now.monotonic_s + _DELETE_AGAIN_S)
            self._spawn(self._delete())
        return wake_at_s

    def _start(self, action: NodeAction) -> None:
        if isinstance(action, AwaitRenewal):
            self._awaited.add(action.node)
            return
        node = self.job.nodes[action.node]
        if isinstance(action, Renew):
            node.renewal_started()
            self._spawn(self._renew(node, action), otherwise=lambda: self._renewed(node))
            return
        node.command_started(lease_stands=isinstance(action, Push | Select))
        name = type(action).__name__.lower()
        command = self._select if isinstance(action, Select) else self._nodes.command
        self._spawn(command(node, action), self._trace.step(name, **{"k8s.node.name": action.node}))

    async def _renew(self, node: Node, action: Renew) -> bool:
        """Renew a lease; whether the job must be looked at at once: something has changed, or waits for this."""
        before = node.leased_pods, node.clock, node.description, node.fault, self.family.schedule
        await self._nodes.command(node, action)
        after = node.leased_pods, node.clock, node.description, node.fault, self.family.schedule
        return after != before or node.fault is not None or node.name in self._awaited

    def _renewed(self, node: Node) -> None:
        """Look no later than the next renewal is due; in turn if the agent has described its node once more."""
        if node.description == 0 or self.family.schedules_wanted:
            self._wake.in_turn()
        self.next_reconcile_s = min(self.next_reconcile_s, node.renew_at_s)
        self._wake.at(node.renew_at_s)

    def _written(self) -> None:
        """The status is stored, and there is nothing more to report."""
        self._trace.reported(self._status.stored, self.job.generation)

    async def _select(self, node: Node, action: NodeCommand) -> bool:
        """Select on a node; whether the job must be looked at at once: the last of many has ended, or one failed."""
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
        """Reconcile no more, and forget the job: another replica serves it. Leases stay for that one where the job has
        pods.
        """
        await self.stop()
        await release_left_nodes(self.job, self._services)
        self._services.metrics.forget_job(self.ref)
        self._services.epochs.forget(self.ref.uid)

    async def release(self) -> None:
        """Reconcile no more, and return every GPU of the job to its default clocks: the object is deleted."""
        await self.stop()
        await release_job(self.job, self._services)
