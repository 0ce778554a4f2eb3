"""The schedule as flat arrays: what every stage runs, in which order, and what each instruction waits for.

Flat arrays instead of objects keep schedules with millions of instructions small, and everything that follows can be
vectorised. A schedule holds no times; what an instruction takes is in the profile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidSchedule
from perseus_solver.kinds import Bools, Ints

ABSENT = -1
"""In `Schedule.position`: the stage has no such chunk."""

_NAMED_IN_CYCLE = 8  # enough to see the loop, short enough for one line


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Schedule:
    """Which instructions every stage runs, and in which order, as flat arrays stage by stage.

    A *position* is a place in the model's chain of layers. A stage that holds several chunks of the model (virtual
    stages) has several positions. Microbatch m passes the positions upwards in its forwards and downwards in its
    backwards.

    Attributes:
        name: as given to `build_schedule`, or ``custom``.
        microbatches: M; microbatches are numbered 0 … M − 1.
        kind, microbatch, chunk: int32[n], what each instruction is.
        stage_offset: int32[stages + 1]; stage s owns ``stage_offset[s] … stage_offset[s + 1] − 1``, in execution order.
        position: int32[stages, chunks], position of each chunk. `ABSENT` where a stage has fewer chunks, and for
            recomputations, which have a chunk number of their own and wait for no other stage.
        joined: bool[n], whether an instruction runs in one action with the next one of its stage, as an overlapped
            forward and backward do. An action begins when all that its parts receive is there, and sends when all of
            them have ended.
        bidirectional: two copies of the model run in opposite directions (DualPipe): every position is on two stages,
            and chunk c of a stage is its position in copy c.
    """

    name: str
    microbatches: int
    kind: Ints
    microbatch: Ints
    chunk: Ints
    stage_offset: Ints
    position: Ints
    joined: Bools
    bidirectional: bool = False

    @property
    def title(self) -> str:
        """Name and size, as above a picture: ``1F1B, 4 stages, 8 microbatches``."""
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.name}, {self.stages} stages{chunks}, {self.microbatches} microbatches"

    @property
    def stages(self) -> int:
        """Number of stages, N."""
        return int(self.position.shape[0])

    @property
    def chunks(self) -> int:
        """Largest number of model chunks on one stage."""
        return int(self.position.shape[1])

    @property
    def instructions(self) -> int:
        """Number of instructions over all stages, n."""
        return int(self.kind.shape[0])

    @property
    def stage(self) -> Ints:
        """int32[n], the stage of each instruction."""
        return np.repeat(np.arange(self.stages, dtype=np.int32), np.diff(self.stage_offset))

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name}, {self.stages} stages, {self.microbatches} microbatches, {self.chunks} chunks, "
            f"{self.instructions} instructions)"
        )

    def span(self, stage: int) -> slice:
        """Return the slice of the arrays that holds a stage."""
        return slice(int(self.stage_offset[stage]), int(self.stage_offset[stage + 1]))

    def of_stage(self, stage: int) -> list[tuple[str, int, int]]:
        """Return the instructions of one stage in execution order, as a rank registers them.

        Args:
            stage: 0 … stages − 1.

        Returns:
            ``(instruction, microbatch, chunk)`` of each.
        """
        span = self.span(stage)
        labels = [InstructionKind(k).label for k in self.kind[span].tolist()]
        return list(zip(labels, self.microbatch[span].tolist(), self.chunk[span].tolist(), strict=True))

    def columns(self, stage: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the instructions of one stage in execution order, as they are sent to an agent.

        Args:
            stage: 0 … stages − 1.

        Returns:
            Kinds, microbatches and chunks, one of each for every instruction.
        """
        span = self.span(stage)
        return tuple(self.kind[span].tolist()), tuple(self.microbatch[span].tolist()), tuple(self.chunk[span].tolist())

    def describe(self, instruction: int) -> str:
        """Return an instruction in words, for messages, such as ``forward 3 on stage 1``."""
        stage = int(np.searchsorted(self.stage_offset, instruction, side="right")) - 1
        chunk = f" of chunk {int(self.chunk[instruction])}" if self.chunks > 1 else ""
        kind = InstructionKind(int(self.kind[instruction])).label
        return f"{kind} {int(self.microbatch[instruction])}{chunk} on stage {stage}"

    def edges(self) -> tuple[Ints, Ints]:
        """Return the precedence between instructions.

        The consecutive instructions of each stage come first, then data from other stages, which bind the first and the
        last instruction of an action. Data flow between instructions of one stage is implied by their order there, so
        no instruction has more predecessors than its action has parts, and one.

        Returns:
            ``(before, after)``, int32[m] each: ``after`` starts when ``before`` has ended.

        Raises:
            InvalidSchedule: an instruction is missing, runs twice, or waits for one that runs later on its own stage.
        """
        n = self.instructions
        last = np.zeros(n, dtype=bool)
        last[self.stage_offset[1:] - 1] = True
        chain = np.flatnonzero(~last).astype(np.int32)

        before, after = self._data_flow()
        stage = self.stage
        same = stage[before] == stage[after]
        late = same & (before >= after)
        if late.any():
            k = int(np.argmax(late))
            raise InvalidSchedule(
                f"the schedule deadlocks: {self.describe(int(after[k]))} runs before "
                f"{self.describe(int(before[k]))}, whose result it needs"
            )
        first, final = self._actions()
        before, after = final[before[~same]], first[after[~same]]
        return np.concatenate([chain, before]), np.concatenate([chain + 1, after]).astype(np.int32)

    def _actions(self) -> tuple[Ints, Ints]:
        """Return int32[n] twice: the first and the last instruction of the action that each instruction is in."""
        place = np.arange(self.instructions, dtype=np.int32)
        final = place[~self.joined]
        first = np.concatenate([[0], final[:-1] + 1]).astype(np.int32)
        action = np.searchsorted(final, place)
        return first[action], final[action]

    def _data_flow(self) -> tuple[Ints, Ints]:
        """Forwards go up the positions, gradients down; weight gradients follow the input gradients of their stage."""
        if (self.kind == InstructionKind.STEP).any():
            self._check_steps()
            return np.empty(0, np.int32), np.empty(0, np.int32)
        position = self.position[self.stage, self.chunk]
        positions = int(self.position.max()) + 1
        place = self.microbatch.astype(np.int64) * positions + position
        flows = (position != ABSENT) & (self.kind != InstructionKind.CONSTANT)

        def at(*kinds: InstructionKind) -> Ints:
            """The instruction of one of these kinds at each place; `ABSENT` where there is none."""
            which = np.flatnonzero(np.isin(self.kind, kinds) & flows).astype(np.int32)
            table = np.full(self.microbatches * positions, ABSENT, dtype=np.int32)
            table[place[which]] = which
            twice = np.flatnonzero(table[place[which]] != which)
            if twice.size:
                raise InvalidSchedule(f"{self.name}: {self.describe(int(which[twice[0]]))} runs more than once")
            return table

        forward = at(InstructionKind.FORWARD)
        gradient = at(InstructionKind.BACKWARD, InstructionKind.INPUT_GRADIENT)
        weight = at(InstructionKind.WEIGHT_GRADIENT)
        split = gradient != ABSENT
        split[split] = self.kind[gradient[split]] == InstructionKind.INPUT_GRADIENT
        for missing, what in (
            (forward == ABSENT, "forward"),
            (gradient == ABSENT, "backward or input_gradient"),
            (split & (weight == ABSENT), "weight_gradient"),
            (~split & (weight != ABSENT), "input_gradient"),
        ):
            if missing.any():
                microbatch, where = divmod(int(np.argmax(missing)), positions)
                raise InvalidSchedule(f"{self.name}: no {what} of microbatch {microbatch} for {self._place(where)}")

        at_position = np.arange(forward.size) % positions
        up = np.flatnonzero(at_position > 0)
        down = np.flatnonzero(at_position < positions - 1)
        turn = np.flatnonzero(at_position == positions - 1)
        before = [forward[up - 1], gradient[down + 1], forward[turn], gradient[split]]
        after = [forward[up], gradient[down], gradient[turn], weight[split]]
        return np.concatenate(before), np.concatenate(after)

    def _check_steps(self) -> None:
        """A step passes nothing on: it is the whole iteration, or one phase of it, which are the stage's chunks."""
        if self.stages > 1 or (self.kind != InstructionKind.STEP).any():
            raise InvalidSchedule(f"{self.name}: steps are those of one stage, and there is nothing else beside them")
        _, first = np.unique(np.column_stack([self.microbatch, self.chunk]), axis=0, return_index=True)
        if first.size < self.instructions:
            twice = int(np.setdiff1d(np.arange(self.instructions), first)[0])
            raise InvalidSchedule(f"{self.name}: {self.describe(twice)} runs more than once")

    def _place(self, position: int) -> str:
        if self.chunks == 1:
            return f"stage {position}"
        stage, chunk = (int(k) for k in np.argwhere(self.position == position)[0])
        return f"chunk {chunk} of stage {stage}"


