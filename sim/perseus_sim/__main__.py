"""``perseus-sim``: programs that need no cluster and no GPU, above all ``perseus-sim demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perseus_sim.gpus.model import GPU_MODELS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit code 0: everything happened as it should; 1: something did not; 2: bad input."""
    parser = argparse.ArgumentParser(prog="perseus-sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="the whole system on this machine: API server, operator, agents, training")
    demo.add_argument(
        "--gpu-model", choices=GPU_MODELS, default="h100", help="what the simulated GPUs are; default: %(default)s"
    )
    demo.add_argument(
        "--profile", type=Path, help="CSV stage,instruction,frequency,time,energy; default: the simulator's own"
    )
    demo.add_argument("--stages", type=int, help="pipeline stages; default: the sample manifest's")
    demo.add_argument("--microbatches", type=int, help="microbatches an iteration; default: the sample manifest's")
    demo.add_argument(
        "--blocking-power", type=float, metavar="WATTS", help="of a waiting GPU; default: the model's, or the sample's"
    )
    demo.add_argument("--output", type=Path, default=Path("out"), help="folder of the report and its pictures")
    arguments = parser.parse_args(argv)
    return _demo(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from perseus_sim.demo.scenario import Demo, DemoFailed, DemoOptions
    from perseus_solver.errors import SolverError

    try:
        demo = Demo(
            DemoOptions(
                output=arguments.output,
                gpu_model=arguments.gpu_model,
                profile=arguments.profile,
                stages=arguments.stages,
                microbatches=arguments.microbatches,
                blocking_power_w=arguments.blocking_power,
            )
        )
    except (SolverError, OSError) as error:
        print(f"perseus-sim demo: {error}", file=sys.stderr)
        return 2
    try:
        demo.run()
    except DemoFailed as error:
        print(f"perseus-sim demo: NOT SEEN: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("everything above was observed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
