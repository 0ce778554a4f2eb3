"""``perseus-sim``: programs that need no cluster and no GPU, above all ``perseus-sim demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perseus_sim.gpus.model import GPU_MODELS, MODELS, profile_csv, steps_csv


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
    demo.set_defaults(run=_demo)
    sample = commands.add_parser(
        "sample",
        help="a profile to try perseus with, before you have measured one",
        description="Write a profile made up from the figures of a GPU model, as CSV. Those of newer models are partly"
        " assumed; proto/perseus_proto/gpus has the source of each.",
        epilog="example: perseus-sim sample --gpu-model h100 --stages 8 > profile.csv",
    )
    sample.add_argument("--gpu-model", choices=GPU_MODELS, default="h100", help="default: %(default)s")
    sample.add_argument("--stages", type=int, default=4, help="pipeline stages; default: %(default)s")
    sample.add_argument(
        "--forward-ms", type=float, default=36.0, help="of a stage and microbatch; default: %(default)s"
    )
    sample.add_argument(
        "--imbalance", type=float, default=1.12, help="time of the last stage over the others'; default: %(default)s"
    )
    sample.add_argument("--step-ms", type=float, help="a job without a pipeline, with iterations of this time, instead")
    sample.set_defaults(run=_sample)
    arguments = parser.parse_args(argv)
    code: int = arguments.run(arguments)
    return code


def _sample(arguments: argparse.Namespace) -> int:
    try:
        if arguments.step_ms is not None:
            text = steps_csv(arguments.gpu_model, arguments.step_ms / 1e3)
        else:
            text = profile_csv(
                arguments.stages, arguments.gpu_model, arguments.imbalance, forward_s=arguments.forward_ms / 1e3
            )
    except ValueError as error:
        print(f"perseus-sim sample: {error}", file=sys.stderr)
        return 2
    model = MODELS[arguments.gpu_model]
    print(text, end="")
    print(f"{model.name}: --blocking-power {model.blocking_power_w:g}", file=sys.stderr)
    return 0


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
