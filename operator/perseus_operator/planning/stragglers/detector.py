"""Which pipelines are slow, and by how much, as telemetry shows; declared stragglers are in ``annotation``.

The statistics are the solver's; this module chooses what is compared. A pipeline's time is divided by the time of its
own plan, and this ratio is compared with that of the other pipelines. So neither a planned slowdown nor a profile that
is off by some per cent looks like a straggler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median, median_low
from typing import Protocol

from perseus_operator.api.job import Straggler
from perseus_operator.planning.iterations import JobIteration
from perseus_solver.stragglers import SIGMA_PER_MAD, SIGMAS, Thresholds
from perseus_solver.stragglers import Detector as Statistics

_WINDOW = 15
_MIN_SAMPLES = 5
"""Iterations of a pipeline before its spread is used."""
_RESOLUTION = 0.01
"""A smaller change of a known slowdown is not worth a new plan, and a smaller slowdown does not count."""
MAX_SLOWDOWN = 100.0
"""Of a detected slowdown. More is a hang or a false report, and no frontier reaches as far."""
_MIN_THRESHOLD = 1e-4
"""The statistics need a threshold above 1, though the user may ask for 0%."""


class PlannedTimes(Protocol):
    """What the plans in force say about single instructions."""

    def paces(self, iteration: JobIteration) -> Mapping[int, Sequence[float]]:
        """Measured divided by planned time of each stage, by pipeline (dp), where every instruction was measured."""
        ...

    def slowdown(self, stage_slowdowns: Mapping[int, float]) -> float:
        """Slowdown of an iteration whose stages have these slowdowns."""
        ...


class StragglerDetector:
    """Detection with hysteresis: a threshold to enter, a lower one to leave, and a number of iterations that must
    agree; a single one if the GPU itself says that something slows it.

    One statistic on two things: the span of whole pipelines, which shows whatever slows them, and the pace of every
    stage, which tells where, and how slow when half of the first slow iteration was not. Nothing is lost by waiting
    for all: the straggler reports last. A threshold to enter is never below four standard deviations of what healthy
    pipelines show.
    """

    def __init__(self) -> None:
        self.slowdowns: dict[int, float] = {}
        """Slowdown of each slow pipeline, compared with the others, by dp."""
        self.stages: dict[int, dict[int, float]] = {}
        """Slowdown of their slow stages, where single stages are measured: dp → stage → slowdown."""
        self.paced: frozenset[int] = frozenset()
        """Pipelines whose single stages were measured in the latest iteration."""
        self._spans: Statistics | None = None
        self._paces: Statistics | None = None
        self._healthy: dict[int, deque[float]] = {}
        """Latest ratios of each pipeline to the reference while it was no straggler."""

    def observe(
        self,
        iteration: JobIteration,
        planned_us: Mapping[int, int],
        spec: Straggler,
        *,
        planned_times: PlannedTimes | None = None,
        stage_noise: Sequence[float] | None = None,
        slowed_pipelines: Collection[int] = (),
    ) -> None:
        """Update ``slowdowns`` and ``stages`` with one complete iteration. O(pipelines × instructions).

        Args:
            iteration: of all pipelines.
            promised_us: the time of each pipeline's own plan.
            spec: the thresholds that the user wants.
            promises: of single instructions, if known.
            stage_noise: standard deviation of each stage's pace, if the job is calibrated.
            evident: pipelines of which a GPU says that something slows it.
        """
        if iteration.mixed:
            return
        ratios = {p: span_us / planned_us[p] for p, span_us in iteration.spans_us.items()}
        self._spans = _with_thresholds(self._spans, _thresholds(spec, [SIGMAS * self._noise()]))
        self._spans.observe({p: (ratio,) for p, ratio in ratios.items()}, evident=slowed_pipelines)
        slowdowns = {found.dp: found.slowdown for found in self._spans.stragglers}
        reference = median_low(ratios.values())
        for p, ratio in ratios.items():
            if p not in slowdowns and ratio / reference < self._spans.thresholds.enter[0]:
                self._healthy.setdefault(p, deque(maxlen=_WINDOW)).append(ratio / reference)

        self.stages = {}
        paces = planned_times.paces(iteration) if planned_times else {}
        self.paced = frozenset(paces)
        if planned_times is not None and paces:
            stages = len(next(iter(paces.values())))
            margins = Thresholds.from_noise(stage_noise).enter if stage_noise else (1.0,) * stages
            self._paces = _with_thresholds(self._paces, _thresholds(spec, [margin - 1 for margin in margins]))
            self._paces.observe(paces, evident=slowed_pipelines)
        for found in self._paces.stragglers if self._paces else ():
            self.stages.setdefault(found.dp, {})[found.stage] = found.slowdown
        if planned_times is not None:
            for p, stage_slowdowns in self.stages.items():
                slowdowns[p] = max(slowdowns.get(p, 1.0), planned_times.slowdown(stage_slowdowns))
        self._publish(slowdowns)

    def _publish(self, slowdowns: Mapping[int, float]) -> None:
        known = self.slowdowns
        self.slowdowns = {
            p: known[p] if p in known and abs(slowdown / known[p] - 1) <= _RESOLUTION else min(slowdown, MAX_SLOWDOWN)
            for p, slowdown in slowdowns.items()
            if slowdown > 1 + _RESOLUTION or p in known
        }

    def _noise(self) -> float:
        """Standard deviation of healthy pipelines' iterations."""
        healthy = [own for p, own in self._healthy.items() if p not in self.slowdowns and len(own) >= _MIN_SAMPLES]
        spread = [abs(value / middle - 1) for own in healthy for middle in [median(own)] for value in own]
        return SIGMA_PER_MAD * median(spread) if spread else 0.0


def _with_thresholds(statistics: Statistics | None, thresholds: Thresholds) -> Statistics:
    """The statistics so far, with thresholds that may have changed."""
    statistics = statistics or Statistics(thresholds)
    statistics.thresholds = thresholds
    return statistics


def _thresholds(spec: Straggler, margins: Sequence[float]) -> Thresholds:
    """As the user wants, but never within the margins that noise needs; half of a margin is hysteresis."""
    leave = [1 + max(spec.recovery_ratio, margin / 2, _MIN_THRESHOLD) for margin in margins]
    enter = [max(low, 1 + spec.slowdown_ratio, 1 + margin) for low, margin in zip(leave, margins, strict=True)]
    return Thresholds(tuple(enter), tuple(leave), spec.confirm_iterations)
