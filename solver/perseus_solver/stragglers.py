"""Detect slow stages from measured instruction times: robust statistics with hysteresis.

A stage is compared twice. First with its plan: its *pace* is measured time divided by planned time, the median over its
instructions. Then with the same stage of the other data-parallel pipelines. A planned slowdown, a profile that is off
by some percent and a clock change are the same in all pipelines and raise no alarm. Slowness outside computations (data
loading, network) is not visible here. What to do about a straggler (Perseus, SOSP 2024, section 3) is decided
elsewhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low

import numpy as np

from perseus_solver.kinds import SIGMA_PER_MAD, Floats, Ints
from perseus_solver.model.simulator import Choice, Simulator

__all__ = [
    "MIN_EXCESS",
    "SIGMAS",
    "SIGMA_PER_MAD",
    "Detector",
    "Straggler",
    "Thresholds",
    "least_slowdowns",
    "stage_pace",
    "straggling_time_s",
]

SIGMAS = 4.0
"""Standard deviations of noise below the threshold. With two iterations that must agree, that is less than one false
alarm in 10⁸ iterations of a stage if the noise is normal.
"""
MIN_EXCESS = 0.01
"""A stage that is slower by a smaller share is no straggler: the points of a frontier are not closer than that."""
_WINDOW = 5
"""Iterations since its onset over which the slowdown of a straggler is a median, so that it follows changes."""


def stage_pace(duration_s: Floats, planned_s: Floats, stage_offset: Ints) -> Floats:
    """Return measured time divided by planned time of each stage, the median over its instructions.

    The median is used because single instructions are delayed by tens of percent on healthy GPUs, while a slow GPU
    slows all of them.

    Args:
        duration_s: float[n] or float[iterations, n], measured seconds of each instruction in schedule order.
        planned_s: planned seconds, of the same shape.
        stage_offset: int[stages + 1]; stage s owns instructions ``stage_offset[s] … stage_offset[s + 1] − 1``.

    Returns:
        float[stages] or float[iterations, stages], ratios; 1.2 is 20 % slower than planned.
    """
    ratio = duration_s / planned_s
    pace: Floats = np.stack([np.median(ratio[..., a:b], axis=-1) for a, b in pairwise(stage_offset.tolist())], axis=-1)
    return pace


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a stage counts as slow.

    Attributes:
        enter: for each stage, the pace relative to the other pipelines from which an iteration counts as slow.
        leave: for each stage, the relative pace up to which an iteration counts as recovered.
        confirm: number of consecutive iterations that must agree.
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
        """Return thresholds above the difference between two healthy stages.

        Args:
            noise: for each stage, the standard deviation of its pace as a share; see `Calibration.stage_noise`.
            min_excess: smallest share above 1 to use as a threshold.
            confirm: number of consecutive iterations that must agree.
        """
        margins = [max(min_excess, _margin(sigma)) for sigma in noise]
        return cls(
            enter=tuple(1 + margin for margin in margins),
            leave=tuple(1 + margin / 2 for margin in margins),
            confirm=confirm,
        )


def _margin(sigma: float) -> float:
    """Return the share that noise seldom exceeds: two paces with standard deviation σ differ by one of √2·σ."""
    return SIGMAS * math.sqrt(2) * sigma


def least_slowdowns(noise: Sequence[float], *, min_excess: float = MIN_EXCESS) -> tuple[float, ...]:
    """Return the smallest slowdown of each stage that is reliably detected in spite of noise.

    Args:
        noise: for each stage, the standard deviation of its pace as a share.
        min_excess: as in `Thresholds.from_noise`.

    Returns:
        Ratios ≥ 1: the threshold, plus the noise that may hide a slowdown from it.
    """
    return tuple((1 + max(min_excess, _margin(sigma))) * (1 + _margin(sigma)) for sigma in noise)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A stage that is slow now.

    Attributes:
        dp: index of its pipeline.
        stage: its stage.
        slowdown: its time divided by that of the same stage in other pipelines; 1.2 is 20 % slower.
    """

    dp: int
    stage: int
    slowdown: float


@dataclass(slots=True)
class _Stage:
    """What is known of one stage of one pipeline."""

    pace: float = 1.0
    agreeing: int = 0
    slow: bool = False
    since_onset: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))


