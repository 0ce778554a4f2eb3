"""The operator without kopf: jobs, pods and agents as the cluster shows them, and one runner for each job.

Jobs and pods are also listed now and then, since a watch can miss the end of an object.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from perseus_core import keys
from perseus_operator.budgets.power_budgets import OtherJob, PowerBudgets
from perseus_operator.classes import energy_classes
from perseus_operator.clients.kube.client import KubeClient
from perseus_operator.clients.kube.interface import AgentPods
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.controller.advised import advised_replicas
from perseus_operator.controller.autoscalers import AUTOSCALERS_S, Autoscalers
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.controller.known_jobs import KnownJobs, ref_of
from perseus_operator.controller.set_straggler import Declared, StragglerRequest, set_straggler
from perseus_operator.controller.settings import Settings
from perseus_operator.controller.taken_pods import LOOK_S, observe_taken_pods
from perseus_operator.controller.view import JobView, PoolView, View
from perseus_operator.errors import KubeError
from perseus_operator.families.registry import FAMILIES, Kind
from perseus_operator.jobs.services import Services
from perseus_operator.objects.values import JobRef, Now, Pod
from perseus_operator.replicas.shard import shard_of
from perseus_operator.replicas.shards import Replica, Shards

JobKey = tuple[str, str]
"""Namespace and name of a PerseusJob."""

logger = logging.getLogger(__name__)

_KINDS: Final = "PerseusJobs and ServingPools"
_RESYNC_S: Final = 60.0
_STUCK_S: Final = 30.0
"""A reconciliation this late, or an event loop this silent, makes the liveness probe fail."""
_HEARTBEAT_S: Final = 1.0
_AGENTS_S: Final = 0.2
"""How often jobs are informed of agents that have come or gone."""
_SHARING_S: Final = 1.0
"""How often the shares of PowerBudgets are decided."""
_NEW_GARBAGE_S: Final = 60.0
_GARBAGE_S: Final = 600.0
"""How often garbage is sought among the objects of the last minute, and among all. Python by itself seeks it by number:
whenever there are 700 more, and among all whenever they are a quarter more. The reports of an iteration of thousands of
nodes are a hundred thousand, and leave no cycles: a third of a second for nothing, most likely at a straggler's."""
_UNOBSERVED_S: Final = 5.0
"""After a start, until the watch has delivered the PerseusJobs that exist."""


