"""Command-line arguments that several commands share, and the checks of single values.

A value that is out of range is refused while the arguments are parsed, so nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from perseus_core.units import ratio_from_percent

DEFAULT_CONFIDENCE = 0.95
"""Share of the iterations that keep a rehearsed plan's time."""
DEFAULT_PROOF_S = 60.0
"""CP-SAT proves 32 instructions in two to seven seconds, and gains little after a minute."""
MAX_GPUS = 10_000_000
MAX_POINTS = 10_000
"""Of a frontier: on 8 stages with 96 microbatches each point is 7 kB of JSON, or 100 kB in full."""


def add_pipeline(parser: argparse.ArgumentParser, *, measured: bool = True) -> None:
    """Add what describes the planning problem: profile, schedule, powers and delays.

    ``measured``: a profile and the power of a waiting GPU are required.
    """
    group = parser.add_argument_group("the pipeline")
    group.add_argument(
        "--profile",
        required=measured,
        type=Path,
        metavar="P.csv",
        help="measured time and energy, as a CSV",
    )
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help="1F1B, DualPipe, EarlyRecompute1F1B, GPipe, Interleaved1F1B, Steps, ZBH1 or ZBV, as in a PerseusJob",
    )
    group.add_argument("--stages", type=int, metavar="N", help="stages of one pipeline")
    group.add_argument("--microbatches", type=int, metavar="M", help="microbatches in one iteration of one pipeline")
    group.add_argument("--chunks", type=int, metavar="V", help="model chunks on each stage (Interleaved1F1B only)")
    group.add_argument(
        "--order",
        dest="schedule_csv",
        type=Path,
        metavar="SCHEDULE.csv",
        help="a custom schedule instead of the four options above: a CSV as torch.distributed.pipelining exports it, "
        "compute-only or with communication",
    )
    group.add_argument(
        "--blocking-power",
        required=measured,
        type=not_negative,
        metavar="W",
        help="power of a GPU while it waits for another stage, in watts",
    )
    group.add_argument(
        "--delay-s",
        type=not_negative,
        default=0.0,
        metavar="S",
        help="transfer time between two stages, in seconds (default: 0)",
    )
    group.add_argument(
        "--overhead-s",
        type=not_negative,
        default=0.0,
        metavar="S",
        help="time of each iteration outside the pipeline, in seconds (default: 0)",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="CAL.json",
        help="a file from perseus calibrate, instead of --delay-s and --overhead-s: predicted times are then those of "
        "real iterations",
    )
    _add_noise(parser)


def _add_noise(parser: argparse.ArgumentParser) -> None:
    noise = parser.add_argument_group("noisy profiles")
    noise.add_argument(
        "--samples",
        action="store_true",
        help="the profile may repeat a row: use the median of its samples, with times raised by --guard",
    )
    noise.add_argument(
        "--guard",
        type=not_negative,
        default=2.0,
        metavar="K",
        help="raise sampled times by this many standard errors, because an instruction that is slower than its "
        "profile delays the whole pipeline (default: 2)",
    )
    noise.add_argument(
        "--repair", action="store_true", help="with --samples: raise times so that no lower clock is faster"
    )


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Add the two ways to limit the iteration time."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--deadline-s", type=positive, metavar="T", help="longest iteration time allowed, in seconds")
    group.add_argument(
        "--max-slowdown",
        type=percent,
        metavar="P%",
        help="how much longer an iteration may take than with all clocks at their maximum, such as 3%% "
        "(default: no longer, to half a per cent with --hardware)",
    )


def add_prove(parser: argparse.ArgumentParser) -> None:
    """Add the wish for an exact proof, and how long it may take."""
    parser.add_argument(
        "--prove",
        type=positive,
        nargs="?",
        const=DEFAULT_PROOF_S,
        metavar="S",
        help="let an exact solver close or narrow the gap for up to this many seconds (default: 60); it closes that of "
        "some dozen instructions in seconds, and narrows that of some hundred",
    )


def add_switching(parser: argparse.ArgumentParser) -> None:
    """Add how much energy may be spent to avoid clock changes."""
    parser.add_argument(
        "--max-switch-loss",
        type=percent,
        metavar="P%",
        help="change clocks as rarely as the loss of this share of the iteration energy allows, such as 0.5%%",
    )


def add_hardware(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the description of the hardware on which plans are rehearsed."""
    group = parser.add_argument_group(
        "rehearsal", "Plans are executed many times on the hardware described, on which clocks change late."
    )
    group.add_argument(
        "--hardware",
        required=required,
        type=Path,
        metavar="H.json",
        help="GPU model, switch latency, marks and launch queue, as JSON; with it, plans change clocks as often as "
        "such GPUs can, and keep their times with a confidence",
    )
    group.add_argument(
        "--confidence",
        type=confidence,
        default=DEFAULT_CONFIDENCE,
        metavar="C%",
        help="share of the iterations that keep the time (default: 95%%)",
    )


def add_scatter(parser: argparse.ArgumentParser) -> None:
    """Add how much instructions scatter, for plans that keep their time without a description of the hardware."""
    parser.add_argument(
        "--scatter",
        type=percent,
        metavar="P%",
        help="standard deviation of an instruction's time; plans then keep their deadline with --confidence although "
        "instructions scatter (default: as measured by --calibration, if --confidence is given)",
    )
    parser.set_defaults(confidence=None)


def add_files(parser: argparse.ArgumentParser, *, gantt: bool) -> argparse._ArgumentGroup:
    """Add the files to write, and return their group; ``gantt``: the pipeline can be drawn."""
    group = parser.add_argument_group("files")
    group.add_argument("--output", metavar="F.json", help="where to write JSON; - for standard output")
    group.add_argument("--plot", metavar="F.png", help="draw energy against time (needs matplotlib)")
    if gantt:
        group.add_argument(
            "--gantt", metavar="G.png", help="draw the pipeline at maximum clocks and as planned, coloured by power"
        )
    return group


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    return value


def positive(text: str) -> float:
    """Read a finite number greater than zero.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if (value := _number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"must be greater than zero, not {text}")
    return value


def not_negative(text: str) -> float:
    """Read a finite number, zero or more.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if (value := _number(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be zero or more, not {text}")
    return value


def percent(text: str) -> float:
    """Read a percentage such as ``3%`` as a ratio, 0.03.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        return ratio_from_percent(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def confidence(text: str) -> float:
    """Read a percentage between 50% and 99.9% as a ratio.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not 0.5 <= (value := percent(text)) <= 0.999:
        raise argparse.ArgumentTypeError(f"must be between 50% and 99.9%, not {text}")
    return value


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return what reads a whole number within these bounds; it raises ``argparse.ArgumentTypeError`` for another."""

    def read(text: str) -> int:
        digits = text.isascii() and text.isdecimal() and len(text) <= len(str(most)) + 2
        if not digits or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least:,} to {most:,}, not {text}")
        return int(text)

    return read
