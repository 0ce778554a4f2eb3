"""Serves the page: files of ``static`` and five JSON documents, GET and HEAD only, in threads of its own.

On loopback there is no login: ``kubectl port-forward`` reaches it there, so access needs the rights of that command.
The Host header must be a local name: otherwise another site's script could read the page through a name that resolves
to 127.0.0.1. Anywhere else the documents need a bearer token, and say only what its user may see; ``access`` decides.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any, Final, TypeVar

from perseus_core import keys
from perseus_operator.controller.view import JobView, PoolView, View
from perseus_operator.errors import KubeError, UnknownJob
from perseus_operator.objects.values import JobRef
from perseus_operator.servers.web.access import Access, NotKnown, Viewer
from perseus_operator.servers.web.responses import (
    NotThere,
    job_document,
    overview,
    plan_document,
    pool_document,
    pools_overview,
)
from perseus_operator.servers.web.shares import Shares
from perseus_runtime.addresses import on_loopback
from perseus_runtime.http_server import Certificate, HttpServer

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
    "/static/pools.js": ("pools.js", "text/javascript; charset=utf-8"),
    "/static/tables.js": ("tables.js", "text/javascript; charset=utf-8"),
}
_LOCAL: Final = {"localhost", "127.0.0.1", "[::1]"}
_NAME: Final = r"([a-z0-9][-a-z0-9.]{0,252})"
_JOB: Final = re.compile(rf"/api/jobs/{_NAME}/{_NAME}(?:/plans/([0-9]{{1,6}}))?")
_POOL: Final = re.compile(rf"/api/pools/{_NAME}/{_NAME}")
_JSON: Final = "application/json"
_STATUS: Final = {NotThere: HTTPStatus.NOT_FOUND, NotKnown: HTTPStatus.UNAUTHORIZED}
_PATIENCE_S: Final = 5.0

Answer = tuple[HTTPStatus, str, bytes]
ReadElsewhere = Callable[[str], tuple[int, bytes]]
"""Status and JSON of a path, from another replica. Raises OperatorError, or TimeoutError."""
MaySee = Callable[[str, str], bool]
"""Whether the viewer may see the objects of a kind, in plural, of a namespace; of "": of every namespace."""
V = TypeVar("V", JobView, PoolView)


def _everything(*_: str) -> bool:
    return True


_EVERYONE: Final = Viewer(None, _everything)


class WebServer(HttpServer):
    """The page of one operator."""

    def __init__(
        self,
        address: str,
        pages: Pages,
        access: Access | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        """Bind and serve.

        Args:
            address: ``host:port``; port 0: any free one.
            pages: what is shown.
            access: who may see what; None: everyone who reaches the address may see everything.
            certificate: shown to browsers; None: HTTP without TLS.

        Raises:
            ValueError: everyone reaches an address that is not loopback.
            OSError: the address cannot be bound, or the certificate not be read.
        """
        if access is None and not on_loopback(address):
            raise ValueError(f"{address} is not loopback: the page needs a login there")
        local = on_loopback(address)

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_S
            server_version, sys_version = "perseus", ""

            def do_GET(self) -> None:
                status, kind, body = self._answer()
                self.send_response(status)
                login = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else {}
                for name, value in {
                    **_HEADERS, **login, "Content-Type": kind, "Content-Length": str(len(body))
                }.items():  # fmt: skip
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815  # the base class looks for this name

            def _answer(self) -> Answer:
                if local and re.sub(r":[0-9]+$", "", self.headers.get("Host", "")) not in _LOCAL:
                    return _refusal(HTTPStatus.MISDIRECTED_REQUEST, "served on loopback: use the host name localhost")
                path = self.path.partition("?")[0]
                try:
                    return pages.file(path) or self._document(path)
                except (NotThere, NotKnown) as error:
                    return _refusal(_STATUS[type(error)], str(error))
                except (TimeoutError, KubeError, UnknownJob) as error:  # the last: the job is changing its replica
                    logger.warning("%s could not be answered: %r", path, error)
                    return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the operator is busy; try again")
                except Exception:  # a page that cannot be drawn must not end the thread without an answer
                    logger.exception("%s could not be answered", self.path)
                    return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected error: see the operator's log")

            def _document(self, path: str) -> Answer:
                # Before the turn: strangers wait for each other, and not in the way of viewers.
                viewer = access.viewer(self.headers.get("Authorization", "")) if access else _EVERYONE
                with pages.shares.turn(viewer.user):
                    return pages.document(path, viewer.may_see)

            def log_message(self, *_: Any) -> None:
                """Requests are not logged."""

        super().__init__(address, Handler, "web", certificate)


class Pages:
    """Finds the answer to a path."""

    def __init__(self, views: Callable[[], Sequence[View]], elsewhere: ReadElsewhere | None = None) -> None:
        """Show jobs and pools.

        Args:
            views: these as they are now; called in the threads that ask.
            elsewhere: reads a document of a job that another replica serves; None: no other one can be asked.
        """
        self._views = views
        self._elsewhere = elsewhere
        self.shares = Shares(_PATIENCE_S)
        static = resources.files("perseus_operator.servers.web") / "static"
        self._files = {path: (kind, (static / name).read_bytes()) for path, (name, kind) in _FILES.items()}

    def file(self, path: str) -> Answer | None:
        """Return a file of the page, which is the same for everyone; None: it is none."""
        return (HTTPStatus.OK, *self._files[path]) if path in self._files else None

    def document(self, path: str, may_see: MaySee) -> Answer:
        """Return what a path says to a viewer; raises NotThere."""
        if path == "/api/jobs":
            return _json(HTTPStatus.OK, overview(self._seen(JobView, keys.PLURAL, may_see)))
        if path == "/api/pools":
            return _json(HTTPStatus.OK, pools_overview(self._seen(PoolView, keys.POOL_PLURAL, may_see)))
        if pool := _POOL.fullmatch(path):
            shown = self._one(PoolView, keys.POOL_KIND, pool[1], pool[2], may_see)
            return _json(HTTPStatus.OK, pool_document(shown))
        match = _JOB.fullmatch(path)
        if not match:
            raise NotThere("no such page; metrics are served on a port of their own, see --metrics-address")
        view = self._one(JobView, keys.KIND, match[1], match[2], may_see)
        if view.elsewhere and self._elsewhere is not None:
            status, document = self._elsewhere(path)
            return HTTPStatus(status), _JSON, document
        return _json(HTTPStatus.OK, plan_document(view, int(match[3])) if match[3] else job_document(view))

    def own_document(self, path: str) -> tuple[int, bytes]:
        """Answer another replica: status and JSON of a job that this one serves.

        Raises:
            UnknownJob: it does not.
            TimeoutError: the other replicas' share is used up.
        """
        with self.shares.turn("other replicas"):
            return self._own_document(path)

    def _own_document(self, path: str) -> tuple[int, bytes]:
        match = _JOB.fullmatch(path)
        views = [view for view in self._of(JobView) if not view.elsewhere]
        served = {(view.ref.namespace, view.ref.name) for view in views}
        if not match or (match[1], match[2]) not in served:
            raise UnknownJob(f"path: this replica serves no job {path[:600]!r}")
        try:
            status, _, document = self.document(path, _everything)
        except NotThere as error:
            status, _, document = _refusal(HTTPStatus.NOT_FOUND, str(error))
        return status, document

    def _of(self, kind: type[V]) -> list[V]:
        return [view for view in self._views() if isinstance(view, kind)]

    def _seen(self, kind: type[V], plural: str, may_see: MaySee) -> list[V]:
        views = self._of(kind)
        if may_see(plural, ""):
            return views
        namespaces = {view.ref.namespace for view in views}
        seen = {namespace for namespace in namespaces if may_see(plural, namespace)}
        return [view for view in views if view.ref.namespace in seen]

    def _one(self, kind: type[V], word: str, namespace: str, name: str, may_see: MaySee) -> V:
        if may_see(JobRef(namespace, name, "", word).plural, namespace):
            for view in self._of(kind):
                if (view.ref.namespace, view.ref.name) == (namespace, name):
                    return view
        # The same answer to both: it does not tell which there are.
        raise NotThere(f"this operator serves no {word} {namespace}/{name} that you may see")


def _refusal(status: HTTPStatus, reason: str) -> Answer:
    return _json(status, {"error": reason})


def _json(status: HTTPStatus, document: dict[str, Any]) -> Answer:
    return status, _JSON, json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
