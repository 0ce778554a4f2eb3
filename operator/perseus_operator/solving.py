"""Solving, away from the event loop: one worker process for each solve or calibration, a bounded number of them, each
with a deadline and a bound on its memory.

``SolverPool`` is called by the job's runner. The worker is ``python -m perseus_operator.solving``: the request comes on
stdin, the frontier or calibration goes as bytes to stdout, a refusal as one line to stderr. A process of its own can
be killed at its deadline, and takes nobody along when it dies.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from perseus_operator.errors import InvalidProfile, SolveFailed, SolveTimeout

if TYPE_CHECKING:
    from perseus_solver.problem import Problem
    from perseus_solver.profile import Profile
    from perseus_solver.schedules import Schedule

_REFUSED = 2
_INVALID_PROFILE = 3
_OUT_OF_MEMORY = 4


@dataclass(frozen=True)
class SolveRequest:
    """Everything that a frontier is solved from."""

    profile_csv: str
    schedule: str
    stages: int
    microbatches: int
    """Of a schedule by name; otherwise its order tells."""
    chunks: int | None
    blocking_power_mw: int
    points: int
    calibration: str = ""
    """JSON of the calibration to plan with; empty: none."""
    order: str = ""
    """CSV of a schedule that has no name."""
    switch_loss: float | None = None
    """Share of the energy that may be given up for fewer changes of clock; None: least energy."""


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
        """What ``calibrating.calibrate_here`` makes of a request. Raises like ``solve``."""
        return (await self._work("calibrate", request))[0]

    async def _work(self, task: str, request: bytes) -> tuple[bytes, float]:
        async with self._slots:
            self.solves += 1
            started_s = time.monotonic()
            worker = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                str(self._memory_mib),
                task,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer, errors = await worker.communicate(request)
            except TimeoutError:
                raise SolveTimeout(f"the solver was stopped after {self._timeout_s:g} s") from None
            finally:
                if worker.returncode is None:
                    worker.kill()
                    await worker.wait()
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2][:500]
        if worker.returncode == _INVALID_PROFILE:
            raise InvalidProfile("ProfileInvalid", last_line)
        if worker.returncode == _REFUSED:
            raise SolveFailed(last_line)
        if worker.returncode == _OUT_OF_MEMORY:
            raise SolveFailed(f"the solver needs more than the {self._memory_mib} MiB that --solve-memory-mib allows")
        if worker.returncode != 0:
            raise SolveFailed(f"the solver process ended with exit code {worker.returncode}: {last_line}")
        return answer, time.monotonic() - started_s


def check_profile(csv: bytes, stages: int) -> None:
    """Whether the CSV is a usable profile; quick next to a solve, but not for the event loop.

    Raises:
        InvalidProfile: one line with the line of the file, the column and the rule.
    """
    from perseus_solver.errors import SolverError
    from perseus_solver.profile import read_profile

    try:
        read_profile(csv, stages=stages)
    except SolverError as error:
        raise InvalidProfile("ProfileInvalid", str(error)) from error


def schedule_of(request: SolveRequest, profile: Profile | None = None) -> Schedule:
    """The order of instructions, with the profile's constant-time ones; ``profile``: if it has been read already. A
    request without a profile has none of them."""
    from perseus_solver.profile import read_profile
    from perseus_solver.schedules import build_schedule, read_order, with_constants

    if profile is None and request.profile_csv:
        profile = read_profile(request.profile_csv.encode(), stages=request.stages)
    constants = profile.constant_stages if profile else ()
    if request.order:
        return with_constants(read_order(request.order), constants)
    return build_schedule(
        request.schedule,
        stages=request.stages,
        microbatches=request.microbatches,
        chunks=request.chunks,
        constants=constants,
    )


def solve_here(request: SolveRequest) -> bytes:
    """The solve itself, in this process."""
    from perseus_solver.frontier import solve_frontier
    from perseus_solver.switches import calm

    problem = problem_of(request)
    frontier = solve_frontier(problem, points=request.points)
    if request.switch_loss is not None:
        frontier = calm(problem, frontier, loss=request.switch_loss)
    return frontier.to_bytes()


def problem_of(request: SolveRequest) -> Problem:
    """What is solved."""
    from perseus_solver.calibration import Calibration
    from perseus_solver.problem import build_problem
    from perseus_solver.profile import read_profile

    profile = read_profile(request.profile_csv.encode(), stages=request.stages)
    schedule = schedule_of(request, profile)
    calibration = Calibration.from_json(request.calibration) if request.calibration else None
    power_w = request.blocking_power_mw / 1000
    return build_problem(profile, schedule, blocking_power_w=power_w, calibration=calibration)


def main() -> int:
    """The worker process."""
    from perseus_solver.errors import InvalidProfile as BadProfile
    from perseus_solver.errors import SolverError

    memory_bytes = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    task, data = sys.argv[2], sys.stdin.buffer.read()
    try:
        if task == "calibrate":
            from perseus_operator.calibrating import CalibrateRequest, calibrate_here

            answer = calibrate_here(CalibrateRequest.from_bytes(data))
        else:
            answer = solve_here(SolveRequest(**json.loads(data)))
    except MemoryError:
        return _OUT_OF_MEMORY
    except SolverError as error:
        sys.stderr.write(f"{error}\n")
        return _INVALID_PROFILE if isinstance(error, BadProfile) else _REFUSED
    sys.stdout.buffer.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
