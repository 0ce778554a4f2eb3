"""The Kubernetes API of an operator in memory, for fleets: PerseusJobs, pods, agents and what the operator writes.

What is written comes back to the operator as a watch would bring it, through JSON. Requests and bytes are counted by
what they are for.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tests.doubles.stored_objects import StoredObjects

from perseus_operator.clients.kube.interface import AgentPods
from perseus_operator.errors import KubeNotFound
from perseus_operator.objects.values import ConfigMap, JobRef, Json, Pod, StoredObject


class MemoryCluster(StoredObjects):
    """One namespace of jobs, and the agents' one."""

    def __init__(self, pods: list[Pod], agents: AgentPods) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.jobs: dict[str, Json] = {}
        """PerseusJobs by UID."""
        self.watch: Callable[[Mapping[str, Any]], None] = lambda _: None
        """Is given every PerseusJob that has changed."""
        self._pods, self._agents = pods, agents
        self._version = 0

    def apply(self, namespace: str, name: str, uid: str, spec: Json) -> None:
        """Create a PerseusJob, or change its spec."""
        known = self.jobs.get(uid)
        generation = known["metadata"]["generation"] + 1 if known else 1
        metadata = {"namespace": namespace, "name": name, "uid": uid, "generation": generation}
        self._put({**(known or {}), "metadata": metadata, "spec": spec})

    def ready(self) -> int:
        """How many jobs are Ready."""
        return sum(
            any(c["type"] == "Ready" and c["status"] == "True" for c in job.get("status", {}).get("conditions", ()))
            for job in self.jobs.values()
        )

    async def read_config_map(self, namespace: str, name: str) -> ConfigMap:
        found = await super().read_config_map(namespace, name)
        self._count("read profile", dict(found.data))
        return found

    async def read_frontier(self, job: JobRef) -> StoredObject:
        self.requests["read frontier"] += 1
        found = await super().read_frontier(job)
        self.bytes["read frontier"] += len(json.dumps(found.spec))
        return replace(found, owners=frozenset({job.uid}))

    async def write_frontier(self, job: JobRef, spec: Json) -> None:
        self._count("write frontier", spec)
        await super().write_frontier(job, spec)

    async def write_status(self, job: JobRef, status: Json) -> str:
        return self._change("write status", job, {"status": status})

    async def annotate(self, job: JobRef, annotations: Mapping[str, str | None], *, version: str | None = None) -> str:
        known = self._job(job)["metadata"]
        merged = {**known.get("annotations", {}), **annotations}
        changed = {**known, "annotations": {k: v for k, v in merged.items() if v is not None}}
        return self._change("annotate", job, {"metadata": changed})

    async def post_event(self, job: JobRef, *, kind: str, reason: str, message: str) -> None:
        self._count("post event", [str(job), kind, reason, message])

    async def job_uids(self, namespaces: Iterable[str]) -> set[str]:
        self._count("list jobs", list(self.jobs))
        return set(self.jobs)

    async def watch_agents(self, namespace: str) -> AsyncIterator[AgentPods]:
        yield self._agents
        await asyncio.Event().wait()

    async def training_pods(self, namespaces: Iterable[str]) -> list[Pod]:
        self._count("list pods", [pod.uid for pod in self._pods])
        return list(self._pods)

    async def autoscalers(self, namespace: str) -> tuple[list[Json], bool]:
        return [], True

    async def close(self) -> None:
        """Nothing is open."""

    def _job(self, job: JobRef) -> Json:
        if job.uid not in self.jobs:
            raise KubeNotFound(job.name)
        return self.jobs[job.uid]

    def _change(self, cause: str, job: JobRef, changes: Json) -> str:
        text = json.dumps(changes)
        self.requests[cause] += 1
        self.bytes[cause] += len(text)
        return self._put({**self._job(job), **json.loads(text)})

    def _put(self, job: Json) -> str:
        self._version += 1
        job["metadata"] = {**job["metadata"], "resourceVersion": str(self._version)}
        self.jobs[job["metadata"]["uid"]] = job
        asyncio.get_running_loop().call_soon(self.watch, job)
        return str(self._version)

    def _count(self, cause: str, said: Any) -> None:
        self.requests[cause] += 1
        self.bytes[cause] += len(json.dumps(said))
