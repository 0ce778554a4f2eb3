"""Pipeline schedules by name: the order in which every stage runs its instructions.

`build_schedule` is the only door; the generators behind it are pure functions of the counts, vectorised over
microbatches. Costs and clocks do not belong here.
"""

from __future__ import annotations

from collections.abc import Callable

from perseus_solver.errors import InvalidSchedule
from perseus_solver.schedules.base import Schedule
from perseus_solver.schedules.classic import gpipe, one_f_one_b

__all__ = ["SCHEDULES", "Schedule", "build_schedule"]

MAX_STAGES = 1_024
MAX_INSTRUCTIONS = 4_000_000
"""Refuse before memory does: about 1 KiB of arrays an instruction over a whole solve."""

_SIMPLE: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}

SCHEDULES = tuple(_SIMPLE)
"""Names that `build_schedule` knows."""


def build_schedule(name: str, *, stages: int, microbatches: int) -> Schedule:
    """The order of instructions of a named schedule.

    Raises:
        InvalidSchedule: unknown name or counts out of range.
    """
    if name not in SCHEDULES:
        raise InvalidSchedule(f"schedule {name!r} is unknown; known are {', '.join(SCHEDULES)}")
    for field, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise InvalidSchedule(f"{field} must be at least 1, not {value}")
    if stages > MAX_STAGES:
        raise InvalidSchedule(f"stages must be at most {MAX_STAGES}, not {stages}")
    if 2 * stages * microbatches > MAX_INSTRUCTIONS:
        raise InvalidSchedule(f"stages × microbatches is too large: more than {MAX_INSTRUCTIONS:,} instructions")
    return _SIMPLE[name](stages, microbatches)
