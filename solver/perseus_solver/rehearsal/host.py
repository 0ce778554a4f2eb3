"""The control that followed the host's marks: the next clock is set when the host marks the end of an instruction.

It is here to show what design note 0019 replaced, and what a job loses whose marks are those of the host.
"""

from __future__ import annotations

import itertools

import numpy as np

from perseus_core.hardware import Hardware
from perseus_core.instruction import InstructionKind
from perseus_core.marks import MarkSource
from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem
from perseus_solver.rehearsal.requests import Moment, Requests, Start


def highest_clocks(planned: Index, stage_offset: list[int]) -> Start:
    """Return the start of a run with the highest clock of each stage; ``planned`` is int[plans, n]."""
    highest = np.stack([planned[:, low:high].max(axis=1) for low, high in itertools.pairwise(stage_offset)], axis=1)
    none = np.zeros(0)
    return Start(
        np.maximum(highest, 0).astype(np.int32), np.zeros(highest.size + 1, dtype=np.int64), none, none.astype(np.int32)
    )


def host_ends(problem: Problem, hardware: Hardware, planned: Index) -> Requests:
    """Return requests for the clock of the next instruction, made when the host marks the end of the one before.

    Hosts that wait for the GPU mark right (`MarkSource.GPU`), or wait after each transfer only and mark the end when
    the instruction is launched (`MarkSource.SYNCHRONISED`, as Megatron's 1F1B does). Others launch until the queue is
    full (`MarkSource.HOST`): a launch then waits until the GPU has reached the kernel one queue before it.

    Args:
        problem: the problem.
        hardware: who marks, and how fast hosts launch.
        planned: int[plans, n], positions of clocks; negative where an instruction sets none.
    """
    offset = problem.stage_offset.tolist()
    kinds = np.array([int(options.kind) for options in problem.options])[problem.option_of]
    kernels = np.array([hardware.kernels[InstructionKind(kind)] for kind in kinds.tolist()], dtype=np.float64)
    owner, marked = np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
    share = np.empty(0)
    for low, high in itertools.pairwise(offset):
        rows = np.arange(low, high)
        owners, shares = _waits(rows, kernels[low:high], hardware)
        owner, marked, share = np.append(owner, owners), np.append(marked, rows), np.append(share, shares)
    order = np.lexsort((marked, owner))
    owner, marked, share = owner[order], marked[order], share[order]
    plans = len(planned)
    first = owner.searchsorted(np.arange(problem.instructions))
    moment = {MarkSource.GPU: Moment.AT_END, MarkSource.SYNCHRONISED: Moment.LAUNCHED}.get(hardware.marks, Moment.AHEAD)
    return Requests(
        first=np.append((np.arange(plans)[:, None] * len(owner) + first).ravel(), plans * len(owner)),
        after_s=np.tile(kernels[marked] * hardware.launch_s, plans),
        clock=_next_clocks(planned, offset)[:, marked].ravel().astype(np.int32),
        moment=np.full(plans * len(owner), moment, dtype=np.int32),
        share=np.tile(share, plans),
    )


def _waits(rows: Index, kernels: Floats, hardware: Hardware) -> tuple[Index, Floats]:
    """Return, for the mark of each instruction of a stage, the instruction for which it waits, and the share of that
    which must be done; negative if nothing must.
    """
    if hardware.marks is not MarkSource.HOST:
        return np.roll(rows, -1) if hardware.marks is MarkSource.GPU else rows, np.full(len(rows), -1.0)
    done = np.cumsum(kernels)
    reached = done - hardware.launch_queue  # kernels that the GPU must have done before the last is launched
    at = done.searchsorted(reached, side="left")
    share = (reached - (done[at] - kernels[at])) / kernels[at]
    return rows[at], np.where(reached > 0, np.maximum(share, -1.0), -1.0)


def _next_clocks(planned: Index, offset: list[int]) -> Index:
    """Return the clock of the next instruction that sets one, [plans, n], around the end of each stage's iteration."""
    following = np.full_like(planned, -1)
    for low, high in itertools.pairwise(offset):
        of_stage = planned[:, low:high]
        sets = np.flatnonzero((of_stage >= 0).any(axis=0))
        if len(sets):
            at = np.searchsorted(sets, np.arange(1, high - low + 1)) % len(sets)
            following[:, low:high] = of_stage[:, sets[at]]
    return following
