"""`perseus calibrate`: from measured iterations to a calibration, and a picture of how well it predicts them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perseus_core.units import fractional_ms_from_s
from perseus_solver.cli import common

if TYPE_CHECKING:
    from perseus_solver.calibration import Calibration
    from perseus_solver.calibration.model import Delay, Estimate
    from perseus_solver.cli.files import Outputs

_DEFAULT_FRACTION = 0.33

DOES: Final = "estimate overhead, delays and noise from measured iterations, for --calibration"
EXAMPLES: Final = """\
  perseus calibrate --instructions run.instructions.csv.gz --iterations run.iterations.csv \\
      --schedule 1F1B --output cal.json --plot cal.png
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument(
        "--instructions",
        required=True,
        type=Path,
        metavar="X.csv[.gz]",
        help="the time of every instruction of every iteration, a CSV with the columns "
        "plan,iteration,stage,instruction,microbatch,duration_s[,chunk]",
    )
    parser.add_argument(
        "--iterations",
        required=True,
        type=Path,
        metavar="Y.csv",
        help="the time of every iteration on every stage, a CSV with the columns plan,iteration,stage,iteration_time_s",
    )
    parser.add_argument("--schedule", required=True, metavar="NAME", help="the schedule that was run, such as 1F1B")
    parser.add_argument("--stages", type=int, metavar="N", help="refuse files with another number of stages")
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="refuse files with another number of microbatches"
    )
    parser.add_argument("--chunks", type=int, metavar="V", help="model chunks on each stage (Interleaved1F1B only)")
    parser.add_argument(
        "--train-fraction",
        type=float,
        default=_DEFAULT_FRACTION,
        metavar="F",
        help="share of the plans to fit; the other plans measure the error (default: 0.33)",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--output", required=True, metavar="CAL.json", help="where to write JSON; - for standard output")
    files.add_argument(
        "--plot", metavar="F.png", help="draw predicted against measured iteration times (needs matplotlib)"
    )


def run(options: argparse.Namespace, outputs: Outputs) -> None:
    """Fit a calibration, write it as JSON, and print its parameters and errors.

    Args:
        options: the parsed arguments.
        outputs: where files are reserved; they are put in place when the context ends without an error.

    Raises:
        SolverError: the measurements cannot be used, or a file cannot be written.
    """
    write = outputs.open("--output", options.output)
    plot = common.reserve_picture(options, outputs, "plot")
    from perseus_solver.calibration import calibrate_against_rivals

    trace = common.read_run(options)
    calibration = calibrate_against_rivals(trace, train_fraction=options.train_fraction)
    write([calibration.to_json().encode()])
    if plot:
        from perseus_solver.calibration.picture import calibration_png

        plot([calibration_png(trace, calibration, options.train_fraction)])
    common.print_summary(options, *_summary(calibration))


def _summary(calibration: Calibration) -> list[str]:
    quality = calibration.quality
    lines = [
        f"the model {calibration.status} this run: {calibration.reason}",
        f"held out: mean error {quality.heldout_mape_percent:.3f} %, median {quality.heldout_median_percent:.3f} %, "
        f"maximum {quality.heldout_max_percent:.3f} % over {quality.iterations_heldout} iterations of "
        f"{quality.plans_heldout} plans; without calibration the mean error is {quality.replay_mape_percent:.2f} %",
    ]
    parameters = calibration.parameters
    if parameters is None:
        return lines
    lines.append(f"overhead per iteration    {_milliseconds(parameters.overhead)}")
    lines += [f"delay, stage {edge.from_stage} to {edge.to_stage}       {_delay(edge)}" for edge in parameters.edges]
    lines += [f"gap within stage {gap.from_stage}        {_delay(gap)}" for gap in parameters.gaps]
    if calibration.least_slowdowns is not None:
        slowdowns = ", ".join(f"{slowdown:.3f}" for slowdown in calibration.least_slowdowns)
        lines.append(f"least slowdown of each stage that can be distinguished from noise: {slowdowns}")
    return lines


def _milliseconds(estimate: Estimate) -> str:
    value, low, high = (
        fractional_ms_from_s(seconds) for seconds in (estimate.value_s, estimate.low_s, estimate.high_s)
    )
    return f"{value:8.2f} ms   95 %: {low:.2f} to {high:.2f} ms"


def _delay(delay: Delay) -> str:
    return _milliseconds(delay.estimate) + ("" if delay.crossed else "   (never on a critical path in this run)")
