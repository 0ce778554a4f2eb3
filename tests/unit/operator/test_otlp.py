"""Traces for a collector, from a real receiver of gRPC; and that one which does not take them harms nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

from perseus_operator.clients.otlp import _SpanExporter
from perseus_operator.controller.settings import InvalidSetting, parse_settings


class Collector(services.TraceServiceServicer):  # type: ignore[misc]
    """Takes spans as a collector of OpenTelemetry does."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.refuses = False
        self._server = grpc.server(ThreadPoolExecutor(4))
        services.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        if self.refuses:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        self.headers = dict(context.invocation_metadata())
        return messages.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


class Log(logging.Handler):
    """What the operator's log gets: all that reaches the root, as it is set up in the program."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname}: {record.getMessage()}")


@pytest.fixture
def log() -> Iterator[Log]:
    root, handler = logging.getLogger(), Log()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def test_headers_come_from_the_environment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    exporter = _SpanExporter(collector.endpoint)
    exporter.export([])
    exporter.shutdown()
    assert collector.headers["authorization"] == "Bearer secret"


def test_a_collector_that_refuses_is_named_once_and_once_more_when_it_takes_them(
    collector: Collector, log: Log
) -> None:
    exporter = _SpanExporter(collector.endpoint)
    for refuses in (False, True, True, True, False, False):
        collector.refuses = refuses
        exporter.export([])
    exporter.shutdown()
    refused, taken = log.messages
    assert refused.startswith(f"WARNING: {collector.endpoint} does not take traces, and is tried again: ")
    assert "who are you?" in refused
    assert taken == f"INFO: {collector.endpoint} takes traces again"


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://collector", "grpc://collector:4317", "http://u:p@c:1"])
def test_an_endpoint_has_a_scheme_and_a_port(endpoint: str) -> None:
    message = "--otlp-endpoint: must be http://.* https://"
    with pytest.raises(InvalidSetting, match=message) as refusal:
        parse_settings(["--insecure", "--otlp-endpoint", endpoint], {})
    assert "u:p" not in str(refusal.value)
