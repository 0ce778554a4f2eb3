"""``set_straggler`` told to this operator: finds the job, and rewrites its annotation as ``told`` says.

Called by ``rpc``. What is told is kept by the API server and comes back to the job's runner by the watch, like an
annotation that a user writes: there is one way only in which a straggler takes effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from perseus_operator.errors import InvalidSpec, KubeConflict, StaleEpoch, UnknownJob
from perseus_operator.planning.state import JobRef, JobState
from perseus_operator.planning.stragglers.annotation import Told, seconds_of, tell
from perseus_proto import keys

_ATTEMPTS: Final = 5
_NEWS_S: Final = 2.0
"""How long to wait for the watch to bring what somebody else has just written."""
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class Request:
    """What was asked. ``job`` None: the one that trains on the GPU ``id``."""

    id: str
    degree: float
    delay_s: float = 0.0
    delay_iterations: int = 0
    job: tuple[str, str] | None = None
    epoch: int = 0


@dataclass(frozen=True)
class Seen:
    """A PerseusJob as the watch has brought it last."""

    version: str
    annotation: str


class Runner(Protocol):
    """The keeper of one job."""

    ref: JobRef
    state: JobState

    @property
    def seen(self) -> Seen:
        """The job as it was seen last."""
        ...

    @property
    def status(self) -> Mapping[str, Any]:
        """As stored, as far as is known."""
        ...


class Writer(Protocol):
    """The door to the API server."""

    async def annotate(self, job: JobRef, annotations: Mapping[str, str | None], *, version: str | None = None) -> str:
        """Raises KubeConflict if the object is no longer at ``version``."""
        ...


async def set_straggler(request: Request, runners: Iterable[Runner], kube: Writer, epoch: int) -> tuple[JobRef, str]:
    """Tell; the job and its annotation afterwards.

    Raises:
        StaleEpoch: a newer operator is in command.
        UnknownJob: there is no such job, or none trains on that GPU.
        InvalidSpec: a field breaks a rule.
        KubeError: it could not be stored; KubeConflict if others were faster every time. Nothing was changed.
    """
    if request.epoch > epoch:
        raise StaleEpoch(f"epoch: this operator's is {epoch}; one with {request.epoch} has been seen")
    runner = _find(request, list(runners))
    if runner.state.fenced is not None:
        raise StaleEpoch(runner.state.fenced.message)
    entry = Told(request.id, _delay_s(request, runner), request.degree)
    _check_pipeline(entry, runner)
    for attempt in range(_ATTEMPTS):
        seen = runner.seen
        wanted = tell(seen.annotation, entry)
        if wanted == seen.annotation:
            return runner.ref, wanted
        try:
            await kube.annotate(runner.ref, {keys.ANNOTATION_STRAGGLER: wanted or None}, version=seen.version)
        except KubeConflict:
            if attempt + 1 == _ATTEMPTS:
                raise
            await _news(runner, seen)
        else:
            return runner.ref, wanted
    raise AssertionError("the last attempt returns or raises")


def _find(request: Request, runners: list[Runner]) -> Runner:
    if request.job is not None:
        for runner in runners:
            if (runner.ref.namespace, runner.ref.name) == request.job:
                return runner
        raise UnknownJob(f"job: this operator serves no PerseusJob {'/'.join(request.job)}")
    if request.id.isdigit():
        raise InvalidSpec("job: must be named if id is a data-parallel rank")
    for runner in runners:
        if any(rank.gpu_uuid == request.id for rank in runner.state.ranks):
            return runner
    raise UnknownJob(f"id: no job that this operator serves trains on {request.id[:60]!r}")


def _delay_s(request: Request, runner: Runner) -> float:
    if not request.delay_iterations:
        return request.delay_s
    delay_s = seconds_of(request.delay_iterations, runner.status)
    if delay_s is None:
        raise InvalidSpec("delay_iterations: nobody knows yet what an iteration takes; give delay_ms")
    return delay_s


def _check_pipeline(entry: Told, runner: Runner) -> None:
    spec = runner.state.spec
    if entry.id.isdigit() and spec is not None and int(entry.id) >= spec.pipeline.data_parallel:
        raise InvalidSpec(f"id: the job has pipelines 0 to {spec.pipeline.data_parallel - 1}, not {entry.id}")


async def _news(runner: Runner, seen: Seen) -> None:
    """Until the watch has brought another version, but not for long."""
    for _ in range(round(_NEWS_S / _POLL_S)):
        if runner.seen.version != seen.version:
            return
        await asyncio.sleep(_POLL_S)
