"""`perseus demo`: the whole system on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perseus_core.gpus import GPU_MODELS
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs

DOES: Final = "the whole system on this machine: API server, operator, agents, training; no cluster, no GPU"
EXAMPLES: Final = """\
  perseus demo
  perseus demo --serving
  perseus demo --profile my.csv --stages 8 --microbatches 96 --blocking-power 83.64
"""
NOT_SEEN: Final = 1
"""Exit code where something that should happen did not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument(
        "--gpu-model", choices=GPU_MODELS, default="h100", help="what the simulated GPUs are; default: %(default)s"
    )
    parser.add_argument("--profile", type=Path, metavar="P.csv", help="default: the simulator's own")
    parser.add_argument("--stages", type=int, metavar="N", help="pipeline stages; default: the sample manifest's")
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="microbatches an iteration; default: the sample manifest's"
    )
    parser.add_argument(
        "--blocking-power", type=float, metavar="W", help="of a waiting GPU; default: the model's, or the sample's"
    )
    parser.add_argument("--serving", action="store_true", help="engines that serve, in place of training")
    parser.add_argument(
        "--output", dest="folder", type=Path, default=Path("out"), metavar="DIR", help="of the report and its pictures"
    )


def run(options: argparse.Namespace, outputs: Outputs) -> int:  # noqa: ARG001
    """Show the whole system at work. Returns the exit code: 0 if everything that was said was observed.

    Raises:
        SolverError: the input cannot be used.
    """
    from perseus_runtime.direct import bypass_proxies
    from perseus_sim.demo.observer import DemoFailed
    from perseus_sim.demo.scenario import Demo, DemoOptions
    from perseus_sim.demo.serving import ServingDemo

    bypass_proxies()
    demo: Demo | ServingDemo
    if options.serving:
        if options.profile or options.stages or options.microbatches or options.blocking_power:
            raise SolverError("--serving takes no --profile, --stages, --microbatches or --blocking-power")
        demo = ServingDemo(options.folder)
    else:
        try:
            demo = Demo(
                DemoOptions(
                    output=options.folder,
                    gpu_model=options.gpu_model,
                    profile=options.profile,
                    stages=options.stages,
                    microbatches=options.microbatches,
                    blocking_power_w=options.blocking_power,
                )
            )
        except OSError as error:
            raise SolverError(str(error)) from error
    try:
        demo.run()
    except DemoFailed as error:
        print(f"perseus demo: NOT SEEN: {error}", file=sys.stderr)
        return NOT_SEEN
    print("everything above was observed")
    return 0
