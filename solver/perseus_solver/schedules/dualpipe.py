"""DualPipe (DeepSeek-AI, 2024): two copies of the model run in opposite directions, each on half of the microbatches.

Stage s holds position s of copy 0 (chunk 0) and position N − 1 − s of copy 1 (chunk 1). Microbatches 0 … M/2 − 1 enter
copy 0 at the first stage, the others copy 1 at the last. A forward and a backward of opposite directions are one
action, as in `_forward_backward_chunk` of DeepSeek's code: it receives before both, and sends after both.
"""

from __future__ import annotations

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidSchedule
from perseus_solver.kinds import Ints
from perseus_solver.schedules.base import Schedule, assemble

# Steps of the pattern. Direction 0 entered at the nearer end of the pipeline, direction 1 at the farther.
_F0, _F1, _B0, _B1 = 0, 1, 2, 3
_I0, _I1 = 4, 5  # a backward whose weight gradient is postponed
_W = 6  # the oldest postponed weight gradient
_JOINED = 8  # added to a forward: one action with the backward that follows


def dualpipe(stages: int, microbatches: int) -> Schedule:
    """Return the eight phases of the published schedule.

    Raises:
        InvalidSchedule: an odd number of stages or microbatches, or fewer than two microbatches for each stage.
    """
    if stages % 2:
        raise InvalidSchedule(f"DualPipe needs an even number of stages, not {stages}")
    if microbatches % 2 or microbatches < 2 * stages:
        raise InvalidSchedule(
            f"DualPipe needs an even number of microbatches, at least 2 × stages = {2 * stages}, not {microbatches}"
        )
    half = microbatches // 2
    steps = [_steps(stages, stage, half) for stage in range(stages)]
    return assemble(
        "DualPipe",
        [
            _instructions(sequence & ~_JOINED, half, far=int(stage >= stages // 2))
            for stage, sequence in enumerate(steps)
        ],
        microbatches=microbatches,
        position=np.stack([np.arange(stages), stages - 1 - np.arange(stages)], axis=1),
        joined=[sequence & _JOINED > 0 for sequence in steps],
        bidirectional=True,
    )


def _steps(stages: int, stage: int, half: int) -> Ints:
    """Return the steps of one stage, which depend only on its distance from the nearer end."""
    depth = min(stage, stages - 1 - stage)
    inner = stages // 2 - 1 - depth
    last_pairs = np.tile([_B1, _B0], depth + 1)
    postponed = np.arange(last_pairs.size) >= depth + 1  # the second half of the last pairs runs its weights later
    last_pairs[postponed] += _I0 - _B0
    return np.concatenate(
        [
            np.tile([_F0], 2 * inner),
            np.tile([_F0, _F1], depth + 1),
            np.tile([_I1, _W, _F1], inner),
            np.tile([_F0 | _JOINED, _B1, _F1 | _JOINED, _B0], half - stages + depth + 1),
            np.tile([_B1, _F1 | _JOINED, _B0], inner),
            last_pairs,
            np.tile([_W, _I0], inner),
            np.tile([_W], depth + 1),
        ]
    ).astype(np.int32)


def _instructions(steps: Ints, half: int, far: int) -> Ints:
    """Turn steps into instructions: microbatches of each direction in turn, weight gradients first in, first out."""
    out = np.zeros((steps.size, 3), dtype=np.int32)
    for direction in (0, 1):
        chunk = direction ^ far
        forward = np.flatnonzero(steps == _F0 + direction)
        backward = np.flatnonzero((steps == _B0 + direction) | (steps == _I0 + direction))
        out[forward, 0] = InstructionKind.FORWARD
        out[backward, 0] = np.where(
            steps[backward] == _B0 + direction, InstructionKind.BACKWARD, InstructionKind.INPUT_GRADIENT
        )
        for which in (forward, backward):
            out[which, 1] = chunk * half + np.arange(half)
            out[which, 2] = chunk
    weights = np.flatnonzero(steps == _W)
    out[weights] = out[(steps == _I0) | (steps == _I1)]
    out[weights, 0] = InstructionKind.WEIGHT_GRADIENT
    return out
