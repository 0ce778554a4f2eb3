"""Detect slow stages from measured instruction times: robust statistics with hysteresis.

A stage is compared three times. First with its plan: its *pace* is measured time divided by planned time, the median
over its instructions. Then with the same stage of the other data-parallel pipelines. A planned slowdown, a profile that
is off by some percent, a clock change and load that all pipelines share are the same in all of them and raise no alarm.
Last with itself over time: load that differs from pipeline to pipeline comes and goes, and a slow stage stays slow. How
much paces come and go is measured, and decides over how many iterations a stage must be slow (`significance`).
Slowness outside computations (data loading, network) is not visible here. What to do about a straggler (Perseus, SOSP
2024, section 3) is decided elsewhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_high, median_low

import numpy as np

from perseus_solver.kinds import Floats, Ints
from perseus_solver.model.simulator import Choice, Simulator
from perseus_solver.significance import LONGEST, SIGMAS, Window, sigma_of, windows

__all__ = [
    "MIN_EXCESS",
    "Detector",
    "PaceNoise",
    "Straggler",
    "Thresholds",
    "least_slowdowns",
    "stage_pace",
    "straggling_time_s",
]

MIN_EXCESS = 0.01
"""A stage that is slower by a smaller share is no straggler: the points of a frontier are not closer than that."""
_WINDOW = 5
"""Iterations since its onset over which the slowdown of a straggler is a median, so that it follows changes. More where
noise needs a longer window."""
_REMEMBERED = 128
"""Iterations whose residuals say how much paces scatter."""
_COINCIDENCES = 0.002
"""How many healthy pipelines of an iteration may by chance be beyond the margin for the second time in a row."""
_SAMPLED = 8
"""Pipelines of an iteration whose residuals are kept: many pipelines say no more than these in many iterations."""


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
    lengths = np.diff(stage_offset)
    if (lengths == lengths[0]).all():  # as in every named schedule; one median of all is much faster than one for each
        return np.asarray(np.median(ratio.reshape(*ratio.shape[:-1], len(lengths), lengths[0]), axis=-1))
    return np.stack([np.median(ratio[..., a:b], axis=-1) for a, b in pairwise(stage_offset.tolist())], axis=-1)


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


class PaceNoise:
    """How much the paces of each stage scatter from iteration to iteration, beyond what all pipelines share.

    From one iteration to the next a pace changes by what the pipelines share, which their median shows, and by noise.
    A slow stage changes only when it becomes slow or recovers, so it is no noise.
    """

    def __init__(self) -> None:
        self._before: dict[int, list[float]] = {}
        self._pipelines = 0
        self._residuals: list[deque[list[float]]] = []
        self._sigmas: list[float] = []
        self._observed, self._due = 0, 1

    def observe(self, paces: Mapping[int, Sequence[float]]) -> None:
        """Learn from one iteration: for each pipeline, the positive pace of each of its stages."""
        logs = {dp: [math.log(value) for value in pace] for dp, pace in paces.items()}
        continued = [dp for dp in logs if dp in self._before]
        if len(continued) > 1:
            chosen = continued[:: math.ceil(len(continued) / _SAMPLED)]
            # Of two pipelines both residuals are the same, and of n the last follows from the others.
            chosen = chosen[:-1] if len(chosen) == len(continued) else chosen
            for stage in range(len(next(iter(logs.values())))):
                changes = {dp: logs[dp][stage] - self._before[dp][stage] for dp in continued}
                shared = median(changes.values())
                if len(self._residuals) <= stage:
                    self._residuals.append(deque(maxlen=_REMEMBERED))
                self._residuals[stage].append([abs(changes[dp] - shared) for dp in chosen])
            self._pipelines = len(continued)
            self._observed += 1
        self._before.update(logs)

    def forget(self, dp: int) -> None:
        """A pipeline has ended or started again: its next pace follows on none."""
        self._before.pop(dp, None)

    def sigmas(self, stages: int) -> Sequence[float]:
        """Return how much the logarithm of each stage's pace scatters, relative to the reference of a `Detector`.

        Args:
            stages: how many there are.

        Returns:
            Standard deviations; infinite: not known yet.
        """
        if self._observed >= self._due:
            self._sigmas = [self._sigma([one for row in rows for one in row]) for rows in self._residuals]
            self._due = self._observed + max(1, self._observed // 16)
        return self._sigmas if len(self._sigmas) == stages else [math.inf] * stages

    def _sigma(self, residuals: list[float]) -> float:
        # A residual is the change of two measurements, less the median of n of them. A pace relative to the reference
        # has the scatter of its own and that of the reference: of two pipelines the faster one.
        n = self._pipelines
        sigma = sigma_of(residuals) * math.sqrt((1 + 2 / n) / (2 * (1 - 1 / n)))
        # Load may have a tail. A single slow iteration makes two residuals of its full size.
        beyond = 2 * math.sqrt(_COINCIDENCES / n) * len(residuals)
        return max(sigma, sorted(residuals)[-1 - math.ceil(beyond)] / SIGMAS) if beyond > 2 else sigma


@dataclass(slots=True)
class _Stage:
    """What is known of one stage of one pipeline."""

    pace: float = 1.0
    agreeing: int = 0
    slow: bool = False
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LONGEST))
    """Relative paces since the stage became slow or recovered."""
    since_onset: deque[float] = field(default_factory=lambda: deque(maxlen=LONGEST))
    span: int = _WINDOW
    """How many of ``since_onset`` the slowdown is a median of."""

    @property
    def slowdown(self) -> float:
        return median(list(self.since_onset)[-self.span :])


class Detector:
    """Hysteresis over iterations, for all stages of all data-parallel pipelines of a job.

    The reference of a stage is the low median over pipelines of its latest pace: of two pipelines the faster one; of
    many, robust while fewer than half are slow. A job with one pipeline has no stragglers, because no pipeline waits
    for it.

    Attributes:
        thresholds: when a stage counts as slow; may be replaced between iterations.
    """

    def __init__(self, thresholds: Thresholds, noise: PaceNoise | None = None) -> None:
        """Create it.

        Args:
            thresholds: when a stage counts as slow.
            noise: learns how much paces scatter, so that no noise is taken for slowness; until it has learned, no stage
                is slow. None: the thresholds are above all noise.
        """
        self.thresholds = thresholds
        self._noise = noise
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
            states = self._pipelines.setdefault(dp, [_Stage() for _ in pace])
            for state, value in zip(states, pace, strict=True):
                state.pace = value
        sigmas = self.sigmas
        for stage in range(stages):
            reference = median_low([states[stage].pace for states in self._pipelines.values()])
            usual = self._windows(stage, sigmas[stage], self.thresholds.confirm)
            # Hardware that reports a slowdown is believed before it is known how much load varies.
            sigma = sigmas[stage] if sigmas[stage] < math.inf else 0.0
            at_once = self._windows(stage, sigma, 1) if evident else usual
            for dp in checked:
                state = self._pipelines[dp][stage]
                looked = at_once if dp in evident and not state.slow else usual
                self._judge(state, state.pace / reference, stage, looked)
        if self._noise is not None:
            self._noise.observe(checked)

    @property
    def sigmas(self) -> Sequence[float]:
        """How much the logarithm of each stage's relative pace scatters: standard deviations; infinite: not known."""
        stages = len(self.thresholds.enter)
        return self._noise.sigmas(stages) if self._noise else [0.0] * stages

    def least_slowdowns(self) -> tuple[float, ...] | None:
        """Return the least slowdown of each stage that is distinguished from noise; None: noise is not known yet."""
        stages = range(len(self.thresholds.enter))
        looked = [self._windows(stage, self.sigmas[stage], self.thresholds.confirm) for stage in stages]
        if not all(looked):
            return None
        return tuple(max(self.thresholds.enter[stage], math.exp(looked[stage][-1].margin)) for stage in stages)

    def _windows(self, stage: int, sigma: float, confirm: int) -> tuple[Window, ...]:
        return windows(sigma, math.log(self.thresholds.enter[stage]), confirm=confirm)

    def _judge(self, state: _Stage, relative: float, stage: int, looked: Sequence[Window]) -> None:
        """Advance the hysteresis of one stage by an iteration with this pace relative to the reference."""
        state.latest.append(relative)
        if not looked:
            return
        first, *longer = looked
        state.agreeing = state.agreeing + 1 if self._differs(state, relative, stage, first) else 0
        # An iteration that counts as recovered does not show how slow the stage is, unless noise makes some of them.
        if state.slow and (longer or not state.agreeing):
            state.since_onset.append(relative)
        shown = first.size if state.agreeing >= first.size else 0
        for window in longer:
            if not shown and len(state.latest) >= window.size:
                latest = list(state.latest)[-window.size :]
                middle = median_high(latest) if state.slow else median_low(latest)
                shown = window.size if self._differs(state, middle, stage, window) else 0
        if shown:
            state.slow, state.agreeing, state.span = not state.slow, 0, max(_WINDOW, looked[-1].size)
            state.since_onset.clear()
            state.since_onset.extend(list(state.latest)[-shown:] if state.slow else ())
            state.latest.clear()

    def _differs(self, state: _Stage, relative: float, stage: int, window: Window) -> bool:
        """Whether a pace, of a window, is beyond noise that of a stage that is slow, or of a slow one that is well."""
        if state.slow:
            leave = self.thresholds.leave[stage]
            # A stage that noise has kept slow until its own slowdown no longer counts has nothing left to differ from.
            return relative <= (
                min(leave, state.slowdown * math.exp(-window.margin)) if state.slowdown > leave else leave
            )
        return relative >= max(self.thresholds.enter[stage], math.exp(window.margin))

    def forget(self, dp: int) -> None:
        """Delete the state of a pipeline that has ended or started again."""
        self._pipelines.pop(dp, None)
        if self._noise is not None:
            self._noise.forget(dp)

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The slow stages, the slowest first."""
        stragglers = [
            Straggler(dp, stage, state.slowdown)
            for dp, stages in self._pipelines.items()
            for stage, state in enumerate(stages)
            if state.slow
        ]
        return tuple(sorted(stragglers, key=lambda one: -one.slowdown))


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
