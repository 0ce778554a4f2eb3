"""EnergyClasses of the cluster: makes the PerseusJobs of workloads that opted in to one, and the ServingPools of
servers, and writes their status.

A pod says its class and the name of its PerseusJob by labels, which the webhook writes as the pod is created; a pod of
a server says by one more that it is to have a ServingPool. While pods run for which neither exists, it is made; one
that a user wrote is there first, and stays as it is. Only the first spec comes from the class: what is to change later
is changed in the PerseusJob. Below, a job is either.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from perseus_core import keys
from perseus_operator.api.energy_class import (
    ClassCondition,
    ClassFigures,
    ClassReason,
    ClassSpec,
    job_of_class,
    pool_of_class,
    refusal,
)
from perseus_operator.api.schema import dump
from perseus_operator.api.serving.spec import Server
from perseus_operator.api.workload import ServerKind
from perseus_operator.classes.pool_owners import owners_with, pod_of_new_owner, server_of_class
from perseus_operator.classes.refusals import pod_refusal
from perseus_operator.clients.kube.cluster_object import ClusterObject, ClusterObjects
from perseus_operator.errors import InvalidSpec, KubeConflict, KubeError, KubeForbidden, KubeNotFound
from perseus_operator.nodes.workloads import PodWorkload, preset_of, workload_of
from perseus_operator.objects.values import JobRef, Json, Now, Owner, Pod, PodGroup

JobKey = tuple[str, str]
"""Namespace and name of a PerseusJob or ServingPool."""

logger = logging.getLogger(__name__)

_RETRY_S: Final = (5.0, 10.0, 20.0, 40.0, 60.0)
"""After one attempt to make a job, two, ...; the last repeats. A change of any EnergyClass ends the wait."""
INTERVAL_S: Final = 0.25
"""Between two goes: so long a pod waits at most before its job is made."""
_AT_ONCE: Final = 4
"""Jobs made in one go; more wait for the next. Namespaces take turns. Sixteen a second are about what an API server
takes beside its other work."""
_LOOKED_AT: Final = 500
"""Jobs that are looked at in one step of the event loop."""


class ClassStore(Protocol):
    """What is needed of the API server."""

    async def energy_classes(self) -> list[Json]:
        """All of them."""
        ...

    async def write_class_status(self, name: str, uid: str, status: Json) -> str:
        """Store this whole status; the object's version after it."""
        ...

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Labels of a namespace."""
        ...

    async def pod_group(self, namespace: str, group: PodGroup) -> Owner:
        """The PodGroup that a pod names. Raises KubeNotFound."""
        ...

    async def create_job(self, job: JobRef, labels: Mapping[str, str], spec: Json, owner: Owner) -> None:
        """Create a PerseusJob or ServingPool."""
        ...

    async def set_owners(self, job: JobRef, owners: Sequence[Json], *, version: str) -> str:
        """Replace the owners of a ServingPool of this version; its version after it."""
        ...

    async def warn(self, namespace: str, about: Owner, *, reason: str, message: str) -> None:
        """Post a warning on an object of a namespace."""
        ...


@dataclass
class _Attempts:
    """How often a job was not made for a pod, until when no further attempt is made (monotonic), and why not."""

    pod: Pod
    failed: int = 0
    retry_at_s: float = 0.0
    refusal: str = ""
    """As the pod's event says; empty: there was none."""

    def begun(self, now_s: float) -> None:
        """One more attempt is made; the next one is due if nothing has come of it."""
        self.retry_at_s = now_s + _RETRY_S[min(self.failed, len(_RETRY_S) - 1)]
        self.failed += 1

    def due(self) -> None:
        """What stood in the way may be gone."""
        self.failed, self.retry_at_s = 0, 0.0


