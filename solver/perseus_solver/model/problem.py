"""The optimisation problem as flat arrays: instructions, their measured options, and the order between them.

Built once from a profile and a schedule; read by the engine, the rounding, the simulator and the certificate checker
alike. Nothing here decides anything.
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
    """What a calibration has learnt about the time between computations."""

    def delays_for(self, schedule: Schedule) -> tuple[Floats, Floats, float]:
        """Seconds between stages [from, to], before each instruction of a stage, and outside the pipeline."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose one option for every instruction.

    Instructions are numbered stage by stage, in the order in which the stage executes them: stage s owns
    ``stage_offset[s] … stage_offset[s + 1] − 1``.

    Attributes:
        schedule: where the order came from.
        options: distinct choice tables.
        option_of: int32[n], the table of each instruction.
        edge_from, edge_to: int32[m], precedence: ``edge_to`` starts no earlier than ``edge_from`` ends plus the delay.
            Includes the edges between consecutive instructions of a stage. No cycles.
        edge_delay_s: float[m], communication delay of each edge, or gap within a stage, seconds.
        blocking_power_w: GPU power while waiting, watts.
        overhead_s: fixed time per iteration outside the graph, seconds (added to every iteration time, every stage
            waits in it).
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
        """Number of pipeline stages (GPUs per pipeline and tensor rank), N."""
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
    """Join measurements and order.

    Where a stage runs several chunks and the profile has no ``chunk`` column, its rows are taken to describe all of
    the stage's layers,
    of which each chunk holds an equal part: 1/chunks of the time and energy. In a bidirectional schedule each chunk is
        a whole place in
    its copy of the model, so it takes the rows of that place in full.

    Args:
        profile: what instructions cost.
        schedule: their order.
        blocking_power_w: GPU power while waiting, watts.
        delay_s: communication delay between stages, seconds: one number, or a matrix [from stage, to stage].
        overhead_s: time per iteration outside the pipeline (optimizer step, gradient synchronisation), seconds.
        calibration: gives delays, gaps and overhead as learnt from real iterations, instead of the two above; times
            of the problem are then times of real iterations.

    Raises:
        InvalidProblem: the profile lacks an instruction of the schedule, or a parameter is out of range.
        InvalidCalibration: it explains nothing, or another pipeline.
        InvalidSchedule: the order is incomplete or deadlocks.
    """
    gap_s = np.zeros(schedule.stages)
    if calibration is not None:
        if overhead_s or np.any(delay_s):
            raise InvalidProblem("delay_s and overhead_s must not be given with a calibration, which holds both")
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
    """One table for each (stage, chunk, kind) that the schedule runs, and the table of each instruction."""
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
