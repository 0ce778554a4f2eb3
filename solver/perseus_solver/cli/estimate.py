"""`perseus estimate`: what plans would save on so many GPUs, in energy, money and carbon dioxide."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from perseus_solver.cli import arguments, assumed, common, deploying
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from perseus_solver.cli.files import Outputs
    from perseus_solver.frontier import Planner
    from perseus_solver.rehearsal import Hardware

_MONTH_H = 720.0


@dataclass(frozen=True)
class _Outcome:
    """A plan against all clocks at their maximum: changes of iteration time and energy, as shares."""

    time: float
    energy: float


DOES: Final = "what plans would save on so many GPUs: energy, money, carbon dioxide"
EXAMPLES: Final = """\
  perseus estimate --gpu "NVIDIA H100 80GB HBM3" --layers 96 --schedule 1F1B --stages 8 --microbatches 96 --gpus 1024
  perseus estimate --profile gpt3.csv --schedule 1F1B --stages 8 --microbatches 96 --blocking-power 83.64 \\
      --gpus 1024 --gpu "NVIDIA H100 80GB HBM3" --price 0.12 --carbon 400
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`."""
    arguments.add_pipeline(parser, measured=False)
    assumed.add_arguments(parser)
    arguments.add_deadline(parser)
    group = parser.add_argument_group("the fleet")
    group.add_argument(
        "--gpus",
        type=arguments.whole(1, arguments.MAX_GPUS),
        metavar="N",
        help="GPUs of the job, a multiple of its stages (default: one pipeline)",
    )
    group.add_argument(
        "--hours", type=arguments.positive, default=_MONTH_H, metavar="H", help="hours of training (default: 720)"
    )
    group.add_argument("--price", type=arguments.not_negative, metavar="P", help="price of a kWh, in any currency")
    group.add_argument("--carbon", type=arguments.not_negative, metavar="G", help="grams of CO2 of a kWh")
    group.add_argument(
        "--gpu",
        metavar="MODEL",
        help="rehearse with what is published about clock changes of this model, as NVML names it, such as "
        "'NVIDIA H100 80GB HBM3'; without --profile also how its time and power follow the clock",
    )
    arguments.add_hardware(parser, required=False)
    parser.add_argument("--output", metavar="F.json", help="where to write JSON; - for standard output")


def run(options: argparse.Namespace, outputs: Outputs) -> None:
    """Plan, rehearse where the hardware is known, and print what is saved for the same work.

    Args:
        options: the parsed arguments.
        outputs: where files are reserved; they are put in place when the context ends without an error.

    Raises:
        Infeasible: the deadline is shorter than T_min.
        SolverError: the input cannot be used, or a file cannot be written.
    """
    if options.gpu is not None and options.hardware is not None:
        raise SolverError("--hardware already says what --gpu would; leave one out")
    assumed.check(options)
    write = common.reserve_json(options, outputs)
    from perseus_core.gpus import TRUE_SHARES
    from perseus_solver.cli.progress import ProgressBar
    from perseus_solver.frontier import Planner

    hardware = _hardware(options)
    if options.profile is not None or hardware is None:
        simulator, base_s, base_j = common.read_baseline(options)
        basis, shares = "the profile", (1.0, 1.0)
    else:
        curves = assumed.curves_of(hardware.model)
        simulator, base_s, base_j = assumed.read_baseline(options, curves)
        basis, shares = assumed.basis(options, curves), TRUE_SHARES
    problem = simulator.problem
    gpus = options.gpus or problem.stages
    if gpus % problem.stages:
        raise SolverError(f"--gpus must be a multiple of {problem.stages}, the GPUs of one pipeline, not {gpus:,}")
    if hardware is not None and options.hardware is None:
        hardware = replace(hardware, pipelines=max(gpus // problem.stages, 1))
    planner = Planner(problem)
    with ProgressBar("solving") as progress:
        ideal = planner.plan(common.deadline_s(options, base_s), progress=progress)
        outcomes = [_Outcome(ideal.iteration_time_s / base_s - 1, ideal.energy_j / base_j - 1)]
        if hardware is not None:
            outcomes.append(_rehearsed(options, planner, hardware))
    power_kw = base_j / base_s * gpus / problem.stages / 1000
    kwh = power_kw * options.hours
    energies = [share * outcome.energy for outcome in outcomes for share in shares]
    saved = sorted({-min(energies) * kwh, -max(energies) * kwh})
    rests_on = [basis, *_limits(hardware)]
    if write:
        document = {
            "gpus": gpus,
            "hours": options.hours,
            "baseline": {"iteration_time_s": base_s, "energy_j": base_j, "power_kw": power_kw, "energy_kwh": kwh},
            "ideal": asdict(outcomes[0]),
            "expected": asdict(outcomes[-1]) if hardware else None,
            "saved_kwh": saved,
            "rests_on": rests_on,
        }
        write([json.dumps(document).encode(), b"\n"])
    worth = [f"{_between(saved)} of {kwh:,.0f} kWh"]
    if options.price is not None:
        worth.append(f"{_between([options.price * one for one in saved])} at {options.price:g} a kWh")
    if options.carbon is not None:
        worth.append(
            f"{_between([options.carbon * one / 1e6 for one in saved], 1)} t of CO2 at {options.carbon:g} g a kWh"
        )
    common.print_summary(
        options,
        f"baseline: {base_s:.4f} s and {base_j:,.0f} J an iteration of {_gpus(problem.stages)}; "
        f"{_gpus(gpus)} draw{'s' if gpus == 1 else ''} {power_kw:,.1f} kW",
        f"planned: {_shares(energies)} energy, {_shares([one.time for one in outcomes])} time",
        f"saved in the work of {options.hours:g} hours: {'; '.join(worth)}",
        f"rests on: {'; '.join(rests_on)}",
    )


def _rehearsed(options: argparse.Namespace, planner: Planner, hardware: Hardware) -> _Outcome:
    """Return what the best plan does where clocks change late, against all clocks at maximum on the same hardware."""
    deployed = deploying.deploy(options, planner, hardware)
    return _Outcome(
        time=float(deployed.after.mean_time_s[0] / deployed.before.mean_time_s[0] - 1),
        energy=float(deployed.after.mean_energy_j[0] / deployed.before.mean_energy_j[0] - 1),
    )


def _hardware(options: argparse.Namespace) -> Hardware | None:
    """Return what plans are rehearsed on; None: nothing is said about it."""
    from perseus_solver.rehearsal.hardware import published_hardware

    if options.hardware is not None:
        return deploying.read_hardware(options.hardware)
    return None if options.gpu is None else published_hardware(options.gpu)


def _limits(hardware: Hardware | None) -> list[str]:
    energy = "energy of GPUs alone"
    if hardware is None:
        return [energy, "clocks that change at once, so this is the most: --gpu or --hardware says what remains"]
    p50_ms, p99_ms = 1000 * hardware.latency.p50_s, 1000 * hardware.latency.p99_s
    return [
        energy,
        f"between clocks that change in {p50_ms:g} ms (99 of 100 within {p99_ms:g} ms; {hardware.latency.source}) and "
        "clocks that change at once",
    ]


def _between(values: list[float], digits: int = 0) -> str:
    texts = [f"{round(value, digits) + 0.0:,.{digits}f}" for value in values]  # + 0.0: no minus before a zero
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _shares(values: list[float]) -> str:
    texts = [f"{round(100 * value, 2) + 0.0:+.2f} %" for value in sorted(values, reverse=True)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _gpus(count: int) -> str:
    return f"{count:,} GPU{'s' if count > 1 else ''}"
