"""Planning problems like those of real GPUs, by seed: what a solver must plan although nobody tuned it to them.

Each family changes one trait of an ordinary profile: unbalanced stages, the plateau of a power cap, times rounded by a
profiler, noise, clocks that differ between stages, options nearly as fast as one another, a single clock. Schedules,
numbers of stages and microbatches, delays and blocking power vary with the seed in every family.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.kinds import Options
from perseus_solver.model.problem import Problem
from perseus_solver.schedules import SCHEDULES, build_schedule

PIPELINES = tuple(name for name in SCHEDULES if name != "Steps")
"""Schedules that have stages and microbatches."""
FAMILIES = ("balanced", "unbalanced", "power-cap", "rounded", "noisy", "clocks-differ", "near-vertical", "one-clock")
_WORK = {
    InstructionKind.FORWARD: 1.0,
    InstructionKind.BACKWARD: 2.0,
    InstructionKind.INPUT_GRADIENT: 1.05,
    InstructionKind.WEIGHT_GRADIENT: 0.95,
}
_MOST_STAGES, _MOST_MICROBATCHES = 6, 16


def problems(count: int, first: int = 0) -> Iterator[tuple[str, Problem]]:
    """Yield problems of all families and schedules in turn, each with a name that says how to build it again."""
    for seed in range(first, first + count):
        family = FAMILIES[seed % len(FAMILIES)]
        yield f"{family}-{seed}", made_up_problem(family, seed)


def made_up_problem(
    family: str, seed: int, *, schedule: str | None = None, stages: int | None = None, microbatches: int | None = None
) -> Problem:
    """Return the problem of a family and a seed; what is not given varies with the seed."""
    random = np.random.default_rng([FAMILIES.index(family), seed])
    name = schedule or PIPELINES[int(random.integers(len(PIPELINES)))]
    count = stages or int(random.integers(1, _MOST_STAGES // 2 + 1)) * 2
    work = microbatches or int(random.integers(1, _MOST_MICROBATCHES // count + 2)) * count
    if name == "DualPipe" and microbatches is None:
        work = max(work, 2 * count)  # its least
    built = build_schedule(name, stages=count, microbatches=work, chunks=2 if name == "Interleaved1F1B" else None)
    kinds = max(InstructionKind) + 1
    key = (built.stage * built.chunks + built.chunk) * kinds + built.kind
    used, option_of = np.unique(key, return_inverse=True)
    stage_work = 1.0 + (random.uniform(0.0, 0.5, count) if family == "unbalanced" else random.uniform(0.0, 0.06, count))
    if family == "unbalanced":
        stage_work[-1] += random.uniform(0.0, 0.4)  # the last stage also computes the loss
    base_s = float(10 ** random.uniform(-2.5, -0.8))
    gpu = _Gpu(random, family)
    tables = []
    for code in used.tolist():
        place, kind = divmod(code, kinds)
        stage, chunk = divmod(place, built.chunks)
        work_s = base_s * stage_work[stage] * _WORK[InstructionKind(kind)] * random.uniform(0.98, 1.02)
        tables.append(Options(stage, InstructionKind(kind), chunk, *gpu.measured(random, work_s, stage)))
    before, after = built.edges()
    across = built.stage[before] != built.stage[after]
    delay_s = base_s * random.uniform(0.0, 0.1) if random.random() < 0.5 else 0.0
    return Problem(
        schedule=built,
        options=tuple(tables),
        option_of=option_of.astype(np.int32),
        edge_from=before,
        edge_to=after,
        edge_delay_s=np.where(across, delay_s, 0.0),
        stage_offset=built.stage_offset,
        blocking_power_w=float(random.uniform(50.0, 110.0)),
        overhead_s=base_s if random.random() < 0.3 else 0.0,
    )


class _Gpu:
    """One model of GPU: its clocks, how time and power depend on them, and how well they are measured."""

    def __init__(self, random: np.random.Generator, family: str) -> None:
        self._family = family
        self._highest = int(random.choice([1410, 1740, 1980]))
        self._step = int(random.choice([15, 30, 45]))
        self._bound = random.uniform(0.05, 0.4)  # share of time that does not depend on the clock
        self._idle_w, self._most_w = random.uniform(60.0, 120.0), random.uniform(300.0, 700.0)
        self._exponent = random.uniform(2.0, 3.0)
        self._grain_s = float(random.choice([1e-3, 1e-4]))

    def measured(
        self, random: np.random.Generator, work_s: float, stage: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return clocks in MHz, descending, with seconds and joules at each."""
        clock = np.arange(self._highest, 0.4 * self._highest, -self._step)
        if self._family == "clocks-differ":
            clock = clock[stage % 3 :: 1 + stage % 2]
        if self._family == "one-clock":
            clock = clock[:1]
        pace = clock.astype(np.float64) / self._highest
        if self._family == "power-cap":
            pace = np.minimum(pace, 0.82)  # above it, the power cap throttles
        time_s = work_s * (self._bound + (1.0 - self._bound) / pace)
        power_w = self._idle_w + (self._most_w - self._idle_w) * pace**self._exponent
        scatter = {"noisy": 0.01, "power-cap": 1e-3, "clocks-differ": 1e-3}.get(self._family, 1e-5)
        time_s = time_s * random.normal(1.0, scatter, len(clock))
        energy_j = power_w * time_s * random.normal(1.0, scatter, len(clock))
        if self._family == "near-vertical":
            # The highest clock is as fast as the next, up to the clock of the host, and takes more energy.
            time_s[0] = time_s[1:2].min(initial=time_s[0]) * (1.0 - 10.0 ** random.uniform(-10.0, -6.0))
            energy_j[0] = energy_j[:2].max() * random.uniform(1.0, 1.02)
        if self._family == "rounded":
            time_s = np.maximum(np.round(time_s / self._grain_s), 1.0) * self._grain_s
            energy_j = np.round(energy_j, 1)
        return clock.astype(np.int32), time_s, np.maximum(energy_j, 0.1)
