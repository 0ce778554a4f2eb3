"""How fast each pipeline is beside the others, while it stays so: GPUs of one model differ by several per cent.

The slowest pipeline decides how long an iteration takes, so a faster one may run slower by what it would only wait. It
must not become the slowest itself: how far a measured pace may be wrong, and how much iterations scatter, is left as a
margin.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median, median_low
from typing import Final

_WINDOW: Final = 16
"""Iterations whose median counts, and that a pipeline keeps its pace before it counts as faster."""
_UNSURE: Final = 2.0
"""Standard errors by which such a median may be wrong."""
_LATELY: Final = 2.5
"""Standard deviations that the latest iterations must all be beyond, where a pipeline has just become slower."""
_FASTER: Final = 0.01
_SLOWER: Final = 0.005
"""What a pace must change by to count: points of a frontier are not much closer. A pipeline that has become slower
delays all others, while one that has become faster only saves less than it could."""


class Spread:
    """Paces of pipelines relative to the median one, and the margin that they need."""

    def __init__(self) -> None:
        self.factors: Mapping[int, float] = {}
        """How many times as long as the reference each pipeline takes; empty while all count as equal."""
        self.margin = 1.0
        """How many times as long as usual a pipeline may take in an iteration without being extraordinary."""
        self._latest: dict[int, deque[float]] = {}
        self._levels: dict[int, float] = {}
        self._kept: dict[int, int] = {}

    def observe(self, ratios: Mapping[int, float], *, sigma: float, confirm: int) -> None:
        """Record one iteration. O(pipelines).

        Args:
            ratios: measured divided by planned time of each pipeline, without stragglers: a slowdown that will pass is
                no pace, and would hold up the others for as long as a pace is kept.
            sigma: standard deviation of the logarithm of a ratio relative to the reference; infinite: not known yet.
            confirm: iterations that show that a pipeline has become slower.
        """
        if len(ratios) < 2 or math.isinf(sigma):
            return
        logs = {dp: math.log(ratio) for dp, ratio in ratios.items()}
        # What all share, beside what is known of each: a pipeline that changes must not move the others.
        shared = median_low(value - self._levels.get(dp, 0.0) for dp, value in logs.items())
        for dp, value in logs.items():
            latest = self._latest.setdefault(dp, deque(maxlen=_WINDOW))
            latest.append(value - shared)
            self._settle(dp, max(median(latest), min(list(latest)[-confirm:]) - _LATELY * sigma))
        # Two medians are compared, and of n pipelines the slowest of an iteration is not far beyond √(2 ln n) σ.
        wrong = math.sqrt(2) * _UNSURE * math.sqrt(math.pi / 2 / _WINDOW)
        margin = math.exp(sigma * (wrong + math.sqrt(2 * math.log(len(ratios)))))
        if margin > self.margin or margin < self.margin / (1 + _SLOWER):
            self.margin = margin
        apart = max(self._levels.values()) - min(self._levels.values()) > _FASTER
        seen = min(len(self._latest[dp]) for dp in ratios) == _WINDOW
        self.factors = {dp: math.exp(level) for dp, level in self._levels.items()} if apart and seen else {}

    def _settle(self, dp: int, level: float) -> None:
        before, kept = self._levels.get(dp, level), self._kept.get(dp, 0)
        slower = level > before + _SLOWER
        faster = level < before - _FASTER and kept >= _WINDOW
        if slower or faster or len(self._latest[dp]) < _WINDOW:
            self._levels[dp], kept = level, 0
        self._kept[dp] = kept + 1
