"""A frontier that was stored in a ConfigMap is a claim of any user who may write there: the worker process verifies it.

Every clock must be one that the job's own profile was measured at, and times and energies are simulated again from the
job's own inputs. What comes back to the operator was encoded by this process, and nothing else of the claim is left
but the proven bound on energy, which only says how good the plans are shown to be.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from perseus_operator.solving.request import SolveRequest, problem_of
from perseus_proto.planset import MAX_POINTS

if TYPE_CHECKING:
    from perseus_solver.model.problem import Problem
    from perseus_solver.model.result import Frontier

TOLERANCE: Final = 1e-6
"""Share by which a stored time or energy may differ from the simulated one: sums of float64 in another order."""
MOST_LATE = 4.0
"""Rehearsed times are not computed again, which would take as long as a solve. They may be so many times as long as
simulated ones at most; a wrong one costs the namespace that stored it its savings, and nobody else anything."""


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
    return verified(Frontier.from_bytes(request.data, max_cells=most), problem).to_bytes()


def verified(frontier: Frontier, problem: Problem) -> Frontier:
    """A frontier with the clocks of this one and the times and energies that a problem gives them.

    Raises:
        SolverError: it is no frontier of this problem.
    """
    import numpy as np

    from perseus_solver.model.result import InvalidFrontier
    from perseus_solver.model.simulator import Simulator

    points = len(frontier)
    if not 1 <= points <= MAX_POINTS or frontier.frequencies_mhz.shape != (points, problem.instructions):
        raise InvalidFrontier("frontier: has another shape than these inputs")
    if not np.array_equal(frontier.stage_offset, problem.stage_offset):
        raise InvalidFrontier("frontier: has other stages than these inputs")
    if len(frontier.statuses) != points or frontier.clock_changes.shape != (points,):
        raise InvalidFrontier("frontier: its columns are not equally long")
    simulator = Simulator(problem)
    time_s, energy_j = simulator.totals(simulator.choice_of(frontier.frequencies_mhz))
    rehearsed = frontier.rehearsed
    stored = (frontier.time_s, frontier.energy_j)
    if rehearsed is not None:
        expected = np.array([*stored, rehearsed.p50_s])
        if not (np.isfinite(expected) & (expected > 0)).all() or (frontier.time_s > MOST_LATE * time_s).any():
            raise InvalidFrontier("frontier: its rehearsed times and energies are impossible")
        stored = (rehearsed.ideal_time_s, rehearsed.ideal_energy_j)
    for name, claimed, simulated in (("time", stored[0], time_s), ("energy", stored[1], energy_j)):
        if not np.allclose(claimed, simulated, rtol=TOLERANCE, atol=0.0):
            raise InvalidFrontier(f"frontier: its clocks give another {name} than it says")
    bound_j = frontier.energy_lower_bound_j
    if not (np.isfinite(bound_j) & (bound_j > 0) & (bound_j <= frontier.energy_j * (1 + TOLERANCE))).all():
        raise InvalidFrontier("frontier: its bounds on energy are not below its energies")
    if not np.isclose(frontier.blocking_power_w, problem.blocking_power_w, rtol=TOLERANCE, atol=TOLERANCE):
        raise InvalidFrontier("frontier: was solved with another blocking power")
    return frontier if rehearsed is not None else replace(frontier, time_s=time_s, energy_j=energy_j)
