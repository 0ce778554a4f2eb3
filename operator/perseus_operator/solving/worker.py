"""The worker process: ``python -m perseus_operator.solving.worker MEMORY_MIB solve|calibrate``.

The request comes on stdin, the frontier or calibration goes as bytes to stdout, a refusal as one line to stderr. The
exit code says which kind of refusal it is. A process of its own can be killed at its deadline, and takes nobody along
when it dies.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import TYPE_CHECKING, Final

from perseus_operator.solving.request import SolveRequest, problem_of

if TYPE_CHECKING:
    from perseus_solver.model.problem import Problem
    from perseus_solver.model.result import Frontier

CONFIDENCE: Final = 0.95
"""Share of the iterations that keep the time of a rehearsed plan."""

REFUSED: Final = 2
INVALID_PROFILE: Final = 3
OUT_OF_MEMORY: Final = 4


def solve_in_process(request: SolveRequest) -> bytes:
    """Solve in this process; the frontier's bytes."""
    from perseus_solver.frontier import solve_frontier
    from perseus_solver.switching import reduce_clock_changes

    problem = problem_of(request)
    if request.hardware:
        return _rehearsed(problem, request).to_bytes()
    frontier = solve_frontier(problem, points=request.points)
    if request.switch_loss is not None:
        frontier = reduce_clock_changes(problem, frontier, loss=request.switch_loss)
    return frontier.to_bytes()


def _rehearsed(problem: Problem, request: SolveRequest) -> Frontier:
    """Plans of all grains, of which each keeps its time with confidence under the request's hardware."""
    from perseus_solver.rehearsal import Hardware, deployable_frontier

    hardware = Hardware.from_json(request.hardware)
    frontier = deployable_frontier(problem, hardware, points=request.points, confidence=CONFIDENCE)
    return frontier if request.switch_loss is None else prefer_few_changes(frontier, request.switch_loss)


def prefer_few_changes(frontier: Frontier, loss: float) -> Frontier:
    """Leave out plans that change clocks often where one that is no slower changes them more seldom.

    Args:
        frontier: rehearsed, fastest plan first.
        loss: share of a plan's energy that may be given up for fewer changes.

    Returns:
        The frontier without the plans that are replaced by others.
    """
    import numpy as np

    energies, kept = frontier.effective_energy_j, []
    for point in range(len(frontier)):
        allowed = np.flatnonzero(energies[: point + 1] <= energies[point] + loss * frontier.energy_j[point])
        fewest = frontier.clock_changes[allowed].min()
        kept.append(int(allowed[frontier.clock_changes[allowed] == fewest][-1]))
    return frontier.subset(sorted({0, *kept}))


def main() -> int:
    """Entry point of the worker process; its exit code."""
    from perseus_solver.errors import InvalidProfile as BadProfile
    from perseus_solver.errors import SolverError

    memory_bytes = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    task, data = sys.argv[2], sys.stdin.buffer.read()
    try:
        if task == "calibrate":
            from perseus_operator.solving.calibration import CalibrateRequest, calibrate_in_process

            answer = calibrate_in_process(CalibrateRequest.from_bytes(data))
        else:
            answer = solve_in_process(SolveRequest(**json.loads(data)))
    except MemoryError:
        return OUT_OF_MEMORY
    except SolverError as error:
        sys.stderr.write(f"{error}\n")
        return INVALID_PROFILE if isinstance(error, BadProfile) else REFUSED
    sys.stdout.buffer.write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
