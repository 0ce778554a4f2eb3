"""The API server, as an operator's client shows it: objects in memory, answers that are late, wrong or missing.

Each replica has a connection of its own. What is written is there for all at once; what a watch says comes later, may
come twice or be held back, and a list may be of a moment ago.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.doubles.lease_store import LeaseConnection, LeaseServer
from tests.doubles.memory_cluster import MemoryCluster
from tests.simulation.scheduler import Process, Scheduler

from perseus_core import keys
from perseus_operator.clients.kube.interface import AgentPods
from perseus_operator.controller.operator import Operator
from perseus_operator.errors import KubeConflict, KubeNotFound, KubeUnavailable
from perseus_operator.objects.values import JobRef, Json, Pod
from perseus_operator.replicas.shard import NO_NOTES, LeaseRecord, Notes


class ApiServer(MemoryCluster):
    """What is stored."""

    def __init__(self, scheduler: Scheduler, agents: AgentPods) -> None:
        super().__init__([], agents)
        self.scheduler = scheduler
        self.connections: list[ApiConnection] = []
        self.leases = LeaseServer()
        self.budgets: dict[str, Json] = {}
        """PowerBudgets by name."""
        self.past: list[tuple[int, dict[str, Json], list[Pod]]] = []
        """What lists would have shown, by time."""

    @property
    def pods(self) -> list[Pod]:
        """Training pods."""
        return self._pods

    def put_pods(self, pods: Iterable[Pod]) -> None:
        """The pods are these."""
        self._remember()
        before = {pod.uid: pod for pod in self._pods}
        self._pods = list(pods)
        now = {pod.uid: pod for pod in self._pods}
        for uid in before.keys() | now.keys():
            if before.get(uid) != now.get(uid):
                self.tell(lambda operator, uid=uid: _observe_pod(operator, now.get(uid), before.get(uid)))

    def apply(self, namespace: str, name: str, uid: str, spec: Json, kind: str = keys.KIND) -> None:
        """Create a PerseusJob or a ServingPool, or change its spec."""
        known = self.jobs.get(uid)
        generation = known["metadata"]["generation"] + 1 if known else 1
        metadata = {"namespace": namespace, "name": name, "uid": uid, "generation": generation}
        self._put({**(known or {}), "kind": kind, "metadata": metadata, "spec": spec})

    def apply_budget(self, name: str, spec: Json) -> None:
        """An administrator creates a PowerBudget, or changes its spec."""
        known = self.budgets.get(name)
        generation = known["metadata"]["generation"] + 1 if known else 1
        uid = known["metadata"]["uid"] if known else f"uid-{name}-{self._version}"
        self._put_budget(
            {**(known or {}), "metadata": {"name": name, "uid": uid, "generation": generation}, "spec": spec}
        )

    def delete_budget(self, name: str) -> None:
        """He deletes it."""
        gone = self.budgets.pop(name, None)
        if gone is not None:
            self.tell(lambda operator: operator.budgets.deleted(gone))

    async def power_budgets(self) -> list[Json]:
        return list(json.loads(json.dumps(list(self.budgets.values()))))

    async def write_budget_status(self, name: str, uid: str, status: Json) -> str:
        known = self.budgets.get(name)
        if known is None or known["metadata"]["uid"] != uid:
            raise KubeNotFound(name)
        return self._put_budget({**known, "status": json.loads(json.dumps(status))})

    async def energy_classes(self) -> list[Json]:
        return []

    def _put_budget(self, budget: Json) -> str:
        self._version += 1
        budget["metadata"] = {**budget["metadata"], "resourceVersion": str(self._version)}
        self.budgets[budget["metadata"]["name"]] = budget
        text = json.dumps(budget)
        self.tell(lambda operator: operator.budgets.observe(json.loads(text)))
        return str(self._version)

    def delete(self, uid: str) -> None:
        """Delete a PerseusJob or a ServingPool."""
        self._remember()
        if self.jobs.pop(uid, None) is not None:
            self.tell(lambda operator: operator.job_deleted(uid))

    def _put(self, job: Json) -> str:
        self._remember()
        self._version += 1
        job["metadata"] = {**job["metadata"], "resourceVersion": str(self._version)}
        self.jobs[job["metadata"]["uid"]] = job
        text = json.dumps(job)
        self.tell(lambda operator: operator.observe_job(json.loads(text), job["kind"]))
        return str(self._version)

    def tell(self, event: Callable[[Operator], None]) -> None:
        """All watches say it."""
        for connection in self.connections:
            connection.tell(event)

    def _remember(self) -> None:
        self.past.append((self.scheduler.now_ns, dict(self.jobs), list(self._pods)))
        del self.past[:-64]

    def as_of(self, ns: int) -> tuple[dict[str, Json], list[Pod]]:
        """Jobs and pods at a time that is not long ago."""
        for at_ns, jobs, pods in self.past:
            if at_ns > ns:
                return jobs, pods
        return self.jobs, self._pods


def _observe_pod(operator: Operator, now: Pod | None, before: Pod | None) -> None:
    pod = now or before
    assert pod is not None
    operator.observe_pod(body_of(pod), deleted=now is None)


def body_of(pod: Pod) -> Json:
    """A pod as the API server shows it."""
    return {
        "metadata": {"uid": pod.uid, "namespace": pod.namespace, "name": pod.name, "labels": dict(pod.labels)},
        "spec": {"nodeName": pod.node, "containers": [{"name": "main"}]},
        "status": {"phase": "Running"},
    }


@dataclass
class ApiFaults:
    """What is wrong between one replica and the API server."""

    away: bool = False
    """Every request fails."""
    failing: float = 0.0
    """Of requests, a share: 429, 500, or an answer that is not JSON; of some the write was done."""
    silent: bool = False
    """Watches say nothing."""
    repeating: float = 0.0
    """Of events, a share that comes twice."""
    stale_s: float = 0.0
    """How old lists are."""


class ApiConnection:
    """One replica's ``Kube`` and store of Leases."""

    def __init__(self, server: ApiServer, process: Process, faults: ApiFaults) -> None:
        self.server = server
        self.faults = faults
        self.operator: Operator | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self._process = process
        self._leases = LeaseConnection(server.leases)
        self._watch_ns = 0
        self._held: list[Callable[[Operator], None]] = []
        server.connections.append(self)

    # ------------------------------------------------------------------------------------------------ watches

    def tell(self, event: Callable[[Operator], None]) -> None:
        """The watch says something, in order, and later."""
        scheduler = self.server.scheduler
        if not self._process.alive:
            return
        if self.faults.silent:
            self._held.append(event)
            return
        times = 2 if scheduler.random.random() < self.faults.repeating else 1
        for _ in range(times):
            delay_ns = int(scheduler.random.uniform(0.001, 0.05) * 1e9)
            self._watch_ns = max(self._watch_ns + 1, scheduler.now_ns + delay_ns)
            scheduler.at(self._watch_ns, lambda: self._observe(event), self._process)

    def relist(self) -> None:
        """The watch is back after a 410: everything is listed again. What was deleted meanwhile nobody says."""
        self._held.clear()
        for job in list(self.server.jobs.values()):
            text, kind = json.dumps(job), job["kind"]
            self.tell(lambda operator, text=text, kind=kind: operator.observe_job(json.loads(text), kind))
        for budget in self.server.budgets.values():
            self.tell(lambda operator, budget=budget: operator.budgets.observe(json.loads(json.dumps(budget))))
        for pod in self.server.pods:
            self.tell(lambda operator, pod=pod: operator.observe_pod(body_of(pod), deleted=False))

    def _observe(self, event: Callable[[Operator], None]) -> None:
        if self.operator is not None and self.loop is not None:
            operator = self.operator
            self.loop.call_soon(lambda: event(operator))

    # ------------------------------------------------------------------------------------------------ requests

    async def _reach(self, *, write: bool = False) -> bool:
        """Wait for the server. Returns whether the answer of a write is lost after it."""
        scheduler = self.server.scheduler
        await asyncio.sleep(scheduler.random.uniform(0.001, 0.03))
        if self.faults.away:
            await asyncio.sleep(scheduler.random.uniform(0, 1))
            raise KubeUnavailable("503: the API server does not answer")
        if scheduler.random.random() < self.faults.failing:
            if write and scheduler.random.random() < 0.4:
                return True
            raise KubeUnavailable(scheduler.random.choice(("429", "500", "the answer is not JSON")))
        return False

    def __getattr__(self, name: str) -> Any:
        """Requests for stored objects: ``MemoryCluster``'s, behind the network."""
        method = getattr(self.server, name)
        write = name.startswith(("write", "annotate", "delete", "post"))

        async def request(*args: Any, **named: Any) -> Any:
            lost = await self._reach(write=write)
            answer = await method(*args, **named)
            if lost:
                raise KubeUnavailable("the answer was lost")
            return answer

        return request

    async def list_profiles(self, *args: Any, **named: Any) -> AsyncIterator[Any]:
        await self._reach()
        async for profile in self.server.list_profiles(*args, **named):
            yield profile

    async def write_status(self, job: JobRef, status: Json) -> str:
        lost = await self._reach(write=True)
        version = await self.server.write_status(job, status)
        if lost:
            raise KubeUnavailable("the answer was lost")
        return version

    async def job_uids(self, namespaces: Iterable[str]) -> set[str]:
        await self._reach()
        jobs, _ = self.server.as_of(self.server.scheduler.now_ns - int(self.faults.stale_s * 1e9))
        return set(jobs) if self.faults.stale_s else set(self.server.jobs)

    async def training_pods(self, namespaces: Iterable[str]) -> list[Pod]:
        await self._reach()
        _, pods = self.server.as_of(self.server.scheduler.now_ns - int(self.faults.stale_s * 1e9))
        return list(pods) if self.faults.stale_s else list(self.server.pods)

    async def autoscalers(self, namespace: str) -> tuple[list[Json], bool]:
        """There are none; the answer is not late either, so that seeds stay what they were."""
        return [], True

    async def watch_agents(self, namespace: str) -> AsyncIterator[AgentPods]:
        await self._reach()
        yield self.server._agents
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is open."""

    # ------------------------------------------------------------------------------------------------ Leases

    async def leases(self) -> dict[str, LeaseRecord]:
        await self._reach()
        return await self._leases.leases()

    async def shard(self, shard: int) -> LeaseRecord:
        await self._reach()
        return await self._leases.shard(shard)

    async def next_epoch(self, least: int = 1) -> int:
        await self._reach()
        return await self._leases.next_epoch(least)

    async def write(self, known: LeaseRecord, holder: str, epoch: int = 0, notes: Notes = NO_NOTES) -> LeaseRecord:
        lost = await self._reach(write=True)
        if self.server.scheduler.random.random() < self.faults.failing / 2:
            raise KubeConflict(f"{known.name}: the object has been modified")
        written = await self._leases.write(known, holder, epoch, notes)
        if lost:
            raise KubeUnavailable("the answer was lost")
        return written
