"""Synthetic runs of a pipeline with known delays, against which tests of calibration compare their estimates."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_core.instruction import InstructionKind
from perseus_solver.calibration import Trace
from perseus_solver.schedules import Schedule, build_schedule

STAGES, MICROBATCHES = 3, 8
OVERHEAD_S = 0.120
MESSAGE_S = {(0, 1): 0.009, (1, 0): 0.009, (1, 2): 0.009, (2, 1): 0.009}
GAP_S = (0.001, 0.001, 0.004)
SCHEDULE = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
PROFILE = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{stage},{what},{clock},{work * 1400 / clock:.6f},{work * clock / 5:.6f}\n"
    for stage in range(STAGES)
    for what, work in (("forward", 0.05), ("backward", 0.1))
    for clock in (1400, 1200, 1000)
)


def durations(
    plans: int, each: int, scatter: float, seed: int = 0, schedule: Schedule = SCHEDULE
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Return the plan of every iteration, and the durations of its instructions in seconds.

    The plans slow down different stages, so that their critical paths differ.
    """
    random = np.random.default_rng(seed)
    work = np.where(schedule.kind == InstructionKind.FORWARD, 0.05, 0.10)
    pace = random.uniform(1.0, 1.3, size=(plans, schedule.stages))
    plan = np.repeat(np.arange(plans, dtype=np.int32), each)
    clean = work * pace[:, schedule.stage][plan]
    return plan, clean * random.normal(1, scatter, size=clean.shape)


def truth_s(
    duration_s: npt.NDArray[np.float64], schedule: Schedule = SCHEDULE, message_s: float | None = None
) -> npt.NDArray[np.float64]:
    """Compute iteration times by a simple recursion over the schedule, which shares no code with the replay."""
    before, after = schedule.edges()
    stage = schedule.stage
    waits: dict[int, list[tuple[int, float]]] = {i: [] for i in range(schedule.instructions)}
    for a, b in zip(before.tolist(), after.tolist(), strict=True):
        pair = (int(stage[a]), int(stage[b]))
        message = MESSAGE_S[pair] if message_s is None and pair in MESSAGE_S else message_s or 0.0
        waits[b].append((a, GAP_S[pair[0]] if pair[0] == pair[1] else message))
    times = []
    for row in duration_s:
        end: dict[int, float] = {}

        def finish(i: int, row: npt.NDArray[np.float64] = row, end: dict[int, float] = end) -> float:
            if i not in end:
                end[i] = max((finish(a) + delay for a, delay in waits[i]), default=0.0) + float(row[i])
            return end[i]

        times.append(max(finish(i) for i in range(schedule.instructions)) + OVERHEAD_S)
    return np.array(times)


def run(plans: int = 60, each: int = 2, scatter: float = 0.01) -> Trace:
    plan, duration_s = durations(plans, each, scatter)
    return Trace(SCHEDULE, plan, duration_s, truth_s(duration_s))
