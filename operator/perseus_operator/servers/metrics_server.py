"""One small HTTP server for the Prometheus series of a program and for the kubelet's probes."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from perseus_runtime.http_server import CachedPage, HttpServer


class Exposes(Protocol):
    """Something that has series."""

    def exposition(self) -> bytes:
        """Return them in Prometheus' text format."""
        ...


class MetricsServer(HttpServer):
    """Serves /metrics, /healthz (the program makes progress) and /readyz (it has begun to serve) in a thread."""

    def __init__(
        self, address: str, metrics: Exposes, *, healthy: Callable[[], str | None], ready: Callable[[], bool]
    ) -> None:
        """Bind and serve.

        Args:
            address: host:port; port 0: any free one.
            metrics: what ``/metrics`` returns.
            healthy: returns None, or what is wrong; called in the server's threads.
            ready: returns whether the program has begun to serve.

        Raises:
            OSError: the address cannot be bound.
        """
        exposition = CachedPage(metrics.exposition)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, exposition(), CONTENT_TYPE_LATEST)
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
                """Probes are not logged."""

        super().__init__(address, Handler, "metrics")
