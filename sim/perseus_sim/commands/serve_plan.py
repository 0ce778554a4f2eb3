"""`perseus serve plan`: replicas, parallelism and clocks of each class of requests, hour by hour, for a day's load.

Steps come from public tables; what is planned for the heaviest hour of each class is then served, request by request,
by the engines of the simulator, with the law's clocks.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perseus_solver.cli import arguments, files
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from perseus_sim.serving.machine import Machine
    from perseus_sim.serving.objective import Objective
    from perseus_solver.serving.planner import LatencyLimits, PlanRequest, ReplicaPlan, Variant
    from perseus_solver.serving.planner.load_csv import ClassLoad, DayLoad

DOES: Final = "replicas, parallelism and clocks of each class of requests for a day's load, hour by hour, with a bound"
_PARALLEL: Final = (1, 2, 4, 8)
_MOST: Final = 9_999_999
_SERVED_S: Final = 60.0
_MOST_SERVED: Final = 20_000
"""Requests that are served to confirm a class: some seconds of computing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that no other task of `perseus serve` has."""
    parser.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="L.csv",
        help="a row for each hour and class: hour,class,requests_per_s,prompt_tokens,output_tokens, and per_kwh (a "
        "price, or kg of CO2) if that is to be least instead of energy",
    )
    parser.add_argument(
        "--gateway",
        metavar="NAME",
        help="print manifests for this Gateway in place of the plan: an InferencePool for each class, and an HTTPRoute",
    )
    group = replica_options(parser)
    group.add_argument(
        "--parallel",
        type=_parallel,
        default="2,4,8",
        metavar="N,N",
        help="GPUs of a replica to choose from, of 1, 2, 4 and 8; default: %(default)s",
    )
    group.add_argument(
        "--gpus", type=arguments.whole(1, _MOST), metavar="N", help="that there are; default: as many as needed"
    )
    group.add_argument(
        "--start-s",
        type=arguments.not_negative,
        default=420.0,
        metavar="S",
        help="how long a replica takes to start, at most an hour; default: %(default)g",
    )
    group.add_argument(
        "--min-up",
        type=arguments.whole(1, _MOST),
        default="1",
        metavar="H",
        help="hours that a replica stays up; default: %(default)s",
    )
    group.add_argument(
        "--spare",
        type=arguments.whole(0, 16),
        default="1",
        metavar="N",
        help="replicas of each class that may be lost; default: %(default)s",
    )
    group.add_argument(
        "--headroom",
        type=arguments.not_negative,
        default=25.0,
        metavar="P",
        help="per cent more than the hour's mean load that must be carried: what a forecast misses, and the heaviest "
        "minute; default: %(default)g",
    )


def replica_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of every task that say what a replica is; a task adds its own to the group."""
    from perseus_sim.serving.machine import GPUS, MODELS

    group = parser.add_argument_group("the replicas")
    group.add_argument("--gpu", required=True, choices=GPUS, help="of each replica")
    group.add_argument("--model", required=True, choices=MODELS, help="that they serve, in bfloat16")
    return group


def plan_day(options: argparse.Namespace, objective: Objective) -> tuple[dict[str, Any], list[str]]:
    """Plan a day, confirm its heaviest hours, and return the document and the lines to print.

    Raises:
        SolverError: the input cannot be used, or GPUs do not suffice.
    """
    from perseus_solver.serving.planner import LatencyLimits, PlanRequest, PoolLoad, Tariff, plan
    from perseus_solver.serving.planner.load_csv import load_from_csv
    from perseus_solver.serving.planner.manifests import manifests

    day = load_from_csv(options.load.name, _text(options.load))
    limits = LatencyLimits(**asdict(objective))
    machines = _machines(options)
    more = 1.0 + options.headroom / 100.0
    pools = []
    for one in day.classes:
        variants = _variants(options, one, limits, machines)
        upper = tuple(more * load for load in one.requests_per_s)
        pools.append(PoolLoad(one.name, variants, one.requests_per_s, upper))
    request = PlanRequest(
        tuple(pools), 3600.0, Tariff(day.per_kwh), gpus=options.gpus, min_up=options.min_up, spare=options.spare
    )
    done = plan(request)
    kept = {one.name: _confirmed(one, done, machines, objective, options.seed) for one in day.classes}
    lines = [*_table(day, done), "", *_summary(day, request, done), *_confirmations(kept, objective)]
    lines.append(
        "rests on: times and watts of public tables, how they follow the clock assumed (docs/serving-rehearse.md); "
        "lengths exponential, requests independent"
    )
    if options.gateway is not None:
        loads = {one.name: sum(one.requests_per_s) for one in day.classes}
        lines = [json.dumps(manifests(loads, options.gateway), indent=2)]
    document = {
        "cost": done.cost,
        "bound": done.bound,
        "gap": done.gap,
        "choices": {name: [asdict(choice) for choice in choices] for name, choices in done.choices.items()},
        "attainment_percent": kept,
    }
    return document, lines


def _text(path: Path) -> str:
    from perseus_solver.errors import InvalidTrace
    from perseus_solver.serving.planner.load_csv import MOST_BYTES

    try:
        return files.read_file("load", path, MOST_BYTES, InvalidTrace).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidTrace(f"load {path.name} is not UTF-8 text: {error.reason}") from None


def _machines(options: argparse.Namespace) -> dict[int, Machine]:
    from perseus_sim.serving.machine import Machine

    machines = {gpus: Machine(options.gpu, options.model, gpus) for gpus in options.parallel}
    return {gpus: machine for gpus, machine in machines.items() if machine.kv_capacity > 0}


