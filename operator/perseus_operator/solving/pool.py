"""Solving, away from the event loop: one worker process for each solve, calibration or stored frontier.

There is a bounded number of them, each with a deadline and a bound on its memory. Turns are fair between namespaces,
and inputs that took too long or too much memory once are not tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
import time
from collections import OrderedDict
from dataclasses import asdict
from typing import Final

from perseus_operator.errors import InvalidProfile, SolveFailed, SolveTimeout
from perseus_operator.solving import worker
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.slots import FairSlots
from perseus_operator.solving.verification import RestoreRequest

RESTORES: Final = 1
"""Stored frontiers verified at a time, beside the solves: after a restart all jobs wait for theirs."""
_MAX_REMEMBERED: Final = 1_024


class SolverPool:
    """At most ``workers`` solver processes at a time; the others wait their turn."""

    def __init__(self, *, workers: int, timeout_s: float, memory_mib: int) -> None:
        self._solves = FairSlots(workers)
        self._restores = FairSlots(RESTORES)
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._failed: OrderedDict[bytes, SolveFailed] = OrderedDict()
        self.solves = 0
        """Worker processes started so far."""

    async def solve(self, request: SolveRequest, namespace: str = "") -> tuple[bytes, float]:
        """The frontier's bytes and the seconds it took, waiting for a slot not counted.

        Args:
            request: the inputs.
            namespace: whose turn it is.

        Raises:
            InvalidProfile: the CSV breaks a rule.
            SolveTimeout: it took longer than allowed and was stopped, now or before.
            SolveFailed: profile, schedule and parameters do not fit, or the worker died.
        """
        return await self._work("solve", json.dumps(asdict(request)).encode(), self._solves, namespace)

    async def calibrate(self, request: bytes, namespace: str = "") -> bytes:
        """The answer of ``calibration.calibrate_in_process`` to a request. Raises like ``solve``."""
        return (await self._work("calibrate", request, self._solves, namespace))[0]

    async def restore(self, request: SolveRequest, data: bytes, namespace: str = "") -> bytes:
        """The bytes of a stored frontier, verified; see ``verification``. Raises like ``solve``."""
        asked = RestoreRequest(request, data).to_bytes()
        return (await self._work("restore", asked, self._restores, namespace))[0]

    async def _work(self, task: str, request: bytes, slots: FairSlots, namespace: str) -> tuple[bytes, float]:
        digest = hashlib.sha256(task.encode() + request).digest()
        async with slots.turn(namespace):
            if (failed := self._failed.get(digest)) is not None:
                raise type(failed)(str(failed))
            try:
                return await self._run(task, request)
            except _Exhausted as error:
                self._failed[digest] = error.outcome
                while len(self._failed) > _MAX_REMEMBERED:
                    self._failed.popitem(last=False)
                raise error.outcome from None

    async def _run(self, task: str, request: bytes) -> tuple[bytes, float]:
        self.solves += 1
        started_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            worker.__name__,
            str(self._memory_mib),
            task,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, errors = await process.communicate(request)
        except TimeoutError:
            raise _Exhausted(SolveTimeout(f"the solver was stopped after {self._timeout_s:g} s")) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2][:500]
        if process.returncode == worker.INVALID_PROFILE:
            raise InvalidProfile("ProfileInvalid", last_line)
        if process.returncode == worker.REFUSED:
            raise SolveFailed(last_line)
        if process.returncode in (worker.OUT_OF_MEMORY, -signal.SIGKILL):
            allowed = f"the {self._memory_mib} MiB that --solve-memory-mib allows"
            raise _Exhausted(SolveFailed(f"the solver needs more than {allowed}, or than its container has"))
        if process.returncode != 0:
            raise SolveFailed(f"the solver process ended with exit code {process.returncode}: {last_line}")
        return answer, time.monotonic() - started_s


class _Exhausted(Exception):
    """The inputs took more time or memory than is allowed, and would again."""

    def __init__(self, outcome: SolveFailed) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome
