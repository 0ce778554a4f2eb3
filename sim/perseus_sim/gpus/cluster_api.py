"""A pod's own way to the API server, for a driver that reads and writes a few objects.

The client library would be twice as large as the image that needs it. The token and the authority are read again for
each request, as the kubelet renews them.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_ANSWER_BYTES: Final = 4 * 2**20
_TIMEOUT_S: Final = 10.0


class ApiError(Exception):
    """A request failed; the message is one line.

    Attributes:
        status: HTTP status of the answer; 0: there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ClusterApi:
    """An API server, and the account with which to speak to it."""

    server: str
    account: Path = ACCOUNT

    @classmethod
    def of_pod(cls) -> ClusterApi:
        """The one that the kubelet names to each pod.

        Raises:
            ApiError: it names none.
        """
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
        if not host or not port:
            raise ApiError("KUBERNETES_SERVICE_HOST: not set; this is no pod")
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the object of the answer.

        Raises:
            ApiError: the server does not answer, refuses, or answers with no object.
        """
        try:
            token = (self.account / "token").read_text(encoding="ascii").strip()
            trusted = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            data = None if body is None else json.dumps(body).encode()
            if data is not None:
                headers["Content-Type"] = "application/json"
            request = urllib.request.Request(f"{self.server}{path}", data, headers, method=method)  # noqa: S310
            direct = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted)
            )
            with direct.open(request, timeout=_TIMEOUT_S) as answer:
                document = json.loads(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            raise ApiError(f"{method} {path}: {error.code} {error.reason}", error.code) from error
        except (OSError, ValueError) as error:
            raise ApiError(f"{method} {path}: {error}") from error
        if not isinstance(document, dict):
            raise ApiError(f"{method} {path}: the answer is no object")
        return document
