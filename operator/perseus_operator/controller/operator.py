"""The whole operator, without the framework: jobs, pods and agents as the cluster shows them, one runner for each job.

``handlers`` (kopf) calls ``observe_job``, ``observe_pod`` and ``keep``; ``__main__`` makes one and closes it. Agents
and pods are also listed now and then, since a watch can miss the end of an object.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

from perseus_operator.clients.kube import KubeClient, pod_of
from perseus_operator.controller import set_straggler
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.controller.power_budgets import Budgets
from perseus_operator.controller.services import Services
from perseus_operator.controller.view import JobView
from perseus_operator.errors import KubeError
from perseus_operator.planning.planner import Now
from perseus_operator.planning.state import JobRef, Pod
from perseus_operator.settings import Settings

JobKey = tuple[str, str]
"""Namespace and name of a PerseusJob."""

logger = logging.getLogger(__name__)

_POD_RESYNC_S: Final = 60.0
_STUCK_S: Final = 30.0
"""A runner this late, or an event loop this silent, makes the liveness probe fail."""
_HEARTBEAT_S: Final = 1.0
_SHARING_S: Final = 1.0
"""How often PowerBudgets are shared anew."""


class Operator:
    """Routes what is seen to the runners."""

    def __init__(self, settings: Settings, kube: KubeClient, services: Services) -> None:
        self._settings = settings
        self._kube = kube
        self._services = services
        self._runners: dict[str, JobRunner] = {}
        self._pods: dict[str, Pod] = {}
        self._pods_of: dict[JobKey, dict[str, Pod]] = {}
        """The same pods by the job that they opted in to: a pod's event costs what its own job costs."""
        self._heard_of: set[str] = set()
        """Pods that the watch has told of since they were listed last."""
        self._agents: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._beat_s = time.monotonic()
        self.budgets = Budgets(kube, self._runners.values, services.metrics, grace_s=settings.lease_ttl_s)

    async def start(self) -> None:
        """List agents, pods and budgets once, then go on listing in the background."""
        # A budget is the site's: who serves some namespaces alone may not see it.
        recall = () if self._settings.namespace_list else (self.budgets.recall,)
        for poll in (self._poll_agents, self._poll_pods, *recall):
            with contextlib.suppress(KubeError):  # said in the log; the polls go on
                await poll()
        self._tasks = [
            asyncio.create_task(self._every(self._settings.agent_poll_s, self._poll_agents)),
            asyncio.create_task(self._every(_POD_RESYNC_S, self._poll_pods)),
            asyncio.create_task(self._every(_HEARTBEAT_S, self._heartbeat)),
            asyncio.create_task(self._every(_SHARING_S, self._share)),
        ]

    async def close(self) -> None:
        """Stop. Leases stay: the next operator takes them over, or they run out."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._services.agents.close()
        await self._kube.close()

    def observe_job(self, body: Mapping[str, Any]) -> None:
        """A PerseusJob as it is now."""
        ref = _ref(body)
        if body["metadata"].get("deletionTimestamp") and ref.uid not in self._runners:
            return
        runner = self._runner(ref)
        if runner.observe(body):
            self.budgets.place(runner)
            self._place(runner)

    def job_gone(self, body: Mapping[str, Any]) -> None:
        """A PerseusJob that exists no more; perhaps somebody took its finalizer away."""
        runner = self._runners.get(_ref(body).uid)
        if runner is not None:
            runner.gone.set()

    async def keep(
        self, body: Mapping[str, Any], stopped: Coroutine[Any, Any, None], is_deleted: Callable[[], bool]
    ) -> None:
        """Keep a job as it says until ``stopped``; then, if it was deleted, give its clocks back."""
        ref = _ref(body)
        runner = self._runner(ref)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(runner.run()),
            asyncio.create_task(runner.gone.wait()),
            asyncio.create_task(stopped),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._runners.pop(ref.uid, None)
        if is_deleted() or runner.gone.is_set():
            await runner.release()

    def observe_pod(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        """A pod that carries the opt-in label."""
        uid = body["metadata"]["uid"]
        self._heard_of.add(uid)
        before, now = self._pods.get(uid), None if deleted else pod_of(body)
        if before == now:
            return
        if before is not None:
            del self._pods[uid]
            del self._pods_of[_key(before)][uid]
        if now is not None:
            self._pods[uid] = now
            self._pods_of.setdefault(_key(now), {})[uid] = now
        affected = {_key(pod) for pod in (before, now) if pod is not None}
        for runner in self._runners.values():
            if (runner.ref.namespace, runner.ref.name) in affected:
                self._place(runner)

    async def views(self) -> list[JobView]:
        """Every job as the web page may see it; a coroutine, so that threads must ask on the event loop."""
        return [runner.view() for runner in self._runners.values()]

    async def tell(self, request: set_straggler.Request) -> tuple[JobRef, str]:
        """Somebody says that a pipeline is slow. Raises like ``telling.set_straggler``."""
        return await set_straggler.set_straggler(request, self._runners.values(), self._kube, self._services.epoch)

    def unhealthy(self) -> str | None:
        """What does not make progress; None: all well."""
        now_s = time.monotonic()
        if now_s - self._beat_s > _STUCK_S:
            return f"the event loop has been silent for {now_s - self._beat_s:.0f} s"
        late = [str(r.ref) for r in list(self._runners.values()) if now_s - r.next_thought_s > _STUCK_S]
        return f"{len(late)} jobs wait for a thought, first {late[0]}" if late else None

    def _runner(self, ref: JobRef) -> JobRunner:
        runner = self._runners.get(ref.uid)
        if runner is None:
            runner = self._runners[ref.uid] = JobRunner(ref, self._services)
        return runner

    def _place(self, runner: JobRunner) -> None:
        own = self._pods_of.get((runner.ref.namespace, runner.ref.name), {})
        runner.place(own.values(), self._agents)

    def _place_all(self) -> None:
        for runner in self._runners.values():
            self._place(runner)

    async def _poll_agents(self) -> None:
        agents = await self._kube.agent_addresses(self._settings.agent_namespace)
        if agents != self._agents:
            await self._services.agents.forget(set(self._agents.values()) - set(agents.values()))
            self._agents = agents
            self._place_all()

    async def _poll_pods(self) -> None:
        self._heard_of.clear()
        listed = await self._kube.training_pods(self._settings.namespace_list)
        pods = {pod.uid: pod for pod in listed if pod.uid not in self._heard_of}
        # What the watch has told meanwhile is newer than the list.
        pods |= {uid: pod for uid, pod in self._pods.items() if uid in self._heard_of}
        if pods != self._pods:
            self._pods, self._pods_of = pods, {}
            for pod in pods.values():
                self._pods_of.setdefault(_key(pod), {})[pod.uid] = pod
            self._place_all()

    async def _share(self) -> None:
        await self.budgets.tick(Now(self._services.monotonic_s(), self._services.wall_s()))

    async def _heartbeat(self) -> None:
        self._beat_s = time.monotonic()

    async def _every(self, interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await work()
            except KubeError as error:
                # Unknown is not empty: what was seen last stays.
                logger.warning("%s: %s", work.__name__.strip("_"), error)


def _key(pod: Pod) -> JobKey:
    return pod.namespace, pod.job


def _ref(body: Mapping[str, Any]) -> JobRef:
    metadata = body["metadata"]
    return JobRef(metadata["namespace"], metadata["name"], metadata["uid"])
