"""The `perseus` command: plan offline from a profile CSV.

Parses, checks everything that can be checked before the work, calls the solver, writes files. Heavy imports (numpy,
ortools, matplotlib) happen only after the arguments are known to be good. Bad input is one line on standard error and
exit code 2.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from perseus_proto.units import ratio_from_percent
from perseus_solver.cli import calibrate
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs, Writer
    from perseus_solver.model.problem import Problem
    from perseus_solver.model.result import Point
    from perseus_solver.model.simulator import Simulator
    from perseus_solver.switching.switches import Switching

BAD_INPUT = 2
INTERRUPTED = 130  # as a shell reports SIGINT
_DEFAULT_POINTS = 100
_MAX_POINTS = 10_000
_IDEAS = 50  # plans of the frontier that a calm plan for one deadline may borrow from
_DEFAULT_LOWTIME_UNIT_S = 1e-3  # what the paper used

_EPILOG = """\
examples:
  perseus frontier --profile gpt3.csv --schedule 1f1b --stages 8 --microbatches 96 \\
      --blocking-power 83.64 --output frontier.json --plot frontier.png
  perseus plan --profile gpt3.csv --schedule 1f1b --stages 8 --microbatches 96 \\
      --blocking-power 83.64 --max-slowdown 3% --output plan.json --gantt pipeline.png
  perseus compare --profile gpt3.csv --schedule 1f1b --stages 8 --microbatches 12 --blocking-power 83.64
  perseus calibrate --instructions run.instructions.csv.gz --iterations run.iterations.csv \\
      --schedule 1f1b --output cal.json --plot cal.png

The profile is a CSV with the columns stage,instruction,frequency,time,energy (MHz, s, J) and
optionally chunk. Instructions are forward, backward, input_gradient, weight_gradient, and
constant, whose time does not depend on the clock (its frequency is 0). Without a chunk column
the rows describe a whole stage, and each of its chunks is an equal part of it.
"""


class _Parser(argparse.ArgumentParser):
    """argparse with errors on one line, like all others."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except SolverError as error:
        print(f"perseus {options.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our standard output has gone
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
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=_Parser)

    frontier = commands.add_parser("frontier", help="all Pareto-optimal plans, from the fastest to the thriftiest")
    _add_problem(frontier)
    frontier.add_argument(
        "--points",
        type=_points,
        default=_DEFAULT_POINTS,
        metavar="N",
        help="plans to compute, evenly spread (default: 100)",
    )
    _add_switching(frontier)
    _add_files(frontier, output=True)

    plan = commands.add_parser(
        "plan", help="one plan: the least energy by a deadline; without one, the least with no slowdown"
    )
    _add_problem(plan)
    _add_deadline(plan)
    _add_switching(plan)
    _add_files(plan, output=True)

    compare = commands.add_parser("compare", help="our plans beside other methods' on the same profile, as a table")
    _add_problem(compare)
    _add_deadline(compare)
    compare.add_argument("--lowtime", action="store_true", help="also run lowtime (extra 'bench'); takes minutes")
    compare.add_argument(
        "--lowtime-unit-s",
        type=_positive,
        default=_DEFAULT_LOWTIME_UNIT_S,
        metavar="S",
        help="lowtime's time grid in seconds (default: 0.001)",
    )
    _add_files(compare, output=False)

    calibrate.add_arguments(
        commands.add_parser(
            "calibrate", help="learn overhead, delays and noise from measured iterations, for --calibration"
        )
    )
    return parser


