"""`perseus rehearse`: what a plan would do on given hardware, and why, if that is worse than it says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perseus_solver.cli import arguments, common, deploying

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs

_WORSE = 0.005
"""Share of time or energy by which a plan does worse than it says, from which the cause is named."""

DOES: Final = "what a plan would do on given hardware, where clocks change late"
EXAMPLES: Final = """\
  perseus rehearse --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 96 --blocking-power 83.64 \\
      --plan plan.json --hardware h100.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    arguments.add_pipeline(parser)
    arguments.add_hardware(parser, required=True)
    parser.add_argument(
        "--plan", required=True, type=Path, metavar="plan.json", help="a plan, as perseus plan writes it"
    )
    parser.add_argument("--output", metavar="F.json", help="where to write JSON; - for standard output")


def run(options: argparse.Namespace, outputs: Outputs) -> None:
    """Rehearse a plan, write the outcome as JSON where asked, and print it.

    Args:
        options: the parsed arguments.
        outputs: where files are reserved; they are put in place when the context ends without an error.

    Raises:
        SolverError: the input cannot be used, or a file cannot be written.
    """
    write = common.reserve_json(options, outputs)
    (simulator, base_s, base_j), hardware = common.read_baseline(options), deploying.read_hardware(options.hardware)
    import numpy as np

    from perseus_solver.cli.documents import expected, read_plan
    from perseus_solver.rehearsal import explain_losses, rehearse

    problem = simulator.problem
    plan = read_plan(options.plan, problem)
    choice = simulator.choice_of(plan)
    exact = simulator.run(choice)
    ideal_s, ideal_j = float(exact.iteration_time_s), float(exact.energy_j)
    rehearsal = rehearse(problem, plan[None], hardware)
    kept_s, energy_j = float(rehearsal.time_kept_s(options.confidence)[0]), float(rehearsal.mean_energy_j[0])
    worse = kept_s > ideal_s * (1 + _WORSE) or energy_j > ideal_j * (1 + _WORSE)
    instruction_s = float(np.median(simulator.duration_s(choice)))
    causes = explain_losses(hardware, instruction_s=instruction_s) if worse else ()
    if write:
        document = {
            **expected(rehearsal),
            "ideal": {"iteration_time_s": ideal_s, "energy_j": ideal_j},
            "below_share": float(rehearsal.below_share[0]),
            "above_share": float(rehearsal.above_share[0]),
            "causes": [{"cause": str(loss.cause), "message": str(loss)} for loss in causes],
        }
        write([json.dumps(document).encode(), b"\n"])
    lines = [
        f"plan: {ideal_s:.4f} s ({100 * (ideal_s / base_s - 1):+.2f} %), {ideal_j:.1f} J "
        f"({100 * (ideal_j / base_j - 1):+.2f} %) against all clocks at maximum, if clocks changed at once",
        deploying.describe_rehearsal(rehearsal, base_s, base_j),
    ]
    if options.confidence != arguments.DEFAULT_CONFIDENCE:
        lines.append(f"{100 * options.confidence:g} % of the iterations take no longer than {kept_s:.4f} s")
    lines += [f"cause: {loss}" for loss in causes[:1]]
    common.print_summary(options, *lines)
