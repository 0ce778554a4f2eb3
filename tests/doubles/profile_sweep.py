"""A job that is swept: ranks on the simulator's GPU, and the meter that reads them as the profiler does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from perseus_core.gpus import BACKWARD_RATIO
from perseus_core.iteration import IterationReport
from perseus_operator.families.training.features.profile.sweep import (
    Recipe,
    Sweep,
    choose_clocks,
    common_clocks,
)
from perseus_operator.families.training.work.profile_aggregator import JobShape, ProfileAggregator
from perseus_sim.gpus.model import MODELS
from perseus_sim.profiles import stage_weights
from perseus_solver.schedules import build_schedule

A100 = MODELS["a100"]
slowdown, power_w = cache(A100.slowdown), cache(A100.power_w)
STAGES, PIPELINES = 2, 2
SCHEDULE = build_schedule("1f1b", stages=STAGES, microbatches=3)
SHAPE = JobShape(PIPELINES, STAGES, 1)
RECIPE = Recipe(iterations=2, most_slowdown=1.0, most_us=10**12)
CLOCKS = choose_clocks(common_clocks([A100.clocks_mhz]), 12)
FORWARD_US = 40_000
WEIGHTS = stage_weights(STAGES, 1.2)


@dataclass
class Job:
    """Ranks that run at whatever clock the sweep asks for, on the simulator's GPU; reports as agents make them."""

    noise: float = 0.0
    seed: int = 1
    iteration: int = 0
    _random: random.Random = field(default_factory=random.Random)
    _energies: dict[tuple[int, int], tuple[int, int, list[float]]] = field(default_factory=dict)

    def restart(self) -> None:
        """New processes: they count from zero, and so do their agents' means."""
        self.iteration = 0
        self._energies.clear()

    def step(self, sweep: Sweep, ranks: Sequence[tuple[int, int]] | None = None) -> list[IterationReport]:
        """One iteration; the first at a clock begins at the clock before, as after a late selection."""
        clock, point = sweep.clocks_mhz[sweep.point], sweep.point
        reports = []
        for pipeline, stage in ranks or [(p, s) for p in range(PIPELINES) for s in range(STAGES)]:
            kinds = [kind for kind, _, _ in SCHEDULE.of_stage(stage)]
            times = [self._time_us(kind, stage, clock) for kind in kinds]
            energies = [1e-3 * t * power_w(clock) for t in times]
            total_us = round(1.5 * sum(self._time_us(kind, 1, clock) for kind in kinds))
            waiting_mj = (total_us - sum(times)) * A100.blocking_power_w / 1e3
            n, at, sums = self._energies.get((pipeline, stage), (0, -1, []))
            if at != point:
                n, sums = 0, [0.0] * len(kinds)
            n, sums = n + 1, [a + b for a, b in zip(sums, energies, strict=True)]
            self._energies[pipeline, stage] = n, point, sums
            reports.append(
                IterationReport(
                    pipeline,
                    stage,
                    0,
                    self.iteration,
                    total_us,
                    total_us,
                    round(sum(energies) + waiting_mj),
                    point,
                    [round(t) for t in times],
                    [round(e / n) for e in sums],
                    n,
                )
            )
        self.iteration += 1
        return reports

    def _time_us(self, kind: str, stage: int, clock: int) -> float:
        ratio = 1.0 if kind == "forward" else BACKWARD_RATIO
        spread = 1 + self.noise * self._random.uniform(-1, 1)
        return FORWARD_US * WEIGHTS[stage] * ratio * slowdown(clock) * spread


def fresh(recipe: Recipe = RECIPE) -> Sweep:
    return Sweep(CLOCKS, "1f1b/2/3", recipe)


def feed(meter: ProfileAggregator, sweep: Sweep, reports: Sequence[IterationReport]) -> Sweep:
    """As the profiler does."""
    for report in reports:
        if sweep.finished:
            return sweep
        meter.begin(sweep.point, sweep.measured)
        reading = meter.observe(report, sweep.clocks_mhz[sweep.point])
        sweep = replace(sweep, spent_us=round(meter.spent_us))
        sweep = sweep.add(reading) if reading else sweep
    return sweep


def run(job: Job, sweep: Sweep) -> Sweep:
    meter = ProfileAggregator(SCHEDULE, SHAPE, sweep.recipe.iterations)
    for _ in range(1000):
        if sweep.finished:
            return sweep
        sweep = feed(meter, sweep, job.step(sweep))
    raise AssertionError(f"it does not end: {meter.rejection}")


@cache
def measured() -> Sweep:
    """Without noise, and without anything going wrong."""
    return run(Job(), fresh())
