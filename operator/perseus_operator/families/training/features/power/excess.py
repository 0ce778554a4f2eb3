"""By how much a job draws more than its plans are said to draw.

A PowerBudget shares watts, and what a plan draws is a prediction: by a profile, which its user has written, and of
clocks as planned, while an agent that cannot tell where its GPU is keeps the highest clock of its plan. So what the
GPUs' counters show in the end decides how much of the share a plan takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perseus_core.units import j_from_mj, s_from_us
from perseus_operator.families.training.features.power.plans import spent_mj
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.solving.view import FrontierView

WINDOW: Final = 8
"""Iterations that are judged together; a job follows another plan after about two."""
_NOISE: Final = 0.02
"""Less than this is no other power: between plans there are often but a few per cent."""
_FALL: Final = 0.01
"""Of each window that drew less. Slower plans may be kept better than quicker ones: what went down at once would send
the job to and fro between two of them."""


@dataclass
class Excess:
    """What was measured of one job. It outlives a new frontier: that of another profile is no other measurement."""

    ratio: float = 1.0
    """Drawn over planned, at least 1."""
    _iterations: int = 0
    _drawn_j: float = 0.0
    _planned_j: float = 0.0

    def iteration_observed(self, iteration: JobIteration, frontier: FrontierView, ranks_per_stage: int) -> None:
        """All pipelines have finished an iteration, transition or not: it took its energy.

        Args:
            iteration: of the job; one at default clocks, or of which some GPU's energy is not known, does not count.
            frontier: whose points it ran.
            ranks_per_stage: of one pipeline: each spends the frontier's energy.
        """
        points = [point for point in iteration.points.values() if point is not None]
        followed = len(points) == len(iteration.points) > 0 and max(points) < len(frontier.times_us)
        if iteration.energy_mj is None or not followed:
            return
        planned_mj = ranks_per_stage * sum(spent_mj(frontier, point) for point in points)
        slowest_us = max(frontier.expected_us[point] for point in points)
        self._iterations += 1
        self._drawn_j += j_from_mj(iteration.energy_mj)
        self._planned_j += j_from_mj(planned_mj) * s_from_us(iteration.time_us) / s_from_us(slowest_us)
        if self._iterations == WINDOW:
            self._judge(self._drawn_j / self._planned_j)
            self._iterations, self._drawn_j, self._planned_j = 0, 0.0, 0.0

    def _judge(self, measured: float) -> None:
        if measured > self.ratio + _NOISE:
            self.ratio = measured
        elif measured < self.ratio - _NOISE:
            self.ratio = max(1.0, measured, self.ratio - _FALL)
