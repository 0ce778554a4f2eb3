"""Profiles of jobs that nobody has measured: how long instructions take at the highest clock, from the layers of the
model or from one run, and how time and power follow the clock, from the published curves of a GPU model.

The imbalance of stages is most of what is saved, and layers give it: they are split evenly, as frameworks do, and the
last position also has the language-model head. What such a profile is worth is `perseus_core.gpus.TRUE_SHARES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from perseus_core.gpus import BACKWARD_RATIO, GpuCurves
from perseus_core.instruction import InstructionKind
from perseus_solver.errors import SolverError
from perseus_solver.kinds import Floats
from perseus_solver.schedules import Schedule
from perseus_solver.schedules.base import ABSENT

Instruction = tuple[int, InstructionKind, int]
"""Stage, kind and chunk."""

FORWARD_S: Final = 0.036
"""Of a stage and microbatch, where nobody says how long an iteration takes."""
HEAD_LAYERS: Final = 1.0
"""The language-model head's time over that of a layer: 0.8 in the published profile of GPT-3 175B, 1.1 in that of
Bloom 176B."""
WORK: Final = {
    InstructionKind.FORWARD: 1.0,
    InstructionKind.BACKWARD: BACKWARD_RATIO,
    InstructionKind.INPUT_GRADIENT: BACKWARD_RATIO / 2,
    InstructionKind.WEIGHT_GRADIENT: BACKWARD_RATIO / 2,
}
"""Time of an instruction over that of the forward of the same layers."""


def times_of_layers(schedule: Schedule, layers: int, head_layers: float = HEAD_LAYERS) -> dict[Instruction, float]:
    """Return how long every instruction of a schedule takes at the highest clock, in forwards of an average stage.

    Args:
        schedule: what the stages run.
        layers: of the whole model, split evenly over the positions of the schedule; the first ones get what is left.
        head_layers: time of the language-model head at the last position, over that of a layer.

    Returns:
        Times by instruction. For schedule Steps, which has no stages to balance, the step's alone.

    Raises:
        SolverError: a position has no layer.
    """
    positions = int(schedule.position.max()) + 1
    if layers < positions:
        raise SolverError(f"layers must be at least {positions}, one for each part of the pipeline, not {layers}")
    each, left = divmod(layers, positions)
    work = [each + (position < left) + head_layers * (position == positions - 1) for position in range(positions)]
    average = sum(work) / schedule.stages
    time_s: dict[Instruction, float] = {}
    for stage, kind, chunk in sorted(set(_instructions(schedule))):
        # A recomputation has a chunk number of its own, but the layers of the stage's first chunk.
        position = int(schedule.position[stage, chunk])
        layers_there = work[position if position != ABSENT else int(schedule.position[stage, 0])]
        time_s[stage, kind, chunk] = WORK.get(kind, 1.0) * layers_there / average
    return time_s


def times_of_run(schedule: Schedule, duration_s: Floats) -> dict[Instruction, float]:
    """Return the median duration of every instruction of a run at default clocks.

    Args:
        schedule: what the run executed.
        duration_s: float[iterations, instructions], seconds, as `perseus_solver.calibration.Trace` has them.

    Returns:
        Seconds by instruction.
    """
    by_instruction: dict[Instruction, list[float]] = {}
    for instruction, median_s in zip(_instructions(schedule), np.median(duration_s, axis=0).tolist(), strict=True):
        by_instruction.setdefault(instruction, []).append(median_s)
    return {instruction: float(np.median(medians_s)) for instruction, medians_s in by_instruction.items()}


def assumed_profile(curves: GpuCurves, times_s: Mapping[Instruction, float]) -> str:
    """Return a profile as the field writes it, at every clock worth measuring.

    Args:
        curves: of the GPU model.
        times_s: seconds of every instruction at the highest clock, under the power limit.

    Returns:
        The CSV, as `perseus_solver.read_profile` reads it.
    """
    clocks = [clock for clock in reversed(curves.clocks_mhz) if clock >= curves.lowest_profiled_mhz]
    chunked = any(chunk for _, _, chunk in times_s)
    lines = [f"stage,instruction,{'chunk,' if chunked else ''}frequency,time,energy"]
    for (stage, kind, chunk), fastest_s in times_s.items():
        for clock in [0] if kind is InstructionKind.CONSTANT else clocks:
            time_s = fastest_s * (curves.slowdown(clock) if clock else 1.0)
            energy_j = time_s * (curves.power_w(clock) if clock else curves.blocking_power_w)
            lines.append(f"{stage},{kind.label},{f'{chunk},' if chunked else ''}{clock},{time_s:.6f},{energy_j:.4f}")
    return "\n".join(lines) + "\n"


def _instructions(schedule: Schedule) -> list[Instruction]:
    kinds = [InstructionKind(kind) for kind in schedule.kind.tolist()]
    return list(zip(schedule.stage.tolist(), kinds, schedule.chunk.tolist(), strict=True))
