"""`perseus plan`: one plan, the cheapest that ends by a deadline."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from perseus_solver.cli import arguments, common

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs

_FRONTIER_POINTS = 50
"""Plans of a frontier from which the search for fewer clock changes starts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    arguments.add_pipeline(parser)
    arguments.add_deadline(parser)
    arguments.add_switching(parser)
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
    write = outputs.open("--output", options.output)
    plot = common.reserve_picture(options, outputs, "plot")
    gantt = common.reserve_picture(options, outputs, "gantt")
    problem = common.read_problem(options)
    from perseus_solver.cli.documents import plan_document
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.frontier import solve_deadline, solve_frontier
    from perseus_solver.model.simulator import Simulator

    simulator = Simulator(problem)
    baseline = simulator.run(all_maximum(problem))
    base_s, base_j = float(baseline.iteration_time_s), float(baseline.energy_j)
    with ProgressBar("solving") as progress:
        deadline_s = common.deadline_s(options, base_s)
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
    write(plan_document(problem, point))
    if plot:
        from perseus_solver.plots import frontier_png

        frontier = solve_frontier(problem)
        plot([frontier_png(problem, frontier, baseline_time_s=base_s, baseline_energy_j=base_j, chosen=point)])
    if gantt:
        gantt([common.before_and_after_png(simulator, point)])
    common.print_summary(options, common.describe(point, base_s, base_j))
