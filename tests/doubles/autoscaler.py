"""A HorizontalPodAutoscaler as Kubernetes computes it, in virtual time, and replicas that take a while to start."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

PERIOD_S = 15


class Autoscaler:
    """Looks each quarter of a minute.

    Args:
        replicas: at the beginning.
        least: of them.
        tolerance: by what share a ratio may differ from 1 without anything being done.
        stabilization_s: of a scale-down: the most that was wanted within it counts.
    """

    def __init__(
        self, replicas: int, *, least: int = 1, most: int = 64, tolerance: float = 0.0, stabilization_s: float = 300.0
    ) -> None:
        self.replicas, self.least, self.most, self.tolerance = replicas, least, most, tolerance
        self._wanted: deque[tuple[float, int]] = deque()
        self._stabilization_s = stabilization_s

    def look(self, now_s: float, *averages: float | None) -> None:
        """Take the sums of metrics with the target AverageValue 1 each; None: one cannot be had, so none scales down.

        What the most of them want counts, as of an HPA with several metrics.
        """
        wanted = [self._desired(value) for value in averages if value is not None]
        if None in averages:
            wanted = [max([self.replicas, *wanted])] if wanted else [self.replicas]
        self._wanted.append((now_s, max(wanted)))
        while self._wanted[0][0] < now_s - self._stabilization_s:
            self._wanted.popleft()
        desired = max(wanted)
        if desired < self.replicas:
            desired = min(self.replicas, max(replicas for _, replicas in self._wanted))
        self.replicas = min(self.most, max(self.least, desired))

    def _desired(self, value: float) -> int:
        ratio = value / self.replicas
        return self.replicas if abs(ratio - 1.0) <= self.tolerance else math.ceil(value - 1e-9)


def swings(series: list[int], within_s: float) -> int:
    """How often a series, one value a look, changes its direction within so many seconds of its step before."""
    steps = [(at, after - before) for at, (before, after) in enumerate(pairwise(series)) if after != before]
    return sum(
        (before > 0) != (after > 0) and PERIOD_S * (later - earlier) < within_s
        for (earlier, before), (later, after) in pairwise(steps)
    )
