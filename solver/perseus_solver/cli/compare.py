"""`perseus compare`: this solver's plans beside those of other methods, on the same profile."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from perseus_solver.cli import arguments, common

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs

_DEFAULT_LOWTIME_UNIT_S = 1e-3  # the paper's

DOES: Final = "this solver's plans beside those of other methods on the same profile, as a table"
EXAMPLES: Final = """\
  perseus compare --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 12 --blocking-power 83.64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    arguments.add_pipeline(parser)
    arguments.add_deadline(parser)
    parser.add_argument("--lowtime", action="store_true", help="also run lowtime (extra 'bench'); takes minutes")
    parser.add_argument(
        "--lowtime-unit-s",
        type=arguments.positive,
        default=_DEFAULT_LOWTIME_UNIT_S,
        metavar="S",
        help="lowtime's time grid, in seconds (default: 0.001)",
    )
    arguments.add_files(parser, gantt=False)


def run(options: argparse.Namespace, outputs: Outputs) -> None:
    """Plan with every method, write the comparison as JSON where asked, and print it as a table.

    Args:
        options: the parsed arguments.
        outputs: where files are reserved; they are put in place when the context ends without an error.

    Raises:
        Infeasible: the deadline is shorter than T_min.
        SolverError: the input cannot be used, lowtime is wanted but not installed, or a file cannot be written.
    """
    from perseus_solver.comparison.lowtime_peer import check_installed

    write = common.reserve_json(options, outputs)
    plot = common.reserve_picture(options, outputs, "plot")
    if options.lowtime:
        check_installed()
    simulator, base_s, _ = common.read_baseline(options)
    from perseus_solver.comparison.table import as_json, as_table, compare, single_clocks

    problem = simulator.problem
    deadline_s = common.deadline_s(options, base_s)
    rows = compare(problem, deadline_s=deadline_s, lowtime_unit_s=options.lowtime_unit_s if options.lowtime else None)
    if write:
        write([as_json(rows), b"\n"])
    if plot:
        from perseus_solver.comparison.picture import compare_png
        from perseus_solver.frontier import solve_frontier

        plot([compare_png(problem, solve_frontier(problem), rows, single_clocks(simulator))])
    common.print_summary(options, as_table(rows))
