"""A job without a pipeline in virtual time: simulated GPUs, the pure planner, and a load that varies.

Every rank runs whole steps at the clock of its plan. A step takes as long as the GPU model says, times the load of the
step, times how slow the rank's GPU is. The ranks wait for the slowest; their reports say what each took without that
wait. No process, no clock, no I/O.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tests.doubles.job_hardware import job_hardware
from tests.unit.operator.conftest import Job

from perseus_core.iteration import IterationReport
from perseus_operator.families.training.features.bound.guard import Hold
from perseus_operator.families.training.features.frontier.inputs import inputs_digest
from perseus_operator.solving.frontier import SolvedFrontier, open_frontier
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.worker import solve_in_process
from perseus_sim.gpus.model import MODELS

STEP_S = 1.0
"""At the highest clock, with the usual load."""
GPU = MODELS["a100"]


@dataclass(frozen=True)
class Load:
    """How steps vary: standard deviations of the logarithm of their length."""

    common: float = 0.0
    """Of what all ranks share, such as a curriculum of sequence lengths."""
    own: float = 0.002
    """Of each rank alone, such as lengths of its own sequences or the load of its experts."""


@dataclass(frozen=True)
class Step:
    """What happened in one iteration."""

    time_s: float
    energy_j: float
    points: tuple[int | None, ...]
    stragglers: dict[int, float]
    hold: Hold


class StepsJob(Job):
    """The planner beside its simulated GPUs."""

    def __init__(
        self,
        ranks: int,
        load: Load,
        *,
        slow: Callable[[int, int], float] | None = None,
        seed: int = 1,
        own_time: bool = True,
        **changes: Any,
    ) -> None:
        """Create it; no iteration has run.

        Args:
            ranks: data-parallel ranks.
            load: how steps vary.
            slow: of iteration and rank: how many times longer its GPU takes than the model says.
            seed: of the load.
            own_time: reports say what each rank took without its wait for the others.
            changes: to the spec.
        """
        shape = {"schedule": "Steps", "stages": 1, "dataParallel": ranks}
        super().__init__(pipeline=shape, **changes)
        self.steps: list[Step] = []
        self._load = load
        self._own_time = own_time
        self._slow = slow or (lambda iteration, rank: 1.0)
        self._random = random.Random(seed)
        self._solved = solve(min(math.hypot(load.common, load.own), 0.2))

    def solve(self) -> None:
        self.state.profile_accepted("csv", None)
        self.state.inputs.read_ended(at_s=self.now_s)
        self.state.solve.frontier = replace(self._solved.view, digest=inputs_digest(self.spec, "csv"))
        self.state.solve.planned_times = self._solved.planned_times

    def step(self, count: int = 1, *, plan_is_slower: float = 1.0) -> None:
        """Run iterations; ``plan_is_slower``: what a plan takes over what it promises."""
        for _ in range(count):
            self._step(plan_is_slower)

    def _step(self, plan_is_slower: float) -> None:
        number, chance = len(self.steps), self._random
        common = math.exp(chance.gauss(0.0, self._load.common))
        points = tuple(node.plans.selected.get(rank) for rank, node in enumerate(self.nodes))
        own_s, powers_w = [], []
        for rank, point in enumerate(points):
            clock_mhz = self._clock_mhz(point)
            load = common * math.exp(chance.gauss(0.0, self._load.own)) * self._slow(number, rank)
            own_s.append(STEP_S * GPU.slowdown(clock_mhz) * load * (plan_is_slower if point is not None else 1.0))
            powers_w.append(GPU.power_w(clock_mhz))
        last_s = max(own_s)
        energies_j = [
            time_s * power_w + (last_s - time_s) * GPU.blocking_power_w
            for time_s, power_w in zip(own_s, powers_w, strict=True)
        ]
        for rank, node in enumerate(self.nodes):
            own_us = round(1e6 * (own_s[rank] if self._own_time else last_s))
            energy_mj, point = round(1000 * energies_j[rank]), points[rank]
            took_us = round(1e6 * last_s)
            report = IterationReport(
                rank, 0, 0, number, took_us, own_us, energy_mj, point, durations_us=[own_us], own_time=self._own_time
            )
            self.state.iteration_reported(node, report)
        self.now_s += last_s
        self.act()
        self.state.baseline_measured()
        detected = dict(self.state.stragglers.detector.slowdowns)
        self.steps.append(Step(last_s, sum(energies_j), points, detected, self.state.guard.hold))

    def _clock_mhz(self, point: int | None) -> int:
        return GPU.max_clock_mhz if point is None else int(self._solved.frontier.frequencies_mhz[point, 0])


def profile_csv(clocks_mhz: Sequence[int]) -> str:
    """The profile of a step."""
    rows = ["stage,instruction,frequency,time,energy"]
    for clock_mhz in clocks_mhz:
        time_s = STEP_S * GPU.slowdown(clock_mhz)
        rows.append(f"0,step,{clock_mhz},{time_s:.6f},{time_s * GPU.power_w(clock_mhz):.4f}")
    return "\n".join(rows) + "\n"


@cache
def solve(noise: float) -> SolvedFrontier:
    """The frontier of a step, rehearsed for instructions that scatter this much."""
    clocks_mhz = [clock for clock in reversed(GPU.clocks_mhz) if clock >= GPU.lowest_profiled_mhz]
    hardware = job_hardware(GPU.name, 15_000, 30_000, 5_000, noise=noise)
    request = SolveRequest(
        profile_csv(clocks_mhz),
        "Steps",
        1,
        1,
        None,
        round(1000 * GPU.blocking_power_w),
        100,
        hardware=hardware.to_json(),
    )
    return open_frontier(solve_in_process(request), request, digest="", solve_ms=1, restored=False)