def _variants(
    options: argparse.Namespace, one: ClassLoad, limits: LatencyLimits, machines: dict[int, Machine]
) -> tuple[Variant, ...]:
    from perseus_sim.serving.canary import ladder
    from perseus_sim.serving.machine_steps import BOOST_DELAY_S, BOOST_MHZ, MachineSteps
    from perseus_solver.serving.planner import ReplicaModel, RequestClass, Variant

    requests = RequestClass.exponential(one.prompt_tokens, one.output_tokens)
    variants = []
    for gpus, machine in machines.items():
        highest_mhz = machine.clocks_mhz[-1]
        steps = MachineSteps(machine, 0.5 * requests.prompt_tokens * (1.0 + requests.prompt_scv))
        replica = ReplicaModel(gpus, steps, highest_mhz, machine.kv_capacity)
        points = tuple(
            replica.points(requests, limits, (mhz,), (replica.raised_mhz(requests, mhz, BOOST_MHZ, BOOST_DELAY_S),))[
                -1:
            ]
            for mhz in (*ladder(machine)[::2], highest_mhz)
        )
        if kept := tuple(point for both in points for point in both):
            variants.append(Variant(gpus, kept, options.start_s, options.start_s * machine.costs(highest_mhz).idle_w))
    if not variants:
        raise SolverError(
            f"class {one.name}: no replica keeps the limits for {one.prompt_tokens:,.0f} tokens of prompt and "
            f"{one.output_tokens:,.0f} of answer: give other --parallel, or longer limits"
        )
    return tuple(variants)


def _confirmed(
    one: ClassLoad, done: ReplicaPlan, machines: dict[int, Machine], objective: Objective, seed: int
) -> float | None:
    """Serve a minute of the heaviest hour; the attainment in per cent, None without requests."""
    from perseus_sim.gpus.model import MODELS
    from perseus_sim.serving.canary import complete_table
    from perseus_sim.serving.controllers import Fixed, Law
    from perseus_sim.serving.fleet import Setting, run
    from perseus_sim.serving.objective import attainment
    from perseus_sim.serving.rehearsal import poisson

    hour = max(range(len(one.requests_per_s)), key=one.requests_per_s.__getitem__)
    choice, rate = done.choices[one.name][hour], one.requests_per_s[hour]
    if rate <= 0.0 or not choice.replicas:
        return None
    machine = machines[choice.gpus]
    driver = next(iter(MODELS.values())).driver
    seconds = min(_SERVED_S, _MOST_SERVED / rate)
    requests = poisson(rate, one.prompt_tokens, one.output_tokens, seconds, seed)
    longest = [each for each in requests if each.prompt_tokens + each.output_tokens <= machine.kv_capacity]
    try:
        table = complete_table(machine, objective, one.prompt_tokens, driver.latency.p50_s)
    except SolverError:
        served = run(Setting(machine, driver, choice.replicas, seed), longest, lambda _: Fixed()).served
    else:
        served = run(
            Setting(machine, driver, choice.replicas, seed), longest, lambda _: Law(table, objective, machine)
        ).served
    return attainment(served, objective, machine).percent


def _table(day: DayLoad, done: ReplicaPlan) -> list[str]:
    width = max(5, *(len(one.name) for one in day.classes))
    rows = [
        f"hour  {'class':<{width}}{'requests/s':>12}{'replicas':>10}{'GPUs each':>11}{'MHz':>7}{'start':>7}{'kWh':>9}"
    ]
    for hour in range(len(day.classes[0].requests_per_s)):
        for one in day.classes:
            choice = done.choices[one.name][hour]
            rows.append(
                f"{hour:>4}  {one.name:<{width}}{one.requests_per_s[hour]:>12.2f}{choice.replicas:>10}"
                f"{choice.gpus:>11}{choice.clock_mhz:>7}{choice.starts:>7}{choice.joules / 3.6e6:>9.2f}"
            )
    return rows


def _summary(day: DayLoad, request: PlanRequest, done: ReplicaPlan) -> list[str]:
    hours = range(request.epochs)
    gpus = [sum(choices[hour].gpus * choices[hour].replicas for choices in done.choices.values()) for hour in hours]
    most = max(hours, key=gpus.__getitem__)
    kwh = sum(choice.joules for choices in done.choices.values() for choice in choices) / 3.6e6
    what = f", {done.cost:,.2f} by per_kwh" if day.per_kwh else ""
    return [
        f"{request.epochs} hours: {kwh:,.1f} kWh of GPUs{what}; {gpus[most]} GPUs serve at hour {most}, "
        f"{min(gpus)} at the least",
        f"the best plan costs at most {100.0 * done.gap:.2f} % less; every class carries its load with "
        f"{request.spare} replica{'' if request.spare == 1 else 's'} lost",
    ]


def _confirmations(kept: dict[str, float | None], objective: Objective) -> list[str]:
    served = {name: percent for name, percent in kept.items() if percent is not None}
    if not served:
        return []
    worst = min(served, key=served.__getitem__)
    lines = [f"served request by request in its heaviest hour: {worst} keeps the objective for {served[worst]:.2f} %"]
    if served[worst] < 100.0 * objective.attainment:
        lines.append(
            f"do not rely on it: that is less than the {100.0 * objective.attainment:g} % wanted; "
            "more --headroom or --spare come first"
        )
    return lines


def _parallel(text: str) -> tuple[int, ...]:
    """Read 2,4,8."""
    parts = text.split(",")
    if not all(part in {str(size) for size in _PARALLEL} for part in parts) or len(set(parts)) != len(parts):
        raise argparse.ArgumentTypeError(f"must be different ones of 1, 2, 4 and 8 with commas between, not {text}")
    return tuple(sorted(map(int, parts)))
