"""OTLP over gRPC: sends a collector of OpenTelemetry the traces of edits, and the series that Prometheus may scrape.

Series keep their names, labels and values, so that rules and dashboards are the same for both ways. Each push is what
the operator has at that moment: nothing is queued, and a push that fails is followed by the next one. Whether the
collector answers changes nothing for jobs; the log says once that it does not, and once that it does again.

OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _COMPRESSION and so on) refine both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

logger = logging.getLogger("perseus_operator")

SERVICE: Final = "perseus-operator"
POINTS_AT_ONCE: Final = 4_000
"""Data points of one message: about half a MiB, and gRPC's receivers take 4 MiB unless they are set up otherwise."""
_TIMEOUT_S: Final = 5.0
"""Of one message, with all its repetitions."""


class Sample(Protocol):
    """One number as Prometheus' library has it."""

    @property
    def name(self) -> str:
        """With a suffix such as _total or _bucket."""

    @property
    def labels(self) -> Mapping[str, str]:
        """With le, of a bucket."""

    @property
    def value(self) -> float:
        """In the unit of the name."""


class Family(Protocol):
    """The series of one name as Prometheus' library has them."""

    @property
    def name(self) -> str:
        """Without a suffix."""

    @property
    def documentation(self) -> str:
        """What it means."""

    @property
    def type(self) -> str:
        """Such as gauge, counter or histogram."""

    @property
    def samples(self) -> Sequence[Sample]:
        """Its numbers."""


def resource_of(instance: str, version: str) -> Resource:
    """What is known of this process; OTEL_RESOURCE_ATTRIBUTES adds more.

    Args:
        instance: tells the replicas apart.
        version: of the operator.
    """
    return Resource.create({SERVICE_NAME: SERVICE, SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: version})


def export_traces(endpoint: str, resource: Resource) -> Callable[[], None]:
    """Export the traces of this process.

    Args:
        endpoint: http://host:port, or https:// with TLS. Spans that do not fit into the exporter's queue are lost.
        resource: see ``resource_of``.

    Returns:
        Exports what is left, and ends.
    """
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_SpanExporter(endpoint)))
    trace.set_tracer_provider(provider)
    return provider.shutdown


class MetricsPush:
    """A thread that sends all series every so often."""

    def __init__(
        self, endpoint: str, read: Callable[[], Iterable[Family]], resource: Resource, *, every_s: float = 60.0
    ) -> None:
        """Begin; the first push comes after ``every_s``.

        Args:
            endpoint: http://host:port, or https:// with TLS.
            read: all families as they are now; called in the thread.
            resource: see ``resource_of``.
            every_s: seconds between two pushes.
        """
        self._read = read
        self._resource = resource
        self._every_s = every_s
        self._began_ns = time.time_ns()
        self._outcome = _Outcome("metrics", endpoint)
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the last values, unless the collector did not take those before, and end."""
        self._ended.set()
        if not self._outcome.good:
            self._exporter.shutdown()  # ends the wait before a repetition
        self._thread.join(2 * _TIMEOUT_S)
        if self._outcome.good:
            self._exporter.shutdown()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self._push()
        if self._outcome.good:
            self._push()

    def _push(self) -> None:
        try:
            for metrics in _in_batches(_metrics(self._read(), self._began_ns, time.time_ns())):
                scope = ScopeMetrics(scope=InstrumentationScope(SERVICE), metrics=metrics, schema_url="")
                of = ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")
                sent = self._exporter.export(MetricsData(resource_metrics=[of]))
                self._outcome.seen(good=sent is MetricExportResult.SUCCESS)
                if sent is not MetricExportResult.SUCCESS:
                    return  # the rest would wait as long, one message after the other
        except Exception as error:  # noqa: BLE001  # whatever a collector does to its client, jobs go on
            self._outcome.seen(good=False, why=repr(error))


def _metrics(families: Iterable[Family], began_ns: int, now_ns: int) -> Iterator[Metric]:
    """The same series in OpenTelemetry's types; the number of points of each is not bounded."""
    for family in families:
        if family.type == "histogram":
            data: Any = Histogram(
                data_points=list(_histograms(family.samples, began_ns, now_ns)),
                aggregation_temporality=AggregationTemporality.CUMULATIVE,
            )
            name = family.name
        else:
            points = [NumberDataPoint(dict(s.labels), began_ns, now_ns, float(s.value)) for s in family.samples]
            data = (
                Sum(points, aggregation_temporality=AggregationTemporality.CUMULATIVE, is_monotonic=True)
                if family.type == "counter"
                else Gauge(points)
            )
            name = family.samples[0].name if family.samples else family.name  # a counter's ends with _total
        if data.data_points:
            yield Metric(name=name, description=family.documentation, unit="", data=data)


