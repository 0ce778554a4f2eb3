"""The site's Prometheus, or what answers as one: Thanos, Mimir, VictoriaMetrics.

Its address is validated once and never holds a secret; a token, a password and keys come from files or the environment,
go to that address alone, and are in no message.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from perseus_operator.errors import CannotAnswer, UnusableArgument
from perseus_operator.objects.values import Json
from perseus_runtime.addresses import LOOPBACK, parse_url

ENV_TOKEN: Final = "PERSEUS_PROMETHEUS_TOKEN"  # noqa: S105  # its name
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_USER: Final = re.compile(r"[^:\x00-\x1f\x7f]+")  # RFC 7617
_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 64 << 20
_MAX_TOKEN_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Access:
    """With what to ask a Prometheus.

    Attributes:
        user: whose password the token is, sent as basic authentication; None: it is a bearer token.
        token_file: holds the token; None: that of the environment, if it has one.
        ca: PEM file of the authority of its certificate; None: the system's.
        cert, key: PEM files of the certificate that it wants from callers; None: it wants none.
    """

    user: str | None = None
    token_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class Prometheus:
    """Answers queries."""

    def __init__(self, url: str, access: Access, environment: Mapping[str, str] = os.environ) -> None:
        """Ask nothing yet.

        Args:
            url: such as http://localhost:9090, as ``parse_url`` takes it.
            access: files.
            environment: may hold a token, as `ENV_TOKEN`.

        Raises:
            UnusableArgument: a file cannot be used, or a token would travel in the clear.
        """
        address = parse_url(url)
        self._where = url.rstrip("/")
        authorization = _authorization(access, environment)
        if authorization and address.scheme == "http" and address.host not in LOOPBACK:
            raise UnusableArgument("--prometheus: must be https:// where a token is sent, or on loopback")
        self._headers = {"Authorization": authorization} if authorization else {}
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_tls(access)), _Stay())

    def __call__(self, text: str, first_s: int, last_s: int, step_s: int, /) -> list[Json]:
        """Send a PromQL query for some moments; return its series, each with ``metric`` and ``values``.

        Args:
            text: of the query.
            first_s, last_s: moments, Unix time; the same: of one alone.
            step_s: between moments.

        Raises:
            CannotAnswer: the Prometheus does not answer as one does.
        """
        asked = {"query": text, "start": first_s, "end": last_s, "step": step_s}
        body = urllib.parse.urlencode(asked).encode()
        address = f"{self._where}/api/v1/query_range"
        request = urllib.request.Request(address, body, self._headers)  # noqa: S310  # parse_url
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                return _series(json.loads(answer.read(_MAX_BYTES)))
        except urllib.error.HTTPError as error:
            raise CannotAnswer(f"--prometheus: {self._where} answers {error.code}{self._advice(error)}") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise CannotAnswer(
                f"--prometheus: {self._where} does not answer as a Prometheus: {reason or type(error).__name__}"
            ) from error

    def _advice(self, error: urllib.error.HTTPError) -> str:
        status = error.code
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            if self._headers:
                return ": it does not accept the token"
            if error.headers.get("WWW-Authenticate", "").lower().startswith("basic"):
                return f": it wants a user and a password; see --prometheus-user and {ENV_TOKEN}"
            return f": it wants a token; see --prometheus-token-file and {ENV_TOKEN}"
        if status in (HTTPStatus.MOVED_PERMANENTLY, HTTPStatus.FOUND, *range(303, 309)):
            return ": it is elsewhere; give the address to which it leads, as a token is sent to no other"
        return f" {http.client.responses.get(status, '')}".rstrip()


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere: urllib would take the token along."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _series(answer: Any) -> list[Json]:
    if answer["status"] != "success" or answer["data"]["resultType"] != "matrix":
        raise ValueError("its answer is no matrix")
    result: list[Json] = answer["data"]["result"]
    for series in result:
        if not isinstance(series["metric"], dict):
            raise ValueError("its answer is no matrix")
        for moment_s, value in series["values"]:
            float(moment_s), float(value)
    return result


def _authorization(access: Access, environment: Mapping[str, str]) -> str:
    """The header's value; empty: none is sent."""
    name, token = _token(access, environment)
    if access.user is None:
        if token and not _TOKEN.fullmatch(token):
            raise UnusableArgument(f"{name}: must hold one token, of printable ASCII characters without spaces")
        return f"Bearer {token}" if token else ""
    if not _USER.fullmatch(access.user):
        raise UnusableArgument("--prometheus-user: must be a name, without colons and control characters")
    if not token or not token.isprintable():
        raise UnusableArgument(
            f"--prometheus-user: needs a password, one line in --prometheus-token-file or {ENV_TOKEN}"
        )
    return "Basic " + base64.b64encode(f"{access.user}:{token}".encode()).decode()


def _token(access: Access, environment: Mapping[str, str]) -> tuple[str, str]:
    """What holds the token, and the token; empty: there is none."""
    if access.token_file is None:
        name, token = ENV_TOKEN, environment.get(ENV_TOKEN, "")
    else:
        name = "--prometheus-token-file"
        try:
            with access.token_file.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise UnusableArgument(f"{name}: {access.token_file} cannot be read: {error.strerror}") from error
        if not token.strip():
            raise UnusableArgument(f"{name}: {access.token_file} holds no token")
    return name, token.strip()


def _tls(access: Access) -> ssl.SSLContext:
    if (access.cert is None) != (access.key is None):
        raise UnusableArgument("--prometheus-cert, --prometheus-key: one needs the other")
    try:
        tls = ssl.create_default_context(cafile=access.ca)
    except (OSError, ValueError) as error:
        raise UnusableArgument(f"--prometheus-ca: {access.ca} holds no certificates: {_reason(error)}") from error
    if access.cert is not None:
        try:
            tls.load_cert_chain(access.cert, access.key, password="")  # none is asked on the terminal
        except (OSError, ValueError) as error:
            raise UnusableArgument(
                f"--prometheus-cert, --prometheus-key: must be PEM files of a certificate and its key, without a "
                f"password: {_reason(error)}"
            ) from error
    return tls


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
