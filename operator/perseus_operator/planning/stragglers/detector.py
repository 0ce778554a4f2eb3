"""Which pipelines are slow, and by how much, as telemetry shows it; what is told is in ``told``.

Fed by ``JobState`` with complete iterations; read by the planner. The statistics are the solver's; what is compared is
chosen here. A pipeline is compared with what its own plan promises, and that with how the other pipelines keep their
promises, so neither a planned slowdown nor a profile that is off by some per cent looks like a straggler. Decisions
about plans do not belong here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median, median_low
from typing import Protocol

from perseus_operator.api.job import Straggler
from perseus_operator.planning.iterations import JobIteration
from perseus_solver.stragglers import SIGMAS, Thresholds
from perseus_solver.stragglers import Detector as Statistics

_WINDOW = 15
_ENOUGH = 5
"""Iterations of a pipeline before its spread says anything."""
_RESOLUTION = 0.01
"""A change of a known slowdown below this is not worth a new plan; a slowdown below it is none."""
_SIGMA_PER_MAD = 1.4826
MOST_DEGREE = 100.0
"""Of a slowdown, told or seen. More is a hang or a lie, and no frontier reaches as far."""
_LEAST = 1e-4
"""Of a threshold: the statistics want a number above 1, though the user may ask for 0%."""


class Promises(Protocol):
    """What the plans in force promise of single instructions."""

    def paces(self, iteration: JobIteration) -> Mapping[int, Sequence[float]]:
        """How many times slower than promised each stage of each pipeline was, where it is known."""
        ...

    def slowdown(self, degrees: Mapping[int, float]) -> float:
        """How many times slower an iteration is whose stages are slower by these degrees."""
        ...


class Detector:
    """Detection with hysteresis: a threshold to enter, a lower one to leave, and a number of iterations that must
    agree; a single one if the GPU itself says that something slows it.

    One statistic on two things: the span of whole pipelines, which shows whatever slows them, and the pace of every
    stage, which tells where, and how slow when half of the first slow iteration was not. Nothing is lost by waiting
    for all: the straggler reports last. A threshold to enter is never below four standard deviations of what healthy
    pipelines show.
    """

    def __init__(self) -> None:
        self.slowdowns: dict[int, float] = {}
        """Slow pipelines and how many times slower than the others they are."""
        self.stages: dict[int, dict[int, float]] = {}
        """Their slow stages, where single ones can be told."""
        self.paced: frozenset[int] = frozenset()
        """Pipelines whose single stages were measured in the latest iteration."""
        self._spans: Statistics | None = None
        self._paces: Statistics | None = None
        self._healthy: dict[int, deque[float]] = {}
        """How many times slower than the reference each pipeline was while it was no straggler."""

    def observe(
        self,
        iteration: JobIteration,
        promised_us: Mapping[int, int],
        spec: Straggler,
        *,
        promises: Promises | None = None,
        stage_noise: Sequence[float] | None = None,
        evident: Collection[int] = (),
    ) -> None:
        """Take one complete iteration in. O(pipelines × instructions).

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
        ratios = {p: span_us / promised_us[p] for p, span_us in iteration.spans_us.items()}
        self._spans = _fed(self._spans, _thresholds(spec, [SIGMAS * self._noise()]))
        self._spans.observe({p: (ratio,) for p, ratio in ratios.items()}, evident=evident)
        slowdowns = {found.pipeline: found.degree for found in self._spans.stragglers}
        reference = median_low(ratios.values())
        for p, ratio in ratios.items():
            if p not in slowdowns and ratio / reference < self._spans.thresholds.enter[0]:
                self._healthy.setdefault(p, deque(maxlen=_WINDOW)).append(ratio / reference)

        self.stages = {}
        paces = promises.paces(iteration) if promises else {}
        self.paced = frozenset(paces)
        if promises is not None and paces:
            stages = len(next(iter(paces.values())))
            margins = Thresholds.from_noise(stage_noise).enter if stage_noise else (1.0,) * stages
            self._paces = _fed(self._paces, _thresholds(spec, [margin - 1 for margin in margins]))
            self._paces.observe(paces, evident=evident)
        for found in self._paces.stragglers if self._paces else ():
            self.stages.setdefault(found.pipeline, {})[found.stage] = found.degree
        if promises is not None:
            for p, degrees in self.stages.items():
                slowdowns[p] = max(slowdowns.get(p, 1.0), promises.slowdown(degrees))
        self._publish(slowdowns)

    def _publish(self, slowdowns: Mapping[int, float]) -> None:
        known = self.slowdowns
        self.slowdowns = {
            p: known[p] if p in known and abs(slowdown / known[p] - 1) <= _RESOLUTION else min(slowdown, MOST_DEGREE)
            for p, slowdown in slowdowns.items()
            if slowdown > 1 + _RESOLUTION or p in known
        }

    def _noise(self) -> float:
        """Standard deviation of healthy pipelines' iterations."""
        healthy = [own for p, own in self._healthy.items() if p not in self.slowdowns and len(own) >= _ENOUGH]
        spread = [abs(value / middle - 1) for own in healthy for middle in [median(own)] for value in own]
        return _SIGMA_PER_MAD * median(spread) if spread else 0.0


def _fed(statistics: Statistics | None, thresholds: Thresholds) -> Statistics:
    """The statistics so far, under thresholds that may have changed."""
    statistics = statistics or Statistics(thresholds)
    statistics.thresholds = thresholds
    return statistics


def _thresholds(spec: Straggler, margins: Sequence[float]) -> Thresholds:
    """As the user wants, but never within the margins that noise needs, of which half is hysteresis."""
    leave = [1 + max(spec.recovery_ratio, margin / 2, _LEAST) for margin in margins]
    enter = [max(low, 1 + spec.slowdown_ratio, 1 + margin) for low, margin in zip(leave, margins, strict=True)]
    return Thresholds(tuple(enter), tuple(leave), spec.confirm_iterations)
