"""`perseus plan`: one plan, the cheapest that ends by a deadline."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from perseus_solver.cli import arguments, common, deploying
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from perseus_core.grain import Grain
    from perseus_solver.cli.files import Outputs
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.frontier import Planner
    from perseus_solver.model.result import Point
    from perseus_solver.rehearsal import Rehearsal, RobustPlan

DOES: Final = "one plan: the least energy by a deadline, or without slowdown if no deadline is given"
EXAMPLES: Final = """\
  perseus plan --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 96 --blocking-power 83.64
  perseus plan --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 96 --blocking-power 83.64 \\
      --max-slowdown 3% --output plan.json --gantt pipeline.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    arguments.add_pipeline(parser)
    arguments.add_deadline(parser)
    arguments.add_prove(parser)
    arguments.add_switching(parser)
    arguments.add_hardware(parser, required=False)
    arguments.add_scatter(parser)
    arguments.add_files(parser, gantt=True)


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
    robust = _wants_robust(options)
    setup = common.set_up(options, outputs)
    problem, base_s, base_j = setup.problem, setup.baseline_time_s, setup.baseline_energy_j
    from perseus_solver.cli.documents import plan_document
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.frontier import Planner

    planner = Planner(problem)
    grain: Grain | None = None
    rehearsal: Rehearsal | None = None
    kept: RobustPlan | None = None
    with ProgressBar("solving") as progress:
        if robust:
            kept = _robust(options, setup, planner)
            point = kept.point
        elif options.hardware is None:
            point = _solved(options, setup, planner, progress)
        else:
            point, grain, rehearsal = _rehearsed(options, planner, progress)
    if setup.write:
        setup.write(plan_document(problem, point, grain, rehearsal, kept))
    if setup.plot:
        setup.plot([common.frontier_png(setup, planner.frontier(), point, "this plan")])
    if setup.gantt:
        setup.gantt([common.before_and_after_png(setup.simulator, point)])
    lines = [common.describe(point, base_s, base_j)]
    if options.prove is not None:
        lines.append(_proof(point))
    if rehearsal is not None and grain is not None:
        lines.append(f"grain: {grain.word}; {deploying.describe_rehearsal(rehearsal, base_s, base_j)}")
    if kept is not None:
        lines.append(deploying.describe_scatter(kept, options.confidence, base_s, base_j))
    common.print_summary(options, *lines)


def _wants_robust(options: argparse.Namespace) -> bool:
    """Return whether the plan is to keep its deadline under scatter alone, and set the default confidence.

    Raises:
        SolverError: options contradict each other.
    """
    deploying.check_hardware(options)
    if options.prove is not None and (options.hardware is not None or options.max_switch_loss is not None):
        raise SolverError("--prove is about plans whose clocks change at once and as often as they like")
    robust = options.hardware is None and (options.confidence is not None or options.scatter is not None)
    if robust and (options.prove is not None or options.max_switch_loss is not None):
        raise SolverError("plans with --confidence know no clock changes and no --prove; leave these options out")
    if options.hardware is not None and options.scatter is not None:
        raise SolverError("--hardware already says how much instructions scatter; leave out --scatter")
    if robust and options.scatter is None and options.calibration is None:
        raise SolverError("--confidence needs to know how times scatter: --scatter, --calibration or --hardware")
    options.confidence = options.confidence or arguments.DEFAULT_CONFIDENCE
    return robust


def _robust(options: argparse.Namespace, setup: common.Setup, planner: Planner) -> RobustPlan:
    """Return the plan of least energy found that keeps the deadline with the confidence under scatter."""
    import numpy as np

    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.rehearsal import Scatter, plan_robustly
    from perseus_solver.rehearsal.robust import sampled_iterations_s

    problem, confidence = setup.problem, options.confidence
    if options.scatter is not None:
        scatter = Scatter.uniform(problem, options.scatter)
    else:
        scatter = Scatter.calibrated(problem, common.read_calibration(options.calibration).noise)
    # A slowdown is against all clocks at their maximum, where instructions scatter as well.
    highest_s = sampled_iterations_s(setup.simulator, all_maximum(problem), scatter)
    deadline_s = common.deadline_s(options, float(np.quantile(highest_s, confidence)))
    plan = plan_robustly(planner, deadline_s, scatter, confidence=confidence)
    if plan.kept < confidence:
        common.print_note(
            options,
            f"no plan found keeps {deadline_s:.4f} s in {100 * confidence:g} % of the iterations; this one keeps it in "
            f"{100 * plan.kept:.1f} %, and {plan.time_kept_s(confidence):.4f} s in {100 * confidence:g} %",
        )
    return plan


def _solved(options: argparse.Namespace, setup: common.Setup, planner: Planner, progress: ProgressBar) -> Point:
    """Return the cheapest plan whose clocks change at once, or as rarely as the permitted loss allows."""
    problem, deadline_s = setup.problem, common.deadline_s(options, setup.baseline_time_s)
    point = planner.plan(deadline_s, progress=progress)
    if options.prove is not None:
        from perseus_solver.exact import prove

        point = prove(problem, point, deadline_s, seconds=options.prove)
    if options.max_switch_loss is not None:
        from perseus_solver.switching import reduce_clock_changes_of_point

        frontier = planner.frontier(common.FRONTIER_POINTS)
        loss = options.max_switch_loss
        point = reduce_clock_changes_of_point(problem, frontier, point, deadline_s, loss=loss)
    return point


def _proof(point: Point) -> str:
    """Say what was proven of a plan."""
    from perseus_solver.model.result import Status

    if point.status is Status.OPTIMAL:
        return "proven: no plan of these clocks takes less energy by the deadline"
    return f"proven: no plan of these clocks takes {100 * (1 - 1 / (1 + point.gap)):.3f} % less energy by the deadline"


def _rehearsed(options: argparse.Namespace, planner: Planner, progress: ProgressBar) -> tuple[Point, Grain, Rehearsal]:
    """Return the plan of least expected energy that keeps the deadline with the confidence, and its rehearsal."""
    from perseus_solver.rehearsal import ideal_point

    hardware = deploying.read_hardware(options.hardware)
    executor = deploying.executor_of(options, planner.problem, hardware)
    deployed = deploying.deploy(options, planner, hardware, executor=executor, progress=progress)
    expectation = deployed.point.expectation
    assert expectation is not None
    return ideal_point(planner, deployed.point), expectation.grain, deployed.after
