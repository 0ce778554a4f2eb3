"""`perseus frontier`: all Pareto-optimal plans of a pipeline, from T_min to T*."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from perseus_solver.cli import arguments, common

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs

_DEFAULT_POINTS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    arguments.add_pipeline(parser)
    parser.add_argument(
        "--points",
        type=arguments.points,
        default=_DEFAULT_POINTS,
        metavar="N",
        help="plans to compute, evenly spread (default: 100)",
    )
    arguments.add_switching(parser)
    arguments.add_files(parser, output=True)


def run(options: argparse.Namespace, outputs: Outputs) -> None:
    """Solve the frontier, write it as JSON, and print a summary.

    Args:
        options: the parsed arguments.
        outputs: where files are reserved; they are put in place when the context ends without an error.

    Raises:
        SolverError: the input cannot be used, or a file cannot be written.
    """
    setup = common.set_up(options, outputs)
    problem, base_s, base_j = setup.problem, setup.baseline_time_s, setup.baseline_energy_j
    from perseus_solver.cli.documents import frontier_document
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.frontier import solve_frontier

    with ProgressBar("solving") as progress:
        begin = time.perf_counter()
        frontier = solve_frontier(problem, points=options.points, progress=progress)
        if common.wants_fewer_changes(options):
            from perseus_solver.switching import reduce_clock_changes

            frontier = reduce_clock_changes(
                problem, frontier, common.switching(options), loss=common.switch_loss(options)
            )
        solve_seconds = time.perf_counter() - begin
    setup.write(
        frontier_document(
            problem, frontier, baseline_time_s=base_s, baseline_energy_j=base_j, solve_seconds=solve_seconds
        )
    )
    without_slowdown = frontier[frontier.lookup(base_s)]
    if setup.plot:
        from perseus_solver.plots import frontier_png

        setup.plot([frontier_png(problem, frontier, baseline_time_s=base_s, baseline_energy_j=base_j)])
    if setup.gantt:
        setup.gantt([common.before_and_after_png(setup.simulator, without_slowdown)])
    gap = 100 * frontier.gap
    common.print_summary(
        options,
        f"{len(frontier)} plans in {solve_seconds:.2f} s, "
        f"T_min {frontier.t_min_s:.4f} s, T* {frontier.t_star_s:.4f} s, "
        f"gap to the proven bound {sorted(gap)[len(gap) // 2]:.3f} % (median), {gap.max():.3f} % (max)",
        common.describe(without_slowdown, base_s, base_j),
    )