class Operator:
    """Routes what is observed to the runners."""

    def __init__(
        self,
        settings: Settings,
        kube: KubeClient,
        services: Services,
        replica: Replica,
        kinds: Sequence[Kind] = FAMILIES,
    ) -> None:
        self._settings = settings
        self._kinds = kinds
        self._kube = kube
        self.classes = energy_classes.EnergyClasses(kube, grace_s=_UNOBSERVED_S)
        self._services = services
        self._jobs = KnownJobs(settings.jobs_per_namespace)
        """Every PerseusJob as it was observed last: those of other replicas may become ours."""
        self._beyond: set[str] = set()
        """Jobs of which an event has said that they are beyond the budget of their namespace."""
        self._full: set[str] = set()
        """Namespaces of which one has said that of further jobs nothing is kept."""
        self._runners: dict[str, JobRunner] = {}
        """Of the jobs whose shards this replica holds."""
        self._pods: dict[str, Pod] = {}
        self._pods_of: dict[JobKey, dict[str, Pod]] = {}
        """The same pods by the job that they opted in to, so that a pod's event concerns its own job only."""
        self._observed_since_list: set[str] = set()
        """Pods that the watch has delivered since the latest list."""
        self._agents: dict[str, str] = {}
        """host:port by node, as the jobs know it."""
        self._agent_pods: AgentPods = {}
        """As the watch shows them."""
        self._agents_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._endings: set[asyncio.Task[None]] = set()
        """Of deleted jobs, which take as long as their agents need to answer, and of those of lost shards."""
        self._beat_s = time.monotonic()
        self.budgets = PowerBudgets(
            kube, self._runners.values, services.metrics, grace_s=settings.lease_ttl_s, others=self._other_jobs
        )
        self.shards = Shards(
            replica,
            services.epochs,
            monotonic_s=services.monotonic_s,
            gained=self._shards_gained,
            lost=self._shards_lost,
        )

    async def start(self) -> None:
        """List pods and budgets once, then go on in the background."""
        gc.disable()
        # What is cluster-wide an operator that serves some namespaces only may not read.
        restore = () if self._settings.namespace_list else (self.budgets.restore, self.classes.restore)
        for poll in (polls := (self._poll_pods, *restore)):
            with contextlib.suppress(KubeError):  # the polls go on, and log it
                await poll()
        watch = asyncio.create_task(self._every(self._settings.agent_poll_s, self._watch_agents, at_once=True))
        await self._pass_agents()  # jobs begin with the agents that there are
        with contextlib.suppress(KubeError):
            await self.shards.beat()  # what nobody holds is served at once
        self._tasks = [
            watch,
            asyncio.create_task(self.shards.run()),
            asyncio.create_task(self._every(_AGENTS_S, self._pass_agents)),
            asyncio.create_task(self._every(_HEARTBEAT_S, self._heartbeat)),
            asyncio.create_task(self._every(_NEW_GARBAGE_S, self._collect_new_garbage)),
            asyncio.create_task(self._every(_GARBAGE_S, self._collect_garbage)),
            asyncio.create_task(self._every(_SHARING_S, self._share)),
            asyncio.create_task(self._every(LOOK_S, self._observe_taken_pods)),
            asyncio.create_task(self._every(AUTOSCALERS_S, Autoscalers(self._kube, self._runners.values).observe)),
        ]
        if not self._settings.namespace_list:
            self._tasks.append(asyncio.create_task(self._every(energy_classes.INTERVAL_S, self._make_jobs)))
        self._tasks += [asyncio.create_task(self._every(_RESYNC_S, poll)) for poll in (self._poll_jobs, *polls)]

    async def close(self) -> None:
        """Stop. Leases stay: the next operator takes them over, or they run out. Deleted jobs are released first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(runner.stop() for runner in self._runners.values()))
        await self.shards.leave()
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self._services.agents.close()
        await self._kube.close()
        gc.enable()

    def observe_job(self, body: Mapping[str, Any], kind: str = keys.KIND) -> None:
        """Take in a PerseusJob, or a ServingPool, as it is now, and keep it so from the first time on."""
        ref = ref_of(body, kind)
        if body["metadata"].get("deletionTimestamp"):  # though a finalizer of others may hold it for long
            self.job_deleted(ref.uid)
            return
        new = ref.uid not in self._jobs
        if self._jobs.observe(body, kind):
            self._settle(ref.namespace)
        if new:
            self._pass_pods_of_name(ref.namespace, ref.name, ref.uid)
        if self._jobs.serves(ref.uid):
            self._serve(ref.uid)
        elif ref.uid in self._jobs:
            self._leave_out(ref.uid)
        elif ref.namespace not in self._full and self.shards.holds(ref.uid):
            self._full.add(ref.namespace)
            why = f"has more than {self._jobs.most_kept} {_KINDS}; nothing of others is kept, nor said but this"
            self._end(self._say_beyond(ref, why, " Once others are deleted, edit the job to have it served."))

    def _serve(self, uid: str) -> None:
        """Go on with a job as it was observed last, if it is this replica's and within its namespace's budget."""
        if not self._jobs.serves(uid) or not self.shards.holds(uid):
            return
        body = self._jobs.body(uid)
        runner = self._runners.get(uid)
        if runner is None:
            services = replace(self._services, grants=self.classes)
            runner = self._runners[uid] = JobRunner(ref_of(body), services, self._kinds)
            runner.start()
        if runner.observe(body):
            self.budgets.grant_share(runner)
            self._pass_pods(runner)

    def job_deleted(self, uid: str) -> None:
        """Take in that a PerseusJob or ServingPool is deleted: its GPUs go back to their default clocks."""
        metadata = self._jobs.body(uid)["metadata"] if uid in self._jobs else {}
        namespace = metadata.get("namespace", "")
        changed = self._jobs.forget(uid)
        self._beyond.discard(uid)
        runner = self._runners.pop(uid, None)
        if runner is not None:
            self._end(runner.release())
        if changed:
            self._settle(namespace)
        self._pass_pods_of_name(namespace, metadata.get("name", ""), uid)

    def _settle(self, namespace: str) -> None:
        """Serve the jobs of a namespace that are within its budget, and no others."""
        uids = self._jobs.of_namespace(namespace)
        served = [uid for uid in uids if self._jobs.serves(uid)]
        for uid in uids[len(served) :]:
            self._leave_out(uid)
        for uid in served:
            self._beyond.discard(uid)
            if uid not in self._runners:
                self._serve(uid)
        self._beyond &= set(self._jobs)
        if not self._jobs.is_full(namespace):
            self._full.discard(namespace)

    def _leave_out(self, uid: str) -> None:
        """Serve a job no more that is beyond the budget of its namespace, and say so once."""
        runner = self._runners.pop(uid, None)
        if runner is not None:
            self._end(runner.release())
        if uid not in self._beyond and self.shards.holds(uid):
            self._beyond.add(uid)
            why = f"has more than {self._jobs.most_served} {_KINDS}, and the oldest are served"
            self._end(self._say_beyond(ref_of(self._jobs.body(uid)), why))

    async def _say_beyond(self, ref: JobRef, why: str, then: str = "") -> None:
        message = (
            f"The job is not served: namespace {ref.namespace} {why}. Delete others, or have the administrator raise"
            f" operator.settings.jobsPerNamespace.{then}"
        )
        logger.warning("%s: %s", ref, message)
        try:
            await self._kube.post_event(ref, kind="Warning", reason="TooManyJobs", message=message)
        except KubeError as error:
            logger.warning("%s: event not posted: %s", ref, error)

    def _shards_gained(self, shards: frozenset[int]) -> None:
        self._services.metrics.shards.inc(len(shards))
        for uid in [uid for uid in self._jobs if shard_of(uid) in shards]:
            self._serve(uid)

    def _shards_lost(self, shards: frozenset[int]) -> None:
        self._services.metrics.shards.dec(len(shards))
        for uid in [uid for uid in self._runners if shard_of(uid) in shards]:
            self._end(self._runners.pop(uid).transfer())

    def _end(self, work: Coroutine[Any, Any, None]) -> None:
        ending = asyncio.create_task(work)
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def observe_pod(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """Take in a pod that carries, or carried, the opt-in label."""
        uid = body["metadata"]["uid"]
        self._observed_since_list.add(uid)
        before, now = self._pods.get(uid), None if deleted else pod_of(body)
        if before == now and getattr(before, "address", "") == getattr(now, "address", ""):
            return
        if before is not None:
            del self._pods[uid]
            siblings = self._pods_of[_key(before)]
            del siblings[uid]
            if not siblings:  # names of jobs come and go: what is left of one is nothing
                del self._pods_of[_key(before)]
        if now is not None:
            self._pods[uid] = now
            self._pods_of.setdefault(_key(now), {})[uid] = now
        for key in {_key(pod) for pod in (before, now) if pod is not None}:
            runner = self._runners.get(self._jobs.named(*key))
            if runner is not None:
                self._pass_pods(runner)

    async def views(self) -> list[View]:
        """Every job and pool as the web page may show it; a coroutine, so that threads must ask on the event loop."""
        shown: list[View] = [runner.view() for runner in self._jobs_served()]
        for uid, body in self._jobs.served():
            if body["kind"] == keys.POOL_KIND:
                shown.append(PoolView(ref_of(body), body))
            elif uid not in self._runners:
                shown.append(JobView(ref_of(body), None, body.get("status") or {}, None, elsewhere=True))
        return shown

    async def declare_straggler(self, request: StragglerRequest) -> Declared:
        """Declare a straggler. Raises like ``set_straggler``."""
        return await set_straggler(request, self._jobs_served(), self._kube)

    def advised(self, namespace: str, pool: str) -> int:
        """Replicas that are advised for a pool. Raises like ``advised_replicas``."""
        return advised_replicas(self._jobs, namespace, pool)

    async def namespace_labels(self, namespace: str) -> Mapping[str, str]:
        """Read the labels of a namespace. Raises KubeError."""
        return await self._kube.namespace_labels(namespace)

    def unhealthy(self) -> str | None:
        """What makes no progress, for the liveness probe; None: everything does."""
        now_s = time.monotonic()
        if now_s - self._beat_s > _STUCK_S:
            return f"the event loop has been silent for {now_s - self._beat_s:.0f} s"
        late = [str(r.ref) for r in list(self._runners.values()) if now_s - r.next_reconcile_s > _STUCK_S]
        return f"{len(late)} jobs are not reconciled, first {late[0]}" if late else None

    def _jobs_served(self) -> list[JobRunner]:
        return [runner for runner in self._runners.values() if runner.ref.kind == keys.KIND]

    def _pass_pods(self, runner: JobRunner) -> None:
        key = runner.ref.namespace, runner.ref.name
        taken = self._jobs.named(*key) not in ("", runner.ref.uid)
        pods = {} if taken else self._pods_of.get(key, {})
        runner.observe_pods(pods.values(), self._agents, name_taken=taken)

    def _pass_pods_of_name(self, namespace: str, name: str, changed: str) -> None:
        """A PerseusJob or a ServingPool has come or gone: whose the pods of its name are may have changed."""
        for uid in self._runners.keys() & self._jobs.same_name(namespace, name) - {changed}:
            self._pass_pods(self._runners[uid])

    def _pass_pods_to_all(self) -> None:
        for runner in self._runners.values():
            self._pass_pods(runner)

    async def _watch_agents(self) -> None:
        """Take in the agents' pods until the watch breaks."""
        try:
            async for pods in self._kube.watch_agents(self._settings.agent_namespace):
                self._agent_pods = pods
                self._agents_changed.set()
        finally:
            self._agents_changed.set()  # the first wait must not last until the next attempt

    async def _pass_agents(self) -> None:
        """Inform the jobs of agents that have come and gone: of many at once, as in a rollout, together."""
        await self._agents_changed.wait()
        self._agents_changed.clear()
        agents = dict(self._agent_pods.values())
        if agents != self._agents:
            await self._services.agents.forget(set(self._agents.values()) - set(agents.values()))
            self._agents = agents
            self._pass_pods_to_all()

    async def _poll_pods(self) -> None:
        self._observed_since_list.clear()
        listed = await self._kube.training_pods(self._settings.namespace_list)
        pods = {pod.uid: pod for pod in listed if pod.uid not in self._observed_since_list}
        # What the watch has delivered meanwhile is newer than the list.
        pods |= {uid: pod for uid, pod in self._pods.items() if uid in self._observed_since_list}
        if pods != self._pods:
            self._pods, self._pods_of = pods, {}
            for pod in pods.values():
                self._pods_of.setdefault(_key(pod), {})[pod.uid] = pod
            self._pass_pods_to_all()

    async def _poll_jobs(self) -> None:
        """Release the jobs whose deletion the watch has missed."""
        uids = set(self._jobs)  # asked before the list, which may not show what is created meanwhile
        for uid in uids - await self._kube.job_uids(self._settings.namespace_list):
            self.job_deleted(uid)

    async def _share(self) -> None:
        now = Now(self._services.monotonic_s(), self._services.wall_s())
        await self.budgets.tick(now, leads=self.shards.leads)

    def _other_jobs(self) -> list[OtherJob]:
        """The jobs of other replicas."""
        others = []
        for uid, body in self._jobs.served():
            if uid not in self._runners:
                metadata, spec = body["metadata"], body.get("spec") or {}
                place = metadata["namespace"], metadata["name"], metadata.get("labels") or {}
                others.append(OtherJob(*place, int(spec.get("priority") or 0), body.get("status") or {}))
        return others

    async def _make_jobs(self) -> None:
        if not self.shards.leads:
            return
        jobs, pools = self._jobs.of_kind(keys.KIND), self._jobs.of_kind(keys.POOL_KIND)
        now = Now(self._services.monotonic_s(), self._services.wall_s())
        await self.classes.tick(now, self._pods_of, jobs, pools)

    async def _observe_taken_pods(self) -> None:
        await observe_taken_pods(self._jobs_served(), self._jobs, self._pods_of)

    async def _collect_new_garbage(self) -> None:
        gc.collect(0)

    async def _collect_garbage(self) -> None:
        gc.collect()

    async def _heartbeat(self) -> None:
        self._beat_s = time.monotonic()

    async def _every(self, interval_s: float, work: Callable[[], Awaitable[None]], *, at_once: bool = False) -> None:
        while True:
            await asyncio.sleep(0 if at_once else interval_s)
            at_once = False
            try:
                await work()
            except KubeError as error:
                # Unknown is not empty: what was observed last stays.
                logger.warning("%s: %s", work.__name__.strip("_"), error)
            except Exception:  # one unforeseen answer must not end what goes on for the life of the operator
                logger.exception("%s: unexpected error; trying again", work.__name__.strip("_"))
                self._services.metrics.errors.inc()


def _key(pod: Pod) -> JobKey:
    return pod.namespace, pod.job
