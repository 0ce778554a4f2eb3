"""An HTTP server in its own threads, for probes, metrics and pages.

The unspecified address of either family stands for both, as in gRPC. Any pod that reaches the port can open connections
and be silent, so both their number and their time are bounded: one too many ends the oldest of the host that has most.
So probes of the kubelet, which come from another host, are served. Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from perseus_runtime.addresses import EVERYWHERE, parse_address

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 32
CONNECTION_S: Final = 10.0
"""A scrape of a large operator takes a second."""
PAGES_PER_S: Final = 4.0
PAGES_AT_ONCE: Final = 20
"""A page of a thousand jobs takes a fifth of a second to draw; scrapers ask for it every few seconds."""


class HttpServer:
    """A server that runs from its creation until it is closed."""

    def __init__(
        self, address: str, handler: type[BaseHTTPRequestHandler], name: str, certificate: Certificate | None = None
    ) -> None:
        """Bind ``host:port`` and serve.

        Args:
            address: ``host:port``; port 0: any free one.
            handler: answers requests, in a thread each.
            name: of the serving thread.
            certificate: shown to clients; None: HTTP without TLS.

        Raises:
            ValueError: the text is not an address.
            OSError: the address is not this machine's or in use, or the certificate cannot be read.
        """
        if certificate is not None:
            certificate.context()
        self._server = _bound(*parse_address(address), handler)
        self._server.certificate = certificate
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port really bound."""
        return self._server.server_port

    @property
    def address(self) -> str:
        """host:port really bound."""
        host = self._server.server_name
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Certificate:
    """A certificate chain and its key, in files that are read again when they change."""

    def __init__(self, chain: str, key: str) -> None:
        self._files = chain, key
        self._read: tuple[float, ...] = ()
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def context(self) -> ssl.SSLContext:
        """Of connections that begin now.

        Raises:
            OSError: the files cannot be read, or do not belong together, and no earlier ones were good.
        """
        try:
            written = tuple(Path(file).stat().st_mtime for file in self._files)
            if written != self._read:
                fresh = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                fresh.load_cert_chain(*self._files)
                self._context, self._read = fresh, written
        except OSError:  # half renewed: the certificate so far serves until both files fit
            if not self._read:
                raise
        return self._context


class CachedPage:
    """A page that is drawn a few times a second at most in the long run, however often it is asked for."""

    def __init__(self, draw: Callable[[], bytes], per_s: float = PAGES_PER_S, burst: int = PAGES_AT_ONCE) -> None:
        """``draw``: draws it as it is now; called by one thread at a time."""
        self._draw = draw
        self._per_s = per_s
        self._burst = burst
        self._lock = threading.Lock()
        self._page = b""
        self._left = float(burst)
        self._at_s = time.monotonic()

    def __call__(self) -> bytes:
        """The page as it is now; as it was drawn last, if it has been asked for too often."""
        with self._lock:
            now_s = time.monotonic()
            self._left = min(self._burst, self._left + self._per_s * (now_s - self._at_s))
            self._at_s = now_s
            if self._left >= 1:
                self._left -= 1
                self._page = self._draw()
            return self._page


class _IPv4(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 4 * MAX_CONNECTIONS
    certificate: Certificate | None = None

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, tuple[str, float]] = {}  # host and end of each, in the order of their beginning
        self._open_lock = threading.Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        if self.certificate is None:
            return connection, address
        # The handshake comes with the first read, in the connection's own thread: a silent client delays no other.
        tls = self.certificate.context()
        return tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open[request] = str(client_address[0]), time.monotonic() + CONNECTION_S
            if len(self._open) > MAX_CONNECTIONS:
                (greediest, _), *_ = Counter(host for host, _ in self._open.values()).most_common(1)
                self._hang_up(next(other for other, (host, _) in self._open.items() if host == greediest))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """About twice a second: end connections that have lasted too long."""
        now_s = time.monotonic()
        with self._open_lock:
            for connection in [one for one, (_, end_s) in self._open.items() if end_s <= now_s]:
                self._hang_up(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A peer that goes away, or a page that cannot be drawn; peers may not fill the log."""
        log.debug("a request of %s failed", client_address[0], exc_info=True)

    def _hang_up(self, connection: socket.socket) -> None:
        """Let its thread see the end; it closes the connection."""
        del self._open[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks up this host's name, and may wait for seconds
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _IPv6(_IPv4):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _bound(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> _IPv4:
    if host in EVERYWHERE:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return (_IPv6 if ":" in host else _IPv4)((host, port), handler)
