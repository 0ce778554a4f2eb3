"""What the operator tells Prometheus, and its probes: one small HTTP server.

Series are per PerseusJob, never per rank or iteration; base units in the names; a job's series go when it goes. No
other module knows prometheus_client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from perseus_operator.api import Figures, StatusFigures
from perseus_operator.history import Measured
from perseus_operator.state import JobRef
from perseus_proto.units import j_from_mj, s_from_us

_JOB: Final = ("namespace", "job")


class Metrics:
    """All series of one operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._per_job: list[Gauge] = []
        self._ready = self._gauge("ready", "1 if the plan asked for is in force.")
        self._predicted_s = self._gauge(
            "predicted_iteration_seconds", "Iteration time that the plan in force promises."
        )
        self._predicted_j = self._gauge("predicted_iteration_joules", "Energy per iteration that it promises.")
        self._measured_s = self._gauge("measured_iteration_seconds", "Median iteration time under the plan in force.")
        self._measured_j = self._gauge("measured_iteration_joules", "Median energy per iteration under it.")
        self._baseline_s = self._gauge("baseline_iteration_seconds", "Iteration time measured at default clocks.")
        self._baseline_j = self._gauge("baseline_iteration_joules", "Energy per iteration measured at default clocks.")
        self._points = self._gauge("frontier_points", "Plans on the frontier.")
        self._solve_s = self._gauge("solve_seconds", "Time the solver took for the frontier in use.")
        self._gap = self._gauge("gap_ratio", "Median certified optimality gap of the frontier, a ratio.")
        self._straggler = self._gauge("straggler_pipelines", "Pipelines that are slow now.")
        self._slowdown = self._gauge("planned_slowdown_ratio", "Slowdown by intent: largest plan time over T_min.")
        self.reconcile_seconds = Histogram(
            "perseus_operator_reconcile_seconds",
            "Time to think once about one job.",
            buckets=(0.0001, 0.001, 0.01, 0.1, 1.0, 10.0),
            registry=self.registry,
        )
        self.solves = Counter("perseus_operator_solves", "Frontiers solved.", ("result",), registry=self.registry)
        self.restores = Counter("perseus_operator_frontiers_restored", "Frontiers read back.", registry=self.registry)
        self.agent_calls = Counter(
            "perseus_operator_agent_calls", "Calls to agents.", ("call", "result"), registry=self.registry
        )
        self.late_selections = Counter(
            "perseus_operator_late_selections",
            "Selections that reached an agent after their iteration had begun, and took effect at the next one.",
            registry=self.registry,
        )
        self.telemetry_dropped = Counter(
            "perseus_operator_telemetry_dropped",
            "Batches before which telemetry was lost because this operator was too slow.",
            registry=self.registry,
        )
        self.errors = Counter("perseus_operator_errors", "Unexpected errors.", registry=self.registry)

    def set_job(
        self,
        job: JobRef,
        figures: StatusFigures,
        *,
        measured: Measured | None,
        planned_slowdown: float,
        stragglers: int,
        ready: bool,
    ) -> None:
        """The series of one job; what is not known is not shown."""
        labels = (job.namespace, job.name)
        frontier, predicted, baseline = figures.frontier, figures.predicted, figures.baseline
        _set(self._ready, labels, float(ready))
        _set(self._straggler, labels, float(stragglers))
        _set(self._slowdown, labels, planned_slowdown)
        _set(self._predicted_s, labels, s_from_us(predicted.iteration_time_microseconds) if predicted else None)
        _set(self._predicted_j, labels, _joules(predicted))
        _set(self._baseline_s, labels, s_from_us(baseline.iteration_time_microseconds) if baseline else None)
        _set(self._baseline_j, labels, _joules(baseline))
        _set(self._measured_s, labels, s_from_us(measured.time_us) if measured else None)
        _set(self._measured_j, labels, j_from_mj(measured.energy_mj) if measured and measured.energy_mj else None)
        _set(self._points, labels, float(frontier.points) if frontier else None)
        _set(self._solve_s, labels, frontier.solve_milliseconds / 1000 if frontier else None)
        _set(self._gap, labels, frontier.median_gap_parts_per_million / 1e6 if frontier else None)

    def forget_job(self, job: JobRef) -> None:
        """The job has gone."""
        for gauge in self._per_job:
            _set(gauge, (job.namespace, job.name), None)

    def exposition(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        gauge = Gauge(f"perseus_job_{name}", documentation, _JOB, registry=self.registry)
        self._per_job.append(gauge)
        return gauge


def _joules(figures: Figures | None) -> float | None:
    return None if figures is None or figures.energy_millijoules is None else j_from_mj(figures.energy_millijoules)


def _set(gauge: Gauge, labels: tuple[str, str], value: float | None) -> None:
    if value is not None:
        gauge.labels(*labels).set(value)
        return
    # Absent is not zero.
    gauge.remove(*labels)


class MetricsServer:
    """Serves /metrics, /healthz (the operator makes progress) and /readyz (it has begun to serve) in a thread."""

    def __init__(
        self, address: str, metrics: Metrics, *, healthy: Callable[[], str | None], ready: Callable[[], bool]
    ) -> None:
        """``healthy`` answers None or what is wrong. Port 0: any free one."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, metrics.exposition(), CONTENT_TYPE_LATEST)
                elif self.path == "/healthz":
                    wrong = healthy()
                    self._answer(200 if wrong is None else 503, (wrong or "ok").encode())
                elif self.path == "/readyz":
                    self._answer(*((200, b"ok") if ready() else (503, b"starting")))
                else:
                    self._answer(404, b"/metrics, /healthz or /readyz")

            def _answer(self, code: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
                self.send_response(code)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Probes are not news."""

        host, _, port = address.rpartition(":")
        self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port really bound."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
