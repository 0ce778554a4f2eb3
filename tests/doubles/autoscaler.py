"""A HorizontalPodAutoscaler as Kubernetes computes it, in virtual time, and replicas that take a while to start."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import Any

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
        self._seen: tuple[int, tuple[float | None, ...]] = replicas, (None,)
        """Replicas at the latest look, and the sums of the metrics."""
        self._wanted: deque[tuple[float, int]] = deque()
        self._stabilization_s = stabilization_s

    def look(self, now_s: float, *averages: float | None) -> None:
        """Take the sums of metrics with the target AverageValue 1 each; None: one cannot be had, so none scales down.

        What the most of them want counts, as of an HPA with several metrics.
        """
        self._seen = self.replicas, averages
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

    def body(self, *metrics: str, target: str = "llama") -> dict[str, Any]:
        """As the API server has it: its latest look at metrics of these names, ``running`` if there are none, and the
        replicas that it made of it.
        """
        before, totals = self._seen
        sources = [{"metric": {"name": name}} for name in metrics or ("running",)]
        return {
            "metadata": {"name": "llama-hpa"},
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
                "minReplicas": self.least,
                "maxReplicas": self.most,
                "metrics": [
                    {"type": "Pods", "pods": {**source, "target": {"type": "AverageValue", "averageValue": "1"}}}
                    for source in sources
                ],
                "behavior": {way: {"tolerance": _milli(self.tolerance)} for way in ("scaleUp", "scaleDown")},
            },
            "status": {
                "currentReplicas": before,
                "desiredReplicas": self.replicas,
                "currentMetrics": [
                    {"type": ""}
                    if total is None
                    else {"type": "Pods", "pods": {**source, "current": {"averageValue": _milli(total / before)}}}
                    for source, total in zip(sources, totals, strict=False)
                ],
            },
        }

    def _desired(self, value: float) -> int:
        ratio = value / self.replicas
        return self.replicas if abs(ratio - 1.0) <= self.tolerance else math.ceil(value - 1e-9)


def _milli(value: float) -> str:
    return f"{round(1_000 * value)}m"


def swings(series: list[int], within_s: float) -> int:
    """How often a series, one value a look, changes its direction within so many seconds of its step before."""
    steps = [(at, after - before) for at, (before, after) in enumerate(pairwise(series)) if after != before]
    return sum(
        (before > 0) != (after > 0) and PERIOD_S * (later - earlier) < within_s
        for (earlier, before), (later, after) in pairwise(steps)
    )
