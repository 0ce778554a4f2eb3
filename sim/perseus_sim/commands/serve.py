"""`perseus serve`: what clocks that follow the load would save where models serve."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perseus_runtime.command_line import CommandParser
from perseus_sim.commands import serve_plan
from perseus_solver.cli import arguments, common
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_sim.serving.fleet import Setting
    from perseus_sim.serving.machine import Assumptions, Machine
    from perseus_sim.serving.objective import Objective
    from perseus_sim.serving.rehearsal import Outcome
    from perseus_sim.serving.requests import Request
    from perseus_solver.cli.files import Outputs

DOES: Final = "what clocks that follow the load would save where models serve: a simulation, no cluster, no GPU"
EXAMPLES: Final = """\
  perseus serve rehearse --trace azure.csv --gpu h100 --model llama-3.1-70b --gpus-per-replica 4 --replicas 3
  perseus serve estimate --gpu h100 --model llama-3.1-8b --gpus-per-replica 1 --replicas 8 \\
      --requests-per-second 20 --prompt-tokens 1000 --output-tokens 200
  perseus serve plan --load day.csv --gpu h100 --model llama-3.1-70b --parallel 4,8
"""
MOST_REQUESTS: Final = 1_000_000
"""Served again by each policy: an hour of computing and a gigabyte of memory."""
MOST_REPLICAS: Final = 256
KNEES_MHZ: Final = (900.0, 1090.0, 1300.0)
"""Sources see decode slow down below 950 MHz of 1,300, and below some 1,090 of 1,980."""
_PARALLEL: Final = ("1", "2", "4", "8")
_ESTIMATED_S: Final = 300.0
_MOST_MEAN_TOKENS: Final = 100_000
_MOST_LIMIT_S: Final = 3600.0
_LITTLE_PERCENT: Final = 10.0
_NOTICEABLY_PERCENT: Final = 0.5
_ASSUMED: Final = (
    "times and watts at the highest clock from public tables (docs/serving-rehearse.md); how steps follow the clock is "
    "assumed, not measured: operations in proportion, bytes "
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the three subcommands."""
    chosen = parser.add_subparsers(
        dest="task", metavar="TASK", title="tasks", parser_class=CommandParser, required=True
    )
    rehearse = _task(chosen, "rehearse", "serve a trace of requests with each policy for clocks, and compare them")
    rehearse.add_argument(
        "--trace", type=Path, required=True, metavar="T.csv", help="requests, as docs/serving-traces.md describes"
    )
    _add_replicas(rehearse)
    rehearse.add_argument(
        "--load",
        type=arguments.positive,
        default=1.0,
        metavar="L",
        help="so many times as many requests a second as in the trace; default: %(default)s",
    )
    rehearse.add_argument(
        "--minutes",
        type=arguments.positive,
        default=10.0,
        metavar="M",
        help="of the trace, from its begin; default: %(default)s",
    )
    _add_objective(rehearse)
    estimate = _task(
        chosen, "estimate", "the range of what is saved, over what is not known of the GPU, without a trace"
    )
    _add_replicas(estimate)
    for name, what in (
        ("--requests-per-second", "mean rate of requests to all replicas"),
        ("--prompt-tokens", "mean length of a prompt, without what the prefix cache holds"),
        ("--output-tokens", "mean tokens that a request gets"),
    ):
        estimate.add_argument(name, type=arguments.positive, required=True, metavar="N", help=what)
    _add_objective(estimate)
    plan = _task(chosen, "plan", serve_plan.DOES)
    serve_plan.add_arguments(plan)
    _add_objective(plan)


