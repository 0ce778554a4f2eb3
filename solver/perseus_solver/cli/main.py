"""The `perseus` command: its parser, and one exit code for each outcome.

Each command has a module with its arguments and its work. Everything that can be checked before the work is checked
first; numpy, OR-Tools and matplotlib are imported only after the arguments are known to be good, so that ``--help`` and
errors come at once. Bad input is one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from perseus_solver.cli import calibrate, compare, estimate, frontier, plan, rehearse, terminal
from perseus_solver.errors import SolverError

BAD_INPUT = 2
INTERRUPTED = 130  # as a shell reports SIGINT

_EPILOG = """\
examples:
  perseus frontier --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 96 \\
      --blocking-power 83.64 --output frontier.json --plot frontier.png
  perseus plan --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 96 \\
      --blocking-power 83.64 --max-slowdown 3% --output plan.json --gantt pipeline.png
  perseus rehearse --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 96 \\
      --blocking-power 83.64 --plan plan.json --hardware h100.json
  perseus estimate --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 96 --blocking-power 83.64 \\
      --gpus 1024 --gpu "NVIDIA H100 80GB HBM3" --price 0.12 --carbon 400
  perseus compare --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 12 --blocking-power 83.64
  perseus calibrate --instructions run.instructions.csv.gz --iterations run.iterations.csv \\
      --schedule 1F1B --output cal.json --plot cal.png

The profile is a CSV with the columns stage,instruction,frequency,time,energy (MHz, s, J) and
optionally chunk, and reached (MHz): the clock that was really reached where the power limit held
it below the one set. Instructions are forward, backward, input_gradient, weight_gradient,
constant, and step: the whole iteration, for schedule Steps. The time of a constant instruction
does not depend on the clock; its frequency is 0.
Without a chunk column the rows describe a whole stage, and each of its chunks takes an equal
part of their time and energy.
"""
_OPTION_OF = {"schedule_csv": "--order"}
_COMMANDS = {
    "frontier": (frontier, "all Pareto-optimal plans, from the fastest to the one of least energy"),
    "plan": (plan, "one plan: the least energy by a deadline, or without slowdown if no deadline is given"),
    "rehearse": (rehearse, "what a plan would do on given hardware, where clocks change late"),
    "estimate": (estimate, "what plans would save on so many GPUs: energy, money, carbon dioxide"),
    "compare": (compare, "this solver's plans beside those of other methods on the same profile, as a table"),
    "calibrate": (calibrate, "estimate overhead, delays and noise from measured iterations, for --calibration"),
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, like all other errors of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command line without the program's name; None: that of this process.

    Returns:
        The exit code: 0 if all files are written, `BAD_INPUT` with one line on standard error, `INTERRUPTED` after
        Ctrl-C, 1 if the reader of standard output has gone.
    """
    for stream in (sys.stdout, sys.stderr):
        terminal.replace_unprintable(stream)
    options = _parser().parse_args(arguments)
    command, _ = _COMMANDS[options.command]
    read = {_OPTION_OF.get(name, f"--{name}"): path for name, path in vars(options).items() if isinstance(path, Path)}
    try:
        from perseus_solver.cli.files import Outputs

        with Outputs(read) as outputs:
            command.run(options, outputs)
    except SolverError as error:
        print(f"perseus {options.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of standard output has gone
        sys.stderr.close()
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="perseus",
        description="Energy-optimal GPU clocks for every instruction of a training pipeline.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"perseus {version('perseus-k8s')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=_Parser)
    for name, (module, description) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=description))
    return parser


if __name__ == "__main__":
    sys.exit(main())
