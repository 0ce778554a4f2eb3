"""What a collector gets by OTLP, from a real receiver of gRPC; and that one which does not take it harms nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as messages
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as services
from tests.waiting import PATIENCE_S, eventually

from perseus_operator.api.status import Figures, StatusFigures
from perseus_operator.clients import otlp
from perseus_operator.clients.otlp import MetricsPush, resource_of
from perseus_operator.controller.settings import InvalidSetting, parse_settings
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.objects.values import JobRef

Found = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by name and labels, as Prometheus has them."""


class Collector(services.MetricsServiceServicer):  # type: ignore[misc]
    """Takes metrics as a collector of OpenTelemetry does: by messages of at most 4 MiB."""

    def __init__(self, port: int = 0) -> None:
        self.received: list[Any] = []
        self.headers: dict[str, str] = {}
        self.refuses = False
        self._server = grpc.server(ThreadPoolExecutor(4))
        services.add_MetricsServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        if self.refuses:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        self.headers = dict(context.invocation_metadata())
        self.received.append(request)
        return messages.ExportMetricsServiceResponse()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics(self) -> Iterator[Any]:
        for request in list(self.received):
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    yield from scope.metrics

    def series(self) -> Found:
        """What a Prometheus that takes OTLP would store of it, the newest of each."""
        found: Found = {}
        for metric in self.metrics():
            kind = metric.WhichOneof("data")
            for point in getattr(metric, kind).data_points:
                labels = frozenset((a.key, a.value.string_value) for a in point.attributes)
                if kind != "histogram":
                    found[metric.name, labels] = point.as_double
                    continue
                bounds = [*map(str, point.explicit_bounds), "+Inf"]
                for bound, upto in zip(bounds, range(1, len(bounds) + 1), strict=True):
                    found[f"{metric.name}_bucket", labels | {("le", bound)}] = sum(point.bucket_counts[:upto])
                found[f"{metric.name}_count", labels], found[f"{metric.name}_sum", labels] = point.count, point.sum
        return found

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture
def begin() -> Iterator[Callable[..., MetricsPush]]:
    """Begin to push; ends with the test."""
    begun: list[MetricsPush] = []

    def begin(endpoint: str, metrics: Metrics, every_s: float = 0.05) -> MetricsPush:
        begun.append(
            MetricsPush(endpoint, metrics.registry.collect, resource_of("replica-1", "0.1.0"), every_s=every_s)
        )
        return begun[-1]

    yield begin
    for push in begun:
        push.close()


def filled(jobs: int = 1) -> Metrics:
    metrics = Metrics()
    figures = StatusFigures(baseline=Figures(iteration_time_microseconds=1_000_000, energy_millijoules=5_000_000))
    for number in range(jobs):
        job = JobRef("ns", f"job-{number}", f"u{number}")
        metrics.set_job(job, figures, measured=None, planned_slowdown=1.1, stragglers=0, active=True, ready=True)
        metrics.set_frontier(job, [(1_000_000 + point, 9_000 - point) for point in range(50)])
        metrics.set_class(job, "frugal")
    metrics.solves.labels("solved").inc(3)
    for time_s in (0.00005, 0.05, 0.05, 99.0):
        metrics.reconcile_seconds.observe(time_s)
    return metrics


def exposed(metrics: Metrics) -> Found:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def test_a_collector_gets_what_prometheus_would_scrape(collector: Collector, begin: Any) -> None:
    metrics = filled()
    begin(collector.endpoint, metrics)
    expected = exposed(metrics)
    assert len(expected) > 80
    eventually(lambda: collector.series() == expected, "the series differ")
    [resource] = collector.received[0].resource_metrics
    named = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert named["service.name"] == "perseus-operator"
    assert named["service.instance.id"] == "replica-1"


def test_counters_are_cumulative_sums_and_their_names_stay(collector: Collector, begin: Any) -> None:
    begin(collector.endpoint, filled())
    eventually(lambda: collector.received, "nothing has come")
    counters = {metric.name: metric.sum for metric in collector.metrics() if metric.WhichOneof("data") == "sum"}
    assert "perseus_operator_solves_total" in counters
    assert all(name.endswith("_total") for name in counters)
    assert all(counter.is_monotonic and counter.aggregation_temporality == 2 for counter in counters.values())
    points = [point for counter in counters.values() for point in counter.data_points]
    assert all(0 < point.start_time_unix_nano < point.time_unix_nano for point in points)


