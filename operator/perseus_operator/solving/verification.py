"""A frontier that was stored is a claim of any user who may write there, and one that a worker of the solver service
answers is a claim of that worker: a worker process of the operator's pod verifies both.

Every clock must be one that the job's own profile was measured at, and times and energies are simulated again from the
job's own inputs. The fastest plan must be as fast as all clocks at their highest, since every slowdown is against it.
What comes back to the operator was encoded by this process, and nothing else of the claim is left but the proven bound
on energy, which only says how good the plans are shown to be, and rehearsed figures within wide limits.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from perseus_operator.solving.request import SolveRequest, problem_of
from perseus_proto.planset import MAX_POINTS

if TYPE_CHECKING:
    from perseus_solver.kinds import Floats
    from perseus_solver.model.problem import Problem
    from perseus_solver.model.result import Frontier, Rehearsed

TOLERANCE: Final = 1e-6
"""Share by which a stored time or energy may differ from the simulated one: sums of float64 in another order."""
MOST_APART = 4.0
"""Rehearsed times and energies are not computed again, which would take as long as a solve, but for those of the
fastest plan. They may be so many times as large as simulated ones, or as small. A wrong one costs a job its savings, or
the bound until measured iterations show it."""
REHEARSAL_TOLERANCE = 2e-3
"""Share by which the rehearsed time of the fastest plan may differ: rehearsals of one plan among others do by less."""


@dataclass(frozen=True)
class RestoreRequest:
    """Stored bytes, and the inputs that they claim to be solved from."""

    inputs: SolveRequest
    data: bytes

    def to_bytes(self) -> bytes:
        """One line of JSON, then the stored bytes."""
        return json.dumps(asdict(self.inputs)).encode() + b"\n" + self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> RestoreRequest:
        """What ``to_bytes`` made."""
        line, _, stored = data.partition(b"\n")
        return cls(SolveRequest(**json.loads(line)), stored)


def verify_in_process(request: RestoreRequest) -> bytes:
    """Verify a stored frontier, in the worker process.

    Returns:
        The bytes of a frontier with the same clocks; its times and energies are those simulated here, or rehearsed
        ones whose simulated figures are.

    Raises:
        SolverError: it is no frontier of these inputs.
    """
    from perseus_solver.model.result import Frontier

    problem = problem_of(request.inputs)
    most = MAX_POINTS * (problem.instructions + 64)
    frontier = verified(Frontier.from_bytes(request.data, max_cells=most), problem, request.inputs.hardware)
    return frontier.to_bytes()


def verified(frontier: Frontier, problem: Problem, hardware: str = "") -> Frontier:
    """A frontier with the clocks of this one and the times and energies that a problem gives them.

    Args:
        frontier: as it is claimed.
        problem: of the job's inputs.
        hardware: of the job's inputs, that a rehearsed frontier was rehearsed under; empty: clocks change at once.

    Raises:
        SolverError: it is no frontier of this problem.
    """
    import numpy as np

    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.model.result import InvalidFrontier, status_of
    from perseus_solver.model.simulator import Simulator
    from perseus_solver.switching import clock_changes

    _check_shape(frontier, problem)
    simulator = Simulator(problem)
    time_s, energy_j = simulator.totals(simulator.choice_of(frontier.frequencies_mhz))
    rehearsed = frontier.rehearsed
    stored = (frontier.time_s, frontier.energy_j)
    if (rehearsed is not None) != bool(hardware):
        raise InvalidFrontier("frontier: was rehearsed under other hardware than these inputs have")
    if rehearsed is not None:
        _check_rehearsed(frontier, rehearsed, time_s, energy_j)
        stored = (rehearsed.ideal_time_s, rehearsed.ideal_energy_j)
    for name, claimed, simulated in (("time", stored[0], time_s), ("energy", stored[1], energy_j)):
        if not np.allclose(claimed, simulated, rtol=TOLERANCE, atol=0.0):
            raise InvalidFrontier(f"frontier: its clocks give another {name} than it says")
    if not (np.diff(frontier.time_s) > 0).all():
        raise InvalidFrontier("frontier: its points are not sorted by time")
    if rehearsed is None:
        fastest_s, tolerance = float(simulator.run(all_maximum(problem)).iteration_time_s), TOLERANCE
        first_s = float(time_s[0])
    else:
        first_s, fastest_s = _rehearsed_s(frontier, problem, hardware)
        tolerance = REHEARSAL_TOLERANCE
    if first_s > fastest_s * (1 + tolerance) or frontier.time_s[0] < first_s * (1 - tolerance):
        raise InvalidFrontier(
            f"frontier: its fastest plan takes {first_s:.6g} s, and it says {frontier.time_s[0]:.6g} s; all clocks at"
            f" their highest take {fastest_s:.6g} s"
        )
    bound_j = frontier.energy_lower_bound_j
    if not (np.isfinite(bound_j) & (bound_j > 0) & (bound_j <= frontier.energy_j * (1 + TOLERANCE))).all():
        raise InvalidFrontier("frontier: its bounds on energy are not below its energies")
    if not np.isclose(frontier.blocking_power_w, problem.blocking_power_w, rtol=TOLERANCE, atol=TOLERANCE):
        raise InvalidFrontier("frontier: was solved with another blocking power")
    proven = replace(
        frontier,
        statuses=tuple(status_of(gap) for gap in (frontier.energy_j / bound_j - 1.0).tolist()),
        clock_changes=clock_changes(frontier.frequencies_mhz, problem.stage_offset),
    )
    return proven if rehearsed is not None else replace(proven, time_s=time_s, energy_j=energy_j)


def _rehearsed_s(frontier: Frontier, problem: Problem, hardware: str) -> tuple[float, float]:
    """How long the first plan of a frontier takes with all clocks at their highest beside it, both rehearsed here.

    Raises:
        SolverError: the hardware cannot be used, or the frontier was rehearsed for another confidence.
    """
    import numpy as np

    from perseus_operator.solving.rehearsed import CONFIDENCE
    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.model.result import InvalidFrontier
    from perseus_solver.rehearsal.hardware import hardware_from_json
    from perseus_solver.rehearsal.outcome import rehearse

    if frontier.rehearsed is None or frontier.rehearsed.confidence != CONFIDENCE:
        raise InvalidFrontier(f"frontier: its times are not those kept with a confidence of {CONFIDENCE}")
    highest = problem.frequencies_of(all_maximum(problem)[None])
    both = np.concatenate([frontier.frequencies_mhz[:1], highest])
    first_s, fastest_s = rehearse(problem, both, hardware_from_json(hardware)).time_kept_s(CONFIDENCE).tolist()
    return first_s, fastest_s


def _check_shape(frontier: Frontier, problem: Problem) -> None:
    import numpy as np

    from perseus_solver.model.result import InvalidFrontier

    points = len(frontier)
    if not 1 <= points <= MAX_POINTS or frontier.frequencies_mhz.shape != (points, problem.instructions):
        raise InvalidFrontier("frontier: has another shape than these inputs")
    if not np.array_equal(frontier.stage_offset, problem.stage_offset):
        raise InvalidFrontier("frontier: has other stages than these inputs")
    if len(frontier.statuses) != points or frontier.clock_changes.shape != (points,):
        raise InvalidFrontier("frontier: its columns are not equally long")


def _check_rehearsed(frontier: Frontier, rehearsed: Rehearsed, time_s: Floats, energy_j: Floats) -> None:
    import numpy as np

    from perseus_solver.model.result import InvalidFrontier

    simulated = np.array([time_s, energy_j, time_s])
    apart = np.array([frontier.time_s, frontier.energy_j, rehearsed.p50_s]) / simulated
    shares = np.array([rehearsed.below_share, rehearsed.above_share])
    possible = (apart >= 1 / MOST_APART) & (apart <= MOST_APART)
    if not possible.all() or not ((shares >= 0) & (shares <= 1)).all():
        raise InvalidFrontier("frontier: its rehearsed times and energies are impossible")