def _histograms(samples: Sequence[Sample], began_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """Prometheus counts what is at most a bound, OpenTelemetry what lies between two."""
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, int]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        if "le" in sample.labels:
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), int(sample.value)))
        elif sample.name.endswith("_sum"):
            sums[labels] = float(sample.value)
    for labels, upto in buckets.items():
        upto.sort()
        counts = [count for _, count in upto]
        yield HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=began_ns,
            time_unix_nano=now_ns,
            count=counts[-1],
            sum=sums.get(labels, 0.0),
            bucket_counts=[count - before for before, count in zip([0, *counts], counts, strict=False)],
            explicit_bounds=[bound for bound, _ in upto[:-1]],
            min=None,  # type: ignore[arg-type]  # optional on the wire, and not known
            max=None,  # type: ignore[arg-type]
        )


def _in_batches(metrics: Iterable[Metric]) -> Iterator[list[Metric]]:
    """Split into messages of at most ``POINTS_AT_ONCE`` points."""
    batch: list[Metric] = []
    room = POINTS_AT_ONCE
    for metric in metrics:
        points: Sequence[Any] = metric.data.data_points
        while points:
            part, points = points[:room], points[room:]
            batch.append(_with_points(metric, part))
            room -= len(part)
            if room == 0:
                yield batch
                batch, room = [], POINTS_AT_ONCE
    if batch:
        yield batch


def _with_points(metric: Metric, points: Sequence[Any]) -> Metric:
    match metric.data:
        case Sum(aggregation_temporality=temporality, is_monotonic=monotonic):
            data: Any = Sum(points, temporality, monotonic)
        case Histogram(aggregation_temporality=temporality):
            data = Histogram(points, temporality)
        case _:
            data = Gauge(points)
    return Metric(name=metric.name, description=metric.description, unit=metric.unit, data=data)


class _SpanExporter(SpanExporter):
    """Says once that spans do not arrive, and once that they do again."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._outcome = _Outcome("traces", endpoint)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them, or lose them."""
        sent: SpanExportResult = self._exporter.export(spans)
        self._outcome.seen(good=sent is SpanExportResult.SUCCESS)
        return sent

    def shutdown(self) -> None:
        """End."""
        self._exporter.shutdown()


class _Reasons(logging.Handler):
    """Holds what OpenTelemetry's exporters say of their failures, each in its own thread, instead of logging it: they
    say it again and again for as long as a collector is down.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        self._of_thread.last = record.getMessage()

    @property
    def last(self) -> str:
        return str(getattr(self._of_thread, "last", "no reason is known"))


_REASONS: Final = _Reasons()


class _Outcome:
    """Whether a collector takes what is sent to it; logged when that changes."""

    def __init__(self, what: str, endpoint: str) -> None:
        self._what = what
        self._endpoint = endpoint
        self.good = True
        exporters = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
        exporters.propagate = False
        exporters.filters.clear()  # one drops what is like the message before, though that was of another signal
        if _REASONS not in exporters.handlers:
            exporters.addHandler(_REASONS)

    def seen(self, *, good: bool, why: str = "") -> None:
        """Note how an export has ended."""
        if good == self.good:
            return
        self.good = good
        if good:
            logger.info("%s takes %s again", self._endpoint, self._what)
        else:
            why = why or _REASONS.last
            logger.warning("%s does not take %s, and is tried again: %s", self._endpoint, self._what, why)
