"""The optimisation problem as flat arrays: instructions, their measured options, and the precedence between them.

It is built once from a profile and a schedule, and then read by the solver, the simulator and the certificate checker
alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats, Ints, Options, looked_up
from perseus_solver.model.graph import Edge, Knob, Names, Node, arrays_of
from perseus_solver.model.point import Frequencies, Point
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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
        names: what nodes and knobs are called, if the problem is any graph of work; None: it is of a pipeline.
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
    names: Names | None = None

    @classmethod
    def from_graph(
        cls,
        nodes: Mapping[Node, Sequence[tuple[Knob, float, float]]],
        edges: Iterable[Edge],
        *,
        stage_of: Mapping[Node, int] | None = None,
        blocking_power_w: float = 0.0,
        overhead_s: float = 0.0,
    ) -> Problem:
        """Build a problem from any directed acyclic graph of work and options of any knob.

        A knob is any hashable value: a clock, a power limit, a way to communicate, or a tuple of several. What it means
        does not matter to the solver, so two options may have the same clock.

        Args:
            nodes: for each node its options, (knob, seconds, joules) each; see `perseus_solver.model.graph.Option`.
            edges: (before, after) or (before, after, seconds between them).
            stage_of: the stage, from 0, whose GPU runs each node; the nodes of a stage run one after the other, in the
                order of ``nodes``. None: only edges bind nodes.
            blocking_power_w: power of a stage's GPU while none of its nodes runs, watts; needs ``stage_of``.
            overhead_s: time of each iteration outside the graph, seconds.

        Returns:
            The problem; `knobs` tells what a plan of it sets.

        Raises:
            InvalidProblem: the edges form a cycle, or a value is out of range; the message names the node or edge.

        Example:
            >>> problem = Problem.from_graph(
            ...     {"a": [("fast", 1.0, 10.0), ("slow", 2.0, 6.0)], "b": [(1400, 1.0, 9.0), (1000, 1.5, 8.0)]},
            ...     [("a", "b")],
            ... )
            >>> problem
            Problem(graph of 2 nodes and 1 edges, 2 to 2 options each)
        """
        for name, value in (("blocking_power_w", blocking_power_w), ("overhead_s", overhead_s)):
            if not (math.isfinite(value) and value >= 0):
                raise InvalidProblem(f"{name} must be a finite number, zero or more, not {value}")
        if blocking_power_w and stage_of is None:
            raise InvalidProblem("blocking_power_w needs stage_of: without stages nothing waits")
        arrays = arrays_of(nodes, edges, stage_of)
        return cls(
            schedule=arrays.schedule,
            options=arrays.options,
            option_of=arrays.option_of,
            edge_from=arrays.edge_from,
            edge_to=arrays.edge_to,
            edge_delay_s=arrays.edge_delay_s,
            stage_offset=arrays.schedule.stage_offset,
            blocking_power_w=blocking_power_w,
            overhead_s=overhead_s,
            names=arrays.names,
        )

    def frequencies_of(self, choice: npt.NDArray[np.integer]) -> Frequencies:
        """Return the clocks of plans that are positions in the options.

        Args:
            choice: int[n] or int[plans, n].

        Returns:
            uint16 of the same shape, MHz; 0 for constant-time instructions.
        """
        longest = max(len(options.frequency_mhz) for options in self.options)
        padded = np.stack([np.resize(options.frequency_mhz, longest) for options in self.options]).astype(np.uint16)
        return looked_up(padded, self.option_of, choice)

    def knobs(self, point: Point) -> dict[Node, Knob]:
        """Return what a plan sets on each node.

        Args:
            point: a plan of this problem.

        Raises:
            InvalidProblem: the problem is of a pipeline, whose plans have clocks, or the plan is of another problem.
        """
        if self.names is None:
            raise InvalidProblem("a problem of a pipeline has clocks: see frequencies_mhz of the plan")
        numbers = point.frequencies_mhz.tolist()
        if len(numbers) != self.instructions or not all(0 < number <= len(self.names.knobs) for number in numbers):
            raise InvalidProblem("the plan is of another problem")
        return {node: self.names.knobs[k - 1] for node, k in zip(self.names.nodes, numbers, strict=True)}

    def __repr__(self) -> str:
        sizes = [len(options.frequency_mhz) for options in self.options]
        each = f"{min(sizes)} to {max(sizes)} options each"
        if self.names is not None:
            return f"Problem(graph of {self.instructions} nodes and {len(self.edge_from)} edges, {each})"
        return f"Problem({self.schedule!r}, {each}, waiting at {self.blocking_power_w:g} W)"

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
    kinds = max(InstructionKind) + 1
    key = (schedule.stage * schedule.chunks + schedule.chunk) * kinds + schedule.kind
    used, option_of = np.unique(key, return_inverse=True)
    tables = []
    for code in used.tolist():
        place, kind_number = divmod(code, kinds)
        stage, chunk = divmod(place, schedule.chunks)
        tables.append(_table(profile, schedule, stage, chunk, InstructionKind(kind_number)))
    for stage in profile.constant_stages:
        if not any(table.stage == stage and table.kind is InstructionKind.CONSTANT for table in tables):
            raise InvalidProblem(
                f"the profile has a constant instruction for stage {stage}, which schedule {schedule.name} does not run"
            )
    return tuple(tables), option_of.astype(np.int32)


def _table(profile: Profile, schedule: Schedule, stage: int, chunk: int, kind: InstructionKind) -> Options:
    row, share, column = stage, 1, chunk
    if not profile.has_chunks:
        column = 0
        if schedule.bidirectional:
            row = int(schedule.position[stage, chunk])
        elif kind is not InstructionKind.CONSTANT:
            share = int(np.count_nonzero(schedule.position[stage] >= 0))
    table = profile.tables.get((row, kind, column))
    if table is None:
        if row >= profile.stages:
            raise InvalidProblem(
                f"the schedule {schedule.name} needs stage {row}, but the profile has only {profile.stages} stages"
            )
        where = f"stage {row}" + (f", chunk {column}" if profile.has_chunks else "")
        raise InvalidProblem(
            f"the schedule {schedule.name} needs '{kind.label}' of {where}, for which the profile has no rows"
        )
    return replace(table, stage=stage, chunk=chunk, time_s=table.time_s / share, energy_j=table.energy_j / share)
