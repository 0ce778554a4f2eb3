"""A worker's Prometheus series."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import generate_latest

from perseus_operator.solving.process import Task, Verdict


class SolverMetrics:
    """What a worker does."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._busy = Gauge("perseus_solver_busy", "1 while a piece of work is under way.", registry=self._registry)
        self._ended = Counter(
            "perseus_solver_work", "Pieces of work that have ended.", ("task", "outcome"), registry=self._registry
        )
        self._seconds = Counter(
            "perseus_solver_work_seconds", "Time of the work that was answered.", ("task",), registry=self._registry
        )

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work is under way inside."""
        with self._busy.track_inprogress():
            yield

    def ended(self, task: Task, verdict: Verdict) -> None:
        """A piece of work has ended so."""
        self._ended.labels(task.value, verdict.outcome.value).inc()
        self._seconds.labels(task.value).inc(verdict.seconds)

    def exposition(self) -> bytes:
        """Return all series in Prometheus' text format."""
        return generate_latest(self._registry)