class Detector:
    """Hysteresis over iterations, for all stages of all data-parallel pipelines of a job.

    The reference of a stage is the low median over pipelines of its latest pace: of two pipelines the faster one; of
    many, robust while fewer than half are slow. A job with one pipeline has no stragglers, because no pipeline waits
    for it.

    Attributes:
        thresholds: when a stage counts as slow; may be replaced between iterations.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self._pipelines: dict[int, list[_Stage]] = {}

    def observe(self, paces: Mapping[int, Iterable[float]], *, evident: Collection[int] = ()) -> None:
        """Record one iteration. O(stages × pipelines).

        A pipeline that is absent keeps its state and its latest pace, which still counts for the reference. Leave out
        iterations in which the ranks of a pipeline ran different plans.

        Args:
            paces: for each pipeline, the pace of each of its stages as `stage_pace` returns it.
            evident: pipelines whose hardware reports that it is slowed down; for them one slow iteration is enough.

        Raises:
            ValueError: a pipeline has not one positive, finite number for each stage; nothing is recorded.
        """
        stages = len(self.thresholds.enter)
        checked = {dp: [float(value) for value in pace] for dp, pace in paces.items()}
        for dp, pace in checked.items():
            if len(pace) != stages or not all(0 < value < math.inf for value in pace):
                raise ValueError(f"pace of pipeline {dp} must be {stages} positive, finite numbers, one for each stage")
        for dp, pace in checked.items():
            own = self._pipelines.setdefault(dp, [_Stage() for _ in pace])
            for state, value in zip(own, pace, strict=True):
                state.pace = value
        for stage in range(stages):
            reference = median_low([own[stage].pace for own in self._pipelines.values()])
            for dp in checked:
                state = self._pipelines[dp][stage]
                confirm = 1 if dp in evident and not state.slow else self.thresholds.confirm
                self._judge(state, state.pace / reference, stage, confirm)

    def _judge(self, own: _Stage, relative: float, stage: int, confirm: int) -> None:
        """Advance the hysteresis of one stage by an iteration with this pace relative to the reference."""
        if own.slow:
            own.agreeing = own.agreeing + 1 if relative <= self.thresholds.leave[stage] else 0
        else:
            own.agreeing = own.agreeing + 1 if relative >= self.thresholds.enter[stage] else 0
            if own.agreeing == 0:
                own.since_onset.clear()
                return
        # An iteration that counts as recovered does not show how slow the stage is.
        if not own.slow or own.agreeing == 0:
            own.since_onset.append(relative)
        if own.agreeing >= confirm:
            own.slow, own.agreeing = not own.slow, 0
            if not own.slow:
                own.since_onset.clear()

    def forget(self, dp: int) -> None:
        """Delete the state of a pipeline that has ended or started again."""
        self._pipelines.pop(dp, None)

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The slow stages, the slowest first."""
        found = [
            Straggler(dp, stage, median(state.since_onset))
            for dp, stages in self._pipelines.items()
            for stage, state in enumerate(stages)
            if state.slow
        ]
        return tuple(sorted(found, key=lambda one: -one.slowdown))


def straggling_time_s(simulator: Simulator, choice: Choice, slowdown_of_stage: Mapping[int, float]) -> float:
    """Return T′: the iteration time of a pipeline that runs a plan while some of its stages are slow.

    The other pipelines can run the plan at min(T*, T′) without delaying the job (Perseus, SOSP 2024, section 3). T′ is
    at most the largest slowdown times the planned time, because slack may hide a part and delays do not grow.

    Args:
        simulator: of the planning problem.
        choice: int[n], the plan as positions in the options.
        slowdown_of_stage: slowdown of each slow stage, a ratio ≥ 1.

    Returns:
        Seconds, overhead included.
    """
    slowdown = np.ones(simulator.problem.stages)
    for stage, value in slowdown_of_stage.items():
        slowdown[stage] = value
    duration_s = simulator.duration_s(choice) * slowdown[simulator.problem.schedule.stage]
    return float(simulator.end_s(duration_s).max()) + simulator.problem.overhead_s
