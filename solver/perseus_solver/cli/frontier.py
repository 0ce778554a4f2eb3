"""`perseus frontier`: the plans of a pipeline from T_min to least energy, and on to T* for pipelines that wait."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Final

from perseus_solver.cli import arguments, common, deploying

if TYPE_CHECKING:
    from perseus_solver.cli.documents import Deployable
    from perseus_solver.cli.files import Outputs
    from perseus_solver.frontier import Planner
    from perseus_solver.model.result import Frontier

DOES: Final = "all Pareto-optimal plans, from the fastest to the one of least energy"
EXAMPLES: Final = """\
  perseus frontier --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 96 --blocking-power 83.64 \\
      --output frontier.json --plot frontier.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    arguments.add_pipeline(parser)
    parser.add_argument(
        "--points",
        type=arguments.whole(1, arguments.MAX_POINTS),
        metavar="N",
        help="largest number of plans, placed so that the worst gap at any deadline is least (default: as many as are "
        "needed for that gap, 100 to 1,000)",
    )
    arguments.add_switching(parser)
    arguments.add_hardware(parser, required=False)
    files = arguments.add_files(parser, gantt=True)
    files.add_argument(
        "--full",
        action="store_true",
        help="write each plan as perseus plan does, with every instruction's name beside its clock: fifteen times as "
        "large",
    )


def run(options: argparse.Namespace, outputs: Outputs) -> None:
    """Solve the frontier, write it as JSON, and print a summary.

    On given hardware the plans are those worth deploying there; deadlines are then for the times that they keep.

    Args:
        options: the parsed arguments.
        outputs: where files are reserved; they are put in place when the context ends without an error.

    Raises:
        SolverError: the input cannot be used, or a file cannot be written.
    """
    deploying.check_hardware(options)
    setup = common.set_up(options, outputs)
    problem, base_s, base_j = setup.problem, setup.baseline_time_s, setup.baseline_energy_j
    from perseus_solver.cli.documents import frontier_document
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.frontier import Planner

    deployable: Deployable | None = None
    with ProgressBar("solving") as progress:
        begin = time.perf_counter()
        planner = Planner(problem)
        frontier = planner.frontier(options.points, progress=progress)
        if options.hardware is not None:
            frontier, deployable = _deployable(options, planner)
        elif options.max_switch_loss is not None:
            from perseus_solver.switching import reduce_clock_changes

            frontier = reduce_clock_changes(problem, frontier, loss=options.max_switch_loss)
        solve_seconds = time.perf_counter() - begin
    if setup.write:
        setup.write(
            frontier_document(
                problem,
                frontier,
                baseline_time_s=base_s,
                baseline_energy_j=base_j,
                solve_seconds=solve_seconds,
                deployable=deployable,
                full=options.full,
            )
        )
    in_time = slice(frontier.lookup(max(base_s, frontier.t_min_s)) + 1)
    without_slowdown = int(frontier.energy_j[in_time].argmin())
    if setup.plot:
        setup.plot([common.frontier_png(setup, frontier, frontier[without_slowdown], "no slowdown")])
    if setup.gantt:
        setup.gantt([common.before_and_after_png(setup.simulator, frontier[without_slowdown])])
    lines = _summary(frontier, solve_seconds)
    if deployable is None:
        lines.append(common.describe(frontier[without_slowdown], base_s, base_j))
    else:
        point, grain, rehearsal = deployable.plan(without_slowdown)
        lines.append(common.describe(point, base_s, base_j))
        lines.append(f"grain: {grain.word}; {deploying.describe_rehearsal(rehearsal, base_s, base_j)}")
    common.print_summary(options, *lines)


def _deployable(options: argparse.Namespace, planner: Planner) -> tuple[Frontier, Deployable]:
    """Return the plans worth deploying on the hardware, and what they do at once and when they are rehearsed."""
    from perseus_solver.cli.documents import Deployable
    from perseus_solver.rehearsal import deployable_frontier, ideal_point, rehearse

    hardware = deploying.read_hardware(options.hardware)
    points = {} if options.points is None else {"points": options.points}
    executor = deploying.executor_of(options, planner.problem, hardware)
    frontier = deployable_frontier(planner, hardware, executor=executor, confidence=options.confidence, **points)
    assert frontier.rehearsed is not None
    rehearsal = rehearse(executor, frontier.frequencies_mhz, hardware)
    ideal = [ideal_point(planner, point) for point in frontier]
    return frontier, Deployable(ideal, rehearsal, frontier.rehearsed.grains)


def _summary(frontier: Frontier, solve_seconds: float) -> list[str]:
    """Describe a frontier: its span and its gap to the proven bound."""
    from perseus_solver.model.deployed import DeployedGap

    deployed, least = DeployedGap.of(frontier), frontier.least_energy
    at_once = " of clocks that change at once" if frontier.rehearsed else ""
    lines = [
        f"{least + 1} plans from T_min {frontier.t_min_s:.4f} s to least energy at {frontier.time_s[least]:.4f} s, in "
        f"{solve_seconds:.2f} s; gap to the proven bound{at_once} over all deadlines "
        f"{100 * deployed.mean:.3f} % (mean), {100 * deployed.worst:.3f} % (worst)",
    ]
    if later := len(frontier.straggler_part):
        lines.append(
            f"straggler part, for pipelines that wait for a straggler: {later} plans up to T* {frontier.t_star_s:.4f} s"
            f"; gap {100 * deployed.straggler_worst:.3f} % (worst)"
        )
    return lines
