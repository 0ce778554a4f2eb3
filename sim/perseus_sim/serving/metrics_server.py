"""The HTTP server of one engine: its metrics, as unpleasant as a real one's, and requests for it from a router.

vLLM 0.32 answered in 20 to 42 ms (median) and 90 to 180 ms (99th percentile) from its own API process; an engine that
loads its model refuses; SGLang without ``--enable-metrics`` has no page; TensorRT-LLM's is at another path. Engines in
Python compress for a client that accepts gzip.

A router sends requests as ``POST /requests``, a JSON list of [prompt tokens, output tokens]; they come at once.
"""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from math import exp, log
from typing import Final

from perseus_runtime.http_server import HttpServer
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.recorded_pages import EngineKind
from perseus_sim.serving.requests import Request

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"
_SPREAD: Final = log(135 / 31) / 2.326
"""Of the logarithm of an answer's time: its median is 31 ms and its 99th percentile 135 ms, the middle of what was
measured."""
LEAST_DELAY_S: Final = 0.020
MOST_DELAY_S: Final = 0.180
_MEDIAN_S: Final = 0.031


@dataclass(frozen=True, slots=True)
class Manner:
    """How an engine answers a scraper.

    Attributes:
        kind: engine and version; what it is changes with an upgrade.
        loading: its model is being loaded: 503.
        enabled: its metrics are switched on; otherwise 404.
        slow: it answers as late as a real one; otherwise at once.
    """

    kind: EngineKind = EngineKind.VLLM
    loading: bool = False
    enabled: bool = True
    slow: bool = True


class MetricsServer:
    """Serves the page of one engine from its creation until it is closed; `manner` may be replaced at any time."""

    def __init__(
        self,
        address: str,
        metrics: EngineMetrics,
        manner: Manner,
        *,
        seed: int = 0,
        wait: Callable[[float], object] = time.sleep,
        submit: Callable[[Sequence[Request]], None] | None = None,
    ) -> None:
        """Bind ``host:port`` and serve.

        Args:
            address: ``host:port``; port 0: any free one.
            metrics: what the engine has counted.
            manner: how it answers at first.
            seed: of the delays.
            wait: for so many seconds, before an answer.
            submit: takes requests of a router, whose arrivals are now; None: it takes none.

        Raises:
            ValueError: the text is not an address.
            OSError: the address is not this machine's or in use.
        """
        self.manner = manner
        self._metrics = metrics
        self._random = random.Random(seed)
        self._wait = wait
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, content, body = owner.answer(self.path)
                packed = content == _TEXT and owner.manner.kind is not EngineKind.TGI
                packed = packed and "gzip" in self.headers.get("Accept-Encoding", "")
                if packed:
                    body = gzip.compress(body, compresslevel=6)
                self.send_response(status)
                self.send_header("Content-Type", content)
                if packed:
                    self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if submit is None or self.path != "/requests":
                    self.send_error(404)
                    return
                try:
                    requests = [Request(0.0, int(prompt), int(output)) for prompt, output in json.loads(body)]
                except (ValueError, TypeError) as error:
                    self.send_error(400, str(error))
                    return
                submit(requests)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing for each request."""

        self._server = HttpServer(address, Handler, "engine-metrics")

    @property
    def address(self) -> str:
        """host:port really bound."""
        return self._server.address

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body for a path, after the engine's delay."""
        manner = self.manner
        if manner.slow:
            with self._lock:
                drawn_s = _MEDIAN_S * exp(self._random.gauss(0.0, _SPREAD))
            self._wait(min(MOST_DELAY_S, max(LEAST_DELAY_S, drawn_s)))
        if manner.loading:
            return 503, _JSON, b'{"detail":"Service Unavailable"}'
        trt = manner.kind is EngineKind.TENSORRT_LLM
        if path == "/metrics" and trt:
            return 200, _JSON, b"[]"  # the statistics of its iterations since somebody last asked
        if manner.enabled and path == ("/prometheus/metrics" if trt else "/metrics"):
            return 200, _TEXT, self._metrics.render(manner.kind)
        return 404, _JSON, b'{"detail":"Not Found"}'
