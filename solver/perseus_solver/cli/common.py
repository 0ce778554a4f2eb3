"""Steps that several commands share: read the problem, reserve files, describe a plan.

numpy, OR-Tools and matplotlib are imported inside the functions, so that the parser starts without them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_solver.cli.files import read_file
from perseus_solver.errors import InvalidCalibration, SolverError

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_solver.calibration import Calibration, Trace
    from perseus_solver.cli.files import Outputs, Writer
    from perseus_solver.model.problem import Problem
    from perseus_solver.model.result import Frontier, Point
    from perseus_solver.model.simulator import Simulator
    from perseus_solver.schedules import Schedule

FRONTIER_POINTS = 50
"""Plans of a frontier from which the search for plans that change clocks less often, or later, starts."""
_NAMED = ("schedule", "stages", "microbatches")


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """What commands that plan begin with: reserved files, the problem, and an iteration at maximum clocks.

    Attributes:
        write, plot, gantt: write the JSON and pictures; None where they are not wanted.
        simulator: of the problem.
        baseline_time_s, baseline_energy_j: an iteration with all clocks at their maximum.
    """

    write: Writer | None
    plot: Writer | None
    gantt: Writer | None
    simulator: Simulator
    baseline_time_s: float
    baseline_energy_j: float

    @property
    def problem(self) -> Problem:
        """The planning problem."""
        return self.simulator.problem


def set_up(options: argparse.Namespace, outputs: Outputs) -> Setup:
    """Reserve the files and read the problem.

    Args:
        options: the parsed arguments of ``add_pipeline`` and ``add_files``.
        outputs: where files are reserved.

    Raises:
        SolverError: the input cannot be used, or a file cannot be written.
    """
    write = reserve_json(options, outputs)
    plot, gantt = (reserve_picture(options, outputs, name) for name in ("plot", "gantt"))
    simulator, base_s, base_j = read_baseline(options)
    return Setup(write, plot, gantt, simulator, base_s, base_j)


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """What a command plans: a schedule, the source of its profile, and the power of a waiting GPU in watts."""

    schedule: Schedule
    profile: Path | str
    blocking_power_w: float


def read_baseline(options: argparse.Namespace, pipeline: Pipeline | None = None) -> tuple[Simulator, float, float]:
    """Read the problem as `read_problem`, and simulate an iteration with all clocks at their maximum.

    Returns:
        The problem's simulator, and seconds and joules of that iteration.
    """
    problem = read_problem(options, pipeline)
    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.model.simulator import Simulator

    simulator = Simulator(problem)
    baseline = simulator.run(all_maximum(problem))
    return simulator, float(baseline.iteration_time_s), float(baseline.energy_j)


def read_problem(options: argparse.Namespace, pipeline: Pipeline | None = None) -> Problem:
    """Read and check the schedule, the profile and the calibration that the arguments name.

    Notes about the profile go to standard error.

    Args:
        options: the parsed arguments of `perseus_solver.cli.arguments.add_pipeline`.
        pipeline: None: as the arguments say.

    Returns:
        The planning problem.

    Raises:
        SolverError: a file cannot be used, or arguments are missing or contradict each other.
    """
    from perseus_solver.model.plausibility import check_units
    from perseus_solver.model.problem import build_problem
    from perseus_solver.model.profile import read_profile
    from perseus_solver.model.sampling import Sampling
    from perseus_solver.schedules import with_constants

    given = pipeline or Pipeline(named_schedule(options), options.profile, options.blocking_power)
    schedule = given.schedule
    sampling = Sampling(guard=options.guard, repair_monotone=options.repair) if options.samples else None
    if options.repair and not options.samples:
        raise SolverError("--repair needs --samples")
    profile = read_profile(given.profile, stages=schedule.stages, sampling=sampling)
    for warning in profile.warnings:
        print_warning(options, warning)
    for note in profile.notes:
        print_note(options, note)
    problem = build_problem(
        profile,
        with_constants(schedule, profile.constant_stages),
        blocking_power_w=given.blocking_power_w,
        delay_s=options.delay_s,
        overhead_s=options.overhead_s,
        calibration=read_calibration(options.calibration) if options.calibration else None,
    )
    for doubt in check_units(problem):
        print_warning(options, doubt)
    return problem


def named_schedule(options: argparse.Namespace) -> Schedule:
    """Return the schedule that the arguments name.

    Raises:
        SolverError: arguments are missing, wrong or contradict each other, or the file cannot be used.
    """
    from perseus_solver.schedules import build_schedule, read_schedule

    if options.schedule_csv is not None:
        given = [f"--{name}" for name in (*_NAMED, "chunks") if getattr(options, name) is not None]
        if given:
            raise SolverError(f"--order already gives what {', '.join(given)} would give; leave them out")
        return read_schedule(options.schedule_csv)
    missing = [f"--{name}" for name in _NAMED if getattr(options, name) is None]
    if missing:
        raise SolverError(f"{', '.join(missing)} needed (or --order)")
    return build_schedule(
        options.schedule, stages=options.stages, microbatches=options.microbatches, chunks=options.chunks
    )


def read_run(options: argparse.Namespace) -> Trace:
    """Read the measured run that ``--instructions`` and ``--iterations`` name.

    Raises:
        SolverError: a file cannot be used, or contradicts another argument.
    """
    from perseus_solver.calibration import read_trace

    return read_trace(
        options.instructions,
        options.iterations,
        options.schedule,
        stages=options.stages,
        microbatches=options.microbatches,
        chunks=options.chunks,
    )


def read_calibration(path: Path) -> Calibration:
    """Read the calibration that ``--calibration`` names.

    Raises:
        InvalidCalibration: the file cannot be read or used.
    """
    from perseus_solver.calibration import Calibration
    from perseus_solver.calibration.model import MAX_BYTES

    text = read_file("calibration", path, MAX_BYTES, InvalidCalibration)
    try:
        return Calibration.from_json(text)
    except InvalidCalibration as error:
        raise InvalidCalibration(f"calibration {path}: {error}") from None


def deadline_s(options: argparse.Namespace, baseline_time_s: float) -> float:
    """Return the longest iteration time that the arguments allow, in seconds.

    Args:
        options: the parsed arguments of `perseus_solver.cli.arguments.add_deadline`.
        baseline_time_s: iteration time with all clocks at their maximum: the base of a slowdown, and the deadline
            where none is given.
    """
    if options.deadline_s is not None:
        return float(options.deadline_s)
    return baseline_time_s * (1 + (options.max_slowdown or 0.0))


def reserve_json(options: argparse.Namespace, outputs: Outputs) -> Writer | None:
    """Reserve the JSON file that ``--output`` gives; None if the option is absent.

    Raises:
        SolverError: the file cannot be written.
    """
    return None if options.output is None else outputs.open("--output", options.output)


def reserve_picture(options: argparse.Namespace, outputs: Outputs, name: str) -> Writer | None:
    """Reserve the PNG file that option ``name`` gives; None if the option is absent.

    Raises:
        SolverError: matplotlib is not installed, or the file cannot be written.
    """
    target = getattr(options, name)
    if target is None:
        return None
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise SolverError(f"--{name} needs matplotlib: pip install 'perseus-k8s[plot]'")
    return outputs.open(f"--{name}", target)


def before_and_after_png(simulator: Simulator, point: Point) -> bytes:
    """Draw the pipeline with all clocks at their maximum, and under a plan."""
    from perseus_solver.comparison.baselines import all_maximum
    from perseus_solver.plots import Timeline, gantt_png

    problem = simulator.problem
    at_once = "" if point.expectation is None else ", if clocks changed at once"
    plans = [
        ("all at the highest clock", all_maximum(problem)),
        (f"planned{at_once}", simulator.choice_of(point.frequencies_mhz)),
    ]
    return gantt_png(problem, [Timeline.simulated(title, choice, simulator) for title, choice in plans])


def frontier_png(setup: Setup, frontier: Frontier, point: Point, name: str) -> bytes:
    """Draw a frontier with one plan marked, against all clocks at their maximum."""
    from perseus_solver import plots

    baseline = plots.Mark("all at the highest clock", setup.baseline_time_s, setup.baseline_energy_j)
    return plots.frontier_png(setup.problem, frontier, baseline=baseline, chosen=point, name=name)


def describe(point: Point, baseline_time_s: float, baseline_energy_j: float) -> str:
    """Describe a plan in one line, against all clocks at their maximum."""
    return (
        f"plan: {point.iteration_time_s:.4f} s ({100 * (point.iteration_time_s / baseline_time_s - 1):+.2f} %), "
        f"{point.energy_j:.1f} J ({100 * (point.energy_j / baseline_energy_j - 1):+.2f} %) "
        "against all clocks at maximum; "
        f"gap {100 * point.gap:.3f} %, {point.status.replace('_', ' ')}; {point.clock_changes} clock changes"
    )


def print_summary(options: argparse.Namespace, *lines: str) -> None:
    """Print to standard output, or to standard error where standard output carries the JSON."""
    for line in lines:
        print(line, file=sys.stderr if options.output == "-" else sys.stdout)


def print_warning(options: argparse.Namespace, warning: str) -> None:
    """Print to standard error, in one line, what makes the result doubtful."""
    print(f"perseus {options.command}: WARNING: {warning}", file=sys.stderr)


def print_note(options: argparse.Namespace, note: str) -> None:
    """Print a note of one line to standard error."""
    print(f"perseus {options.command}: note: {note}", file=sys.stderr)
