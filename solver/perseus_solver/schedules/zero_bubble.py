"""Zero-bubble schedules (Qi et al., 2023 and 2024): the backward is split, and weight gradients fill the bubbles.

Input gradients carry the dependency between stages; the weight gradient of a microbatch waits only for its own input
gradient. Pure functions of counts that were checked before.
"""

from __future__ import annotations

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.kinds import Ints
from perseus_solver.schedules.base import Schedule, assemble, run, weave


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B with split backward and no more stored activations than 1F1B has on its first stage.

    Stage s has N − s microbatches in flight, so it can postpone s weight gradients, which then fill its final bubble.
    """
    per_stage = []
    for stage in range(stages):
        warm = min(microbatches, stages - stage)
        lag = min(stage, microbatches)
        forward, inputs, weights = (
            run(kind, 0, microbatches)
            for kind in (InstructionKind.FORWARD, InstructionKind.INPUT_GRADIENT, InstructionKind.WEIGHT_GRADIENT)
        )
        # Steady step k: input gradient k, weight gradient k − lag, forward k + warm, as far as they exist.
        step = np.arange(microbatches)
        now, new = microbatches - lag, microbatches - warm
        turn = np.concatenate([3 * step, 3 * (step[:now] + lag) + 1, 3 * step[:new] + 2])
        steady = np.concatenate([inputs, weights[:now], forward[warm:]])[np.argsort(turn)]
        per_stage.append(np.concatenate([forward[:warm], steady, weights[now:]]))
    return assemble("ZBH1", per_stage, microbatches=microbatches, position=np.arange(stages)[:, None])


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Return ZB-V: two chunks on each stage, the second half of the model running back over the stages in a V.

    Chunk 0 of stage s is position s, chunk 1 position 2N − 1 − s. The pattern needs 2N − 1 microbatches to fill the
    pipeline; with fewer, the missing ones are left out of it.
    """
    filled = max(2 * stages - 1, microbatches)
    per_stage = []
    for stage in range(stages):
        rows_of_stage = _v_stage(stages, stage, filled)
        per_stage.append(rows_of_stage[rows_of_stage[:, 1] < microbatches])
    position = np.stack([np.arange(stages), 2 * stages - 1 - np.arange(stages)], axis=1)
    return assemble("ZBV", per_stage, microbatches=microbatches, position=position)


def _v_stage(stages: int, stage: int, microbatches: int) -> Ints:
    """Return the instructions of one stage of ZB-V."""
    kinds = (InstructionKind.FORWARD, InstructionKind.INPUT_GRADIENT, InstructionKind.WEIGHT_GRADIENT)
    (f0, i0, w0), (f1, i1, w1) = ([run(kind, 0, microbatches, chunk) for kind in kinds] for chunk in (0, 1))
    ahead = 2 * (stages - stage) - 1  # forwards down the first leg before the first one comes back
    after = stages - stage
    steady = microbatches - ahead - stage  # microbatches of chunk 0 still to start after the warm-up
    # In the steady state chunk 1 gets one microbatch further each turn, until its forwards have caught up.
    turns = microbatches - stage - after
    done = after + turns  # microbatches of chunk 1 whose weight gradient is done
    warm_up = [
        f0[:ahead],
        weave(f1[:stage], f0[ahead : ahead + stage]),
        weave(f1[stage : stage + after], i1[:after], w1[:after]),
    ]
    full, rest = slice(0, steady), slice(steady, turns)
    ones = slice(stage + after, stage + after + turns)
    steady_state = [
        weave(f0[ahead + stage :], i0[full], w0[full], f1[ones][full], i1[after:done][full], w1[after:done][full]),
        weave(i0[rest], w0[rest], f1[ones][rest], i1[after:done][rest], w1[after:done][rest]),
    ]
    cool_down = [
        weave(i0[turns : turns + stage], i1[done : done + stage]),
        weave(i0[turns + stage :], w0[turns : turns + after]),
        w1[done:],
        w0[turns + after :],
    ]
    return np.concatenate([*warm_up, *steady_state, *cool_down])
