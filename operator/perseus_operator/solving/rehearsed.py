"""Frontiers of plans that keep their time on real GPUs, made in the worker process.

The solver rehearses plans of all grains under a job's hardware. Where the PerseusJob asks for few clock changes, plans
are left out that change clocks often for little.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perseus_operator.solving.request import SolveRequest
from perseus_solver.frontier import Planner
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frontier
from perseus_solver.rehearsal.deployment import deployable_frontier
from perseus_solver.rehearsal.execution import Executor
from perseus_solver.rehearsal.hardware import hardware_from_json
from perseus_solver.rehearsal.outcome import rehearse_fastest

CONFIDENCE: Final = 0.95
"""Share of the iterations that keep the time of a plan."""


def solve_rehearsed(problem: Problem, request: SolveRequest) -> Frontier:
    """Solve, and rehearse plans of all grains under the hardware of a request.

    Args:
        problem: of the request.
        request: with a hardware.

    Returns:
        The frontier; each point's time is kept with `CONFIDENCE`, and its energy is the expected one.

    Raises:
        SolverError: the hardware cannot be used, or there is no plan.
    """
    hardware = hardware_from_json(request.hardware)
    no_slower_s = float(rehearse_fastest(Executor(problem), hardware).time_kept_s(CONFIDENCE)[0]) * (
        1 + request.no_slowdown
    )
    frontier = deployable_frontier(
        Planner(problem), hardware, points=request.points, confidence=CONFIDENCE, times_s=[no_slower_s]
    )
    return frontier if request.switch_loss is None else prefer_few_changes(frontier, request.switch_loss)


def prefer_few_changes(frontier: Frontier, loss: float) -> Frontier:
    """Leave out plans that change clocks often where one that is no slower changes them more seldom.

    Args:
        frontier: fastest plan first.
        loss: share of a plan's energy that may be given up for fewer changes.

    Returns:
        The frontier without the plans that others replace. The fastest stays.
    """
    effective_j, changes, kept = frontier.effective_energy_j, frontier.clock_changes, {0}
    for point, energy_j in enumerate(frontier.energy_j.tolist()):
        allowed = np.flatnonzero(effective_j[: point + 1] <= effective_j[point] + loss * energy_j)
        kept.add(int(allowed[changes[allowed] == changes[allowed].min()][-1]))
    return frontier.select(sorted(kept))