def test_a_large_fleet_is_sent_in_messages_that_a_collector_takes(collector: Collector, begin: Any) -> None:
    metrics = filled(jobs=700)
    expected = exposed(metrics)
    assert len(expected) > 9 * otlp.POINTS_AT_ONCE
    push = begin(collector.endpoint, metrics, every_s=0.5)
    eventually(lambda: len(collector.received) > len(expected) // otlp.POINTS_AT_ONCE, "it is not all there")
    push.close()
    assert collector.series() == expected
    assert max(request.ByteSize() for request in collector.received) < 1 << 20


def test_headers_come_from_the_environment(collector: Collector, begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    begin(collector.endpoint, filled())
    eventually(lambda: collector.headers.get("authorization") == "Bearer secret", "no header")


class Log(logging.Handler):
    """What the operator's log gets: all that reaches the root, as it is set up in the program."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        (self.warnings if record.levelno >= logging.WARNING else self.messages).append(record.getMessage())


@pytest.fixture
def log() -> Iterator[Log]:
    root, handler = logging.getLogger(), Log()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def test_a_collector_that_refuses_is_named_once_and_once_more_when_it_takes_them(
    collector: Collector, begin: Any, log: Log
) -> None:
    collector.refuses = True
    calls = 0

    def read() -> Any:
        nonlocal calls
        calls += 1
        return metrics.registry.collect()

    metrics = filled()
    push = MetricsPush(collector.endpoint, read, resource_of("a", "0"), every_s=0.02)
    try:
        eventually(lambda: calls >= 5, "it is not tried again")
        [warning] = log.warnings
        assert warning.startswith(f"{collector.endpoint} does not take metrics, and is tried again: ")
        assert "who are you?" in warning
        collector.refuses = False
        eventually(lambda: collector.series() == exposed(metrics), "it is not told what it has missed")
        eventually(lambda: f"{collector.endpoint} takes metrics again" in log.messages, "it is not said")
        assert len(log.warnings) == 1
    finally:
        push.close()


def test_a_collector_that_is_away_delays_no_end(begin: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_TIMEOUT_S", 0.5)
    gone = Collector()
    gone.close()
    push = begin(gone.endpoint, filled())
    eventually(lambda: log.warnings, "nobody says so")
    monkeypatch.setattr(otlp, "_TIMEOUT_S", PATIENCE_S)
    pushing: list[bool] = []
    shutdown = push._exporter.shutdown

    def observed() -> None:
        pushing.append(push._thread.is_alive())
        shutdown()

    monkeypatch.setattr(push._exporter, "shutdown", observed)
    push.close()
    assert pushing == [True], "what waits for the collector is interrupted, not waited for"
    assert not push._thread.is_alive()
    assert len(log.warnings) == 1


def test_what_cannot_be_read_ends_nothing(collector: Collector, log: Log) -> None:
    metrics, wrong = filled(), [True]

    def read() -> Any:
        if wrong[0]:
            raise RuntimeError("dictionary changed size during iteration")
        return metrics.registry.collect()

    push = MetricsPush(collector.endpoint, read, resource_of("a", "0"), every_s=0.02)
    try:
        eventually(lambda: log.warnings, "nobody says so")
        assert "dictionary changed size" in log.warnings[0]
        wrong[0] = False
        eventually(lambda: collector.series() == exposed(metrics), "it is not tried again")
    finally:
        push.close()


def test_the_last_values_are_sent_at_the_end(collector: Collector) -> None:
    metrics = filled()
    MetricsPush(collector.endpoint, metrics.registry.collect, resource_of("a", "0"), every_s=1e6).close()
    assert collector.series() == exposed(metrics)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--otlp-endpoint", "collector:4317"], "--otlp-endpoint: must be http://host:port or https://host:port"),
        (["--otlp-signals", "logs"], "--otlp-signals: must be traces, metrics or both, separated by commas"),
        (["--otlp-signals", ""], "--otlp-signals: must be traces, metrics or both, separated by commas"),
    ],
)
def test_settings_are_checked(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        parse_settings(["--insecure", *flags], {})


def test_signals_are_chosen() -> None:
    assert parse_settings(["--insecure"], {}).otlp_signal_names == {"traces", "metrics"}
    assert parse_settings(["--insecure", "--otlp-signals", "metrics"], {}).otlp_signal_names == {"metrics"}


def test_traces_that_do_not_arrive_are_named_once(collector: Collector, log: Log) -> None:
    """It takes metrics alone."""
    exporter = otlp._SpanExporter(collector.endpoint)
    for _ in range(3):
        exporter.export([])
    exporter.shutdown()
    [warning] = log.warnings
    assert warning.startswith(f"{collector.endpoint} does not take traces, and is tried again: ")
    assert "UNIMPLEMENTED" in warning
