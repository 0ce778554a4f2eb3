"""Pipeline schedules: which instructions every stage runs, and in which order.

`build_schedule` builds a schedule by name, `read_schedule` reads a custom schedule from its CSV. The generators behind
them are pure functions of the counts, vectorised over microbatches. A schedule holds neither times nor clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from perseus_solver.errors import InvalidSchedule
from perseus_solver.schedules.base import Schedule, with_constants
from perseus_solver.schedules.classic import early_recompute, gpipe, interleaved, one_f_one_b, steps
from perseus_solver.schedules.dualpipe import dualpipe
from perseus_solver.schedules.torch_csv import read_schedule, write_schedule
from perseus_solver.schedules.zero_bubble import zb_h1, zb_v

__all__ = [
    "SCHEDULES",
    "Schedule",
    "build_schedule",
    "read_schedule",
    "schedule_name",
    "with_constants",
    "write_schedule",
]

MAX_STAGES = 1_024
MAX_INSTRUCTIONS = 4_000_000
"""Forwards and backwards together. A whole solve takes about a kilobyte of arrays for each, so a larger schedule is
refused before memory runs out.
"""

_GENERATORS: dict[str, Callable[[int, int], Schedule]] = {
    "Steps": steps,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "EarlyRecompute1F1B": early_recompute,
    "ZBH1": zb_h1,
    "ZBV": zb_v,
    "DualPipe": dualpipe,
}
_INTERLEAVED = "Interleaved1F1B"
_FIXED_CHUNKS = {"ZBV": 2, "DualPipe": 2}

SCHEDULES = tuple(sorted((*_GENERATORS, _INTERLEAVED)))
"""Names of schedules, the same as in a PerseusJob."""


def schedule_name(text: str) -> str:
    """Return the name of `SCHEDULES` that is meant; case, hyphens and underscores do not count.

    Args:
        text: a name, such as ``1f1b`` or ``interleaved-1f1b``.

    Returns:
        The name as in `SCHEDULES`; what is none of them comes back as it is.
    """
    return next((name for name in SCHEDULES if _letters(name) == _letters(text)), text)


def _letters(text: str) -> str:
    return text.casefold().replace("-", "").replace("_", "")


def build_schedule(
    name: str, *, stages: int, microbatches: int, chunks: int | None = None, constants: Collection[int] = ()
) -> Schedule:
    """Build a named schedule.

    Args:
        name: one of `SCHEDULES`; case and hyphens do not count.
        stages: number of stages, 1 to `MAX_STAGES`.
        microbatches: number of microbatches in an iteration of one pipeline, at least 1.
        chunks: model chunks (virtual stages) on each stage; None: as many as the schedule needs. Only Interleaved1F1B
            has a choice, and needs 2 or more.
        constants: stages that run a constant-time instruction (data loading) before each forward of their first chunk;
            usually `Profile.constant_stages`.

    Returns:
        The schedule, whose instructions are numbered stage by stage in execution order.

    Raises:
        InvalidSchedule: unknown name, or counts that the schedule cannot run.
    """
    name = schedule_name(name)
    if name not in SCHEDULES:
        raise InvalidSchedule(f"schedule {name!r} is unknown; known are {', '.join(SCHEDULES)}")
    for field, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks or 1)):
        if value < 1:
            raise InvalidSchedule(f"{field} must be at least 1, not {value}")
    if chunks == 0:
        raise InvalidSchedule("chunks must be at least 1, not 0")
    if stages > MAX_STAGES:
        raise InvalidSchedule(f"stages must be at most {MAX_STAGES:,}, not {stages:,}")
    if 2 * stages * microbatches * (chunks or 1) > MAX_INSTRUCTIONS:
        raise InvalidSchedule(
            f"2 × stages × microbatches × chunks is {2 * stages * microbatches * (chunks or 1):,}; "
            f"at most {MAX_INSTRUCTIONS:,} forwards and backwards are supported"
        )
    if name == _INTERLEAVED:
        if chunks is None or chunks < 2:
            raise InvalidSchedule(f"{name} needs chunks of 2 or more, the number of model chunks on each stage")
        schedule = interleaved(stages, microbatches, chunks)
    else:
        fixed = _FIXED_CHUNKS.get(name, 1)
        if chunks not in (None, fixed):
            raise InvalidSchedule(f"chunks must be {fixed} for {name}, not {chunks}")
        schedule = _GENERATORS[name](stages, microbatches)
    return with_constants(schedule, constants)
