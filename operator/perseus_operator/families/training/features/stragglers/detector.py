"""Which pipelines are slow, and by how much, as telemetry shows; declared stragglers are in ``annotation``.

The statistics are the solver's; this module chooses what is compared. A pipeline's time is divided by the time of its
own plan, and this ratio is compared with that of the other pipelines. So neither a planned slowdown nor a profile that
is off by some per cent looks like a straggler, and neither does load that comes and goes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from perseus_operator.api.job import Straggler
from perseus_operator.families.training.features.stragglers.spread import Spread
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.solving.view import PlannedTimes
from perseus_solver.stragglers import Detector as Statistics
from perseus_solver.stragglers import PaceNoise, Thresholds

_RESOLUTION = 0.01
"""A smaller change of a known slowdown is not worth a new plan, and a smaller slowdown does not count."""
MAX_SLOWDOWN = 100.0
"""Of a detected slowdown. More is a hang or a false report, and no frontier reaches as far."""
_MIN_THRESHOLD = 1e-4
"""The statistics need a threshold above 1, though the user may ask for 0%."""


class StragglerDetector:
    """Detection with hysteresis: a threshold to enter, a lower one to leave, and a number of iterations that must
    agree; a single one if the GPU itself says that something slows it; more where noise would hide it in those.

    One statistic on two things: the span of whole pipelines, which shows whatever slows them, and the pace of every
    stage, which tells where, and how slow when half of the first slow iteration was not. Nothing is lost by waiting
    for all: the straggler reports last.
    """

    def __init__(self) -> None:
        self.slowdowns: dict[int, float] = {}
        """Slowdown of each slow pipeline, compared with the others, by dp."""
        self.stages: dict[int, dict[int, float]] = {}
        """Slowdown of their slow stages, where single stages are measured: dp → stage → slowdown."""
        self.paced: frozenset[int] = frozenset()
        """Pipelines whose single stages were measured in the latest iteration."""
        self.spread = Spread()
        """How fast all pipelines are beside each other."""
        self._spans: Statistics | None = None
        self._paces: Statistics | None = None

    def observe(
        self,
        iteration: JobIteration,
        planned_us: Mapping[int, int],
        spec: Straggler,
        *,
        planned_times: PlannedTimes | None = None,
        slowed_pipelines: Collection[int] = (),
    ) -> None:
        """Update ``slowdowns``, ``stages`` and ``spread`` with one complete iteration. O(pipelines × instructions).

        Args:
            iteration: of all pipelines.
            planned_us: the time of each pipeline's own plan.
            spec: the thresholds that the user wants.
            planned_times: of single instructions, if known.
            slowed_pipelines: pipelines of which a GPU says that something slows it.
        """
        if iteration.mixed:
            return
        ratios = {p: span_us / planned_us[p] for p, span_us in iteration.spans_us.items()}
        self._spans = _with_thresholds(self._spans, spec, 1)
        (sigma,) = self._spans.sigmas
        self._spans.observe({p: (ratio,) for p, ratio in ratios.items()}, evident=slowed_pipelines)
        slowdowns = {straggler.dp: straggler.slowdown for straggler in self._spans.stragglers}

        self.stages = {}
        paces = planned_times.paces(iteration) if planned_times else {}
        self.paced = frozenset(paces)
        if paces:
            self._paces = _with_thresholds(self._paces, spec, len(next(iter(paces.values()))))
            self._paces.observe(paces, evident=slowed_pipelines)
        for straggler in self._paces.stragglers if self._paces else ():
            self.stages.setdefault(straggler.dp, {})[straggler.stage] = straggler.slowdown
        if planned_times is not None:
            for p, stage_slowdowns in self.stages.items():
                slowdowns[p] = max(slowdowns.get(p, 1.0), planned_times.slowdown(stage_slowdowns))
        self._publish(slowdowns)
        usual = {p: ratio for p, ratio in ratios.items() if p not in self.slowdowns}
        self.spread.observe(usual, sigma=sigma, confirm=spec.confirm_iterations)

    @property
    def least_slowdown(self) -> float | None:
        """The smallest slowdown of a pipeline that can be distinguished from load; None: not known yet."""
        slowdowns = self._spans.least_slowdowns() if self._spans else None
        return slowdowns[0] if slowdowns else None

    def _publish(self, slowdowns: Mapping[int, float]) -> None:
        before = self.slowdowns
        self.slowdowns = {
            p: before[p]
            if p in before and abs(slowdown / before[p] - 1) <= _RESOLUTION
            else min(max(slowdown, 1 + _RESOLUTION), MAX_SLOWDOWN)
            for p, slowdown in slowdowns.items()
            if slowdown > 1 + _RESOLUTION or p in before
        }


def _with_thresholds(statistics: Statistics | None, spec: Straggler, stages: int) -> Statistics:
    """The statistics so far, with thresholds that may have changed: as the user wants them."""
    leave = 1 + max(spec.recovery_ratio, _MIN_THRESHOLD)
    enter = max(leave, 1 + spec.slowdown_ratio)
    thresholds = Thresholds((enter,) * stages, (leave,) * stages, spec.confirm_iterations)
    statistics = statistics or Statistics(thresholds, PaceNoise())
    statistics.thresholds = thresholds
    return statistics
