"""A namespace with pods whose EnergyClasses are applied, and the API server's objects that this needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from perseus_core import keys
from perseus_operator.classes.energy_classes import EnergyClasses
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.errors import KubeConflict, KubeError, KubeNotFound
from perseus_operator.objects.values import FIELD_MANAGER, MANAGED_BY, JobRef, Json, Now, Owner, Pod, PodGroup

GRACE_S = 5.0
SPEC = {"objective": {"type": "MaxSlowdown", "maxSlowdown": "3%"}, "ttlSecondsAfterFinished": 60}
OWNER = Owner("batch/v1", "Job", "train", "u-job")


class Api:
    """One API server's objects, as far as classes need them."""

    def __init__(self) -> None:
        self.classes: list[Json] = []
        self.namespaces: dict[str, Mapping[str, str]] = {"team-a": {"tier": "batch"}}
        self.jobs: dict[tuple[str, str], tuple[str, Json, Owner]] = {}
        self.pools: dict[tuple[str, str], tuple[str, Json, Owner]] = {}
        self.labels: dict[tuple[str, str], Mapping[str, str]] = {}
        """Of jobs and pools, as they were asked for."""
        self.groups: set[PodGroup] = set()
        """PodGroups that exist."""
        self.owners: dict[tuple[str, str], list[Json]] = {}
        """``ownerReferences`` of pools."""
        self.version = "7"
        """Of every pool."""
        self.attempts = 0
        self.warnings: list[tuple[str, str, str]] = []
        """Kind and name of what each is about, and what it says."""
        self.statuses: list[Json] = []
        self.error: KubeError | None = None

    async def energy_classes(self) -> list[Json]:
        return self.classes

    async def write_class_status(self, name: str, uid: str, status: Json) -> str:
        if self.error:
            raise self.error
        self.statuses.append(status)
        return str(10 * len(self.statuses))

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        return self.namespaces[name]

    async def pod_group(self, namespace: str, group: PodGroup) -> Owner:
        if self.error:
            raise self.error
        if group not in self.groups:
            raise KubeNotFound(group.name)
        return Owner(f"{group.api_group}/v1", "PodGroup", group.name, f"u-{group.name}")

    async def create_job(self, job: JobRef, labels: Mapping[str, str], spec: Json, owner: Owner) -> None:
        self.attempts += 1
        if self.error:
            raise self.error
        made = self.pools if job.kind == keys.POOL_KIND else self.jobs
        if (job.namespace, job.name) in made:
            raise KubeConflict(job.name)
        made[job.namespace, job.name] = labels[keys.LABEL_CLASS], spec, owner
        self.labels[job.namespace, job.name] = labels
        if job.kind == keys.POOL_KIND:
            self.owners[job.namespace, job.name] = [owner.reference()]

    async def set_owners(self, job: JobRef, owners: Sequence[Json], *, version: str) -> str:
        self.attempts += 1
        if self.error:
            raise self.error
        assert (job.kind, job.uid) == (keys.POOL_KIND, f"u-{job.name}")
        if version != self.version:
            raise KubeConflict(job.name)
        self.owners[job.namespace, job.name] = list(owners)
        return version

    async def warn(self, namespace: str, about: Owner, *, reason: str, message: str) -> None:
        assert namespace in {"team-a", "evil"}
        assert reason == "EnergyClassNotApplied"
        self.warnings.append((about.kind, about.name, message))


class Site:
    """A namespace with pods, and an operator that has been up for longer than the grace period."""

    def __init__(self) -> None:
        self.api = Api()
        self.classes = EnergyClasses(self.api, grace_s=GRACE_S)
        self.pods: dict[tuple[str, str], dict[str, Pod]] = {}
        self.now_s = 0.0

    def define(self, spec: Any = SPEC, name: str = "frugal") -> None:
        self.classes.observe({"metadata": {"name": name, "uid": f"u-{name}", "generation": 2}, "spec": spec})

    def run(self, name: str = "t-0", job: str = "train", owner: Owner | None = OWNER, **changes: Any) -> None:
        labels = {keys.LABEL_JOB: job, keys.LABEL_CLASS: "frugal", "batch.kubernetes.io/job-name": "train"}
        labels |= changes.pop("labels", {})
        pod = Pod(f"u-{name}", "team-a", name, "node", job, labels, owner=owner, **changes)
        self.pods.setdefault(("team-a", job), {})[pod.uid] = pod

    async def tick(self, seconds: float = 10.0) -> None:
        self.now_s += seconds
        jobs, pools = KnownJobs(100), KnownJobs(100)
        for (namespace, name), (energy_class, spec, _) in self.api.jobs.items():
            metadata = {"namespace": namespace, "name": name, "uid": f"u-{name}"}
            jobs.observe({"metadata": metadata | {"labels": {keys.LABEL_CLASS: energy_class}}, "spec": spec})
        for (namespace, name), (energy_class, spec, _) in self.api.pools.items():
            ours = {MANAGED_BY: FIELD_MANAGER, keys.LABEL_CLASS: energy_class} if energy_class else {}
            metadata = {"namespace": namespace, "name": name, "uid": f"u-{name}", "resourceVersion": "7"}
            about = metadata | {"labels": ours, "ownerReferences": self.api.owners[namespace, name]}
            pools.observe({"metadata": about, "spec": spec}, keys.POOL_KIND)
        now = Now(self.now_s, 1.9e9 + self.now_s)
        await self.classes.tick(now, self.pods, jobs.of_kind(keys.KIND), pools.of_kind(keys.POOL_KIND))


@pytest.fixture
async def site() -> Site:
    made = Site()
    await made.tick()
    return made
