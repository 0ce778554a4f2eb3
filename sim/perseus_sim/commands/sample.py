"""`perseus sample`: a profile made up from the figures of a GPU model."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from perseus_core.gpus import GPU_MODELS
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs

DOES: Final = "a made-up profile to try the other commands with, before you have measured one"
EXAMPLES: Final = """\
  perseus sample --gpu-model h100 --stages 8 > profile.csv
  perseus sample --gpu-model a100 --step-ms 400 > steps.csv

The figures of newer models are partly assumed; core/perseus_core/gpus has the source of each.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("--gpu-model", choices=GPU_MODELS, default="h100", help="default: %(default)s")
    parser.add_argument("--stages", type=int, default=4, metavar="N", help="pipeline stages; default: %(default)s")
    parser.add_argument(
        "--forward-ms", type=float, default=36.0, metavar="MS", help="of a stage and microbatch; default: %(default)s"
    )
    parser.add_argument(
        "--imbalance",
        type=float,
        default=1.12,
        metavar="R",
        help="time of the last stage over the others'; default: %(default)s",
    )
    parser.add_argument(
        "--step-ms", type=float, metavar="MS", help="a job without a pipeline, with iterations of this time, instead"
    )


def run(options: argparse.Namespace, outputs: Outputs) -> None:  # noqa: ARG001
    """Write the profile to standard output, and its blocking power to standard error.

    Raises:
        SolverError: an argument breaks its rule.
    """
    from perseus_sim.gpus.model import MODELS
    from perseus_sim.profiles import profile_csv, steps_csv

    try:
        if options.step_ms is not None:
            text = steps_csv(options.gpu_model, options.step_ms / 1e3)
        else:
            text = profile_csv(options.stages, options.gpu_model, options.imbalance, options.forward_ms / 1e3)
    except ValueError as error:
        raise SolverError(str(error)) from error
    model = MODELS[options.gpu_model]
    print(text, end="")
    print(f"{model.name}: --blocking-power {model.blocking_power_w:g}", file=sys.stderr)
