"""The optimisation problem as flat arrays: instructions, their measured options, and the precedence between them.

It is built once from a profile and a schedule, and then read by the solver, the simulator and the certificate checker
alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats, Ints, Kind, Options
from perseus_solver.model.profile import Profile
from perseus_solver.schedules import Schedule


class DelaySource(Protocol):
    """A calibration: times between computations that were estimated from measured iterations."""

    def delays_for(self, schedule: Schedule) -> tuple[Floats, Floats, float]:
        """Return the delays for a schedule.

        Returns:
            float[stages, stages] seconds between stages [from, to], float[stages] seconds before each instruction of a
            stage, and seconds of each iteration outside the pipeline.

        Raises:
            InvalidCalibration: the calibration cannot be used, or is of another pipeline.
        """
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose one option for every instruction, so that the iteration is short and takes little energy.

    Instructions are numbered stage by stage, in the order in which the stage executes them: stage s owns
    ``stage_offset[s] … stage_offset[s + 1] − 1``.

    Attributes:
        schedule: the schedule that gives the precedence.
        options: the distinct tables of options.
        option_of: int32[n], the table of each instruction.
        edge_from, edge_to: int32[m], precedence: ``edge_to`` starts no earlier than ``edge_from`` ends plus the delay.
            Includes the edges between consecutive instructions of a stage. Free of cycles.
        edge_delay_s: float[m], communication delay of each edge, or gap within a stage, seconds.
        stage_offset: int32[stages + 1].
        blocking_power_w: power of one GPU while it waits, watts.
        overhead_s: fixed time of each iteration outside the graph, seconds. It is part of every iteration time, and
            every stage waits in it.
    """

    schedule: Schedule
    options: tuple[Options, ...]
    option_of: Ints
    edge_from: Ints
    edge_to: Ints
    edge_delay_s: Floats
    stage_offset: Ints
    blocking_power_w: float
    overhead_s: float = 0.0

    @property
    def instructions(self) -> int:
        """Number of instructions, n."""
        return int(self.option_of.shape[0])

    @property
    def stages(self) -> int:
        """Number of stages, N."""
        return int(self.stage_offset.shape[0]) - 1


def build_problem(
    profile: Profile,
    schedule: Schedule,
    *,
    blocking_power_w: float,
    delay_s: float | Floats = 0.0,
    overhead_s: float = 0.0,
    calibration: DelaySource | None = None,
) -> Problem:
    """Join a profile and a schedule (Perseus, SOSP 2024, section 4: the problem formulation).

    Where a stage runs several chunks and the profile has no ``chunk`` column, its rows describe all layers of the
    stage, and each chunk takes an equal part of their time and energy: 1/chunks. In a bidirectional schedule each chunk
    is a whole position in its copy of the model and takes the rows of that position in full.

    Args:
        profile: measured time and energy of every instruction.
        schedule: which instructions run, and in which order.
        blocking_power_w: power of one GPU while it waits, watts.
        delay_s: communication delay between stages, seconds: one number, or a matrix [from stage, to stage].
        overhead_s: time of each iteration outside the pipeline (optimizer step, gradient synchronisation), seconds.
        calibration: gives delays, gaps and overhead as estimated from measured iterations, instead of ``delay_s`` and
            ``overhead_s``; times of the problem are then times of real iterations.

    Returns:
        The planning problem.

    Raises:
        InvalidProblem: the profile lacks an instruction of the schedule, or a parameter is out of range.
        InvalidCalibration: the calibration does not explain its run, or is of another pipeline.
        InvalidSchedule: the schedule is incomplete or deadlocks.
    """
    gap_s = np.zeros(schedule.stages)
    if calibration is not None:
        if overhead_s or np.any(delay_s):
            raise InvalidProblem("delay_s and overhead_s must not be given with a calibration, which has both")
        delay_s, gap_s, overhead_s = calibration.delays_for(schedule)
    for name, value in (("blocking_power_w", blocking_power_w), ("overhead_s", overhead_s)):
        if not (math.isfinite(value) and value >= 0):
            raise InvalidProblem(f"{name} must be a finite number, zero or more, not {value}")
    delay = np.asarray(delay_s, dtype=np.float64)
    if delay.ndim and delay.shape != (schedule.stages, schedule.stages):
        raise InvalidProblem(
            f"delay_s must be one number or a {schedule.stages} × {schedule.stages} matrix, not of shape {delay.shape}"
        )
    if not (np.isfinite(delay) & (delay >= 0)).all():
        raise InvalidProblem("delay_s must be finite, zero or more")

    stage = schedule.stage
    before, after = schedule.edges()
    across = stage[before] != stage[after]
    delays = np.broadcast_to(delay, (schedule.stages,) * 2)[stage[before], stage[after]]
    delays = np.where(across, delays, gap_s[stage[after]])
    options, option_of = _match(profile, schedule)
    return Problem(
        schedule=schedule,
        options=options,
        option_of=option_of,
        edge_from=before,
        edge_to=after,
        edge_delay_s=delays,
        stage_offset=schedule.stage_offset,
        blocking_power_w=blocking_power_w,
        overhead_s=overhead_s,
    )


def _match(profile: Profile, schedule: Schedule) -> tuple[tuple[Options, ...], Ints]:
    """Return one table for each (stage, chunk, kind) that the schedule runs, and the table of each instruction."""
    kinds = max(Kind) + 1
    key = (schedule.stage * schedule.chunks + schedule.chunk) * kinds + schedule.kind
    used, option_of = np.unique(key, return_inverse=True)
    tables = []
    for code in used.tolist():
        place, kind_number = divmod(code, kinds)
        stage, chunk = divmod(place, schedule.chunks)
        tables.append(_table(profile, schedule, stage, chunk, Kind(kind_number)))
    for stage in profile.constant_stages:
        if not any(table.stage == stage and table.kind is Kind.CONSTANT for table in tables):
            raise InvalidProblem(
                f"the profile has a constant instruction for stage {stage}, which schedule {schedule.name} does not run"
            )
    return tuple(tables), option_of.astype(np.int32)


def _table(profile: Profile, schedule: Schedule, stage: int, chunk: int, kind: Kind) -> Options:
    row, share, column = stage, 1, chunk
    if not profile.has_chunks:
        column = 0
        if schedule.bidirectional:
            row = int(schedule.position[stage, chunk])
        elif kind is not Kind.CONSTANT:
            share = int(np.count_nonzero(schedule.position[stage] >= 0))
    found = profile.tables.get((row, kind, column))
    if found is None:
        if row >= profile.stages:
            raise InvalidProblem(
                f"the schedule {schedule.name} needs stage {row}, but the profile has only {profile.stages} stages"
            )
        where = f"stage {row}" + (f", chunk {column}" if profile.has_chunks else "")
        raise InvalidProblem(
            f"the schedule {schedule.name} needs '{kind.label}' of {where}, for which the profile has no rows"
        )
    return replace(found, stage=stage, chunk=chunk, time_s=found.time_s / share, energy_j=found.energy_j / share)
