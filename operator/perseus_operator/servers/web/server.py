"""Serves the page: files of ``static`` and three JSON documents, GET and HEAD only, in threads of its own.

There is no login. The default address is the pod's loopback, which ``kubectl port-forward`` reaches, so access needs
the rights of that command. On loopback the Host header must be a local name: otherwise another site's script could read
the page through a name that resolves to 127.0.0.1.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any, Final

from perseus_operator.controller.view import JobView
from perseus_operator.servers.web.responses import NotThere, job_document, overview, plan_document
from perseus_proto.addresses import parse_address
from perseus_proto.http_server import HttpServer

logger = logging.getLogger(__name__)

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/app.css": ("app.css", "text/css; charset=utf-8"),
    "/static/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/static/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
}
_LOCAL: Final = {"localhost", "127.0.0.1", "[::1]"}
_NAME: Final = r"([a-z0-9][-a-z0-9.]{0,252})"
_JOB: Final = re.compile(rf"/api/jobs/{_NAME}/{_NAME}")
_PLAN: Final = re.compile(rf"/api/jobs/{_NAME}/{_NAME}/plans/([0-9]{{1,6}})")
_AT_ONCE: Final = 4
_PATIENCE_S: Final = 5.0

Answer = tuple[HTTPStatus, str, bytes]


class WebServer(HttpServer):
    """The page of one operator."""

    def __init__(self, address: str, views: Callable[[], Sequence[JobView]]) -> None:
        """Bind ``host:port`` (port 0: any free one) and serve. ``views`` is called in the server's threads.

        Raises:
            OSError: the address cannot be bound.
        """
        loopback = parse_address(address)[0] in {"localhost", "127.0.0.1", "::1"}
        pages = _Pages(views)
        turns = threading.BoundedSemaphore(_AT_ONCE)

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_S
            server_version, sys_version = "perseus", ""

            def do_GET(self) -> None:
                status, kind, body = self._answer()
                self.send_response(status)
                for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815  # the base class looks for this name

            def _answer(self) -> Answer:
                if loopback and re.sub(r":[0-9]+$", "", self.headers.get("Host", "")) not in _LOCAL:
                    return _refusal(HTTPStatus.MISDIRECTED_REQUEST, "served on loopback: use the host name localhost")
                if not turns.acquire(timeout=_PATIENCE_S):
                    return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"more than {_AT_ONCE} requests at once; try again")
                try:
                    return pages.answer(self.path.partition("?")[0])
                except NotThere as error:
                    return _refusal(HTTPStatus.NOT_FOUND, str(error))
                except TimeoutError:
                    return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the operator is busy; try again")
                except Exception:  # a page that cannot be drawn must not end the thread without an answer
                    logger.exception("%s could not be answered", self.path)
                    return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected error: see the operator's log")
                finally:
                    turns.release()

            def log_message(self, *_: Any) -> None:
                """Requests are not logged."""

        super().__init__(address, Handler, "web")


class _Pages:
    """Finds the answer to a path."""

    def __init__(self, views: Callable[[], Sequence[JobView]]) -> None:
        self._views = views
        static = resources.files("perseus_operator.servers.web") / "static"
        self._files = {path: (kind, (static / name).read_bytes()) for path, (name, kind) in _FILES.items()}

    def answer(self, path: str) -> Answer:
        """Return the answer to a path; raises NotThere."""
        if path in self._files:
            return HTTPStatus.OK, *self._files[path]
        if path == "/api/jobs":
            return _json(HTTPStatus.OK, overview(self._views()))
        job, plan = _JOB.fullmatch(path), _PLAN.fullmatch(path)
        if job:
            return _json(HTTPStatus.OK, job_document(self._job(job[1], job[2])))
        if plan:
            return _json(HTTPStatus.OK, plan_document(self._job(plan[1], plan[2]), int(plan[3])))
        raise NotThere("no such page; metrics are served on a port of their own, see --metrics-address")

    def _job(self, namespace: str, name: str) -> JobView:
        for view in self._views():
            if (view.ref.namespace, view.ref.name) == (namespace, name):
                return view
        raise NotThere(f"this operator serves no PerseusJob {namespace}/{name}")


def _refusal(status: HTTPStatus, reason: str) -> Answer:
    return _json(status, {"error": reason})


def _json(status: HTTPStatus, document: dict[str, Any]) -> Answer:
    return status, "application/json", json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
