"""``SetStraggler``: find the job, and rewrite its annotation with the new declaration.

The declaration is stored by the API server and reaches the job's runner by the watch, like an annotation that a user
writes. So a straggler takes effect in one way only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from perseus_core import keys
from perseus_operator.api.job import JobSpec
from perseus_operator.errors import InvalidSpec, KubeConflict, StaleEpoch, UnknownJob
from perseus_operator.families.training.features.stragglers.annotation import (
    Declaration,
    declare,
    duration_of_iterations_s,
)
from perseus_operator.jobs.job import Job
from perseus_operator.objects.values import JobRef

_ATTEMPTS: Final = 5
_WATCH_WAIT_S: Final = 2.0
"""How long to wait for the watch to deliver what another writer has just written."""
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class StragglerRequest:
    """What a client requests. ``job``: namespace and name; None: the job that trains on the GPU ``id``."""

    id: str
    slowdown: float
    delay_s: float = 0.0
    delay_iterations: int = 0
    job: tuple[str, str] | None = None
    epoch: int = 0


@dataclass(frozen=True)
class ObservedJob:
    """The version and straggler annotation of a PerseusJob as the watch delivered it last."""

    version: str
    annotation: str


@dataclass(frozen=True)
class Declared:
    """What came of a request: the job, its annotation, and the epoch under which it is commanded."""

    ref: JobRef
    annotation: str
    epoch: int


class ServedJob(Protocol):
    """A job that this operator serves."""

    ref: JobRef
    job: Job

    @property
    def epoch(self) -> int:
        """The highest under which it is commanded."""
        ...

    @property
    def observed(self) -> ObservedJob:
        """The job as it was observed last."""
        ...

    @property
    def status(self) -> Mapping[str, Any]:
        """The status as stored, as far as is known."""
        ...


class AnnotationWriter(Protocol):
    """What is needed of the API server."""

    async def annotate(self, job: JobRef, annotations: Mapping[str, str | None], *, version: str | None = None) -> str:
        """Raises KubeConflict if the object is no longer at ``version``."""
        ...


async def set_straggler(request: StragglerRequest, jobs: Iterable[ServedJob], kube: AnnotationWriter) -> Declared:
    """Declare a straggler.

    Args:
        request: from the client.
        jobs: that this operator serves.
        kube: where the annotation is written.

    Raises:
        StaleEpoch: a newer operator is in command.
        UnknownJob: there is no such job, or no job trains on that GPU.
        InvalidSpec: a field breaks a rule.
        KubeError: it could not be stored; KubeConflict if others wrote first every time. Nothing was changed.
    """
    served = _find(request, list(jobs))
    if request.epoch > served.epoch:
        raise StaleEpoch(f"epoch: {served.epoch} commands the job, the request requires {request.epoch} or later")
    if served.job.fenced is not None:
        raise StaleEpoch(served.job.fenced.message)
    entry = Declaration(request.id, _delay_s(request, served), request.slowdown)
    _check_pipeline(entry, served)
    for attempt in range(_ATTEMPTS):
        observed = served.observed
        wanted = declare(observed.annotation, entry)
        if wanted == observed.annotation:
            return Declared(served.ref, wanted, served.epoch)
        try:
            await kube.annotate(served.ref, {keys.ANNOTATION_STRAGGLER: wanted or None}, version=observed.version)
        except KubeConflict:
            if attempt + 1 == _ATTEMPTS:
                raise
            await _next_version(served, observed)
        else:
            return Declared(served.ref, wanted, served.epoch)
    raise AssertionError("the last attempt returns or raises")


def _find(request: StragglerRequest, jobs: list[ServedJob]) -> ServedJob:
    if request.job is not None:
        for served in jobs:
            if (served.ref.namespace, served.ref.name) == request.job:
                return served
        raise UnknownJob(f"job: this operator serves no PerseusJob {'/'.join(request.job)}")
    if request.id.isdigit():
        raise InvalidSpec("job: must be named if id is a data-parallel rank")
    for served in jobs:
        if any(rank.gpu_uuid == request.id for rank in served.job.nodes.ranks):
            return served
    raise UnknownJob(f"id: no job that this operator serves trains on {request.id[:60]!r}")


def _delay_s(request: StragglerRequest, served: ServedJob) -> float:
    if not request.delay_iterations:
        return request.delay_s
    delay_s = duration_of_iterations_s(request.delay_iterations, served.status)
    if delay_s is None:
        raise InvalidSpec("delay_iterations: the time of an iteration is not known yet; use delay_ms")
    return delay_s


def _check_pipeline(entry: Declaration, served: ServedJob) -> None:
    spec = served.job.spec
    if entry.id.isdigit() and isinstance(spec, JobSpec) and int(entry.id) >= spec.pipeline.data_parallel:
        raise InvalidSpec(f"id: the job has data-parallel ranks 0 to {spec.pipeline.data_parallel - 1}, not {entry.id}")


async def _next_version(served: ServedJob, observed: ObservedJob) -> None:
    """Wait until the watch has delivered another version, but not for long."""
    for _ in range(round(_WATCH_WAIT_S / _POLL_S)):
        if served.observed.version != observed.version:
            return
        await asyncio.sleep(_POLL_S)
