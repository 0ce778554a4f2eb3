"""Arguments for a pipeline without a profile: its times at the highest clock from layers or a run, the rest from the
published curves of the GPU model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perseus_solver.cli import arguments, common
from perseus_solver.errors import SolverError

if TYPE_CHECKING:
    from perseus_core.gpus import GpuCurves
    from perseus_solver.model.simulator import Simulator

_INSTEAD: Final = ("layers", "head_layers", "iteration_s", "instructions", "iterations")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what stands in for a profile."""
    group = parser.add_argument_group(
        "without a profile", "Times at the highest clock, from one of these; --gpu says how they follow the clock."
    )
    group.add_argument(
        "--layers", type=arguments.whole(1, arguments.MAX_GPUS), metavar="N", help="layers of the model, split evenly"
    )
    group.add_argument(
        "--head-layers",
        type=arguments.not_negative,
        metavar="X",
        help="time of the language-model head over that of a layer (default: 1)",
    )
    group.add_argument(
        "--iteration-s",
        type=arguments.positive,
        metavar="T",
        help="how long an iteration takes now, in seconds (default: that of forwards of 36 ms)",
    )
    for option, content in (
        ("--instructions", "instruction of a run at default clocks"),
        ("--iterations", "its iterations"),
    ):
        help_text = f"instead of --layers: the time of every {content}, as perseus calibrate reads it"
        group.add_argument(option, type=Path, metavar="X.csv", help=help_text)


def check(options: argparse.Namespace) -> None:
    """Check that a pipeline is described once.

    Raises:
        SolverError: arguments are missing or contradict each other.
    """
    given = [f"--{name.replace('_', '-')}" for name in _INSTEAD if getattr(options, name) is not None]
    if options.profile is not None:
        if given:
            raise SolverError(f"--profile already says what {', '.join(given)} would; leave them out")
        if options.blocking_power is None:
            raise SolverError("--profile needs --blocking-power")
        return
    run = [name for name in ("instructions", "iterations") if getattr(options, name) is not None]
    if len(run) == 1:
        raise SolverError("--instructions and --iterations belong together")
    if run and len(given) > len(run):
        raise SolverError(f"--instructions already says what {given[0]} would; leave it out")
    from perseus_solver.schedules import schedule_name

    if run and options.schedule is None:
        raise SolverError("--instructions needs --schedule: which one was run")
    if not run and options.layers is None and schedule_name(options.schedule or "") != "Steps":
        raise SolverError("--profile and --blocking-power needed, or --gpu with --layers or a run (--instructions)")
    if options.gpu is None and options.hardware is None:
        raise SolverError("without --profile, --gpu is needed: which curves time and power follow")


def curves_of(model: str) -> GpuCurves:
    """Return the published curves of a GPU model.

    Raises:
        SolverError: there are none.
    """
    from perseus_core import gpus

    curves_of_model = gpus.curves_of(model)
    if curves_of_model is None:
        models = ", ".join(curves.name for curves in gpus.known_gpus().values())
        raise SolverError(f"no curves of {model!r} are known: give --profile, or one of {models}")
    return curves_of_model


def read_baseline(options: argparse.Namespace, curves: GpuCurves) -> tuple[Simulator, float, float]:
    """Return the problem's simulator, and seconds and joules of an iteration with all clocks at their maximum.

    Raises:
        SolverError: the arguments or the run cannot be used.
    """
    from perseus_solver.model.assumed import (
        FORWARD_S,
        HEAD_LAYERS,
        Instruction,
        assumed_profile,
        times_of_layers,
        times_of_run,
    )

    def with_times(times_s: dict[Instruction, float]) -> tuple[Simulator, float, float]:
        waiting_w = curves.blocking_power_w if options.blocking_power is None else options.blocking_power
        pipeline = common.Pipeline(schedule, assumed_profile(curves, times_s), waiting_w)
        return common.read_baseline(options, pipeline)

    if options.instructions is not None:
        trace = common.read_run(options)
        if (plans := len(set(trace.plan.tolist()))) > 1:
            raise SolverError(f"--instructions: the run has {plans} plans; needed is one at default clocks")
        schedule = trace.schedule
        return with_times(times_of_run(schedule, trace.duration_s))
    schedule = common.named_schedule(options)
    head = HEAD_LAYERS if options.head_layers is None else options.head_layers
    forwards = times_of_layers(schedule, options.layers or 1, head)
    baseline = with_times({each: FORWARD_S * forward for each, forward in forwards.items()})
    if options.iteration_s is None:
        return baseline
    # Delays between stages do not scale either, but few of them are on the critical path.
    fixed_s = baseline[0].problem.overhead_s
    scale = (options.iteration_s - fixed_s) / (baseline[1] - fixed_s)
    if scale <= 0:
        raise SolverError(f"--iteration-s must be more than the overhead, {fixed_s:g}, not {options.iteration_s:g}")
    return with_times({each: scale * FORWARD_S * forward for each, forward in forwards.items()})


def basis(options: argparse.Namespace, curves: GpuCurves) -> str:
    """Say in a clause what such an estimate rests on, and how far off it may be."""
    from perseus_core.gpus import TRUE_SHARES
    from perseus_solver.model.assumed import HEAD_LAYERS

    if options.instructions is not None:
        times = "the run's times"
    elif options.layers is None:
        times = "one step"
    else:
        head = HEAD_LAYERS if options.head_layers is None else options.head_layers
        times = f"{options.layers:,} equal layers and a head of {head:g}"
    partly = ", partly assumed" if curves.assumed else ""
    low, high = TRUE_SHARES
    return (
        f"{times} and the curves of {curves.name}{partly}, not a profile: plans have saved {low:g} to {high:g} times "
        "what such curves say, and that is the interval"
    )
