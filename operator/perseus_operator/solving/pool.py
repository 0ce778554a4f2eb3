"""Solving, away from the event loop: in worker processes of the operator's pod, or by the solver service.

There is a bounded number of workers, each with a deadline and a bound on its memory. Turns are fair between namespaces,
the same work is done once for all who ask for it meanwhile, and inputs that took too long or too much memory once are
not tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final, Protocol

from perseus_operator.errors import AnswerRefused, SolveFailed
from perseus_operator.solving.answers import most_calibration_bytes, most_frontier_bytes
from perseus_operator.solving.calibration import CalibrateRequest, CheckRequest
from perseus_operator.solving.process import Task, Verdict, run_worker
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.serving_plan import MOST_ANSWER_BYTES, ServingPlan, ServingPlanRequest
from perseus_operator.solving.shared_work import SharedWork
from perseus_operator.solving.slots import FairSlots
from perseus_operator.solving.verification import RestoreRequest

RESTORES: Final = 1
"""Stored frontiers verified at a time, beside the solves: after a restart all jobs wait for theirs."""
SPARE: Final = 1
"""Solves beside the others, of a namespace that has none while another has several: theirs may take minutes each."""
_MAX_REMEMBERED: Final = 1_024


class Workers(Protocol):
    """Where work is done."""

    slots: FairSlots
    """As many as workers; each `run` holds one."""

    async def run(self, task: Task, request: bytes, most_bytes: int) -> Verdict:
        """Do one piece of work, whose answer has at most so many bytes."""
        ...


class LocalWorkers:
    """Processes of this pod, at most so many at a time."""

    def __init__(self, workers: int, *, timeout_s: float, memory_mib: int, spare: int = 0) -> None:
        self.slots = FairSlots(workers, spare=spare)
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib

    async def run(self, task: Task, request: bytes, most_bytes: int) -> Verdict:
        """Do it in a new process."""
        limits = {"memory_mib": self._memory_mib, "most_bytes": most_bytes}
        return await run_worker(task, request, timeout_s=self._timeout_s, **limits)


class SolverPool:
    """Solves, calibrates, plans pools that serve, and verifies stored frontiers."""

    def __init__(self, *, workers: int, timeout_s: float, memory_mib: int, service: Workers | None = None) -> None:
        """Start nothing yet.

        Args:
            workers: processes of this pod that solve at a time; none do if there is a ``service``.
            timeout_s: of each process.
            memory_mib: of each process.
            service: solves and calibrates instead. Its answers and stored frontiers are verified here, which is short.
        """
        self._trusted = service is None
        limits: Any = {"timeout_s": timeout_s, "memory_mib": memory_mib}
        self.solvers: Workers = service or LocalWorkers(workers, spare=SPARE, **limits)
        self._restorers = LocalWorkers(RESTORES, **limits)
        self._shared = SharedWork[Verdict]()
        self._failed: OrderedDict[bytes, Verdict] = OrderedDict()
        self.solves = 0
        """Pieces of work begun so far."""

    async def solve(self, request: SolveRequest, namespace: str = "") -> tuple[bytes, float]:
        """The frontier's bytes and the seconds it took, waiting for a slot not counted.

        Args:
            request: the inputs.
            namespace: whose turn it is.

        Raises:
            InvalidProfile: the CSV breaks a rule.
            SolveTimeout: it took longer than allowed and was stopped, now or before.
            AnswerRefused: a solver service answered what is not so.
            SolveFailed: profile, schedule and parameters do not fit, or the worker died.
        """
        asked = await asyncio.to_thread(lambda: json.dumps(asdict(request)).encode())
        verdict = await self._work(Task.SOLVE, asked, most_frontier_bytes(request), self.solvers, namespace)
        data = verdict.result()
        if not self._trusted:
            with _unused_if_refused():
                data = await self.restore(request, data, namespace)
        return data, verdict.seconds

    async def calibrate(self, request: CalibrateRequest, namespace: str = "") -> bytes:
        """The answer of ``calibration.calibrate_in_process`` to a request. Raises like ``solve``."""
        asked, most_bytes = await asyncio.to_thread(request.to_bytes), most_calibration_bytes(request.inputs)
        answer = (await self._work(Task.CALIBRATE, asked, most_bytes, self.solvers, namespace)).result()
        if self._trusted:
            return answer
        check = await asyncio.to_thread(CheckRequest(asked, answer).to_bytes)
        with _unused_if_refused():
            return (await self._work(Task.CHECK, check, most_bytes, self._restorers, namespace)).result()
        raise AssertionError("refusals are raised")

    async def plan_serving(self, request: ServingPlanRequest, namespace: str = "") -> ServingPlan:
        """Whether a pool would save by a split into several; nothing is set by the answer. Raises like ``solve``."""
        asked = await asyncio.to_thread(request.to_bytes)
        verdict = await self._work(Task.PLAN_SERVING, asked, MOST_ANSWER_BYTES, self.solvers, namespace)
        return ServingPlan.from_bytes(verdict.result())

    async def restore(self, request: SolveRequest, data: bytes, namespace: str = "") -> bytes:
        """The bytes of a stored frontier, verified; see ``verification``. Raises like ``solve``."""
        asked = await asyncio.to_thread(RestoreRequest(request, data).to_bytes)
        most_bytes = most_frontier_bytes(request)
        return (await self._work(Task.RESTORE, asked, most_bytes, self._restorers, namespace)).result()

    async def _work(self, task: Task, request: bytes, most_bytes: int, workers: Workers, namespace: str) -> Verdict:
        digest = await asyncio.to_thread(digest_of, task, request)  # some requests have tens of MiB
        return await self._shared.outcome(
            digest, workers.slots, namespace, lambda: self._do(digest, task, request, most_bytes, workers)
        )

    async def _do(self, digest: bytes, task: Task, request: bytes, most_bytes: int, workers: Workers) -> Verdict:
        if (failed := self._failed.get(digest)) is not None:
            return failed
        self.solves += 1
        verdict = await workers.run(task, request, most_bytes)
        if verdict.exhausted:
            self._failed[digest] = verdict
            while len(self._failed) > _MAX_REMEMBERED:
                self._failed.popitem(last=False)
        return verdict


@contextmanager
def _unused_if_refused() -> Iterator[None]:
    """What is refused inside was an answer of the solver service."""
    try:
        yield
    except SolveFailed as error:
        raise AnswerRefused(f"the answer of the solver service is not used: {error}") from error


def digest_of(task: Task, request: bytes) -> bytes:
    """SHA-256 of a piece of work: the same work has the same answer."""
    digest = hashlib.sha256(task.value.encode())
    digest.update(request)
    return digest.digest()