def _add_problem(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the pipeline")
    group.add_argument(
        "--profile", required=True, type=Path, metavar="P.csv", help="measured time and energy (see perseus --help)"
    )
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help="1f1b, dualpipe, early-recompute-1f1b, gpipe, interleaved-1f1b, zb-h1 or zb-v",
    )
    group.add_argument("--stages", type=int, metavar="N", help="GPUs in one pipeline")
    group.add_argument("--microbatches", type=int, metavar="M", help="microbatches in one iteration of one pipeline")
    group.add_argument("--chunks", type=int, metavar="V", help="model chunks on each stage (interleaved-1f1b)")
    group.add_argument(
        "--order",
        type=Path,
        metavar="ORDER.csv",
        help="instead of these four: the order as torch.distributed.pipelining exports it, in either of its forms",
    )
    group.add_argument(
        "--blocking-power",
        required=True,
        type=_not_negative,
        metavar="W",
        help="GPU power while waiting for another stage, in watts",
    )
    group.add_argument(
        "--delay-s", type=_not_negative, default=0.0, metavar="S", help="transfer time between stages (default: 0)"
    )
    group.add_argument(
        "--overhead-s",
        type=_not_negative,
        default=0.0,
        metavar="S",
        help="time per iteration outside the pipeline (default: 0)",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="CAL.json",
        help="instead of these two: what perseus calibrate learnt, so that times are those of real iterations",
    )
    noise = parser.add_argument_group("noisy profiles")
    noise.add_argument(
        "--samples",
        action="store_true",
        help="the profile may hold several samples of a row: take medians, and raise times by --guard",
    )
    noise.add_argument(
        "--guard",
        type=_not_negative,
        default=2.0,
        metavar="K",
        help="standard errors by which sampled times are raised, as too small a time delays everybody (default: 2)",
    )
    noise.add_argument(
        "--repair", action="store_true", help="with --samples: raise times so that no lower clock is faster"
    )


def _add_deadline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--deadline-s", type=_positive, metavar="T", help="iteration time not to be exceeded, in seconds"
    )
    group.add_argument(
        "--max-slowdown", type=_percent, metavar="P%", help="how much slower than all clocks at maximum, such as 3%%"
    )


def _add_switching(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "changes of clock", "Given any of these, plans change clocks as rarely as the permitted loss allows."
    )
    group.add_argument(
        "--switch-latency-s",
        type=_not_negative,
        metavar="S",
        help="how long a new clock takes to settle, where waiting does not hide it, in seconds; measure it on your GPU "
        "model (default: 0)",
    )
    group.add_argument(
        "--switch-cost-j", type=_not_negative, metavar="J", help="energy of one change in joules (default: 0)"
    )
    group.add_argument(
        "--max-switch-loss",
        type=_percent,
        metavar="P%",
        help="energy that may be given up for fewer changes, such as 0.5%% (default: 0.2%%)",
    )


def _add_files(parser: argparse.ArgumentParser, *, output: bool) -> None:
    group = parser.add_argument_group("files")
    group.add_argument("--output", required=output, metavar="F.json", help="where to write JSON; - for standard output")
    group.add_argument("--plot", metavar="F.png", help="draw energy against time (needs matplotlib)")
    if output:
        group.add_argument("--gantt", metavar="G.png", help="draw the pipeline, before and after, coloured by power")


def _run(options: argparse.Namespace) -> None:
    from perseus_solver.cli.files import Outputs

    commands = {"frontier": _frontier, "plan": _plan, "compare": _compare, "calibrate": _calibrate}
    with Outputs() as outputs:
        commands[options.command](options, outputs)


def _problem(options: argparse.Namespace) -> Problem:
    """Read and check everything that the three commands share."""
    from perseus_solver.model.problem import build_problem
    from perseus_solver.model.profile import read_profile
    from perseus_solver.model.sampling import Sampling
    from perseus_solver.schedules import build_schedule, read_order, with_constants

    if options.order is not None:
        given = [
            f"--{name}"
            for name in ("schedule", "stages", "microbatches", "chunks")
            if getattr(options, name) is not None
        ]
        if given:
            raise SolverError(f"--order already says what {', '.join(given)} would say; leave them out")
        schedule = read_order(options.order)
    else:
        missing = [f"--{name}" for name in ("schedule", "stages", "microbatches") if getattr(options, name) is None]
        if missing:
            raise SolverError(f"{', '.join(missing)} needed (or --order)")
        schedule = build_schedule(
            options.schedule, stages=options.stages, microbatches=options.microbatches, chunks=options.chunks
        )
    sampling = Sampling(guard=options.guard, repair_monotone=options.repair) if options.samples else None
    if options.repair and not options.samples:
        raise SolverError("--repair needs --samples")
    profile = read_profile(options.profile, stages=schedule.stages, sampling=sampling)
    for note in profile.notes:
        print(f"perseus {options.command}: note: {note}", file=sys.stderr)
    return build_problem(
        profile,
        with_constants(schedule, profile.constant_stages),
        blocking_power_w=options.blocking_power,
        delay_s=options.delay_s,
        overhead_s=options.overhead_s,
        calibration=calibrate.read_calibration(options.calibration) if options.calibration else None,
    )