def _task(chosen: Any, name: str, does: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = chosen.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
    parser.add_argument("--output", metavar="F.json", help="where to write JSON; - for standard output")
    parser.add_argument(
        "--seed",
        type=arguments.whole(0, 999_999_999),
        default=0,
        metavar="N",
        help="of all that is drawn; default: %(default)s",
    )
    return parser


def _add_replicas(parser: argparse.ArgumentParser) -> None:
    group = serve_plan.replica_options(parser)
    group.add_argument(
        "--gpus-per-replica", required=True, choices=_PARALLEL, metavar="N", help="1, 2, 4 or 8, tensor parallel"
    )
    group.add_argument(
        "--replicas", required=True, type=arguments.whole(1, MOST_REPLICAS), metavar="N", help="behind one router"
    )


def _add_objective(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the objective")
    group.add_argument(
        "--first-token",
        type=_duration_s,
        default="250ms",
        metavar="T",
        help="limit of the time to the first token, such as 250ms or 1s; default: %(default)s",
    )
    group.add_argument(
        "--undisturbed",
        type=arguments.not_negative,
        default=5.0,
        metavar="K",
        help="instead, where that is longer, so many times what the prompt takes alone; 0: never; default: %(default)s",
    )
    group.add_argument(
        "--per-token",
        type=_duration_s,
        default="50ms",
        metavar="T",
        help="limit of a request's mean time between tokens; default: %(default)s",
    )
    group.add_argument(
        "--attainment",
        type=_attainment,
        default="99",
        metavar="P",
        help="per cent of the requests that shall keep both; default: %(default)s",
    )


def run(options: argparse.Namespace, outputs: Outputs) -> None:
    """Rehearse, estimate, or plan.

    Args:
        options: the parsed arguments.
        outputs: where files are reserved; they are put in place when the context ends without an error.

    Raises:
        SolverError: the input cannot be used, or a file cannot be written.
    """
    write = common.reserve_json(options, outputs)
    if options.task == "plan":
        document, lines = serve_plan.plan_day(options, _objective(options))
    else:
        document, lines = (_rehearse if options.task == "rehearse" else _estimate)(options)
    if write:
        write([json.dumps(document).encode(), b"\n"])
    common.print_summary(options, *lines)


def _rehearse(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from perseus_sim.serving.machine import Assumptions
    from perseus_sim.serving.rehearsal import LAW, ServingBench, compare
    from perseus_sim.serving.requests import MOST_LOAD, piece, scaled
    from perseus_sim.serving.traces import read_trace
    from perseus_solver.cli.progress import ProgressBar

    if options.load > MOST_LOAD:
        raise SolverError(f"--load must be at most {MOST_LOAD:g}, not {options.load:g}")
    setting, objective = _setting(options, Assumptions()), _objective(options)
    trace = read_trace(options.trace)
    if len(trace) * options.load > MOST_REQUESTS:  # before copies fill the memory
        trace = piece(trace, 0.0, 60 * options.minutes)
    _check_work(len(trace) * options.load, "--minutes or --load")
    requests = _fitting(piece(scaled(trace, options.load, options.seed), 0.0, 60 * options.minutes), setting.machine)
    with ProgressBar("rehearsing") as progress:
        outcomes = compare(ServingBench(setting, requests, objective), progress)
    assumptions = setting.machine.assumptions
    rests_on = (
        f"{_ASSUMED}below {assumptions.knee_mhz:,.0f} MHz; {assumptions.watts} watts of what sources give: "
        "perseus serve estimate shows the range",
    )
    lines = [
        f"{len(requests):,} requests in {requests[-1].arrival_s / 60:.1f} minutes to {_replicas_text(options)}; "
        f"{_objective_text(objective)}",
        "",
        *_table(outcomes),
        "",
        *_verdict([(outcomes[0], next(one for one in outcomes if one.policy == LAW))], objective),
        *(f"rests on: {one}" for one in rests_on),
    ]
    document = {
        "requests": len(requests),
        "seconds": requests[-1].arrival_s,
        "objective": asdict(objective),
        "assumptions": asdict(assumptions),
        "outcomes": [asdict(one) for one in outcomes],
        "rests_on": list(rests_on),
    }
    return document, lines


def _estimate(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from perseus_sim.serving.controllers import Fixed
    from perseus_sim.serving.machine import WATTS, Assumptions
    from perseus_sim.serving.rehearsal import HIGHEST, LAW, ServingBench, poisson
    from perseus_solver.cli.progress import ProgressBar

    for name in ("prompt_tokens", "output_tokens"):
        if not 1.0 <= getattr(options, name) <= _MOST_MEAN_TOKENS:
            raise SolverError(f"--{name.replace('_', '-')} must be from 1 to {_MOST_MEAN_TOKENS:,}")
    _check_work(options.requests_per_second * _ESTIMATED_S, "--requests-per-second")
    objective = _objective(options)
    drawn = poisson(
        options.requests_per_second, options.prompt_tokens, options.output_tokens, _ESTIMATED_S, options.seed
    )
    points = []
    cells = [Assumptions(knee_mhz=knee_mhz, watts=watts) for knee_mhz in KNEES_MHZ for watts in WATTS]
    with ProgressBar("estimating") as progress:
        for done, assumptions in enumerate(cells):
            progress(done, len(cells))
            setting = _setting(options, assumptions)
            bench = ServingBench(setting, _fitting(drawn, setting.machine), objective)
            base = bench.served(lambda _: Fixed())
            highest = bench.outcome(HIGHEST, base, base)
            points.append((assumptions, highest, bench.outcome(LAW, bench.served(bench.law()), base)))
    rests_on = (
        f"{_ASSUMED}below {KNEES_MHZ[0]:,.0f} to {KNEES_MHZ[-1]:,.0f} MHz; watts as sources disagree about them",
        f"{_ESTIMATED_S / 60:g} minutes of requests that come independently, with exponentially distributed lengths: "
        "bursts are shorter than real ones, so rehearse a trace of your own before you decide",
    )
    laws, highests = [law for _, _, law in points], [highest for _, highest, _ in points]
    saved = _span([-law.energy_percent for law in laws])
    watts = _span([one.watts_per_gpu for one in highests], 0)
    lines = [
        f"{_replicas_text(options)}, {options.requests_per_second:g} requests a second; {_objective_text(objective)}",
        f"highest clock: {watts} W a GPU, {_kept(highests)} % keep the objective",
        f"law: saves {saved} % of it, {_kept(laws)} % keep the objective",
        *_verdict(list(zip(highests, laws, strict=True)), objective),
        *(f"rests on: {one}" for one in rests_on),
    ]
    document = {
        "objective": asdict(objective),
        "points": [
            {"assumptions": asdict(assumed), "highest": asdict(highest), "law": asdict(law)}
            for assumed, highest, law in points
        ],
        "rests_on": list(rests_on),
    }
    return document, lines


def _setting(options: argparse.Namespace, assumptions: Assumptions) -> Setting:
    """The replicas that the arguments describe; refused if the model does not fit on them."""
    from perseus_sim.gpus.model import MODELS
    from perseus_sim.serving.fleet import Setting
    from perseus_sim.serving.machine import BYTES_OF_A_VALUE, Machine

    machine = Machine(options.gpu, options.model, int(options.gpus_per_replica), assumptions)
    if machine.kv_capacity < 1:
        gib = BYTES_OF_A_VALUE * machine.model.weights / 2**30
        raise SolverError(
            f"--gpus-per-replica {options.gpus_per_replica} is too few: {options.model} has {gib:.0f} GiB of weights"
        )
    return Setting(machine, MODELS[options.gpu].driver, options.replicas, options.seed)


def _objective(options: argparse.Namespace) -> Objective:
    from perseus_sim.serving.objective import Objective

    return Objective(options.first_token, options.undisturbed, options.per_token, options.attainment)


def _check_work(requests: float, option: str) -> None:
    if requests > MOST_REQUESTS:
        raise SolverError(f"{option}: {requests:,.0f} requests are more than {MOST_REQUESTS:,}; give less")


def _fitting(requests: Sequence[Request], machine: Machine) -> Sequence[Request]:
    """The requests, if each fits into the memory of a replica."""
    longest = max(one.prompt_tokens + one.output_tokens for one in requests)
    if longest > machine.kv_capacity:
        raise SolverError(
            f"a request has {longest:,} tokens, and the memory of a replica holds {machine.kv_capacity:,}: "
            "give more --gpus-per-replica"
        )
    return requests


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    head = f"{'policy':<26}{'energy':>10}{'attainment':>13}{'W a GPU':>10}{'calls/s a node':>17}"
    rows = []
    for one in outcomes:
        name = f"{one.policy}, {one.clock_mhz:,} MHz" if one.clock_mhz else one.policy
        rows.append(
            f"{name:<26}{_signed(one.energy_percent):>8} %{one.attainment.percent:>11.2f} %"
            f"{one.watts_per_gpu:>10.0f}{one.calls_per_s:>17.2f}"
        )
    return [head, *rows]


def _verdict(pairs: Sequence[tuple[Outcome, Outcome]], objective: Objective) -> list[str]:
    """What the highest clock and the law, under each assumption, mean for who decides."""
    highest = min(one.attainment.percent for one, _ in pairs)
    law = min(one.attainment.percent for _, one in pairs)
    lost = max(one.attainment.percent - other.attainment.percent for one, other in pairs)
    saved = min(-one.energy_percent for _, one in pairs)
    wanted = 100 * objective.attainment
    advice = []
    if highest < wanted:
        advice.append(
            f"do not use the law here: at the highest clock {highest:.2f} % keep the objective, not {wanted:g} %; "
            "more replicas or longer limits come first"
        )
    elif law < wanted or lost > _NOTICEABLY_PERCENT:
        advice.append(
            f"do not use the law here: with it {law:.2f} % keep the objective, not {wanted:g} %; at the highest clock "
            f"up to {lost:.2f} points more"
        )
    if saved < _LITTLE_PERCENT:
        advice.append(f"the law saves little here: {saved:.1f} %, less than the {_LITTLE_PERCENT:g} % worth a change")
    return advice


def _replicas_text(options: argparse.Namespace) -> str:
    replicas = f"{options.replicas} replica{'' if options.replicas == 1 else 's'}"
    return f"{replicas} of {options.model} on {options.gpus_per_replica} x {options.gpu}"


def _objective_text(objective: Objective) -> str:
    longer = f" or {objective.undisturbed:g} times undisturbed" if objective.undisturbed else ""
    return (
        f"objective: first token within {1e3 * objective.first_token_s:g} ms{longer}, "
        f"{1e3 * objective.per_token_s:g} ms a token, for {100 * objective.attainment:g} %"
    )


def _kept(outcomes: Sequence[Outcome]) -> str:
    return _span([one.attainment.percent for one in outcomes], 2)


def _signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}" if round(value, 1) else "0.0"


def _span(values: Sequence[float], digits: int = 1) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _duration_s(text: str) -> float:
    """Read a time such as 250ms or 1.5s as seconds."""
    number, unit_s = (text[:-2], 1e-3) if text.endswith("ms") else (text[:-1], 1.0)
    if not text.endswith("s"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 250ms or 1s")
    seconds = unit_s * arguments.positive(number)
    if not seconds <= _MOST_LIMIT_S:
        raise argparse.ArgumentTypeError(f"must be at most {_MOST_LIMIT_S:g}s, not {text}")
    return seconds


def _attainment(text: str) -> float:
    """Read per cent, from 50 to 99.99, as a share."""
    value = arguments.positive(text.removesuffix("%"))
    if not 50 <= value <= 99.99:
        raise argparse.ArgumentTypeError(f"must be from 50 to 99.99, not {text}")
    return value / 100
