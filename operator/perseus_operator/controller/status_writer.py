"""Reports one job: metrics at once, the status when it has changed and is due, then events.

There is one status write at a time. Events follow only a write that succeeded, and a write that failed is repeated
later. The texts are the family's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from perseus_core import keys
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.status import StatusFigures
from perseus_operator.clients.kube.versioned import Versioned
from perseus_operator.errors import KubeError, KubeNotFound
from perseus_operator.jobs import document
from perseus_operator.jobs.events import JobEvent, condition_events
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.report import JobReport
from perseus_operator.jobs.services import Services, backoff_s
from perseus_operator.objects.values import JobRef, Json, Now

logger = logging.getLogger(__name__)

NEVER_S: Final = float("inf")
SAME_EVENT_S: Final = 600.0
"""An event is not repeated within this time; the log and the conditions still show each occurrence."""
_APPLYING_S: Final = 1.0
"""How long a job that was Ready may change to other plans before its status says so: usually the agents hold them by
then, and one write does for two."""


class StatusWriter:
    """What has been reported about the job so far, and what is to be."""

    def __init__(self, ref: JobRef, services: Services, spawn: Callable[[Coroutine[Any, Any, bool]], None]) -> None:
        """``spawn`` runs a write as a task, then wakes the runner if the write returns True."""
        self._ref = ref
        self._services = services
        self._spawn = spawn
        self._status = Versioned[Json]({})
        self._annotation = Versioned[str | None](None)
        self._contested = False
        """Another writer has changed the status. If it was a newer operator, that one reports this job now."""
        self._pending: list[JobEvent] = []
        self._posted: dict[JobEvent, float] = {}
        """Events posted lately, and when (monotonic)."""
        self._announced: Mapping[int, int] = {}
        """The plans of the latest event about plans."""
        self._restored = False
        """An earlier operator has posted the event about the plans in force."""
        self._hold_until_s = 0.0
        """A restart must not make a running job look broken: a job that was Ready stays so until then (monotonic)."""
        self._ready = False
        self._written_at_s = float("-inf")
        self._turn_s: float | None = None
        """When a write that only updates figures may start (monotonic)."""
        self._failures = 0
        self._writing = False
        self._missed = False
        """There was something to report while a write was under way."""

    @property
    def stored(self) -> Json:
        """The status as stored in the cluster, as far as is known."""
        return self._status.value

    def observe(self, written: Json, annotations: Mapping[str, str], version: str) -> bool:
        """Take in status and annotations as the watch delivers them.

        Returns:
            Whether another writer has changed what this operator wrote.
        """
        foreign = self._status.observed(dict(written), version)
        foreign |= self._annotation.observed(annotations.get(keys.ANNOTATION_PLANNED_SLOWDOWN), version)
        self._contested |= foreign
        return foreign

    def restore(self, written: Json, annotations: Mapping[str, str], version: str) -> None:
        """Take in what an earlier operator has written."""
        self.observe(written, annotations, version)
        self._contested = False
        if document.was_ready(written):
            self._restored = True
            self._hold_until_s = self._services.monotonic_s() + self._services.limits.lease_ttl_s

    def report(self, job: Job, report: JobReport, now: Now) -> float:
        """Update the metrics, and start a write of the status if one is due.

        Args:
            job: whose report it is.
            report: by its family.
            now: when it was made.

        Returns:
            Seconds until the next report is due though nothing happens.
        """
        if job.fenced is not None:
            return NEVER_S  # the newer operator reports this job
        conditions = report.conditions
        ready = conditions[-1].status is True
        if isinstance(report.figures, StatusFigures):
            self._services.metrics.set_job(
                self._ref,
                report.figures,
                measured=report.measured,
                planned_slowdown=report.planned_slowdown,
                stragglers=report.stragglers,
                active=bool(job.nodes.occupied),
                ready=ready,
                quality=report.quality,
                evidence=report.evidence,
            )
        if report.pool is not None:
            self._services.metrics.pools.set_pool(self._ref, report.pool, active=bool(job.nodes.occupied), ready=ready)
        self._services.metrics.set_frontier(self._ref, report.curve)
        self._pending += report.events
        if report.plan and report.plan != self._announced:
            if not self._restored and report.plan_event is not None:
                self._pending.append(report.plan_event())
            self._announced, self._restored = report.plan, False
        if ready:
            self._hold_until_s = 0.0
        elif self._ready and conditions[-1].reason is Reason.APPLYING:
            self._hold_until_s = now.monotonic_s + _APPLYING_S
        self._ready = ready
        if self._writing:
            self._missed = True
            return NEVER_S  # its end wakes the loop
        wanted = document.document(
            conditions, report.figures, self.stored, generation=job.generation, wall_s=now.wall_s
        )
        # A plan in force that is not the wanted one keeps its annotation.
        present = self._annotation.value if report.in_force else None
        announced = f"{report.planned_slowdown:.4f}" if report.announces else present
        due_s = max(self._due_s(wanted, announced, now), self._hold_until_s - now.monotonic_s)
        if due_s > 0:
            return due_s
        self._writing = True
        changes = report.changes(self.stored, wanted) if report.changes is not None else ()
        self._spawn(self._write(job, wanted, announced, [*changes, *condition_events(self.stored, conditions)]))
        return NEVER_S

    def _due_s(self, wanted: Json, announced: str | None, now: Now) -> float:
        """Seconds until a write: none for conditions and events, a turn for figures, a pause after a failure."""
        if self._failures:
            return self._written_at_s + backoff_s(self._failures) - now.monotonic_s
        if self._pending or document.essence(wanted) != document.essence(self.stored):
            return 0.0
        if (wanted, announced) == (self.stored, self._annotation.value):
            return NEVER_S
        wait_s = self._written_at_s + self._services.status_interval_s - now.monotonic_s
        if wait_s > 0:
            return wait_s
        if self._turn_s is None:
            self._turn_s = self._services.figures_pace.turn_s(now.monotonic_s)
        return self._turn_s - now.monotonic_s

    def _is_new(self, event: JobEvent) -> bool:
        """Whether the same event has not been posted lately: a condition that flaps must not flood the events."""
        now_s = self._services.monotonic_s()
        self._posted = {posted: at_s for posted, at_s in self._posted.items() if now_s - at_s < SAME_EVENT_S}
        return self._posted.setdefault(event, now_s) == now_s

    async def _write(self, job: Job, wanted: Json, announced: str | None, changes: Sequence[JobEvent]) -> bool:
        """Write, and post events; whether there is more to report now."""
        try:
            await self._write_once(job, wanted, announced, changes)
        finally:
            missed, self._missed = self._missed, False
        return missed or self._failures > 0

    async def _write_once(self, job: Job, wanted: Json, announced: str | None, changes: Sequence[JobEvent]) -> None:
        kube, ref = self._services.kube, self._ref
        events = [*changes, *self._pending]
        self._written_at_s, self._turn_s = self._services.monotonic_s(), None
        self._failures += 1
        try:
            if self._contested and await self._superseded(job):
                return
            self._status.write_started(wanted)
            self._status.write_succeeded(await kube.write_status(ref, wanted))
            self._pending = [event for event in self._pending if event not in events]
            if announced != self._annotation.value:
                self._annotation.write_started(announced)
                version = await kube.annotate(ref, {keys.ANNOTATION_PLANNED_SLOWDOWN: announced})
                self._annotation.write_succeeded(version)
            self._failures = 0
        except KubeNotFound:
            logger.info("%s: it was deleted", ref)
            return
        except KubeError as error:
            logger.warning("%s: status not written: %s", ref, error)
            return
        finally:
            self._writing = False
        for event in events:
            logger.info("%s: %s: %s", ref, event.reason.value, event.message)
            if not self._is_new(event):
                continue
            try:
                await kube.post_event(ref, kind=event.kind, reason=event.reason.value, message=event.message)
            except KubeError as error:
                logger.warning("%s: event not posted: %s", ref, error)

    async def _superseded(self, job: Job) -> bool:
        """Whether a newer operator has started: the two would overwrite each other's status for ever."""
        epochs, uid = self._services.epochs, self._ref.uid
        newest, drawn = await epochs.newest(uid), epochs.drawn(uid)
        self._contested = False
        if newest <= drawn:
            logger.info("%s: another writer has changed the status; writing it again", self._ref)
            return False
        message = f"A newer operator writes this status: its epoch is {newest}, this operator's is {drawn}."
        job.fenced_by(Explanation(Reason.FENCED, message))
        logger.warning("%s: %s: %s", self._ref, Reason.FENCED.value, message)
        return True