def _frontier(options: argparse.Namespace, outputs: Outputs) -> None:
    write = outputs.open("--output", options.output)
    plot, gantt = _picture(options, outputs, "plot"), _picture(options, outputs, "gantt")
    problem = _problem(options)
    from perseus_solver.cli.documents import frontier_document
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.frontier import solve_frontier
    from perseus_solver.model.simulator import Simulator

    simulator = Simulator(problem)
    baseline = simulator.run(all_maximum(problem))
    base_s, base_j = float(baseline.iteration_time_s), float(baseline.energy_j)
    with ProgressBar("solving") as progress:
        begin = time.perf_counter()
        frontier = solve_frontier(problem, points=options.points, progress=progress)
        if _wants_calm(options):
            from perseus_solver.switching.switches import calm

            frontier = calm(problem, frontier, _switching(options), loss=_switch_loss(options))
        solve_seconds = time.perf_counter() - begin
    write(
        frontier_document(
            problem, frontier, baseline_time_s=base_s, baseline_energy_j=base_j, solve_seconds=solve_seconds
        )
    )
    free = frontier[frontier.lookup(base_s)]
    if plot:
        from perseus_solver.plots import frontier_png

        plot([frontier_png(problem, frontier, baseline_time_s=base_s, baseline_energy_j=base_j)])
    if gantt:
        gantt([_before_and_after(simulator, free)])
    gap = 100 * frontier.gap
    _say(
        options,
        f"{len(frontier)} plans in {solve_seconds:.2f} s, "
        f"T_min {frontier.t_min_s:.4f} s, T* {frontier.t_star_s:.4f} s, "
        f"gap to the proven bound {sorted(gap)[len(gap) // 2]:.3f} % (median), {gap.max():.3f} % (max)",
        _against(free, base_s, base_j),
    )


def _plan(options: argparse.Namespace, outputs: Outputs) -> None:
    write = outputs.open("--output", options.output)
    plot, gantt = _picture(options, outputs, "plot"), _picture(options, outputs, "gantt")
    problem = _problem(options)
    from perseus_solver.cli.documents import plan_document
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.frontier import solve_deadline, solve_frontier
    from perseus_solver.model.simulator import Simulator

    simulator = Simulator(problem)
    baseline = simulator.run(all_maximum(problem))
    base_s, base_j = float(baseline.iteration_time_s), float(baseline.energy_j)
    with ProgressBar("solving") as progress:
        deadline_s = _deadline_s(options, base_s)
        point = solve_deadline(problem, deadline_s, progress=progress)
        if _wants_calm(options):
            from perseus_solver.switching.switches import calm_point

            ideas = solve_frontier(problem, points=_IDEAS)
            point = calm_point(problem, ideas, point, deadline_s, _switching(options), loss=_switch_loss(options))
            if point.iteration_time_s > deadline_s * (1 + 1e-9):
                print(
                    f"perseus plan: note: no plan found keeps {deadline_s:.4f} s with this switch latency; "
                    f"the fastest takes {point.iteration_time_s:.4f} s",
                    file=sys.stderr,
                )
    write(plan_document(problem, point))
    if plot:
        from perseus_solver.plots import frontier_png

        frontier = solve_frontier(problem)
        plot([frontier_png(problem, frontier, baseline_time_s=base_s, baseline_energy_j=base_j, chosen=point)])
    if gantt:
        gantt([_before_and_after(simulator, point)])
    _say(options, _against(point, base_s, base_j))


