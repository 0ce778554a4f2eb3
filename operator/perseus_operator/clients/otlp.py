"""OTLP over gRPC: sends a collector of OpenTelemetry the traces of edits.

Whether the collector answers changes nothing for jobs; the log says once that it does not, and once that it does again.
It scrapes metrics, as Prometheus does. OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE,
_COMPRESSION and so on) refine what is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

logger = logging.getLogger("perseus_operator")

SERVICE: Final = "perseus-operator"
_TIMEOUT_S: Final = 5.0
"""Of one message, with all its repetitions."""


def export_traces(endpoint: str, instance: str, version: str) -> Callable[[], None]:
    """Export the traces of this process.

    Args:
        endpoint: http://host:port, or https:// with TLS. Spans that do not fit into the exporter's queue are lost.
        instance: tells the replicas apart.
        version: of the operator. OTEL_RESOURCE_ATTRIBUTES adds more that is known of this process.

    Returns:
        Exports what is left, and ends.
    """
    resource = Resource.create({SERVICE_NAME: SERVICE, SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: version})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_SpanExporter(endpoint)))
    trace.set_tracer_provider(provider)
    return provider.shutdown


class _SpanExporter(SpanExporter):
    """Says once that spans do not arrive, and once that they do again."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        self._arrive = True
        self._failures = _LastMessage()
        log = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
        log.propagate = False
        log.addHandler(self._failures)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them, or lose them."""
        sent: SpanExportResult = self._exporter.export(spans)
        arrived = sent is SpanExportResult.SUCCESS
        if arrived and not self._arrive:
            logger.info("%s takes traces again", self._endpoint)
        elif self._arrive and not arrived:
            logger.warning("%s does not take traces, and is tried again: %s", self._endpoint, self._failures.text)
        self._arrive = arrived
        return sent

    def shutdown(self) -> None:
        """End."""
        self._exporter.shutdown()


class _LastMessage(logging.Handler):
    """Keeps what OpenTelemetry's exporter says of its failures instead of logging it: it says it again and again for as
    long as a collector is down.
    """

    text = "no reason is known"

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
