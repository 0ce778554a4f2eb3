"""What commands share that choose plans for real hardware: how it is described, and what is said of plans there.

numpy and OR-Tools are imported inside the functions, so that the parser starts without them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_solver.cli import common
from perseus_solver.cli.files import read_file
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_core.hardware import Hardware
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.frontier import Planner
    from perseus_solver.model.problem import Problem
    from perseus_solver.model.result import Point
    from perseus_solver.rehearsal import Executor, Rehearsal, RobustPlan


def check_hardware(options: argparse.Namespace) -> None:
    """Refuse to say twice how rarely clocks change.

    Raises:
        SolverError: there are both a description of the hardware and a permitted loss.
    """
    if options.hardware is not None and options.max_switch_loss is not None:
        raise SolverError("--hardware already says what clock changes cost; leave out --max-switch-loss")


def read_hardware(path: Path) -> Hardware:
    """Read the description of the hardware that ``--hardware`` names.

    Raises:
        InvalidHardware: the file cannot be read or used.
    """
    from perseus_core.hardware import MAX_BYTES
    from perseus_solver.rehearsal.hardware import InvalidHardware, hardware_from_json

    text = read_file("hardware", path, MAX_BYTES, InvalidHardware)
    try:
        return hardware_from_json(text)
    except InvalidHardware as error:
        raise InvalidHardware(f"hardware {path}: {error}") from None


def executor_of(options: argparse.Namespace, problem: Problem, hardware: Hardware) -> Executor:
    """Return what executes plans: where the hardware says nothing of scatter, with that of ``--calibration``.

    Raises:
        InvalidCalibration: the file cannot be read or used.
    """
    from perseus_solver.rehearsal import Executor, Scatter

    noise = common.read_calibration(options.calibration).noise if options.calibration and not hardware.noise else ()
    return Executor(problem, Scatter.calibrated(problem, noise) if noise else None)


@dataclass(frozen=True, slots=True, eq=False)
class Deployed:
    """A plan that was chosen for real hardware.

    Attributes:
        point: the plan.
        before, after: rehearsals of all clocks at their maximum, and of the plan.
    """

    point: Point
    before: Rehearsal
    after: Rehearsal


def deploy(
    options: argparse.Namespace,
    planner: Planner,
    hardware: Hardware,
    *,
    executor: Executor | None = None,
    progress: ProgressBar | None = None,
) -> Deployed:
    """Return the plan of least expected energy that keeps the deadline with the confidence on this hardware.

    Where none does, the fastest is returned, and a note says so. Where no deadline is given it is that of the operator
    for no slowdown.

    Args:
        options: the parsed arguments of ``add_deadline`` and ``add_hardware``.
        planner: of the problem.
        hardware: what plans meet.
        executor: of the problem, which knows how its instructions scatter; None: as the hardware says.
        progress: shows how far the solution is.

    Raises:
        Infeasible: the deadline is shorter than T_min.
    """
    import numpy as np

    from perseus_solver.errors import Infeasible
    from perseus_solver.kinds import latest_s
    from perseus_solver.rehearsal import Executor, deployable_frontier, rehearse, rehearse_fastest
    from perseus_solver.significance import NO_SLOWDOWN

    problem, confidence = planner.problem, options.confidence
    executor = executor or Executor(problem)
    before = rehearse_fastest(executor, hardware)
    fastest_s = float(before.time_kept_s(confidence)[0])
    free = options.deadline_s is None and options.max_slowdown is None
    wanted_s = (1 + NO_SLOWDOWN) * fastest_s if free else common.deadline_s(options, fastest_s)
    if latest_s(wanted_s) < planner.t_min_s:
        raise Infeasible(wanted_s, planner.t_min_s)
    frontier = deployable_frontier(
        planner, hardware, executor=executor, confidence=confidence, times_s=(wanted_s,), progress=progress
    )
    kept = np.flatnonzero(frontier.time_s <= latest_s(wanted_s))
    if not len(kept):
        common.print_note(
            options,
            f"no plan found keeps {wanted_s:.4f} s in {100 * confidence:g} % of the iterations; "
            f"the fastest keeps {frontier.t_min_s:.4f} s",
        )
    index = int(kept[frontier.energy_j[kept].argmin()]) if len(kept) else 0
    after = rehearse(executor, frontier.frequencies_mhz[index : index + 1], hardware)
    return Deployed(frontier[index], before, after)


def describe_rehearsal(rehearsal: Rehearsal, baseline_time_s: float, baseline_energy_j: float) -> str:
    """Describe in one line what came of the one plan that was rehearsed, against all clocks at their maximum."""
    p50_s, p95_s = (float(rehearsal.time_kept_s(share)[0]) for share in (0.5, 0.95))
    energy_j = float(rehearsal.mean_energy_j[0])
    return (
        f"rehearsed: {p50_s:.4f} s ({100 * (p50_s / baseline_time_s - 1):+.2f} %) in the median, {p95_s:.4f} s "
        f"({100 * (p95_s / baseline_time_s - 1):+.2f} %) at the 95th percentile, {energy_j:.1f} J "
        f"({100 * (energy_j / baseline_energy_j - 1):+.2f} %); {100 * float(rehearsal.below_share[0]):.1f} % of the "
        f"computing time below the planned clock, {100 * float(rehearsal.above_share[0]):.1f} % above"
    )


def describe_scatter(plan: RobustPlan, confidence: float, baseline_time_s: float, baseline_energy_j: float) -> str:
    """Describe in one line what a plan does under scatter, against all clocks at their maximum without it."""
    shares = (0.5, confidence, 0.99)
    times = ", ".join(
        f"{plan.time_kept_s(share):.4f} s ({100 * (plan.time_kept_s(share) / baseline_time_s - 1):+.2f} %) in "
        f"{100 * share:g} %"
        for share in dict.fromkeys(shares)
    )
    return (
        f"under scatter: {100 * plan.kept:.1f} % of the iterations end by {plan.deadline_s:.4f} s; {times} of them; "
        f"{plan.mean_energy_j:.1f} J ({100 * (plan.mean_energy_j / baseline_energy_j - 1):+.2f} %) on average"
    )
