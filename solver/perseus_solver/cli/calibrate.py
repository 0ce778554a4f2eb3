"""`perseus calibrate`: from two CSV files of measured iterations to a calibration, and a picture of how well it
predicts.

Registered by `perseus_solver.cli.main`, which says what comes back and handles errors. Outside the package
`calibration`, so that the command line is parsed before numpy is loaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from perseus_solver.errors import InvalidCalibration, SolverError

if TYPE_CHECKING:
    from perseus_solver.calibration.model import Calibration, Delay, Estimate
    from perseus_solver.cli.files import Outputs

_DEFAULT_FRACTION = 0.33


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` needs."""
    parser.add_argument(
        "--instructions",
        required=True,
        type=Path,
        metavar="X.csv[.gz]",
        help="plan,iteration,stage,instruction,microbatch,duration_s[,chunk]: every computation of every iteration",
    )
    parser.add_argument(
        "--iterations",
        required=True,
        type=Path,
        metavar="Y.csv",
        help="plan,iteration,stage,iteration_time_s: how long every iteration took on every rank",
    )
    parser.add_argument("--schedule", required=True, metavar="NAME", help="the schedule that was run, such as 1f1b")
    parser.add_argument("--stages", type=int, metavar="N", help="refuse files of another number of stages")
    parser.add_argument("--microbatches", type=int, metavar="M", help="refuse files of another number of microbatches")
    parser.add_argument("--chunks", type=int, metavar="V", help="model chunks on each stage (interleaved-1f1b)")
    parser.add_argument(
        "--train-fraction",
        type=float,
        default=_DEFAULT_FRACTION,
        metavar="F",
        help="share of the plans used for fitting; the others judge the result (default: 0.33)",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--output", required=True, metavar="CAL.json", help="where to write JSON; - for standard output")
    files.add_argument("--plot", metavar="F.png", help="draw predicted against measured time (needs matplotlib)")


def run(options: argparse.Namespace, outputs: Outputs) -> list[str]:
    """Read, fit, judge, write; the result in words."""
    write = outputs.open("--output", options.output)
    plot = None
    if options.plot is not None:
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise SolverError("--plot needs matplotlib: pip install 'perseus-k8s[plot]'")
        plot = outputs.open("--plot", options.plot)
    from perseus_solver.calibration import calibrate, read_trace

    trace = read_trace(
        options.instructions,
        options.iterations,
        options.schedule,
        stages=options.stages,
        microbatches=options.microbatches,
        chunks=options.chunks,
    )
    calibration = calibrate(trace, train_fraction=options.train_fraction)
    write([calibration.to_json().encode()])
    if plot:
        from perseus_solver.plots import calibration_png

        plot([calibration_png(trace, calibration, options.train_fraction)])
    return _words(calibration)


def read_calibration(path: Path) -> Calibration:
    """What ``--calibration`` names.

    Raises:
        InvalidCalibration: the file cannot be read, or what it holds cannot be used.
    """
    from perseus_solver.calibration.model import MAX_BYTES, Calibration

    try:
        with path.open("rb") as file:
            return Calibration.from_json(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise InvalidCalibration(f"calibration {path} cannot be read: {error.strerror or error}") from error
    except InvalidCalibration as error:
        raise InvalidCalibration(f"calibration {path}: {error}") from None


def _words(calibration: Calibration) -> list[str]:
    quality = calibration.quality
    lines = [
        f"the model {calibration.verdict} this run: {calibration.reason}",
        f"held out: mean error {quality.heldout_mape_percent:.3f} %, median {quality.heldout_median_percent:.3f} %, "
        f"maximum {quality.heldout_max_percent:.3f} % over {quality.iterations_heldout} iterations of "
        f"{quality.plans_heldout} plans; without calibration the mean error is {quality.replay_mape_percent:.2f} %",
    ]
    found = calibration.parameters
    if found is None:
        return lines
    lines.append(f"overhead per iteration    {_milliseconds(found.overhead)}")
    lines += [f"delay, stage {edge.from_stage} to {edge.to_stage}       {_delay(edge)}" for edge in found.edges]
    lines += [f"gap within stage {gap.from_stage}        {_delay(gap)}" for gap in found.gaps]
    if calibration.least_degrees is not None:
        degrees = ", ".join(f"{degree:.3f}" for degree in calibration.least_degrees)
        lines.append(f"slowdown of a stage that can be told from noise, stage by stage: × {degrees}")
    return lines


def _milliseconds(estimate: Estimate) -> str:
    return f"{1e3 * estimate.value_s:8.2f} ms   95 %: {1e3 * estimate.low_s:.2f} to {1e3 * estimate.high_s:.2f} ms"


def _delay(delay: Delay) -> str:
    return _milliseconds(delay.estimate) + ("" if delay.crossed else "   (never critical in this run)")