def assemble(
    name: str,
    per_stage: Sequence[npt.NDArray[np.integer]],
    *,
    microbatches: int,
    position: npt.NDArray[np.integer],
    joined: Sequence[Bools] | None = None,
    bidirectional: bool = False,
) -> Schedule:
    """Join the instructions of all stages into a schedule.

    Args:
        name: name of the schedule.
        per_stage: for each stage int[instructions, 3], rows of (kind, microbatch, chunk) in execution order.
        microbatches: number of microbatches.
        position: int[stages, chunks], see `Schedule`.
        joined: for each stage bool[instructions], see `Schedule`; None: every instruction is an action of its own.
        bidirectional: see `Schedule`.
    """
    rows = np.concatenate(per_stage).astype(np.int32)
    return Schedule(
        name=name,
        microbatches=microbatches,
        kind=np.ascontiguousarray(rows[:, 0]),
        microbatch=np.ascontiguousarray(rows[:, 1]),
        chunk=np.ascontiguousarray(rows[:, 2]),
        stage_offset=np.cumsum([0, *(len(rows_of_stage) for rows_of_stage in per_stage)]).astype(np.int32),
        position=position.astype(np.int32),
        joined=np.zeros(len(rows), dtype=bool) if joined is None else np.concatenate(joined),
        bidirectional=bidirectional,
    )