def _compare(options: argparse.Namespace, outputs: Outputs) -> None:
    write = outputs.open("--output", options.output) if options.output is not None else None
    plot = _picture(options, outputs, "plot")
    problem = _problem(options)
    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.comparison.compare import as_json, as_table, compare, single_clocks
    from perseus_solver.model.simulator import Simulator

    simulator = Simulator(problem)
    base_s = float(simulator.run(all_maximum(problem)).iteration_time_s)
    deadline_s = _deadline_s(options, base_s)
    rows = compare(problem, deadline_s=deadline_s, lowtime_unit_s=options.lowtime_unit_s if options.lowtime else None)
    if write:
        write([as_json(rows), b"\n"])
    if plot:
        from perseus_solver.frontier import solve_frontier
        from perseus_solver.plots import compare_png

        plot([compare_png(problem, solve_frontier(problem), rows, single_clocks(simulator))])
    _say(options, as_table(rows))


def _calibrate(options: argparse.Namespace, outputs: Outputs) -> None:
    _say(options, *calibrate.run(options, outputs))


def _wants_calm(options: argparse.Namespace) -> bool:
    given = (options.switch_latency_s, options.switch_cost_j, options.max_switch_loss)
    return any(value is not None for value in given)


def _switching(options: argparse.Namespace) -> Switching:
    from perseus_solver.switching.switches import Switching

    return Switching(cost_j=options.switch_cost_j or 0.0, latency_s=options.switch_latency_s or 0.0)


def _switch_loss(options: argparse.Namespace) -> float:
    from perseus_solver.switching.switches import DEFAULT_LOSS

    return DEFAULT_LOSS if options.max_switch_loss is None else float(options.max_switch_loss)


def _deadline_s(options: argparse.Namespace, baseline_time_s: float) -> float:
    """What was asked for; by default, and as the base of a slowdown, the time at the highest clocks."""
    if options.deadline_s is not None:
        return float(options.deadline_s)
    return baseline_time_s * (1 + (options.max_slowdown or 0.0))


def _picture(options: argparse.Namespace, outputs: Outputs, name: str) -> Writer | None:
    """Reserve a PNG if it was asked for and can be drawn."""
    target = getattr(options, name)
    if target is None:
        return None
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise SolverError(f"--{name} needs matplotlib: pip install 'perseus-k8s[plot]'")
    return outputs.open(f"--{name}", target)


def _before_and_after(simulator: Simulator, point: Point) -> bytes:
    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.plots import gantt_png

    problem = simulator.problem
    plans = [
        ("all at the highest clock", all_maximum(problem)),
        ("planned", simulator.choice_of(point.frequencies_mhz)),
    ]
    return gantt_png(problem, plans, simulator)


def _against(point: Point, base_s: float, base_j: float) -> str:
    """One plan in words."""
    return (
        f"plan: {point.iteration_time_s:.4f} s ({100 * (point.iteration_time_s / base_s - 1):+.2f} %), "
        f"{point.energy_j:.1f} J ({100 * (point.energy_j / base_j - 1):+.2f} %) against all clocks at maximum; "
        f"gap {100 * point.gap:.3f} %, {point.status.replace('_', ' ')}; {point.clock_changes} clock changes"
    )


def _say(options: argparse.Namespace, *lines: str) -> None:
    """For people: on standard output, unless that is where the JSON goes."""
    for line in lines:
        print(line, file=sys.stderr if options.output == "-" else sys.stdout)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return value


def _positive(text: str) -> float:
    if (value := _number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"must be greater than zero, not {text}")
    return value


def _not_negative(text: str) -> float:
    if (value := _number(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be zero or more, not {text}")
    return value


def _percent(text: str) -> float:
    try:
        return ratio_from_percent(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _points(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_POINTS:
        raise argparse.ArgumentTypeError(f"must be a whole number between 1 and {_MAX_POINTS}, not {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
