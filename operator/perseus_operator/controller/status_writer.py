"""Says what is so about one job: metrics at once, the status when it changed and is due, then the events.

Owned by the job's runner, which calls ``tell`` after every plan. One status write at a time; events follow only a write
that held; a write that failed is written again, later. What the words are is ``status``'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from perseus_operator.api.conditions import Condition, Reason
from perseus_operator.controller.services import BACKOFF_S, Services
from perseus_operator.controller.versioned import Stored
from perseus_operator.errors import KubeError, KubeNotFound
from perseus_operator.objects import Json
from perseus_operator.planning.planner import Now, Plan
from perseus_operator.planning.state import Fault, JobRef, JobState
from perseus_operator.reporting import status
from perseus_proto import keys

logger = logging.getLogger(__name__)

NEVER_S: Final = float("inf")
SAME_EVENT_S: Final = 600.0
"""An event is not repeated within this time; the log and the conditions tell every time."""
_APPLYING_S: Final = 1.0
"""How long a job that was Ready may be about to be so again, under other plans, before its status says so: usually
agents have been told by then, and one write does for two."""


class Reporter:
    """What has been written and said about the job so far, and what is to be."""

    def __init__(self, ref: JobRef, services: Services, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """``spawn`` runs a write beside the runner's loop and wakes it at its end."""
        self._ref = ref
        self._services = services
        self._spawn = spawn
        self._status = Stored[Json]({})
        self._annotation = Stored[str | None](None)
        self._contested = False
        """Somebody else has written there. If that was a newer operator, it speaks for this job now."""
        self._pending: list[status.Event] = []
        self._posted: dict[status.Event, float] = {}
        """Lately, and when."""
        self._announced: dict[int, int] = {}
        """The plans last announced."""
        self._recalled = False
        """An operator before this one has announced the plan in force."""
        self._hold_until_s = 0.0
        """A restart must not make a running job look broken: what was Ready is left so until it is again, or then."""
        self._ready = False
        self._written_at_s = float("-inf")
        self._turn_s: float | None = None
        """When figures alone may be written."""
        self._failures = 0
        self._writing = False

    @property
    def written(self) -> Json:
        """The status as stored, as far as we know."""
        return self._status.value

    def hear(self, written: Json, annotations: Mapping[str, str], version: str) -> bool:
        """The job as the watch brings it; whether anything there is not as we left it."""
        news = self._status.heard(dict(written), version)
        news |= self._annotation.heard(annotations.get(keys.ANNOTATION_PLANNED_SLOWDOWN), version)
        self._contested |= news
        return news

    def recall(self, written: Json, annotations: Mapping[str, str], version: str) -> None:
        """What an operator before this one has written."""
        self.hear(written, annotations, version)
        self._contested = False
        if status.was_ready(written):
            self._recalled = True
            self._hold_until_s = self._services.monotonic_s() + self._services.limits.lease_ttl_s

    def tell(self, state: JobState, plan: Plan, now: Now) -> float:
        """Say what is so. Seconds until it must be looked at again."""
        baseline = state.measure_baseline()
        if state.fenced is not None:
            return NEVER_S  # the newer operator speaks for this job
        said, figures = status.conditions(state, plan), status.figures(state, plan)
        slowdown = status.planned_slowdown(state, plan)
        ready = said[-1].status is True
        self._services.metrics.set_job(
            self._ref,
            figures,
            measured=status.current(state, plan),
            planned_slowdown=slowdown,
            stragglers=len(plan.slowdowns),
            ready=ready,
            verdict=state.learning.verdict,
        )
        self._services.metrics.set_frontier(self._ref, status.curve(state))
        if baseline is not None:
            self._pending.append(status.baseline_event(baseline))
        if plan.applied and plan.wanted != self._announced:
            if not self._recalled:
                self._pending.append(status.plan_event(state, plan))
            self._announced, self._recalled = plan.wanted, False
        if ready:
            self._hold_until_s = 0.0
        elif self._ready and said[-1].reason is Reason.APPLYING:
            self._hold_until_s = now.monotonic_s + _APPLYING_S
        self._ready = ready
        if self._writing:
            return NEVER_S  # its end wakes the loop
        wanted = status.document(said, figures, self.written, generation=state.generation, wall_s=now.wall_s)
        slowed = plan.applied or (plan.profiling is not None and bool(plan.wanted))
        kept = self._annotation.value if status.in_force(state) else None
        announced = f"{slowdown:.4f}" if slowed else kept
        due_s = max(self._due_s(wanted, announced, now), self._hold_until_s - now.monotonic_s)
        if due_s > 0:
            return due_s
        self._writing = True
        self._spawn(self._write(state, wanted, announced, said))
        return NEVER_S

    def _due_s(self, wanted: Json, announced: str | None, now: Now) -> float:
        """Seconds until a write: none for what matters, a turn for figures, a back-off after a failure."""
        if self._failures:
            pause_s = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
            return self._written_at_s + pause_s - now.monotonic_s
        if self._pending or status.essence(wanted) != status.essence(self.written):
            return 0.0
        if (wanted, announced) == (self.written, self._annotation.value):
            return NEVER_S
        wait_s = self._written_at_s + self._services.status_interval_s - now.monotonic_s
        if wait_s > 0:
            return wait_s
        if self._turn_s is None:
            self._turn_s = self._services.figures.turn_s(now.monotonic_s)
        return self._turn_s - now.monotonic_s

    def _is_news(self, event: status.Event) -> bool:
        """Whether the same has not been posted lately: what comes and goes all the time is one event in a while."""
        now_s = self._services.monotonic_s()
        self._posted = {said: at_s for said, at_s in self._posted.items() if now_s - at_s < SAME_EVENT_S}
        return self._posted.setdefault(event, now_s) == now_s

    async def _write(self, state: JobState, wanted: Json, announced: str | None, said: Iterable[Condition]) -> None:
        kube, ref = self._services.kube, self._ref
        events = [*status.events(self.written, said), *self._pending]
        self._written_at_s, self._turn_s = self._services.monotonic_s(), None
        self._failures += 1
        try:
            if self._contested and await self._superseded(state):
                return
            self._status.write(wanted)
            self._status.wrote(await kube.write_status(ref, wanted))
            self._pending = [event for event in self._pending if event not in events]
            if announced != self._annotation.value:
                self._annotation.write(announced)
                self._annotation.wrote(await kube.annotate(ref, {keys.ANNOTATION_PLANNED_SLOWDOWN: announced}))
            self._failures = 0
        except KubeNotFound:
            logger.info("%s: has gone", ref)
            return
        except KubeError as error:
            logger.warning("%s: status not written: %s", ref, error)
            return
        finally:
            self._writing = False
        for event in events:
            logger.info("%s: %s: %s", ref, event.reason.value, event.message)
            if not self._is_news(event):
                continue
            try:
                await kube.post_event(ref, kind=event.kind, reason=event.reason.value, message=event.message)
            except KubeError as error:
                logger.warning("%s: event not posted: %s", ref, error)

    async def _superseded(self, state: JobState) -> bool:
        """Whether a newer operator has begun, which would write again whatever we write, and we whatever it does."""
        newest, own = await self._services.newest_epoch(), self._services.epoch
        self._contested = False
        if newest <= own:
            logger.info("%s: somebody has written over the status; writing it again", self._ref)
            return False
        state.fenced = Fault(Reason.FENCED, f"A newer operator writes this status: its epoch is {newest}, not {own}.")
        logger.warning("%s: %s: %s", self._ref, Reason.FENCED.value, state.fenced.message)
        return True