class EnergyClasses(ClusterObjects[ClusterObject[ClassSpec]]):
    """All EnergyClasses of the cluster."""

    def __init__(self, kube: ClassStore, *, grace_s: float) -> None:
        """``grace_s``: how long after a start no job is made, as those that exist may not be observed yet."""
        super().__init__(partial(ClusterObject[ClassSpec], keys.CLASS_KIND), ClassSpec)
        self._kube = kube
        self._grace_s = grace_s
        self._settled_s: float | None = None
        self._attempts: dict[JobKey, _Attempts] = {}
        """Of the jobs that pods wait for."""
        self._turns: dict[str, int] = {}
        """When each namespace whose pods wait had its last turn, by count."""
        self._turn = 0

    async def _list(self) -> list[Json]:
        return await self._kube.energy_classes()

    async def _send(self, name: str, uid: str, status: Json) -> str:
        return await self._kube.write_class_status(name, uid, status)

    def _spec_changed(self) -> None:
        for attempts in self._attempts.values():  # what was refused may be right now
            attempts.due()

    def serves(self, energy_class: str) -> bool:
        """Whether ServingPools are made of a class; not of one that does not exist."""
        stored = self._objects.get(energy_class)
        return stored is not None and stored.spec is not None and stored.spec.serving is not None

    async def shared_namespace(self, energy_class: str, namespace: str) -> str | None:
        """See ``services.ProfileGrants``."""
        stored = self._objects.get(energy_class)
        if stored is None or stored.spec is None or stored.spec.profiles_from is None:
            return None
        not_for_it = refusal(energy_class, stored.spec, namespace, await self._labels(stored.spec, namespace))
        return None if not_for_it else stored.spec.profiles_from.namespace

    async def tick(
        self,
        now: Now,
        pods_of: Mapping[JobKey, Mapping[str, Pod]],
        jobs: Mapping[JobKey, Mapping[str, Any]],
        pools: Mapping[JobKey, Mapping[str, Any]],
    ) -> None:
        """Make the jobs that are missing, and write what has changed. Call it every `INTERVAL_S`.

        Args:
            now: the time.
            pods_of: pods by UID, of each job that they name.
            jobs: the PerseusJobs that exist, as ``KnownJobs`` keeps them.
            pools: the ServingPools that exist.
        """
        if self._settled_s is None:
            self._settled_s = now.monotonic_s + self._grace_s
        if now.monotonic_s >= self._settled_s:
            due = await self._due(now, pods_of, jobs, pools)
            await asyncio.gather(*(self._make(key, pod, pools.get(key), now) for key, pod in due))
        jobs_of, pools_of = _by_class(jobs), _by_class(pools)
        for energy_class in list(self._objects.values()):
            figures = ClassFigures(jobs=jobs_of[energy_class.name], pools=pools_of[energy_class.name])
            await self._write_status(energy_class, [_accepted(energy_class)], dump(figures), now)

    async def _due(
        self,
        now: Now,
        pods_of: Mapping[JobKey, Mapping[str, Pod]],
        jobs: Mapping[JobKey, Mapping[str, Any]],
        pools: Mapping[JobKey, Mapping[str, Any]],
    ) -> list[tuple[JobKey, Pod]]:
        """The jobs to make now, or to give one more owner: one of each namespace, then the next of each, those first
        whose last turn is longest ago. So one with any number of pods that are refused delays no other.
        """
        due, missing = dict[str, deque[tuple[JobKey, Pod]]](), set[JobKey]()
        for number, (key, pods) in enumerate(list(pods_of.items()), 1):
            if number % _LOOKED_AT == 0:
                await asyncio.sleep(0)
            if key in jobs:
                continue
            pool, attempts = pools.get(key), self._attempts.get(key)
            pod = _opted_in(pods.values()) if pool is None else pod_of_new_owner(pool, pods.values())
            if pool is not None and pod is None:
                continue
            missing.add(key)
            waits = attempts is not None and attempts.pod == pod and attempts.retry_at_s > now.monotonic_s
            if pod is not None and not waits:
                due.setdefault(key[0], deque()).append((key, pod))
        for gone in self._attempts.keys() - missing:
            del self._attempts[gone]
        for absent in self._turns.keys() - {namespace for namespace, _ in missing}:
            del self._turns[absent]
        chosen = list[tuple[JobKey, Pod]]()
        while due and len(chosen) < _AT_ONCE:
            for namespace in sorted(due, key=lambda name: self._turns.get(name, 0))[: _AT_ONCE - len(chosen)]:
                chosen.append(due[namespace].popleft())
                self._turn += 1
                self._turns[namespace] = self._turn
                if not due[namespace]:
                    del due[namespace]
        return chosen

    async def _make(self, key: JobKey, pod: Pod, pool: Mapping[str, Any] | None, now: Now) -> None:
        """Make the job of a pod, or say on the pod why not; a pool that is there goes with what made the pod, too."""
        attempts = self._attempts.get(key)
        if attempts is None or attempts.pod != pod:
            said = attempts.refusal if attempts is not None else ""
            attempts = self._attempts[key] = _Attempts(pod, refusal=said)
        attempts.begun(now.monotonic_s)
        namespace, name = key
        try:
            if pool is not None:
                metadata = pool["metadata"]
                ref = JobRef(namespace, name, metadata["uid"], keys.POOL_KIND)
                await self._kube.set_owners(ref, owners_with(pool, pod), version=metadata["resourceVersion"])
                return
            server = server_of_class(pod)
            workload = server or workload_of(pod.labels, pod.owner)
            owner = workload.owner if workload else await self._owner(pod)
            why = await self._refusal(pod)
            if why:
                await self._refuse(key, pod, owner, why, attempts)
                return
            spec = self._objects[pod.energy_class].spec
            assert spec is not None
            if server is not None:
                kind, body = keys.POOL_KIND, _pool(spec, server)
            else:
                reference = None if workload is None else (workload.kind, workload.name)
                kind, body = keys.KIND, job_of_class(spec, reference, pod.profile)
            labels = {label: pod.labels[label] for label in (keys.LABEL_CLASS, keys.LABEL_MODEL) if label in pod.labels}
            await self._kube.create_job(JobRef(namespace, name, "", kind), labels, body, owner)
            logger.info("%s/%s: %s made of EnergyClass %s for pod %s", *key, kind, pod.energy_class, pod.name)
        except KubeConflict:
            pass  # it exists, or was changed: the watch is late
        except KubeError as error:
            logger.warning("%s/%s: not made of EnergyClass %s: %s", namespace, name, pod.energy_class, error)

    async def _owner(self, pod: Pod) -> Owner:
        """With what goes the job of a pod whose workload is of no kind that is known here."""
        if pod.group is not None:
            try:
                return await self._kube.pod_group(pod.namespace, pod.group)
            except (KubeNotFound, KubeForbidden) as error:  # the pod is scheduled all the same, or does not run
                logger.warning("%s/%s: PodGroup %s: %s", pod.namespace, pod.name, pod.group.name, error)
        return pod.owner or _reference(pod)

    async def _refusal(self, pod: Pod) -> str:
        """Why a pod's class cannot be applied; empty: it can."""
        stored = self._objects.get(pod.energy_class)
        spec = None if stored is None else stored.spec or InvalidSpec(stored.fault)
        return pod_refusal(pod, spec, await self._labels(spec, pod.namespace))

    async def _labels(self, spec: ClassSpec | InvalidSpec | None, namespace: str) -> Mapping[str, str]:
        """Labels of a namespace, if the class chooses by them."""
        if not isinstance(spec, ClassSpec) or spec.namespace_selector is None:
            return {}
        return await self._kube.namespace_labels(namespace)

    async def _refuse(self, key: JobKey, pod: Pod, owner: Owner, why: str, attempts: _Attempts) -> None:
        """Say it once on the pod, and on its workload, where its user looks first."""
        if attempts.refusal == why:
            return
        does = "trains" if server_of_class(pod) is None else "serves"
        message = f"The pod {does} at default clocks: {why}."
        for about in dict.fromkeys((_reference(pod), owner)):
            await self._kube.warn(pod.namespace, about, reason=ClassReason.NOT_APPLIED.value, message=message)
        logger.warning("%s/%s: pod %s: %s", *key, pod.name, why)
        attempts.refusal = why


