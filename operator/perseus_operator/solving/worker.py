"""The worker process: ``python -m perseus_operator.solving.worker MEMORY_MIB TASK``, a value of `Task`.

The request comes on stdin, the frontier or calibration goes as bytes to stdout, a refusal as one line to stderr. The
exit code says which kind of refusal it is. A process of its own can be killed at its deadline, and takes nobody along
when it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Final

from perseus_operator.solving.request import SolveRequest, problem_of

REFUSED: Final = 2
INVALID_PROFILE: Final = 3
OUT_OF_MEMORY: Final = 4
_NICENESS: Final = 10
"""A frontier that comes some seconds later harms nobody; an operator that answers later is waited for."""


def solve_in_process(request: SolveRequest) -> bytes:
    """Solve in this process; the frontier's bytes."""
    from perseus_solver.frontier import solve_frontier
    from perseus_solver.switching import reduce_clock_changes

    problem = problem_of(request)
    if request.hardware:
        from perseus_operator.solving.rehearsed import solve_rehearsed

        return solve_rehearsed(problem, request).to_bytes()
    frontier = solve_frontier(problem, points=request.points)
    if request.switch_loss is not None:
        frontier = reduce_clock_changes(problem, frontier, loss=request.switch_loss)
    return frontier.to_bytes()


def main() -> int:
    """Entry point of the worker process; its exit code."""
    from perseus_solver.errors import InvalidProfile as BadProfile
    from perseus_solver.errors import SolverError, content_withheld

    os.nice(_NICENESS)
    memory_bytes = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(OSError):  # if the container's memory is used up all the same, not the operator
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    task, data = sys.argv[2], sys.stdin.buffer.read()
    try:
        with content_withheld():
            answer = _answer(task, data)
    except MemoryError:
        return OUT_OF_MEMORY
    except SolverError as error:
        sys.stderr.write(f"{error}\n")
        return INVALID_PROFILE if isinstance(error, BadProfile) else REFUSED
    sys.stdout.buffer.write(answer)
    return 0


def _answer(task: str, data: bytes) -> bytes:
    if task == "calibrate":
        from perseus_operator.solving.calibration import CalibrateRequest, calibrate_in_process

        return calibrate_in_process(CalibrateRequest.from_bytes(data))
    if task == "check":
        from perseus_operator.solving.calibration import CheckRequest, check_in_process

        return check_in_process(CheckRequest.from_bytes(data))
    if task == "restore":
        from perseus_operator.solving.verification import RestoreRequest, verify_in_process

        return verify_in_process(RestoreRequest.from_bytes(data))
    if task == "plan-serving":
        from perseus_operator.solving.serving_plan import ServingPlanRequest, plan_in_process

        return plan_in_process(ServingPlanRequest.from_bytes(data))
    return solve_in_process(SolveRequest(**json.loads(data)))


if __name__ == "__main__":
    sys.exit(main())
