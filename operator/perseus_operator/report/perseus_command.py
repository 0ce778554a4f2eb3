"""`perseus report`: a report of energy without a cluster, from a file or a Prometheus."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from perseus_operator.errors import CannotAnswer, UnusableArgument
from perseus_operator.report import command
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs

DOES: Final = "energy that jobs and pools took and saved, as a table, CSV, JSON, SPDX, FOCUS or Annex XI text"
EXAMPLES: Final = """\
  perseus report --month 2026-10 --format json --prometheus http://localhost:9090 > october.json
  perseus report --from october.json
  perseus report --from days/2026-10-*.json --format json > october.json
  perseus report --from october.json --by namespace --pue "1.21:site meters, 2025" --format csv
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("--namespace", metavar="NAME", help="of the jobs and pools; default: all")
    command.add_arguments(parser)


def run(options: argparse.Namespace, outputs: Outputs) -> None:  # noqa: ARG001
    """Write the report to standard output.

    Raises:
        SolverError: an argument breaks its rule, or the Prometheus does not answer.
    """
    try:
        statement, by = command.report(options, command.Scope(namespace=options.namespace))
        print(command.text(statement, by, options.format))  # noqa: T201
    except (CannotAnswer, UnusableArgument) as error:
        raise SolverError(str(error)) from error
