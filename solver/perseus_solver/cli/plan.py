"""`perseus plan`: one plan, the cheapest that ends by a deadline."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from perseus_solver.cli import arguments, common
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.model.result import Grain, Point
    from perseus_solver.rehearsal import Rehearsal

_FRONTIER_POINTS = 50
"""Plans of a frontier from which the search for plans with fewer clock changes starts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    arguments.add_pipeline(parser)
    arguments.add_deadline(parser)
    arguments.add_switching(parser)
    arguments.add_hardware(parser, required=False)
    arguments.add_files(parser, output=True)


def run(options: argparse.Namespace, outputs: Outputs) -> None:
    """Solve for one deadline, write the plan as JSON, and print a summary.

    Without a deadline the plan is not slower than all clocks at their maximum.

    Args:
        options: the parsed arguments.
        outputs: where files are reserved; they are put in place when the context ends without an error.

    Raises:
        Infeasible: the deadline is shorter than T_min.
        SolverError: the input cannot be used, or a file cannot be written.
    """
    if options.hardware is not None and common.wants_fewer_changes(options):
        raise SolverError("--hardware already says what clock changes cost; leave out the options for clock changes")
    setup = common.set_up(options, outputs)
    problem, base_s, base_j = setup.problem, setup.baseline_time_s, setup.baseline_energy_j
    from perseus_solver.cli.documents import plan_document
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.frontier import solve_frontier

    grain: Grain | None = None
    rehearsal: Rehearsal | None = None
    with ProgressBar("solving") as progress:
        if options.hardware is None:
            point = _solved(options, setup, progress)
        else:
            point, grain, rehearsal = _rehearsed(options, setup, progress)
    setup.write(plan_document(problem, point, grain, rehearsal))
    if setup.plot:
        from perseus_solver.plots import frontier_png

        frontier = solve_frontier(problem)
        setup.plot([frontier_png(problem, frontier, baseline_time_s=base_s, baseline_energy_j=base_j, chosen=point)])
    if setup.gantt:
        setup.gantt([common.before_and_after_png(setup.simulator, point)])
    lines = [common.describe(point, base_s, base_j)]
    if rehearsal is not None:
        lines.append(f"grain: {grain}; {common.describe_rehearsal(rehearsal, base_s, base_j)}")
    common.print_summary(options, *lines)


def _solved(options: argparse.Namespace, setup: common.Setup, progress: ProgressBar) -> Point:
    """Return the cheapest plan whose clocks change at once, or as the options for clock changes say."""
    from perseus_solver.frontier import solve_deadline, solve_frontier

    problem, deadline_s = setup.problem, common.deadline_s(options, setup.baseline_time_s)
    point = solve_deadline(problem, deadline_s, progress=progress)
    if common.wants_fewer_changes(options):
        from perseus_solver.switching import reduce_clock_changes_of_point

        frontier = solve_frontier(problem, points=_FRONTIER_POINTS)
        point = reduce_clock_changes_of_point(
            problem, frontier, point, deadline_s, common.switching(options), loss=common.switch_loss(options)
        )
        if point.iteration_time_s > deadline_s * (1 + 1e-9):
            common.print_note(
                options,
                f"no plan found meets {deadline_s:.4f} s with this switch latency; "
                f"the fastest takes {point.iteration_time_s:.4f} s",
            )
    return point


def _rehearsed(
    options: argparse.Namespace, setup: common.Setup, progress: ProgressBar
) -> tuple[Point, Grain, Rehearsal]:
    """Return the plan of least expected energy that keeps the deadline with the confidence, and its rehearsal."""
    import numpy as np

    from perseus_solver.errors import Infeasible
    from perseus_solver.frontier import solve_frontier
    from perseus_solver.rehearsal import deployable_frontier, ideal_point, rehearse

    problem, confidence = setup.problem, options.confidence
    hardware = common.read_hardware(options.hardware)
    fastest = np.array([[problem.options[k].frequency_mhz[0] for k in problem.option_of.tolist()]], dtype=np.uint16)
    # A slowdown is against all clocks at their maximum on the same hardware, where instructions scatter as well.
    kept_s = float(rehearse(problem, fastest, hardware).time_kept_s(confidence)[0])
    deadline_s = common.deadline_s(options, kept_s)
    shortest_s = np.array([options.time_s.min() for options in problem.options])[problem.option_of]
    t_min_s = float(setup.simulator.end_s(shortest_s).max()) + problem.overhead_s
    if deadline_s < t_min_s:
        raise Infeasible(deadline_s, t_min_s)
    solved = solve_frontier(problem, points=_FRONTIER_POINTS, progress=progress)
    found = deployable_frontier(problem, hardware, confidence=confidence, frontier=solved, times_s=(deadline_s,))
    kept = np.flatnonzero(found.time_s <= deadline_s * (1 + 1e-9))
    if not len(kept):
        common.print_note(
            options,
            f"no plan found keeps {deadline_s:.4f} s in {100 * confidence:g} % of the iterations; "
            f"the fastest keeps {found.t_min_s:.4f} s",
        )
    index = int(kept[found.energy_j[kept].argmin()]) if len(kept) else 0
    expectation = found[index].expectation
    assert expectation is not None
    rehearsal = rehearse(problem, found.frequencies_mhz[index : index + 1], hardware)
    return ideal_point(problem, solved, found[index]), expectation.grain, rehearsal