@dataclass(frozen=True)
class _Statement:
    """A condition of an EnergyClass."""

    type: ClassCondition
    status: bool | None
    reason: ClassReason
    message: str


def _accepted(energy_class: ClusterObject[ClassSpec]) -> _Statement:
    if energy_class.refusal:
        return _Statement(ClassCondition.ACCEPTED, False, ClassReason.SPEC_INVALID, energy_class.refusal)
    return _Statement(ClassCondition.ACCEPTED, True, ClassReason.ACCEPTED, "The manifest is valid.")


def _pool(spec: ClassSpec, server: PodWorkload) -> Json:
    assert spec.serving is not None
    assert isinstance(server.kind, ServerKind)
    workload = Server(api_version=preset_of(server.kind).group, kind=server.kind, name=server.name)
    return pool_of_class(spec.serving, workload, spec.priority)


def _by_class(jobs: Mapping[JobKey, Mapping[str, Any]]) -> Counter[str]:
    """How many jobs say that they were made of each class."""
    return Counter((job["metadata"].get("labels") or {}).get(keys.LABEL_CLASS, "") for job in jobs.values())


def _reference(pod: Pod) -> Owner:
    return Owner("v1", "Pod", pod.name, pod.uid)


def _opted_in(pods: Iterable[Pod]) -> Pod | None:
    """The oldest of these pods that runs and names a class; None: none does."""
    running = [pod for pod in pods if pod.energy_class and not pod.succeeded and not pod.failure]
    return min(running, key=lambda pod: (pod.created, pod.name), default=None)
