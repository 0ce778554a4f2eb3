"""Solving, away from the event loop: one worker process for each solve or calibration, a bounded number of them, each
with a deadline and a bound on its memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict

from perseus_operator.errors import InvalidProfile, SolveFailed, SolveTimeout
from perseus_operator.solving import worker
from perseus_operator.solving.request import SolveRequest


class SolverPool:
    """At most ``workers`` solver processes at a time; the others wait their turn."""

    def __init__(self, *, workers: int, timeout_s: float, memory_mib: int) -> None:
        self._slots = asyncio.Semaphore(workers)
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self.solves = 0
        """Worker processes started so far."""

    async def solve(self, request: SolveRequest) -> tuple[bytes, float]:
        """The frontier's bytes and the seconds it took, waiting for a slot not counted.

        Raises:
            InvalidProfile: the CSV breaks a rule.
            SolveTimeout: it took longer than allowed and was stopped.
            SolveFailed: profile, schedule and parameters do not fit, or the worker died.
        """
        return await self._work("solve", json.dumps(asdict(request)).encode())

    async def calibrate(self, request: bytes) -> bytes:
        """The answer of ``calibration.calibrate_in_process`` to a request. Raises like ``solve``."""
        return (await self._work("calibrate", request))[0]

    async def _work(self, task: str, request: bytes) -> tuple[bytes, float]:
        async with self._slots:
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
                raise SolveTimeout(f"the solver was stopped after {self._timeout_s:g} s") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2][:500]
        if process.returncode == worker.INVALID_PROFILE:
            raise InvalidProfile("ProfileInvalid", last_line)
        if process.returncode == worker.REFUSED:
            raise SolveFailed(last_line)
        if process.returncode == worker.OUT_OF_MEMORY:
            raise SolveFailed(f"the solver needs more than the {self._memory_mib} MiB that --solve-memory-mib allows")
        if process.returncode != 0:
            raise SolveFailed(f"the solver process ended with exit code {process.returncode}: {last_line}")
        return answer, time.monotonic() - started_s
