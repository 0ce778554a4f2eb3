"""No pipeline at all, GPipe, and the 1F1B family: plain, interleaved over chunks, and with early recomputation.

Pure functions of counts that were checked before.
"""

from __future__ import annotations

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidSchedule
from perseus_solver.kinds import Ints
from perseus_solver.schedules.base import ABSENT, Schedule, assemble, rows, run, weave

RECOMPUTATION = 1
"""Chunk number of the recomputations of early-recompute 1F1B."""


def steps(stages: int, microbatches: int) -> Schedule:
    """Return the schedule of a job without a pipeline: an iteration is one instruction, the step.

    Every rank of a data-parallel or sharded job is a pipeline of one stage.
    """
    if (stages, microbatches) != (1, 1):
        raise InvalidSchedule(f"Steps has 1 stage and 1 microbatch, not {stages} and {microbatches}: a step is whole")
    return assemble("Steps", [run(InstructionKind.STEP, 0, 1)], microbatches=1, position=np.array([[0]]))


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards (Huang et al., 2019)."""
    rows_of_stage = np.concatenate(
        [run(InstructionKind.FORWARD, 0, microbatches), run(InstructionKind.BACKWARD, 0, microbatches)]
    )
    return assemble("GPipe", [rows_of_stage] * stages, microbatches=microbatches, position=np.arange(stages)[:, None])


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B with flush (Narayanan et al., 2019): N − s forwards on stage s, then backward and forward in turn."""
    per_stage = []
    for stage in range(stages):
        warm = min(microbatches, stages - stage)
        forward, backward = (
            run(InstructionKind.FORWARD, 0, microbatches),
            run(InstructionKind.BACKWARD, 0, microbatches),
        )
        per_stage.append(alternate(forward, backward, warm))
    return assemble("1F1B", per_stage, microbatches=microbatches, position=np.arange(stages)[:, None])


def early_recompute(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B that recomputes activations just before each backward (Merak, 2023).

    A recomputation does not wait for the gradient. It is a forward of chunk `RECOMPUTATION`. The last stage stores its
    activations, because its backward follows its forward at once. The profile's ``backward`` must not include
    recomputation. A recomputation takes the time and energy of the stage's ``forward``, unless the profile has
    ``forward`` rows of that chunk.
    """
    per_stage = []
    for stage in range(stages):
        forward, backward = (
            run(InstructionKind.FORWARD, 0, microbatches),
            run(InstructionKind.BACKWARD, 0, microbatches),
        )
        if stage == stages - 1:
            per_stage.append(alternate(forward, backward, 1))
            continue
        warm = min(microbatches, stages - stage)
        again = run(InstructionKind.FORWARD, 0, microbatches, chunk=RECOMPUTATION)
        steady = microbatches - warm
        per_stage.append(
            np.concatenate(
                [
                    forward[:warm],
                    weave(again[:steady], backward[:steady], forward[warm:]),
                    weave(again[steady:], backward[steady:]),
                ]
            )
        )
    position = np.stack([np.arange(stages), np.full(stages, ABSENT)], axis=1)
    return assemble("EarlyRecompute1F1B", per_stage, microbatches=microbatches, position=position)


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Return interleaved 1F1B (Narayanan et al., 2021): chunk c of stage s is position c·N + s of the model.

    Microbatches pass the chunks in rounds of N, or of more than N where their number requires it, as torch generalises
    the schedule.
    """
    rounds = max(1, microbatches // stages)
    if microbatches % rounds:
        raise InvalidSchedule(
            f"Interleaved1F1B runs microbatches in {rounds} rounds, and {microbatches} is not a multiple of {rounds}; "
            "use a multiple of the number of stages"
        )
    length = microbatches // rounds
    k = np.arange(microbatches * chunks)
    microbatch = k // (length * chunks) * length + k % length
    chunk = k // length % chunks
    forward = rows(InstructionKind.FORWARD, microbatch, chunk)
    backward = rows(InstructionKind.BACKWARD, microbatch, chunks - 1 - chunk)
    per_stage = []
    for stage in range(stages):
        warm = min((chunks - 1) * length + 2 * (stages - 1 - stage) + 1, k.size)
        per_stage.append(alternate(forward, backward, warm))
    position = np.arange(chunks)[None, :] * stages + np.arange(stages)[:, None]
    return assemble("Interleaved1F1B", per_stage, microbatches=microbatches, position=position)


def alternate(forward: Ints, backward: Ints, warm: int) -> Ints:
    """Return ``warm`` forwards, then one backward and one forward in turn, then the remaining backwards."""
    steady = len(forward) - warm
    return np.concatenate([forward[:warm], weave(backward[:steady], forward[warm:]), backward[steady:]])
