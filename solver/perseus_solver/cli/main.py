"""The `perseus` command: its parser, and one exit code for each outcome.

Each command has a module with its arguments, its examples and its work; other packages of the project add commands by
the entry point `perseus.commands`. Everything that can be checked before the work is checked first; numpy, OR-Tools and
matplotlib are imported only after the arguments are known to be good, so that ``--help`` and errors come at once. Bad
input is one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

from perseus_runtime.command_line import BAD_INPUT, CommandParser
from perseus_solver.cli import calibrate, compare, estimate, frontier, plan, rehearse, terminal
from perseus_solver.errors import SolverError

INTERRUPTED: Final = 130  # as a shell reports SIGINT

_EPILOG = """\
examples:
  perseus sample --gpu-model h100 --stages 8 > profile.csv
  perseus estimate --gpu "NVIDIA H100 80GB HBM3" --layers 96 --schedule 1F1B --stages 8 --microbatches 96 --gpus 1024
  perseus frontier --profile profile.csv --schedule 1F1B --stages 8 --microbatches 96 --blocking-power 139
  perseus plan --help
"""
_PROFILE = """\

The profile is a CSV with the columns stage,instruction,frequency,time,energy (MHz, s, J) and
optionally chunk, and reached (MHz): the clock that was really reached where the power limit held
it below the one set. Instructions are forward, backward, input_gradient, weight_gradient,
constant, and step: the whole iteration, for schedule Steps. The time of a constant instruction
does not depend on the clock; its frequency is 0.
Without a chunk column the rows describe a whole stage, and each of its chunks takes an equal
part of their time and energy.
"""
_OPTION_OF = {"schedule_csv": "--order"}
_OWN: Final[Mapping[str, Any]] = {
    "frontier": frontier,
    "plan": plan,
    "rehearse": rehearse,
    "estimate": estimate,
    "compare": compare,
    "calibrate": calibrate,
}
ENTRY_POINT: Final = "perseus.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command line without the program's name; None: that of this process.

    Returns:
        The exit code: 0 if all is done and written, `BAD_INPUT` with one line on standard error, `INTERRUPTED` after
        Ctrl-C, 1 if the reader of standard output has gone, or what the command says.
    """
    for stream in (sys.stdout, sys.stderr):
        terminal.replace_unprintable(stream)
    commands = _commands()
    parser = command_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    command = commands[options.command]
    read = {_OPTION_OF.get(name, f"--{name}"): path for name, path in vars(options).items() if isinstance(path, Path)}
    try:
        from perseus_solver.cli.files import Outputs

        with Outputs(read) as outputs:
            return command.run(options, outputs) or 0
    except SolverError as error:
        print(f"perseus {options.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of standard output has gone
        sys.stderr.close()
        return 1


def _commands() -> dict[str, Any]:
    """Return the module of every command, by its name."""
    package = distribution("perseus-k8s")
    return {
        **_OWN,
        **{entry_point.name: entry_point.load() for entry_point in package.entry_points.select(group=ENTRY_POINT)},
    }


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = CommandParser(
        prog="perseus",
        description="Energy-optimal GPU clocks for every instruction of a training pipeline.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"perseus {distribution('perseus-k8s').version}")
    chosen = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=CommandParser)
    for name, module in _commands().items():
        does: str = module.DOES
        epilog = f"examples:\n{module.EXAMPLES}"
        described = chosen.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.", epilog=epilog)
        module.add_arguments(described)
        if any(action.dest == "profile" for action in described._actions):
            described.epilog = epilog + _PROFILE
    return parser


if __name__ == "__main__":
    sys.exit(main())