def rows(kind: InstructionKind, microbatch: npt.NDArray[np.integer], chunk: npt.NDArray[np.integer] | int = 0) -> Ints:
    """Return instructions of one kind as rows for `assemble`.

    Args:
        kind: their kind.
        microbatch: int[instructions].
        chunk: int[instructions], or one chunk for all.

    Returns:
        int32[instructions, 3].
    """
    out = np.empty((microbatch.size, 3), dtype=np.int32)
    out[:, 0] = kind
    out[:, 1] = microbatch
    out[:, 2] = chunk
    return out


def run(kind: InstructionKind, first: int, last: int, chunk: int = 0) -> Ints:
    """Return one kind of instruction on microbatches first … last − 1, as rows for `assemble`."""
    return rows(kind, np.arange(first, last), chunk)


def weave(*runs: Ints) -> Ints:
    """Interleave sequences of equal length: a0, b0, c0, a1, b1, c1 and so on."""
    return np.stack(runs, axis=1).reshape(-1, 3)


def with_constants(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Return the schedule with a constant-time instruction before each forward of chunk 0 on the given stages.

    Args:
        schedule: a schedule without constant-time instructions.
        stages: where they run; usually `Profile.constant_stages`.

    Raises:
        InvalidSchedule: a stage does not exist.
    """
    if not stages:
        return schedule
    if not set(stages) <= set(range(schedule.stages)):
        raise InvalidSchedule(f"constants must be stages 0 … {schedule.stages - 1}, not {sorted(stages)}")
    per_stage, joined = [], []
    for stage in range(schedule.stages):
        span = schedule.span(stage)
        rows_of_stage = np.column_stack([schedule.kind[span], schedule.microbatch[span], schedule.chunk[span]])
        joined_of_stage = schedule.joined[span]
        if stage in stages:
            at = np.flatnonzero((rows_of_stage[:, 0] == InstructionKind.FORWARD) & (rows_of_stage[:, 2] == 0))
            rows_of_stage = np.insert(rows_of_stage, at, rows(InstructionKind.CONSTANT, rows_of_stage[at, 1]), axis=0)
            # loading before a part that is not the first of its action is a part of it; no action ends joined
            joined_of_stage = np.insert(joined_of_stage, at, joined_of_stage[at - 1])
        per_stage.append(rows_of_stage)
        joined.append(joined_of_stage)
    return assemble(
        schedule.name,
        per_stage,
        microbatches=schedule.microbatches,
        position=schedule.position,
        joined=joined,
        bidirectional=schedule.bidirectional,
    )


def name_cycle(schedule: Schedule, before: Ints, after: Ints, stuck: npt.NDArray[np.bool_]) -> str:
    """Return one cycle among the instructions that can never start, in words.

    Args:
        schedule: names the instructions.
        before, after: int[m], the precedence that has a cycle.
        stuck: bool[n], the instructions that can never start.
    """
    inner = stuck[before] & stuck[after]
    waits_for = dict(zip(after[inner].tolist(), before[inner].tolist(), strict=True))
    at = next(iter(waits_for))
    path: dict[int, None] = {}
    while at not in path:
        path[at] = None
        at = waits_for[at]
    cycle = list(path)[list(path).index(at) :]
    named = [schedule.describe(i) for i in cycle[:_NAMED_IN_CYCLE]]
    if len(cycle) > _NAMED_IN_CYCLE:
        named.append(f"… {len(cycle) - _NAMED_IN_CYCLE} more …")
    return " waits for ".join([*named, schedule.describe(at)])
