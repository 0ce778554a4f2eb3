"""An HTTP server in its own threads, for probes, metrics and pages.

The unspecified address of either family stands for both, as in gRPC. Standard library only.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from perseus_proto.addresses import EVERYWHERE, parse_address


class HttpServer:
    """A server that runs from its creation until it is closed."""

    def __init__(self, address: str, handler: type[BaseHTTPRequestHandler], name: str) -> None:
        """Bind ``host:port`` and serve.

        Args:
            address: ``host:port``; port 0: any free one.
            handler: answers requests, in a thread each.
            name: of the serving thread.

        Raises:
            ValueError: the text is not an address.
            OSError: the address is not this machine's, or in use.
        """
        self._server = _bound(*parse_address(address), handler)
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


class _IPv4(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks up this host's name, and may wait for seconds
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _IPv6(_IPv4):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _bound(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    if host in EVERYWHERE:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return (_IPv6 if ":" in host else _IPv4)((host, port), handler)
