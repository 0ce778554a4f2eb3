"""A pipeline schedule: which instructions every stage runs, in which order, and what each must wait for.

Made by the generators of this package and by the reader of torch's exported orders; read by `perseus_solver.problem`.
Holds no times: what an instruction costs is the profile's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_solver.errors import InvalidSchedule
from perseus_solver.problem import Ints, Kind

ABSENT = -1
"""In `Schedule.position`: the stage has no such chunk."""

_NAMED_IN_CYCLE = 8  # enough to see the loop, short enough for one line


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The order of instructions on every stage, as flat arrays stage by stage.

    A *stage* is a GPU of the pipeline; a *position* is a place in the model's chain of layers. A stage that holds
    several chunks of the model (virtual stages) holds several positions. Microbatch m passes the positions upwards in
    its forwards, downwards in its backwards.

    Attributes:
        name: as given to `build_schedule`, or ``custom``.
        microbatches: M; microbatches are numbered 0 … M − 1.
        kind, microbatch, chunk: int32[n], what each instruction is.
        stage_offset: int32[stages + 1]; stage s owns ``stage_offset[s] … stage_offset[s + 1] − 1``, in execution order.
        position: int32[stages, chunks], place of each chunk in the model; `ABSENT` where a stage has fewer chunks.
        bidirectional: two copies of the model run towards each other (DualPipe): every position lies on two stages,
            and chunk c of a stage is its place in copy c.
    """

    name: str
    microbatches: int
    kind: Ints
    microbatch: Ints
    chunk: Ints
    stage_offset: Ints
    position: Ints
    bidirectional: bool = False

    @property
    def stages(self) -> int:
        """Number of GPUs in the pipeline, N."""
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

    def of_stage(self, stage: int) -> list[tuple[str, int, int]]:
        """``(instruction, microbatch, chunk)`` of one stage in execution order: what a training process registers."""
        own = slice(int(self.stage_offset[stage]), int(self.stage_offset[stage + 1]))
        labels = [Kind(k).label for k in self.kind[own].tolist()]
        return list(zip(labels, self.microbatch[own].tolist(), self.chunk[own].tolist(), strict=True))

    def describe(self, instruction: int) -> str:
        """An instruction in words, for messages."""
        stage = int(np.searchsorted(self.stage_offset, instruction, side="right")) - 1
        chunk = f" of chunk {int(self.chunk[instruction])}" if self.chunks > 1 else ""
        return f"{Kind(int(self.kind[instruction])).label} {int(self.microbatch[instruction])}{chunk} on stage {stage}"

    def edges(self) -> tuple[Ints, Ints]:
        """Precedence between instructions: ``(before, after)``, the order on each stage first, then data from other
        stages.

        Data flow between instructions of one stage is implied by the order there, so no instruction has more than two
        predecessors.

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
                f"the order deadlocks: {self.describe(int(after[k]))} runs before "
                f"{self.describe(int(before[k]))}, whose result it needs"
            )
        return np.concatenate([chain, before[~same]]), np.concatenate([chain + 1, after[~same]]).astype(np.int32)

    def _data_flow(self) -> tuple[Ints, Ints]:
        """Forward up the positions, gradients down, weight gradients after the input gradients of their own stage."""
        positions = int(self.position.max()) + 1
        place = self.microbatch.astype(np.int64) * positions + self.position[self.stage, self.chunk]
        size = self.microbatches * positions

        def at(*kinds: Kind) -> Ints:
            who = np.flatnonzero(np.isin(self.kind, kinds)).astype(np.int32)
            table = np.full(size, ABSENT, dtype=np.int32)
            table[place[who[::-1]]] = who[::-1]  # the first wins: a second forward of a microbatch is its recomputation
            return table

        forward = at(Kind.FORWARD)
        gradient = at(Kind.BACKWARD, Kind.INPUT_GRADIENT)
        self._complete(forward, gradient, place, positions)

        at_position = np.arange(size) % positions
        up = np.flatnonzero(at_position > 0)
        down = np.flatnonzero(at_position < positions - 1)
        turn = np.flatnonzero(at_position == positions - 1)
        weight = np.flatnonzero(self.kind == Kind.WEIGHT_GRADIENT).astype(np.int32)
        before = [forward[up - 1], gradient[down + 1], forward[turn], gradient[place[weight]]]
        after = [forward[up], gradient[down], gradient[turn], weight]
        return np.concatenate(before), np.concatenate(after)

    def _complete(self, forward: Ints, gradient: Ints, place: npt.NDArray[np.int64], positions: int) -> None:
        """Every microbatch has one forward and one gradient at every position; split gradients come in pairs."""
        for table, what in ((forward, "forward"), (gradient, "backward or input_gradient")):
            if (table == ABSENT).any():
                microbatch, position = divmod(int(np.argmax(table == ABSENT)), positions)
                where = f"stage {position}" if self.chunks == 1 else f"model chunk {position}"
                raise InvalidSchedule(f"{self.name}: no {what} of microbatch {microbatch} for {where}")
        split = place[self.kind == Kind.INPUT_GRADIENT]
        weight = place[self.kind == Kind.WEIGHT_GRADIENT]
        unmatched = np.setxor1d(split, weight)
        if unmatched.size:
            microbatch, position = divmod(int(unmatched[0]), positions)
            where = f"microbatch {microbatch} at position {position} of the model"
            raise InvalidSchedule(f"{self.name}: input_gradient and weight_gradient do not come in pairs for {where}")
        gradients = np.isin(self.kind, (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT))
        twice, counts = np.unique(np.stack([self.kind[gradients], place[gradients]]), axis=1, return_counts=True)
        if (counts > 1).any() or np.count_nonzero(
            np.isin(self.kind, (Kind.BACKWARD, Kind.INPUT_GRADIENT))
        ) != gradient.size:
            kind, at = twice[:, int(np.argmax(counts))].tolist()
            raise InvalidSchedule(
                f"{self.name}: {Kind(kind).label} of microbatch {at // positions} runs twice "
                f"at position {at % positions} of the model"
            )


def assemble(
    name: str,
    orders: Sequence[npt.NDArray[np.integer]],
    *,
    microbatches: int,
    position: npt.NDArray[np.integer],
    bidirectional: bool = False,
) -> Schedule:
    """A schedule from one int array [instructions, 3] of (kind, microbatch, chunk) a stage."""
    rows = np.concatenate(orders).astype(np.int32)
    return Schedule(
        name=name,
        microbatches=microbatches,
        kind=np.ascontiguousarray(rows[:, 0]),
        microbatch=np.ascontiguousarray(rows[:, 1]),
        chunk=np.ascontiguousarray(rows[:, 2]),
        stage_offset=np.cumsum([0, *(len(order) for order in orders)]).astype(np.int32),
        position=position.astype(np.int32),
        bidirectional=bidirectional,
    )


def run(kind: Kind, first: int, last: int, chunk: int = 0) -> Ints:
    """One kind of instruction on microbatches first … last − 1, as rows for `assemble`."""
    rows = np.empty((max(last - first, 0), 3), dtype=np.int32)
    rows[:, 0] = kind
    rows[:, 1] = np.arange(first, max(first, last))
    rows[:, 2] = chunk
    return rows


def weave(*runs: Ints) -> Ints:
    """Runs of equal length in turn: a0, b0, c0, a1, b1, c1, …"""
    return np.stack(runs, axis=1).reshape(-1, 3)


def name_cycle(schedule: Schedule, before: Ints, after: Ints, stuck: npt.NDArray[np.bool_]) -> str:
    """The instructions of one cycle among those that can never start, in words."""
    inner = stuck[before] & stuck[after]
    waits_for = dict(zip(after[inner].tolist(), before[inner].tolist(), strict=True))
    at = next(iter(waits_for))
    path: dict[int, None] = {}
    while at not in path:
        path[at] = None
        at = waits_for[at]
    cycle = list(path)[list(path).index(at) :]
    words = [schedule.describe(i) for i in cycle[:_NAMED_IN_CYCLE]]
    if len(cycle) > _NAMED_IN_CYCLE:
        words.append(f"… {len(cycle) - _NAMED_IN_CYCLE} more …")
    return " waits for ".join([*words, schedule.describe(at)])
