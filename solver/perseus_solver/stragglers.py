"""Which stage of which pipeline is slow, and how many times: robust statistics with hysteresis.

Called by the operator with telemetry, an iteration at a time, and by the rehearsal on recorded runs. Each
instruction is compared with what its plan promises, and each stage with the same stage of the other pipelines: a
planned slowdown, a profile that is off by some per cent and a change of clocks look the same everywhere and raise no
alarm. Slowness outside computations (loading, network) does not show here. What to do about a straggler is not
decided here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low

import numpy as np

from perseus_solver.kinds import Floats, Ints
from perseus_solver.model.simulator import Choice, Simulator

SIGMAS = 4.0
"""Standard deviations between noise and alarm: with two iterations that must agree, less than one false alarm in 10⁸
iterations of a stage, if noise is normal."""
MIN_EXCESS = 0.01
"""Slower by less than this is no straggler: no plan is chosen that finely."""
_WINDOW = 5


def stage_pace(duration_s: Floats, planned_s: Floats, stage_offset: Ints) -> Floats:
    """How many times slower than promised each stage was: the median over its instructions, [stages] or [iterations,
    stages].

    The median, because single instructions are delayed by tens of per cent on healthy GPUs, while a slow GPU slows
    all of them.
    """
    ratio = duration_s / planned_s
    pace: Floats = np.stack([np.median(ratio[..., a:b], axis=-1) for a, b in pairwise(stage_offset.tolist())], axis=-1)
    return pace


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a stage counts as slow.

    Attributes:
        enter: relative pace, stage by stage, from which an iteration speaks for a straggler.
        leave: relative pace up to which an iteration speaks for its recovery.
        confirm: consecutive iterations that must agree.
    """

    enter: tuple[float, ...]
    leave: tuple[float, ...]
    confirm: int = 2

    def __post_init__(self) -> None:
        if len(self.enter) != len(self.leave) or not self.enter:
            raise ValueError("enter and leave must have one number for each stage")
        if not all(1.0 < low <= high < math.inf for low, high in zip(self.leave, self.enter, strict=True)):
            raise ValueError("thresholds must be finite, with 1 < leave ≤ enter")
        if self.confirm < 1:
            raise ValueError(f"confirm must be at least 1, not {self.confirm}")

    @classmethod
    def from_noise(cls, noise: Sequence[float], *, min_excess: float = MIN_EXCESS, confirm: int = 2) -> Thresholds:
        """Above what two healthy paces differ by; ``noise`` is `Calibration.stage_noise`."""
        margins = [max(min_excess, _margin(sigma)) for sigma in noise]
        return cls(
            enter=tuple(1 + margin for margin in margins),
            leave=tuple(1 + margin / 2 for margin in margins),
            confirm=confirm,
        )


def _margin(sigma: float) -> float:
    """Two paces with standard deviation σ differ by one of √2·σ."""
    return SIGMAS * math.sqrt(2) * sigma


def least_slowdowns(noise: Sequence[float], *, min_excess: float = MIN_EXCESS) -> tuple[float, ...]:
    """The smallest slowdown of each stage that noise cannot hide from the threshold that it cannot reach."""
    return tuple((1 + max(min_excess, _margin(sigma))) * (1 + _margin(sigma)) for sigma in noise)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A stage that is slow now. ``degree``: how many times slower than the same stage elsewhere."""

    dp: int
    stage: int
    slowdown: float


@dataclass(slots=True)
class _Stage:
    pace: float = 1.0
    agreeing: int = 0
    slow: bool = False
    since_onset: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))


class Detector:
    """Hysteresis over iterations, for all stages of all pipelines of a job.

    The reference of a stage is the low median over pipelines of its latest pace: of two pipelines the faster; of
    many, robust while less than half are slow. A job of one pipeline has no stragglers: nobody waits for it.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self._copies: dict[int, list[_Stage]] = {}

    def observe(self, paces: Mapping[int, Iterable[float]], *, evident: Collection[int] = ()) -> None:
        """Take in one iteration: of each pipeline, its stages' paces as `stage_pace` has them. O(stages × pipelines).

        A pipeline that is not reported stays what it was, and a reference for the others. Iterations in which ranks of
        a pipeline ran different plans must be left out. ``evident``: pipelines whose hardware itself says that it is
        slowed: one slow iteration is enough for them.

        Raises:
            ValueError: not one positive, finite number for each stage; nothing is taken in.
        """
        stages = len(self.thresholds.enter)
        checked = {dp: [float(value) for value in pace] for dp, pace in paces.items()}
        for dp, pace in checked.items():
            if len(pace) != stages or not all(0 < value < math.inf for value in pace):
                raise ValueError(f"pace of pipeline {dp} must be {stages} positive, finite numbers, one a stage")
        for dp, pace in checked.items():
            own = self._copies.setdefault(dp, [_Stage() for _ in pace])
            for state, value in zip(own, pace, strict=True):
                state.pace = value
        for stage in range(stages):
            reference = median_low([own[stage].pace for own in self._copies.values()])
            for dp in checked:
                state = self._copies[dp][stage]
                confirm = 1 if dp in evident and not state.slow else self.thresholds.confirm
                self._judge(state, state.pace / reference, stage, confirm)

    def _judge(self, own: _Stage, relative: float, stage: int, confirm: int) -> None:
        if own.slow:
            own.agreeing = own.agreeing + 1 if relative <= self.thresholds.leave[stage] else 0
        else:
            own.agreeing = own.agreeing + 1 if relative >= self.thresholds.enter[stage] else 0
            if own.agreeing == 0:
                own.since_onset.clear()
                return
        # An iteration that speaks for recovery says nothing about how slow the stage is.
        if not own.slow or own.agreeing == 0:
            own.since_onset.append(relative)
        if own.agreeing >= confirm:
            own.slow, own.agreeing = not own.slow, 0
            if not own.slow:
                own.since_onset.clear()

    def forget(self, dp: int) -> None:
        """A pipeline has gone or started again."""
        self._copies.pop(dp, None)

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Slow stages, the slowest first."""
        found = [
            Straggler(dp, stage, median(state.since_onset))
            for dp, stages in self._copies.items()
            for stage, state in enumerate(stages)
            if state.slow
        ]
        return tuple(sorted(found, key=lambda one: -one.slowdown))


def straggling_time_s(simulator: Simulator, choice: Choice, slowdown_of_stage: Mapping[int, float]) -> float:
    """T′: the iteration time of a pipeline that runs a plan while some of its stages are slow.

    Never more than the largest degree times the plan's own time: what a slow stage adds may be hidden by others, and
    delays do not stretch.
    """
    slowdown = np.ones(simulator.problem.stages)
    for stage, value in slowdown_of_stage.items():
        slowdown[stage] = value
    duration_s = simulator.duration_s(choice) * slowdown[simulator.problem.schedule.stage]
    return float(simulator.end_s(duration_s).max()) + simulator.problem.overhead_s
